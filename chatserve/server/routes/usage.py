"""``GET /v1/usage``: what the caller's tenant used, and what it may use.

Also the shape of usage reports, which ``/admin/usage`` shares. Numbers come from `chatserve.tenancy.ledger`.
"""

from __future__ import annotations

import datetime
import re
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chatserve.errors import InvalidRequestError
from chatserve.server.context import ServerContext
from chatserve.server.middleware import request_info
from chatserve.server.routes.reply import json_response
from chatserve.tenancy.limits import LimitStatus
from chatserve.tenancy.tenant import TenantLimits
from chatserve.tenancy.usage import Usage, UsageRow, day_of

DEFAULT_DAYS = 30
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)


class UsageReport(msgspec.Struct):
    """Sums by UTC day (and tenant), oldest first, and of all of them."""

    data: list[UsageRow]
    total: Usage
    object: str = "list"


class OwnUsage(msgspec.Struct):
    """A tenant's own report: its limits, what is left of those per minute, and its use."""

    tenant: str
    limits: TenantLimits
    now: LimitStatus
    data: list[UsageRow]
    total: Usage
    object: str = "usage"


class OwnUsageEndpoint:
    """Endpoint for tenants."""

    def __init__(self, context: ServerContext) -> None:
        self._tenants = context.tenants

    async def __call__(self, request: Request) -> Response:
        """Of the caller's tenant alone, whatever the query says; ``?from=`` and ``?to=`` select days."""
        tenant = self._tenants.tenant(request_info(request.scope).principal.tenant)
        first, last = days_asked(request)
        rows = await self._tenants.ledger.usage(tenant=tenant.name, first_day=first, last_day=last)
        return json_response(OwnUsage(tenant.name, tenant.limits, self._tenants.status(tenant.name), *report(rows)))


def days_asked(request: Request) -> tuple[str, str]:
    """First and last day of ``?from=YYYY-MM-DD&to=YYYY-MM-DD``; the last thirty days where not given.

    Raises `InvalidRequestError` naming the parameter that is no day.
    """
    today = time.time()
    first = _day(request, "from") or day_of(today - (DEFAULT_DAYS - 1) * 86400)
    return first, _day(request, "to") or day_of(today)


def report(rows: list[UsageRow]) -> tuple[list[UsageRow], Usage]:
    """Rows and their sum."""
    total = Usage()
    for row in rows:
        total.add(row.usage)
    return rows, total


def _day(request: Request, name: str) -> str | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        if not _DAY.fullmatch(text):
            raise ValueError
        datetime.date.fromisoformat(text)
    except ValueError:
        raise InvalidRequestError(f"{name} must be a day as in 2030-12-31 (UTC).", param=name) from None
    return text
