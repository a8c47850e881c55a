"""What holds for all tests: Hypothesis judges results, never the time that a busy machine takes to draw or run them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
