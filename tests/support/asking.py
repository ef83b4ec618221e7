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
    scope = _scope(url, method, client, headers)
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


def stay_at(app: Any, url: str, count: int) -> list[int]:
    """Return the statuses of requests that come at the same time; whoever is answered on and on goes when all are."""
    statuses: list[int] = []

    async def one() -> None:
        async def receive() -> dict[str, Any]:
            while len(statuses) < count:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await app(_scope(url, "GET", "127.0.0.1", {}), receive, send)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(all_of_them())
    return statuses


def _scope(url: str, method: str, client: str, headers: dict[str, str]) -> dict[str, Any]:
    parts = urlsplit(url)
    given = {"host": "127.0.0.1:8080"} | {name.replace("_", "-").lower(): value for name, value in headers.items()}
    return {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": parts.path,
        "raw_path": parts.path.encode(), "query_string": parts.query.encode(), "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": (client, 50000), "server": ("127.0.0.1", 8080),
    }  # fmt: skip
