"""What stands before every page: which host is meant, how often somebody may ask, and what a browser may load."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replayfleet.federation.service.quotas import Limiter

POLICY = "; ".join((
    "default-src 'none'", "style-src 'self'", "script-src 'self'", "img-src 'self' data:", "connect-src 'self'",
    "form-action 'self'", "frame-ancestors 'none'", "base-uri 'none'",
))  # fmt: skip
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REQUESTS_PER_S, REQUESTS_AT_ONCE = 150.0, 500.0
"""From one address, which may be a proxy's."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Who may ask.

    Attributes:
        hosts: names that the console answers to, as a ``Host`` header has them without the port; a page of somebody
            else's that made its own name lead here gets nothing.
        clock: seconds; never runs backwards.
    """

    hosts: frozenset[str]
    clock: Callable[[], float] = time.monotonic


class Guard:
    """Refuses before anything is read, and adds headers to every answer."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules
        self._limiter = Limiter(REQUESTS_PER_S, REQUESTS_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        host = host_of(Headers(scope=scope).get("host", ""))
        if host not in self._rules.hosts:
            return PlainTextResponse("this console has another name; start it with --console-name to add one\n", 421)
        address = (scope.get("client") or ("",))[0]
        if not self._limiter.admit(address, self._rules.clock()):
            return PlainTextResponse("too many requests; wait a moment\n", 429, {"Retry-After": "2"})
        return None


def host_of(header: str) -> str:
    """Return the name of a ``Host`` header without its port; of IPv6 without brackets."""
    if header.startswith("["):
        return header[1:].split("]", 1)[0].lower()
    return header.rsplit(":", 1)[0].lower() if ":" in header else header.lower()
