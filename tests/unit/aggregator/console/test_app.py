from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

import pytest

from replayfleet.aggregator.console import watch
from replayfleet.aggregator.console.app import Console
from replayfleet.aggregator.console.facts import fleet_on_disk
from replayfleet.aggregator.console.views import client_page
from replayfleet.aggregator.console.watch import Watch
from replayfleet.aggregator.members import table as members
from replayfleet.aggregator.records.roll import Exclusion
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.service.web.access import Access, add_token
from replayfleet.federation.service.web.guard import POLICY, Rules, host_of
from replayfleet.federation.service.web.hosts import means_this_machine
from tests.support.asking import ask, stay_at
from tests.support.watched_fleet import BEGAN, watched_fleet

PAGES = ("/", "/round", "/clients/cam-001", "/clients/cam-002", "/methods", "/journal")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return watched_fleet(tmp_path_factory.mktemp("fleet"))


def console(folder: Path, **rules: Any) -> Any:
    return Console(
        Watch(folder), Rules(frozenset({"127.0.0.1", "localhost"}), Access(None, reading_needs_token=False), **rules)
    ).app


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_whole_and_escapes_what_clients_say(folder: Path, path: str) -> None:
    said = ask(console(folder), path)
    assert said.status == 200
    assert "</html>" in said.text
    assert "<script>document" not in said.text
    assert "onerror=alert(1)>" not in said.text
    assert "\x1b" not in said.text
    assert "\u202e" not in said.text
    assert 'style="' not in said.text  # the policy would refuse it


def test_the_page_says_who_is_waited_for_and_who_refuses(folder: Path) -> None:
    app = console(folder)
    assert "Round 3 waits for cam-002 and cam-003" in ask(app, "/").text
    text = ask(app, "/round").text
    assert "2 of 4 uploads are there" in text
    assert "The deadline is" not in text, "it is counted anew when the aggregator runs again"
    assert "probe-mismatch" in ask(app, "/clients/cam-002").text
    assert "probe-mismatch" not in ask(app, "/clients/cam-001").text


def test_where_no_aggregator_runs_nobody_is_waited_for_who_takes_no_part(tmp_path: Path) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    enrolled = members.Members(folder)
    for serial, client in enumerate(("cam-000", "cam-001", "cam-002", "cam-003")):
        enrolled.enrol(client, members.Issued(serial, BEGAN, BEGAN + 9, BEGAN + 9), BEGAN)
    enrolled.revoke("cam-003", BEGAN)
    enrolled.close()
    store = AggregatorStore(folder)
    for client in ("cam-002", "cam-003"):  # one of them was excluded before it was revoked
        store.exclude(client, Exclusion(BEGAN, "anna", "its lens is dirty"))
    store.close()
    fleet = Watch(folder).read(lambda fleet, *_: fleet)
    assert [(one.state, one.tone) for one in fleet.members[2:]] == [("excluded", "warn"), ("revoked", "bad")]
    text = ask(console(folder), "/").text
    assert "waits for" not in text
    assert re.search(r"With trouble.{1,30}1 of 3", text, re.DOTALL), "whoever was replaced is no client any more"
    assert fleet.accuracy == fmean(one.accuracy for one in fleet.members[:2])


def test_the_page_says_since_when_a_round_is_aggregated_and_how_long_it_took_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    store = AggregatorStore(folder)
    store.close_round(3, BEGAN)
    store.close()
    with (folder / "events.jsonl").open("a") as file:
        file.write(f'{{"time": {BEGAN}, "event": "round closed", "round": 3, "by": "quorum"}}\n')
    took = "averages what came; it took 1.50 s last time"
    text = ask(console(folder), "/round").text
    assert f"{took}</span>" in text, "nothing goes on where no aggregator runs"
    assert "The aggregator isn&#39;t running" in text
    monkeypatch.setattr(watch, "fleet_on_disk", lambda *args: replace(fleet_on_disk(*args), is_live=True))
    text = ask(console(folder), "/round").text
    assert f'{took}, and runs for <time datetime="2027-01-15T08:00:00.000Z"' in text


