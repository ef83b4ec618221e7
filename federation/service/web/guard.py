"""What stands before every page: which host is meant, who asks and how often, and what a browser may load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service.quotas import Limiter
from replayfleet.federation.service.web.access import NOBODY, Access, Somebody
from replayfleet.federation.service.web.hosts import host_of

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
BODY_S = 10.0
"""What is sent with a request comes within this time, or its connection gives its place back."""

COOKIE = "replayfleet-console"
_OPEN = ("/login", "/static/console.css", "/static/icon.svg")
_ASKING = "replayfleet.asking"


@dataclass(frozen=True, slots=True)
class Asking:
    """Who asks, and when on the console's clock."""

    somebody: Somebody
    now: float


@dataclass(frozen=True, slots=True)
class Rules:
    """Who may ask.

    Attributes:
        hosts: names that the pages are reached under, as a ``Host`` header has them without the port; a page of
            somebody else's that made its own name lead here gets nothing.
        access: tokens and sessions.
        clock: seconds; never runs backwards.
        elsewhere: what whoever means another host is told.
    """

    hosts: frozenset[str]
    access: Access
    clock: Callable[[], float] = time.monotonic
    elsewhere: str = "this console has another name; start it with --console-name to add one"


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

        now = self._rules.clock()
        refusal: Response | None = self._refusal(scope, now)
        if refusal is None:
            somebody = self._somebody(scope, now)
            scope[_ASKING] = Asking(somebody or NOBODY, now)
            refusal = self._locked(scope, somebody)
        await (self._app if refusal is None else refusal)(scope, receive, with_headers)

    def _somebody(self, scope: Scope, now: float) -> Somebody | None:
        """Return who asks; None for a token that is nobody's."""
        headers, access = Headers(scope=scope), self._rules.access
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind:
            return access.by_token(token.strip()) if kind.lower() == "bearer" else None
        return access.by_cookie(Request(scope).cookies.get(cookie_name(headers.get("host", "")), ""), now)

    def _locked(self, scope: Scope, somebody: Somebody | None) -> Response | None:
        path = scope["path"]
        if somebody is not None and (somebody.role or not self._rules.access.reading_needs_token or path in _OPEN):
            return None
        if somebody is None or path.startswith(("/api/", "/live")):
            return PlainTextResponse(
                "a token is needed: Authorization: Bearer TOKEN\n", 401, {"WWW-Authenticate": "Bearer"}
            )
        # A form that was sent too late is asked for again by the page that it stood on.
        meant = str(Request(scope).url) if scope["method"] == "GET" else Headers(scope=scope).get("referer", "")
        try:
            to = urlsplit(meant)._replace(scheme="", netloc="").geturl()
        except ValueError:  # whatever a stranger calls a page
            to = ""
        return RedirectResponse(f"/login?{urlencode({'to': to})}", 303)

    def _refusal(self, scope: Scope, now: float) -> PlainTextResponse | None:
        host = host_of(Headers(scope=scope).get("host", ""))
        if host not in self._rules.hosts:
            return PlainTextResponse(f"{self._rules.elsewhere}\n", 421)
        address = (scope.get("client") or ("",))[0]
        if not self._limiter.admit(address, now):
            return PlainTextResponse("too many requests; wait a moment\n", 429, {"Retry-After": "2"})
        return None


def cookie_name(host: str) -> str:
    """Return what a session's cookie is called where a request means this host: browsers send one to all its ports."""
    port = host.rpartition(":")[2]
    return f"{COOKIE}-{port}" if port.isascii() and port.isdecimal() else COOKIE


class Refused(ReplayfleetError):
    """What a request asks isn't done; the text says why.

    Attributes:
        status: of the HTTP answer.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def body_of(request: Request, most: int) -> bytes:
    """Return what was sent with a request.

    Raises:
        Refused: It is more than ``most`` bytes, took too long, or broke off.
    """

    async def read() -> bytes:
        found = b""
        async for part in request.stream():
            found += part
            if len(found) > most:
                raise Refused(413, f"expected at most {most} bytes")
        return found

    try:
        return await asyncio.wait_for(read(), BODY_S)
    except ClientDisconnect as error:
        raise Refused(400, "what was to be sent broke off") from error
    except asyncio.TimeoutError as error:
        raise Refused(408, f"what was to be sent didn't come within {BODY_S:g} s") from error


def who_asks(request: Request) -> Asking:
    """Return what the guard found out about a request."""
    asking: Asking = request.scope[_ASKING]
    return asking


def is_ours(request: Request) -> bool:
    """Whether a form was sent by one of our pages: browsers say so, and no script can lie about it.

    Behind a proxy that speaks TLS a page's own scheme isn't the one that is seen here; its browser knows.
    """
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    return request.headers.get("origin") == own or request.headers.get("sec-fetch-site") == "same-origin"
