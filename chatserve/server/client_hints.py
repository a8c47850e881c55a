"""What clients tell about themselves in headers, beside the request: how patient they are, how often they have tried.

Hints only: a value that makes no sense counts as not given. The middleware reads them once per request. Knows the
headers of OpenAI's own clients; does not know what is done with the values.
"""

from __future__ import annotations

import re

from starlette.types import Scope

from chatserve.server.origin import header

MAX_PATIENCE = 24 * 3600.0
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_COUNT = re.compile(r"[0-9]{1,3}")


def read_patience(scope: Scope) -> float | None:
    """Seconds the client waits for a first answer before it hangs up (``x-stainless-read-timeout``)."""
    text = header(scope, b"x-stainless-read-timeout") or ""
    if not _SECONDS.fullmatch(text):
        return None
    return min(float(text), MAX_PATIENCE) or None


def is_retry(scope: Scope) -> bool:
    """Whether the client sends this request again after a failure (``x-stainless-retry-count``)."""
    text = header(scope, b"x-stainless-retry-count") or ""
    return _COUNT.fullmatch(text) is not None and int(text) > 0
