"""What operators do in the console: each verb first says what will happen, then is done; pages and JSON alike."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import re
import secrets
from collections import deque
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from replayfleet.aggregator.console.facts import Fleet
from replayfleet.aggregator.console.views import BUTTONS, Pages
from replayfleet.aggregator.console.watch import Watch
from replayfleet.aggregator.control.membership import Plan
from replayfleet.aggregator.control.verbs import (
    MAX_VERB_BYTES,
    RollBack,
    Verb,
    VerbRefused,
    client_of,
    decode_verb,
    name_of,
    parse_version,
)
from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.service.web.access import Access, Somebody
from replayfleet.federation.service.web.guard import Refused, body_of, cookie_name, is_ours, who_asks
from replayfleet.federation.wire.protocol.limits import check

MAX_BODY_BYTES = 16 * 1024
_STATUS = {MalformedMessage: 400, VerbRefused: 409, ConnectionError: 503}
_OWN = re.compile(r"/(?!do\b|login\b|logout\b)([!-.0-\[\]-~][!-\[\]-~]*)?")
"""A path, and no host: not two slashes, and no backslash, which browsers take for one."""
_FIELDS = ("verb", "client", "because", "to", "by_s")


class Operating:
    """Login, verbs and the JSON interface.

    Args:
        watch: knows the aggregator.
        access: who may.
        pages: templates.
        secure: whether the console is reached over TLS.
    """

    def __init__(self, watch: Watch, access: Access, pages: Pages, *, secure: bool) -> None:
        self._watch = watch
        self._access = access
        self._pages = pages
        self._secure = secure
        self._said: dict[str, tuple[str, str]] = {}
        self._turn = asyncio.Lock()  # a second click waits for the first
        self._spent: deque[str] = deque(maxlen=1000)  # forms that were done
        self.handlers = dict.fromkeys((Refused, *_STATUS), self._refuse)
        self.routes = [
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/ask", self._ask),
            Route("/do", self._do, methods=["POST"]),
            Route("/api/fleet", self._api_fleet),
            Route("/api/plan", self._api_verb, methods=["POST"]),
            Route("/api/do", self._api_verb, methods=["POST"]),
        ]

    def take_said(self, somebody: Somebody) -> tuple[str, str]:
        """Return what was just done and the address that takes it back, once."""
        return self._said.pop(somebody.secret, ("", "")) if somebody.secret else ("", "")

    async def _login(self, request: Request) -> Response:
        now = who_asks(request).now
        facts = {"title": "Log in", "wrong": "", "possible": self._access.has_tokens}
        if request.method != "POST":
            return self._page("login.html", {**facts, "to": request.query_params.get("to", "")})
        form = await _form(request)
        address = request.client.host if request.client else ""
        somebody = self._access.by_token(form.get("token", "")) if self._access.may_try(address, now) else None
        if somebody is None:
            wrong = "This is no valid token, or too many were tried; wait ten seconds and look again."
            return self._page("login.html", {**facts, "wrong": wrong, "to": form.get("to", "")}, 403)
        answer = RedirectResponse(_own(form.get("to", "")), 303)
        name, cookie = cookie_name(request.headers["host"]), self._access.begin(somebody, now)
        answer.set_cookie(name, cookie, httponly=True, samesite="strict", secure=self._secure, path="/")
        return answer

    async def _logout(self, request: Request) -> Response:
        _check_form(who_asks(request).somebody, await _form(request))
        name = cookie_name(request.headers["host"])
        self._access.end(request.cookies.get(name, ""))
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(name, path="/", httponly=True, samesite="strict", secure=self._secure)
        return answer

    async def _ask(self, request: Request) -> Response:
        """Say what a verb would do, and ask whether to do it. Changes nothing, so a link may lead here."""
        somebody = who_asks(request).somebody
        verb = _verb_of(request.query_params)
        _check_operator(somebody)
        plan = await run_in_threadpool(self._watch.control.plan, verb)
        return self._page("ask.html", _asked(verb, request.query_params, somebody, plan=plan))

    async def _do(self, request: Request) -> Response:
        somebody = who_asks(request).somebody
        form = await _form(request)
        _check_form(somebody, form)
        _check_operator(somebody)
        async with self._turn:
            return await self._done(form, somebody)

    async def _done(self, form: Mapping[str, str], somebody: Somebody) -> Response:
        """Do what a form says, once, if it would still do what its page said."""
        once, agreed = form.get("once", ""), form.get("plan", "")
        if once and once in self._spent:
            return RedirectResponse(_page_of(_verb_of(form)), 303)
        try:
            verb = _verb_of(form)
            plan = await run_in_threadpool(self._watch.do, verb, f"{somebody.name} in the console", agreed)
        except tuple(_STATUS) as error:
            if agreed and isinstance(error, VerbRefused):
                with contextlib.suppress(VerbRefused):
                    plan = await run_in_threadpool(self._watch.control.plan, verb)
                    if plan.mark != agreed:
                        return self._page("ask.html", _asked(verb, form, somebody, plan=plan, changed=True), 409)
            if not form.get("because"):
                raise
            verb = _verb_of({**form, "because": ""})
            return self._page("ask.html", _asked(verb, form, somebody, wrong=str(error)), _STATUS[type(error)])
        self._spent.append(once)
        self._said[somebody.secret] = f"Done: {name_of(verb)} {_whom(verb)}".strip(), _undo(verb, plan)
        return RedirectResponse(_page_of(verb), 303)

    async def _api_fleet(self, request: Request) -> Response:
        fleet = await run_in_threadpool(self._watch.read, lambda fleet, story, number: fleet)
        return Response(msgspec.json.encode(_json_of(fleet)), media_type="application/json")

    async def _api_verb(self, request: Request) -> Response:
        """Take a verb as JSON: ``/api/plan`` says what it would do, ``/api/do`` does it."""
        somebody = who_asks(request).somebody
        _check_operator(somebody)
        if somebody.secret:
            raise Refused(403, "a browser's session has no say here; send Authorization: Bearer TOKEN")
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise Refused(415, "expected Content-Type: application/json")
        verb = decode_verb(await body_of(request, MAX_VERB_BYTES))
        if request.url.path == "/api/plan":
            plan = await run_in_threadpool(self._watch.control.plan, verb)
        else:
            plan = await run_in_threadpool(self._watch.do, verb, f"{somebody.name} over HTTP")
        return Response(msgspec.json.encode(plan), media_type="application/json")

    def _page(self, template: str, facts: dict[str, object], status: int = 200) -> Response:
        return HTMLResponse(self._pages.render(template, facts), status)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, Refused) else _STATUS[type(error)]
        if request.url.path.startswith("/api/"):
            return JSONResponse({"error": str(error)}, status)
        return self._page(
            "problem.html", {"title": "That didn't work", "text": str(error), **_way_on(request, error)}, status
        )


def _verb_of(fields: Mapping[str, str]) -> Verb:
    given: dict[str, object] = {name: fields[name] for name in _FIELDS if fields.get(name)}
    if "to" in given:
        given["to"] = parse_version(str(given["to"]))
    if "by_s" in given:
        try:
            given["by_s"] = by_s = float(str(given["by_s"]))
        except ValueError as error:
            raise MalformedMessage(f"by_s {given['by_s']!r}, expected seconds") from error
        check(math.isfinite(by_s), f"by_s {by_s}, expected seconds")
    return decode_verb(msgspec.json.encode(given))


def _asked(verb: Verb, fields: Mapping[str, str], somebody: Somebody, **said: object) -> dict[str, object]:
    """Return what the page that asks shows: the ``plan``, or what was ``wrong`` with what was typed."""
    return {
        "title": BUTTONS[name_of(verb)].removesuffix(" its model"),  # whose follows
        "verb": name_of(verb), "whom": _whom(verb), "once": secrets.token_urlsafe(9),
        "fields": {name: value for name in _FIELDS if (value := fields.get(name))},
        "takes_reason": name_of(verb) == "exclude", "somebody": somebody, "back": _page_of(verb), **said,
    }  # fmt: skip


def _whom(verb: Verb) -> str:
    return "all clients" if isinstance(verb, RollBack) and not client_of(verb) else client_of(verb)


def _undo(verb: Verb, plan: Plan) -> str:
    """Return the address that asks whether to take back what was done; empty if nothing does."""
    if isinstance(verb, RollBack):
        to = plan.undo.rpartition(" ")[2]
        return to and f"/ask?{urlencode({'verb': name_of(verb), 'client': client_of(verb), 'to': to})}"
    other = {"exclude": "readmit", "readmit": "exclude", "pause": "resume", "drain": "resume", "resume": "pause"}
    client = client_of(verb)
    name = other.get(name_of(verb))
    return "" if name is None else f"/ask?verb={name}" + (f"&client={client}" if client else "")


def _page_of(verb: Verb) -> str:
    return f"/clients/{client_of(verb)}" if client_of(verb) else "/round"


def _way_on(request: Request, error: Exception) -> dict[str, object]:
    """Return what a problem's page leads to: where something can be done about it."""
    somebody, about = who_asks(request).somebody, "/"
    form = getattr(request.state, "form", request.query_params)
    if isinstance(error, Refused) and not somebody.may_operate:
        wanted = {name: form[name] for name in _FIELDS if form.get(name)}
        back = f"/login?{urlencode({'to': f'/ask?{urlencode(wanted)}'})}" if wanted else "/login"
        return {"somebody": somebody, "back": back, "back_name": "Log in"}
    with contextlib.suppress(MalformedMessage):
        about = _page_of(_verb_of(form))
    name = {"/": "the fleet", "/round": "the round"}.get(about, about.rpartition("/")[2])
    return {"somebody": somebody, "back": about, "back_name": f"To {name}"}


def _own(address: str) -> str:
    """Return an address of this console that a browser can be led to; its first page for any other."""
    return address if _OWN.fullmatch(address) else "/"


def _json_of(fleet: Fleet) -> object:
    return {**{name: getattr(fleet, name) for name in fleet.__slots__ if name != "held"}, "accuracy": fleet.accuracy}


def _check_operator(somebody: Somebody) -> None:
    if not somebody.may_operate:
        raise Refused(403 if somebody.role else 401, "this takes the token of an operator; log in with one")


def _check_form(somebody: Somebody, form: Mapping[str, str]) -> None:
    if not somebody.secret or not hmac.compare_digest(somebody.secret.encode(), form.get("secret", "").encode()):
        raise Refused(403, "this form is of another session; load the page again")


async def _form(request: Request) -> Mapping[str, str]:
    if not is_ours(request):
        raise Refused(403, "this form was sent by a page of somebody else's")
    text = (await body_of(request, MAX_BODY_BYTES)).decode(errors="replace")
    try:
        request.state.form = form = dict(parse_qsl(text, keep_blank_values=True, max_num_fields=20))
    except ValueError as error:
        raise Refused(400, f"this is no form of ours: {error}") from error
    return form
