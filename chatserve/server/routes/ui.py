"""The browser page: its files, and the login that turns a key into a cookie.

Files are read once at the start and found by exact path, so there is no traversal, no byte ranges and no disk
access per request. The page's own code lives in ``web/`` and knows nothing of this module.
"""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import chatserve
from chatserve.server.auth import COOKIE_NAME, SESSION_SECONDS
from chatserve.server.body import decode, read_json_body
from chatserve.server.context import ServerContext
from chatserve.server.wire import LoginRequest

PACKAGE = Path(chatserve.__file__).parent
SUFFIXES = frozenset({".html", ".js", ".css", ".svg", ".png", ".ico", ".woff2", ".webmanifest"})
SKIPPED_FOLDERS = frozenset({"tests", "node_modules"})

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",
}


class StaticFile(msgspec.Struct, frozen=True):
    """One file of the page, as served."""

    body: bytes
    media_type: str
    etag: str


def web_folder() -> Path:
    """Where the page's files are: inside an installed wheel, or beside the package in the source tree."""
    packaged = PACKAGE / "_web"
    return packaged if packaged.is_dir() else PACKAGE.parent / "web"


def load_files(folder: Path) -> dict[str, StaticFile]:
    """URL path to file, ``/`` being ``index.html``. Hidden files, tests and unknown kinds are left out."""
    files: dict[str, StaticFile] = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        hidden = any(part.startswith(".") or part in SKIPPED_FOLDERS for part in relative.parts)
        if hidden or path.suffix not in SUFFIXES or not path.is_file():
            continue
        body = path.read_bytes()
        media_type = "text/javascript" if path.suffix == ".js" else mimetypes.guess_type(path.name)[0]
        file = StaticFile(body, media_type or "application/octet-stream", f'"{hashlib.sha256(body).hexdigest()[:32]}"')
        files["/" + relative.as_posix()] = file
        if relative.as_posix() == "index.html":
            files["/"] = file
    return files


class Page:
    """Endpoints of the page."""

    def __init__(self, context: ServerContext, files: dict[str, StaticFile]) -> None:
        self._context = context
        self._files = files

    async def file(self, request: Request) -> Response:
        """One file; 304 where the browser has it already."""
        file = self._files[request.scope["path"]]
        headers = {**SECURITY_HEADERS, "etag": file.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)

    async def log_in(self, request: Request) -> Response:
        """``{"key": "…"}`` → 204 and an opaque cookie; 401 for a wrong key. Without keys there is nothing to do."""
        body = decode(await read_json_body(request, self._context.config.server), LoginRequest)
        response = Response(status_code=204)
        if self._context.auth.required:
            response.set_cookie(
                COOKIE_NAME,
                self._context.auth.log_in(body.key, request.scope),
                max_age=SESSION_SECONDS,
                path="/",
                secure=request.scope["scheme"] == "https",
                httponly=True,
                samesite="strict",
            )
        return response

    async def log_out(self, request: Request) -> Response:
        """Ends the cookie's session."""
        self._context.auth.log_out(request.scope)
        response = Response(status_code=204)
        response.delete_cookie(COOKIE_NAME, path="/", httponly=True, samesite="strict")
        return response