def test_of_many_places_a_chart_shows_what_all_of_them_do(tmp_path: Path) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    shares = {f"stream_accuracy/street {number:02}": number / 20 for number in range(21)}
    told = {"time": BEGAN, "event": "client report", "client": "cam-001", "round": 4, "metrics": shares}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(told) + "\n")
    app = console(folder)
    assert "mean of 23" in ask(app, "/clients/cam-001").text
    charts = Watch(folder).read(lambda fleet, story, _: client_page(fleet, story, {"client": "cam-001"}))["charts"]
    newest = {name: shares[-1] for name, shares, _ in charts[-1][1].lines}
    assert newest == {"lowest": 0.0, "highest": 1.0, "mean of 23": pytest.approx(0.5)}


def test_of_a_fleet_that_learns_boxes_the_pages_show_how_many_are_found(tmp_path: Path) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    journal, shares = folder / "events.jsonl", Watch(folder).read(lambda fleet, *_: [m.accuracy for m in fleet.members])
    journal.write_text(journal.read_text().replace('"accuracy"', '"boxes_found"'))
    fleet = Watch(folder).read(lambda fleet, *_: fleet)
    assert [member.accuracy for member in fleet.members] == shares
    assert fleet.accuracy is not None
    app = console(folder)
    text = ask(app, "/").text
    assert "Boxes found after each round</h2>" in text
    assert re.search(rf"<dt>Mean boxes found</dt><dd>{100 * fleet.accuracy:.1f} %", text)
    assert "ccuracy" not in text
    assert re.search(r"<dt>Boxes found</dt><dd>\d", ask(app, "/clients/cam-001").text)
    assert re.search(r"boxes_found.{0,40} %", ask(app, "/journal?q=boxes_found").text)


def test_rows_can_be_chosen(folder: Path) -> None:
    text = ask(console(folder), "/?show=trouble&q=CAM").text
    assert "/clients/cam-002" in text
    assert "/clients/cam-001" not in text
    assert "No client matches" in ask(console(folder), "/?q=%3Cb%3E").text


def test_the_journal_is_searched_and_paged(folder: Path) -> None:
    app = console(folder)
    assert ask(app, "/journal?q=probe-mismatch").text.count('class="trouble"') == 3
    assert "Nothing is there" in ask(app, "/journal?q=xyzzy").text
    assert ask(app, "/journal?before=2").text.count('class="what"') == 2
    assert ask(app, "/journal?before=-1&kind=x&trouble=1").status == 200


def test_an_event_of_a_client_that_has_no_page_leads_to_none(tmp_path: Path) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "event": "client refused", "client": "stranger"}\n')
    text = ask(console(folder), "/journal").text
    assert "<b>client refused</b> stranger" in text
    assert 'href="/clients/cam-001"' in text


def test_what_isnt_there_is_said_and_escaped(folder: Path) -> None:
    for path in ("/clients/nobody", "/%3Cscript%3E", "/static/../app.py", "/clients/"):
        said = ask(console(folder), path)
        assert said.status == 404
        assert "<script>" not in said.text


def test_every_answer_has_a_strict_policy(folder: Path) -> None:
    app = console(folder)
    for path in ("/", "/nope", "/static/console.css", "/static/live.js"):
        assert ask(app, path).headers["content-security-policy"] == POLICY
    assert ask(app, "/", host="evil.example").headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8080", "", "[::2]:80", "evil.example:127.0.0.1"]
)
def test_a_name_that_somebody_else_made_lead_here_gets_nothing(folder: Path, host: str) -> None:
    said = ask(console(folder), "/", host=host)
    assert said.status == 421
    assert "street" not in said.text


