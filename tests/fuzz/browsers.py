"""Targets: whatever reaches our pages over HTTP, from who has a token, a session, or nothing at all."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec
import numpy as np

from replayfleet.aggregator.console.app import Console
from replayfleet.aggregator.console.watch import Watch
from replayfleet.aggregator.control.membership import Plan
from replayfleet.aggregator.control.verbs import VerbRefused
from replayfleet.edge_client.flow import Answers, Inputs, LabelProgress, Picture, Prediction, Shown
from replayfleet.edge_client.learning.labels.operators_word import AnyFeedback, FeedbackRefused, TakeBack
from replayfleet.edge_client.operator.operator_desk import BoxBody
from replayfleet.edge_client.operator.studio.app import Pages
from replayfleet.edge_client.operator.studio.studio import Known, Studio
from replayfleet.edge_client.operator.studio.words import Answer, Question, decode_answer, decode_question
from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.service.web.access import Access, add_token
from replayfleet.federation.service.web.guard import Rules, cookie_name
from tests.fuzz.forms import JSON, MSGPACK, document, taken_apart
from tests.fuzz.mutation import Unfit
from tests.fuzz.target import Target, scratch, seeds
from tests.support.asking import ask
from tests.support.watched_fleet import watched_fleet

_HOST = "127.0.0.1:8080"
_OURS = {"origin": f"http://{_HOST}"}
_HOSTS = frozenset({"127.0.0.1"})
_TAKEN = ("app", "url", "method", "body", "client")
"""Words that no header can have here: they are ``ask``'s own."""


def _asked(app: Any, request: bytes, own: dict[str, str]) -> str:
    """Send [method, path, query, headers, body]; a form or JSON as a body travels as such."""
    method, path, query, headers, body = taken_apart(request, tuple[str, str, dict[str, Any], dict[str, str], Any])
    try:
        url = f"{path}?{urlencode(query)}" if query else path
        urlsplit(url)
        if isinstance(body, dict):
            is_json = headers.get("content-type") == "application/json"
            body = json.dumps(body, default=repr).encode() if is_json else urlencode(body).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise Unfit from error  # nobody could send it
    given = {name: value for name, value in {**own, **headers}.items() if name not in _TAKEN}
    said = ask(app, url, method, body=body if isinstance(body, bytes) else repr(body).encode(), **given)
    assert said.status < 500 or said.status == 503, said.text
    if said.status >= 400:
        raise MalformedMessage(str(said.status))
    return f"{method} {said.status}"


class _Control:
    """Stands for a loop that says yes to every verb."""

    def look(self) -> Any:
        raise ConnectionError("nobody is there")

    def plan(self, verb: Any) -> Plan:
        return Plan(f"does {verb}")

    def do(self, verb: Any, who: str, agreed: str = "") -> Plan:
        plan = self.plan(verb)
        if agreed not in {"", plan.mark}:
            raise VerbRefused(f"now {plan.text}")
        return plan


@cache
def _console() -> tuple[Any, dict[str, str], dict[str, str], str]:
    """The console, what one with a token sends, what one with a session sends, and the secret of that one's forms."""
    folder = watched_fleet(scratch() / "watched")
    token = add_token(scratch() / "tokens.toml", "anna", "operator")
    access = Access(scratch() / "tokens.toml", reading_needs_token=False)
    watch = Watch(folder)
    watch.control = _Control()  # type: ignore[assignment]
    time = iter(range(10**12))
    app = Console(watch, Rules(_HOSTS, access, clock=lambda: 0.01 * next(time))).app
    cookie = access.begin(access.by_token(token) or _nobody(), 0.0)
    secret = access.by_cookie(cookie, 0.0).secret
    return app, {"authorization": f"Bearer {token}"}, {**_OURS, "cookie": f"{cookie_name(_HOST)}={cookie}"}, secret


def _nobody() -> Any:
    raise AssertionError("our own token isn't known")


def _console_requests(data: bytes) -> str:
    who, secretly, request = taken_apart(data, tuple[str, bool, Any])
    app, with_token, with_session, secret = _console()
    if not isinstance(request, list) or len(request) != 5:
        raise Unfit
    if secretly and isinstance(request[4], dict):
        request[4]["secret"] = secret
    own = {"token": with_token, "session": with_session}.get(who, _OURS)
    if request[1] == "/logout":
        raise Unfit  # the session is the next one's too
    return _asked(app, document(request), own)


