"""Operators' verbs from pages and over HTTP, on a fleet whose loop turns."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from support.tiny_fleet import TinyFleet
from support.waiting_fleet import waiting_fleet

from replayfleet.aggregator.console.app import Console
from replayfleet.aggregator.console.watch import Watch
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.aggregator.rounds.opening import Opening
from replayfleet.federation.service.web.access import Access, add_token
from replayfleet.federation.service.web.guard import COOKIE, Rules
from tests.support.asking import Said, ask

OURS = "http://127.0.0.1:8080"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TinyFleet]:
    with waiting_fleet(tmp_path) as made:
        yield made


class Browser:
    """Asks as a browser with a session does."""

    def __init__(self, folder: Path, role: Any = None, *, locked: bool = False) -> None:
        tokens = folder / "tokens.toml"
        self.token = add_token(tokens, "anna", role or "viewer")
        rules = Rules(frozenset({"127.0.0.1"}), Access(tokens, reading_needs_token=locked))
        self.app = Console(Watch(folder / "aggregator"), rules).app
        self.cookie = ""
        if role is not None:
            self.log_in(self.token)

    def log_in(self, token: str) -> Said:
        said = self.send("/login", token=token)
        self.cookie = said.headers.get("set-cookie", "").split(";")[0]
        return said

    def get(self, url: str) -> Said:
        return ask(self.app, url, cookie=self.cookie)

    def send(self, url: str, origin: str = OURS, **form: str) -> Said:
        return ask(self.app, url, "POST", body=urlencode(form).encode(), cookie=self.cookie, origin=origin)

    def confirm(self, asked: Said, **more: str) -> Said:
        """Send the form of a page that asks, as a click does."""
        fields = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', asked.text)
        return self.send("/do", **{name: html.unescape(value) for name, value in fields}, **more)

    def secret(self, page: Said) -> str:
        found = re.search(r'name="secret" value="([^"]+)"', page.text)
        return found[1]


def test_a_client_is_excluded_and_brought_back(fleet: TinyFleet) -> None:
    anna = Browser(fleet.tmp_path, "operator")
    assert "Round 0 waits for cam-3" in anna.get("/").text
    asked = anna.get("/ask?verb=exclude&client=cam-3")
    assert "Round 0 closes with 2 uploads, and has 2" in asked.text
    done = anna.send("/do", verb="exclude", client="cam-3", because="its lens is broken", secret=anna.secret(asked))
    assert (done.status, done.headers["location"]) == (303, "/clients/cam-3")
    renewed = ask(anna.app, "/clients/cam-3", cookie=anna.cookie, sec_fetch_dest="empty").text
    assert "Done: exclude cam-3" not in renewed, "another window of hers isn't told instead"
    page = anna.get("/clients/cam-3").text
    assert "Done: exclude cam-3" in page
    assert "Excluded by anna in the console: its lens is broken" in page
    assert "Done: exclude" not in anna.get("/clients/cam-3").text
    asked = anna.get("/ask?verb=readmit&client=cam-3")
    assert anna.send("/do", verb="readmit", client="cam-3", secret=anna.secret(asked)).status == 303
    told = [event for event in read_journal(fleet.tmp_path / "aggregator") if event["event"] == "operator"]
    assert [(event["verb"], event["who"]) for event in told] == [
        ("exclude", "anna in the console"),
        ("readmit", "anna in the console"),
    ]


def deeds(fleet: TinyFleet) -> list[str]:
    told = read_journal(fleet.tmp_path / "aggregator")
    return [f"{event['verb']} {event.get('client', '')}".strip() for event in told if event["event"] == "operator"]


def test_what_is_clicked_twice_is_done_once(fleet: TinyFleet) -> None:
    anna = Browser(fleet.tmp_path, "operator")
    asked = [anna.get("/ask?verb=round%20extend"), anna.get("/ask?verb=round%20extend")]
    for page in (asked[0], asked[0], asked[1]):
        assert (anna.confirm(page).status, anna.confirm(page).headers["location"]) == (303, "/round")
    assert deeds(fleet) == ["round extend"] * 2, "another page that asks may do it again"
    exclude = anna.get("/ask?verb=exclude&client=cam-3")
    for _ in range(2):
        assert anna.confirm(exclude).headers["location"] == "/clients/cam-3"
    assert deeds(fleet)[2:] == ["exclude cam-3"]


def test_what_would_do_something_else_than_it_said_is_asked_again(fleet: TinyFleet) -> None:
    anna = Browser(fleet.tmp_path, "operator")
    asked = anna.get("/ask?verb=exclude&client=cam-3")
    assert "Round 0 closes with 2 uploads, and has 2" in asked.text
    anna.confirm(anna.get("/ask?verb=exclude&client=cam-1"))
    again = anna.confirm(asked, because="its lens is broken")
    assert again.status == 409
    assert "Nothing was done: the fleet has changed since you were asked" in again.text
    assert "closes with 1 upload, and has 1" in again.text
    assert 'value="its lens is broken"' in again.text
    assert deeds(fleet) == ["exclude cam-1"]
    assert anna.confirm(again).status == 303
    assert deeds(fleet) == ["exclude cam-1", "exclude cam-3"]
    assert "is excluded already" in anna.confirm(asked, because="x").text


def test_a_pause_is_told_once_and_ends_with_a_button(fleet: TinyFleet) -> None:
    anna = Browser(fleet.tmp_path, "operator")
    asked = anna.get("/ask?verb=pause")
    assert 'nobody begins to train from now on until <a href="/round">Resume</a>' in asked.text
    anna.confirm(asked)
    said = 'An operator paused the fleet: nobody begins to train, and no round closes; <a href="/round">Resume</a> lets'
    for page in ("/", "/round", "/journal"):
        text = anna.get(page).text
        assert text.count("paused the fleet") == 1
        assert said in text
        assert "`" not in text
    viewer = Browser(fleet.tmp_path, "viewer")
    assert "<code>aggregator resume</code> lets rounds go on" in viewer.get("/round").text


def test_what_would_be_refused_is_not_offered(tmp_path: Path) -> None:
    with waiting_fleet(tmp_path, min_clients=3):
        anna = Browser(tmp_path, "operator")
        text = anna.get("/round").text
        assert re.findall(r'href="/ask\?verb=([^"]+)"', text) == ["round%20extend", "pause", "drain"]
        assert "Close the round now<small>round 0 has 2 uploads, and closes with 3 at least" in text
        assert "Roll all back<small>nothing earlier is kept of anybody" in text
        assert "Roll back its model<small>nothing earlier of it is kept" in anna.get("/clients/cam-1").text
        anna.confirm(anna.get("/ask?verb=exclude&client=cam-1"))
        text = anna.get("/clients/cam-1").text
        assert re.findall(r'href="/ask\?verb=(\w+)[^"]*">Readmit', text) == ["readmit"]
        assert "it is excluded, and gets no models" in text


def test_a_problem_leads_to_where_something_can_be_done(fleet: TinyFleet) -> None:
    anna = Browser(fleet.tmp_path, "operator")
    for verb, leads_to in (
        ("readmit&client=cam-1", 'href="/clients/cam-1">To cam-1<'),
        ("resume", 'href="/round">To the round<'),
        ("exclude&client=a%20b", 'href="/">To the fleet<'),
    ):
        assert leads_to in anna.get(f"/ask?verb={verb}").text
    form = {"verb": "readmit", "client": "cam-1", "secret": anna.secret(anna.get("/"))}
    assert 'href="/clients/cam-1">To cam-1<' in anna.send("/do", **form).text


@pytest.mark.parametrize("locked", [False, True])
def test_who_was_logged_out_comes_back_to_what_was_to_be_done(fleet: TinyFleet, locked: bool) -> None:
    nobody, asked = Browser(fleet.tmp_path, locked=locked), "/ask?verb=exclude&client=cam-1"
    token = add_token(fleet.tmp_path / "tokens.toml", "ben", "operator")
    form, headers = b"verb=exclude&client=cam-1", {"origin": OURS, "referer": f"{OURS}{asked}"}
    for said in (nobody.get(asked), ask(nobody.app, "/do", "POST", body=form, **headers)):
        found = re.search(r'href="(/login[^"]*)">Log in<', said.text)
        way = html.unescape(found[1]) if found else said.headers["location"]
        to = re.search(r'name="to" value="([^"]*)"', nobody.get(way).text)
        said = nobody.send("/login", token=token, to=html.unescape(to[1]))
        assert (said.status, said.headers["location"]) == (303, asked)


@pytest.mark.parametrize(
    "to",
    ["", "x", "//evil.example", "/\\evil.example", "https://evil.example", "/do", "/login?to=/", "/a b", "/a\r\nb"],
)
def test_a_login_leads_to_no_other_host_and_to_nothing_that_is_done(fleet: TinyFleet, to: str) -> None:
    anna = Browser(fleet.tmp_path, "operator")
    assert anna.send("/login", token=anna.token, to=to).headers["location"] == "/"


def test_a_page_of_no_address_leads_to_the_login_like_any_other(fleet: TinyFleet) -> None:
    said = ask(Browser(fleet.tmp_path, locked=True).app, "/do", "POST", origin=OURS, referer="http://[x")
    assert (said.status, said.headers["location"]) == (303, "/login?to=")


def test_a_round_that_waits_for_an_operator_is_opened_in_the_console(tmp_path: Path) -> None:
    with waiting_fleet(tmp_path, opening=Opening()):
        anna = Browser(tmp_path, "operator")
        page = anna.get("/round").text
        assert "Round 0 waits to begin" in page
        assert "it begins when an operator opens it" in anna.get("/").text
        assert "round%20open" in page
        assert "round%20close" not in page
        asked = anna.get("/ask?verb=round%20open")
        assert "round 0 begins now" in asked.text.lower()
        assert anna.send("/do", verb="round open", secret=anna.secret(asked)).status == 303
        assert "Round 0 waits for cam-3" in anna.get("/round").text
        assert "when an operator opens it" not in anna.get("/").text, "what it waits for is older than the rest"
        told = [event for event in read_journal(tmp_path / "aggregator") if event["event"] == "operator"]
        assert [(event["verb"], event["who"]) for event in told] == [("round open", "anna in the console")]


def test_whoever_shows_no_operators_token_changes_nothing(fleet: TinyFleet) -> None:
    viewer = Browser(fleet.tmp_path, "viewer")
    assert viewer.get("/ask?verb=pause").status == 403
    page = viewer.get("/clients/cam-3")
    assert 'id="exclude"' not in page.text
    assert viewer.send("/do", verb="pause", secret=viewer.secret(page)).status == 403
    nobody = Browser(fleet.tmp_path)
    assert nobody.get("/ask?verb=pause").status == 401
    assert nobody.send("/do", verb="pause", secret="").status == 403
    assert "open" in nobody.get("/").text
    assert not [event for event in read_journal(fleet.tmp_path / "aggregator") if event["event"] == "operator"]


def test_a_form_counts_only_with_its_sessions_secret_and_from_our_own_page(fleet: TinyFleet) -> None:
    anna = Browser(fleet.tmp_path, "operator")
    secret = anna.secret(anna.get("/"))
    for origin in ("https://evil.example", "null", "http://127.0.0.1:8081"):
        assert anna.send("/do", origin, verb="pause", secret=secret).status == 403
        assert anna.send("/login", origin, token=anna.token).status == 403
    assert anna.send("/do", verb="pause", secret="x").status == 403
    assert anna.send("/do", verb="pause").status == 403
    assert anna.get("/do").status == 405
    assert ask(anna.app, "/do", "POST", body=b"verb=pause", cookie=anna.cookie).status == 403
    assert anna.send("/do", verb="pause", secret=secret).status == 303
    anna.send("/logout", secret=secret)
    assert anna.send("/do", verb="resume", secret=secret).status == 403


def test_behind_a_proxy_that_speaks_tls_forms_of_our_own_pages_count(fleet: TinyFleet) -> None:
    anna = Browser(fleet.tmp_path)
    form = urlencode({"token": anna.token}).encode()
    proxied = "https://127.0.0.1:8080"
    for site, status in (("same-origin", 303), ("same-site", 403), ("cross-site", 403)):
        assert ask(anna.app, "/login", "POST", body=form, origin=proxied, sec_fetch_site=site).status == status


def test_where_reading_needs_a_token_nobody_else_sees_a_word(fleet: TinyFleet) -> None:
    nobody = Browser(fleet.tmp_path, locked=True)
    for path in ("/", "/round", "/journal", "/clients/cam-3", "/ask?verb=pause"):
        said = nobody.get(path)
        assert (said.status, said.headers["location"], said.body) == (303, f"/login?{urlencode({'to': path})}", b"")
    for path in ("/live", "/api/fleet"):
        assert nobody.get(path).status == 401
    assert ask(nobody.app, "/login", authorization="Bearer x").status == 401
    led = ask(nobody.app, "/", "HEAD")
    assert (led.status, ask(nobody.app, led.headers["location"], "HEAD").status) == (303, 200), "as watchers ask"
    assert nobody.log_in(nobody.token).status == 303
    assert "tiny-fleet" in nobody.get("/").text


def test_a_cookie_is_closed_to_scripts_and_other_sites(fleet: TinyFleet) -> None:
    said = Browser(fleet.tmp_path).log_in(add_token(fleet.tmp_path / "tokens.toml", "ben", "viewer"))
    cookie = said.headers["set-cookie"].lower()
    assert cookie.startswith(COOKIE)
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


def test_consoles_that_are_reached_under_one_name_dont_log_each_other_out(fleet: TinyFleet) -> None:
    """Through two tunnels, say: a browser sends what one of them set to the other's port too."""
    anna = Browser(fleet.tmp_path)
    cookies = {
        port: ask(
            anna.app, "/login", "POST", body=urlencode({"token": anna.token}).encode(),
            host=f"127.0.0.1:{port}", origin=f"http://127.0.0.1:{port}",
        ).headers["set-cookie"].split(";")[0]
        for port in (8080, 8081)
    }  # fmt: skip
    held = dict(cookie.split("=", 1) for cookie in cookies.values())
    assert len(held) == 2, "the second one doesn't take the first one's place"
    sent = "; ".join(f"{name}={value}" for name, value in held.items())
    assert "anna, viewer" in ask(anna.app, "/", cookie=sent, host="127.0.0.1:8080").text