def test_pages_that_are_told_of_changes_have_so_many_places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayfleet.aggregator.console.app.MAX_LIVE", 3)
    app = console(folder)
    for _ in range(2):  # places are given back
        assert sorted(stay_at(app, "/live", 5)) == [200] * 3 + [503] * 2


def test_who_asks_too_often_waits(folder: Path) -> None:
    app = console(folder, clock=lambda: 0.0)
    codes = [ask(app, "/static/icon.svg").status for _ in range(520)]
    assert codes.count(200) == 500
    assert codes[-1] == 429
    assert ask(app, "/static/icon.svg", client="10.0.0.2").status == 200


@pytest.mark.parametrize(
    ("typed", "status", "said"),
    [
        ("l" * 201, 400, "reason of 201 characters, expected at most 200"),
        ("its lens\tis <broken>", 400, "reason contains &#39;\\t&#39;, which can&#39;t be printed"),
        ("its lens is <broken>", 503, "no aggregator"),
    ],
)
def test_what_was_typed_comes_back_with_what_was_wrong(
    folder: Path, tmp_path: Path, typed: str, status: int, said: str
) -> None:
    tokens = tmp_path / "tokens.toml"
    token = add_token(tokens, "anna", "operator")
    app = Console(Watch(folder), Rules(frozenset({"127.0.0.1"}), Access(tokens, reading_needs_token=False))).app
    ours = {"origin": "http://127.0.0.1:8080"}
    cookie = ask(app, "/login", "POST", body=f"token={token}".encode(), **ours).headers["set-cookie"].split(";")[0]
    secret = re.findall(r'name="secret" value="([^"]+)"', ask(app, "/", cookie=cookie).text)[0]
    form = {"verb": "exclude", "client": "cam-001", "because": typed, "secret": secret}
    page = ask(app, "/do", "POST", body=urlencode(form).encode(), cookie=cookie, **ours)
    assert page.status == status
    assert f"That didn't work: {said}" in page.text
    fields = dict(re.findall(r'<input[^>]* name="(\w+)"[^>]* value="([^"]*)"', page.text))
    assert {name: html.unescape(value) for name, value in fields.items()} == form


def test_a_form_of_somebody_elses_is_refused_whatever_it_holds(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    token = add_token(tokens, "anna", "operator")
    app = Console(Watch(folder), Rules(frozenset({"127.0.0.1"}), Access(tokens, reading_needs_token=False))).app
    ours = {"origin": "http://127.0.0.1:8080"}
    cookie = ask(app, "/login", "POST", body=f"token={token}".encode(), **ours).headers["set-cookie"].split(";")[0]
    assert ask(app, "/login", "POST", body=b"a=1&" * 30, **ours).status == 400
    for body in (b"", b"secret=x", "secret=é".encode(), b"secret=%C3%A9"):
        assert ask(app, "/do", "POST", body=body, cookie=cookie, **ours).status == 403


def test_a_data_dir_that_cant_be_read_is_said(tmp_path: Path) -> None:
    said = ask(console(tmp_path), "/")
    assert said.status == 503
    assert "no aggregator has run here" in said.text
    folder = watched_fleet(tmp_path / "fleet")
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").mkdir()
    said = ask(console(folder), "/")
    assert said.status == 503
    assert "Is a directory" in said.text
    made = Console(Watch(folder), Rules(frozenset(), Access(None, reading_needs_token=False)))
    assert made._number() == -1, "who listens is told to ask, and that page why nothing is shown"


def test_hosts() -> None:
    assert [host_of(text) for text in ("A.b:80", "a.b", "[::1]:80", "[::1]")] == ["a.b", "a.b", "::1", "::1"]
    for text in ("127.0.0.1:24095.evil.example", "[::1].evil.example", "[::1]:80.evil.example", "::1:80"):
        assert host_of(text) == text, "it is no name of ours"
        assert not means_this_machine(text)
