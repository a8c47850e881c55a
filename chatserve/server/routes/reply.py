"""JSON replies."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def json_response(content: msgspec.Struct | dict[str, str], status: int = 200) -> Response:
    """A complete JSON answer."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
