"""What is counted of a tenant's use, as one row of numbers per tenant and UTC day.

Plain data that adds up. `tenancy.ledger` counts into it, `tenancy.store` keeps it, the usage endpoints show it.
"""

from __future__ import annotations

import datetime

import msgspec


class Usage(msgspec.Struct):
    """Sums; every field only grows.

    Attributes:
        requests_completed, requests_cancelled, requests_failed: accepted requests, by how they ended (all choices
            done; ended by the client; ended by an error).
        requests_rejected: requests refused because of a limit of the tenant; they cost nothing.
        prompt_tokens: of accepted requests, each prompt once.
        cached_tokens: of the prompts, those whose KV was reused.
        computed_tokens: of the prompts, those that were run through the model.
        generated_tokens: sampled, end tokens included, all choices.
        delivered_tokens: of the generated, those handed to the client's response or socket.
        queue_seconds: from acceptance to the start, or to the end of a request that never started.
        run_seconds: from the start to the end.
        device_block_seconds, host_block_seconds: KV blocks times the seconds they were held, per tier.
    """

    requests_completed: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    requests_rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    delivered_tokens: int = 0
    queue_seconds: float = 0.0
    run_seconds: float = 0.0
    device_block_seconds: float = 0.0
    host_block_seconds: float = 0.0

    @property
    def billed_tokens(self) -> int:
        """What the limits on tokens count."""
        return self.prompt_tokens + self.generated_tokens

    def add(self, other: Usage) -> None:
        """Add every sum of ``other``."""
        for field in FIELDS:
            setattr(self, field, getattr(self, field) + getattr(other, field))


FIELDS = Usage.__struct_fields__


class UsageRow(msgspec.Struct, frozen=True):
    """The use of one tenant on one day (``YYYY-MM-DD``, UTC)."""

    tenant: str
    day: str
    usage: Usage


def day_of(unix_time: float) -> str:
    """The UTC day of a moment."""
    return datetime.datetime.fromtimestamp(unix_time, datetime.UTC).date().isoformat()