def test_tokens_cant_be_guessed_often(fleet: TinyFleet) -> None:
    nobody = Browser(fleet.tmp_path)
    assert [nobody.send("/login", token="guess").status for _ in range(6)] == [403] * 6
    assert nobody.log_in(nobody.token).status == 403


def test_programs_have_the_same_verbs(fleet: TinyFleet) -> None:
    app, token = (made := Browser(fleet.tmp_path, "operator")).app, made.token

    def post(url: str, body: object, **headers: str) -> Said:
        given = {"authorization": f"Bearer {token}", "content_type": "application/json"} | headers
        return ask(app, url, "POST", body=body if isinstance(body, bytes) else json.dumps(body).encode(), **given)

    exclude = {"verb": "exclude", "client": "cam-3"}
    planned = json.loads(post("/api/plan", exclude).body)
    assert planned["undo"] == "aggregator readmit cam-3"
    assert post("/api/do", exclude, authorization="Bearer x").status == 401
    assert post("/api/do", exclude, authorization="").status == 401
    assert post("/api/do", exclude, content_type="text/plain").status == 415
    assert post("/api/do", b"{" * 5000).status == 413
    assert post("/api/do", b"\x00").status == 400
    assert post("/api/do", {"verb": "exclude", "client": "../x"}).status == 400
    assert post("/api/do", exclude).status == 200
    refused = post("/api/do", exclude)
    assert refused.status == 409
    assert "is excluded already, by anna over HTTP" in json.loads(refused.body)["error"]
    members = {one["client"]: one for one in json.loads(ask(app, "/api/fleet").body)["members"]}
    assert members["cam-3"]["state"] == "excluded"
    # a browser's session doesn't count here, so no page can use it
    assert ask(app, "/api/do", "POST", body=b"{}", cookie=made.cookie, content_type="application/json").status == 403


def test_pages_follow_the_loop_and_fall_back_to_the_disk_when_it_ends(tmp_path: Path) -> None:
    with waiting_fleet(tmp_path) as fleet:
        anna = Browser(fleet.tmp_path, "operator")
        assert "isn&#39;t running" not in anna.get("/round").text
    time.sleep(1.1)  # looks at most once a second
    assert "isn&#39;t running" in anna.get("/round").text
    assert anna.get("/ask?verb=pause").status == 503
