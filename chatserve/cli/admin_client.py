"""A small client for a running server's ``/admin/*`` and ``/v1/*``: JSON in, JSON out, errors as `ChatserveError`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from chatserve.errors import ChatserveError, EngineUnavailableError


class AdminClient:
    """Speaks to one server with one key."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key

    def with_key(self, key: str) -> AdminClient:
        """The same server, as somebody else."""
        return AdminClient(self.url, key)

    @property
    def headers(self) -> dict[str, str]:
        """What shows who is calling."""
        return {"authorization": f"Bearer {self._key}"} if self._key else {}

    def call(self, method: str, path: str, body: object = None) -> Any:
        """One request; ``None`` where the answer has no body.

        Raises:
            ChatserveError: with the server's own message and code.
            EngineUnavailableError: nobody answers at the URL.
        """
        content = self._send(method, path, body)
        return json.loads(content) if content else None

    def events(self, method: str, path: str, body: object) -> list[Any]:
        """One request that is answered by a stream: its JSON events. Raises as `call`, also for an error event."""
        lines = self._send(method, path, body).decode().split("\n")
        found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        for event in found:
            if "error" in event:
                raise ChatserveError(str(event["error"]["message"]), code=str(event["error"]["code"]))
        return found

    def _send(self, method: str, path: str, body: object) -> bytes:
        headers = {"content-type": "application/json", **self.headers}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            raise _refusal(error.read(), error.code) from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise EngineUnavailableError(f"No server answers at {self.url}: {reason}.") from None


def _refusal(content: bytes, status: int) -> ChatserveError:
    try:
        error = json.loads(content)["error"]
        return ChatserveError(str(error["message"]), code=str(error["code"]))
    except (ValueError, KeyError, TypeError):
        return ChatserveError(f"The server answered {status}.")
