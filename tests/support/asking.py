"""Asks an ASGI app without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Said:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(
    app: Any, url: str, method: str = "GET", *, body: bytes = b"", client: str = "127.0.0.1", **headers: str
) -> Said:
    """Return what an app says to one request; ``_`` in a header's name is ``-``."""
    parts = urlsplit(url)
    given = {"host": "127.0.0.1:8080"} | {name.replace("_", "-").lower(): value for name, value in headers.items()}
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": parts.path,
        "raw_path": parts.path.encode(), "query_string": parts.query.encode(), "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": (client, 50000), "server": ("127.0.0.1", 8080),
    }  # fmt: skip
    said = Said(0, {}, b"")
    sent = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return sent.pop(0) if sent else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            said.status = message["status"]
            said.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            said.body += message.get("body", b"")

    asyncio.run(app(scope, receive, send))
    return said