def _console_seeds() -> list[bytes]:
    as_json = {"content-type": "application/json"}
    pages = ["/", "/round", "/clients/cam-001", "/methods", "/journal", "/login", "/static/console.css"]
    asked = [("", False, ["GET", page, {}, {}, b""]) for page in pages]
    asked += [
        ("", False, ["GET", "/journal", {"q": "probe", "before": "9", "trouble": "1", "kind": "x"}, {}, b""]),
        ("", False, ["GET", "/", {"q": "cam", "show": "trouble"}, {}, b""]),
        ("token", False, ["GET", "/api/fleet", {}, {}, b""]),
        ("token", False, ["POST", "/api/plan", {}, as_json, {"verb": "exclude", "client": "cam-001", "because": "x"}]),
        ("token", False, ["POST", "/api/do", {}, as_json, {"verb": "round extend", "by_s": 9.5}]),
        ("session", False, ["GET", "/ask", {"verb": "rollback", "client": "all", "to": "1"}, {}, b""]),
        ("session", True, ["POST", "/do", {}, {}, {"verb": "exclude", "client": "cam-001", "because": "dirt"}]),
        ("session", True, ["POST", "/do", {}, {}, {"verb": "pause", "once": "a", "plan": ""}]),
    ]
    return [document(one) for one in asked]


class _Client:
    """Takes every label of a class that it knows."""

    def learn(self, feedback: AnyFeedback, _shown: Shown) -> TakeBack:
        if getattr(feedback, "class_name", "") not in {"cat", "dog"}:
            raise FeedbackRefused("unknown class")
        return str

    def known(self) -> Known:
        return Known("cam-1", ("cat", "dog"), 0, 1, LabelProgress(1, 2, 1, 1))


@cache
def _studio_app() -> Any:
    client, now = _Client(), SimpleNamespace(s=0.0)
    studio = Studio(client.known, client.learn, 1e12, lambda: now.s)
    for frame in range(8):
        now.s += 1.0
        picture = Picture("front", frame, np.full((24, 32, 3), 90, np.uint8), 0.0, None)
        answers = Answers(np.zeros(1, np.int64), np.array([frame / 10], np.float32))
        inputs = Inputs(np.zeros((1, 1, 2, 2), np.float32))
        studio.watch(Shown(picture, inputs, Prediction("front", frame, answers, 1, 0.0, 0.0)))
    time = iter(range(10**12))
    rules = Rules(_HOSTS, Access(None, reading_needs_token=False), clock=lambda: 0.01 * next(time))
    return Pages(studio, rules).app


def _studio_requests(data: bytes) -> str:
    request = taken_apart(data, list[Any])
    if len(request) != 5 or request[1] == "/live":
        raise Unfit  # a stream that never ends
    return _asked(_studio_app(), data, _OURS)


def _studio_seeds() -> list[bytes]:
    as_json = {"content-type": "application/json"}
    return [
        document(["GET", "/", {}, {}, b""]),
        document(["GET", "/api/state", {}, {}, b""]),
        document(["GET", "/static/studio.js", {}, {}, b""]),
        *(document(["GET", "/frame", {"camera": "front", "frame": str(frame)}, {}, b""]) for frame in range(8)),
        document(["POST", "/api/label", {}, as_json, {"camera": "front", "frame": 1, "class": "cat"}]),
        document(["POST", "/api/skip", {}, as_json, {"camera": "front", "frame": 2}]),
    ]


_PAGE = Question(7, "boxes", "ab", "front", 8, boxes=(BoxBody("cat", (1.0, 2.0, 3.0, 4.0)),))

BROWSERS = {
    "studio questions": Target(
        seeds(lambda: [msgspec.json.encode(_PAGE), msgspec.json.encode(Question(1, "state"))]),
        lambda data: decode_question(data).act,
        (MalformedMessage,),
        JSON,
    ),
    "studio answers": Target(
        seeds(lambda: [msgspec.msgpack.encode(Answer(7, "ab", state=b"{}", picture=b"x"))]),
        lambda data: str(len(decode_answer(data).picture)),
        (MalformedMessage,),
        MSGPACK,
    ),
    "console": Target(seeds(_console_seeds), _console_requests, (MalformedMessage,), MSGPACK),
    "studio": Target(seeds(_studio_seeds), _studio_requests, (MalformedMessage,), MSGPACK),
}
