"""A tool that is missing costs a skip on one's own machine and the run in CI."""

from __future__ import annotations

import pytest

from tests.needs import missing


@pytest.mark.parametrize("value", ["true", "1"])
def test_ci_fails_where_something_is_missing(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Whatever CI is set to: services differ."""
    monkeypatch.setenv("CI", value)
    with pytest.raises(pytest.fail.Exception, match="no hammer"):
        missing("no hammer")


def test_elsewhere_it_is_a_skip_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no hammer"):
        missing("no hammer")
