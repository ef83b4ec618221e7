"""Operators' verbs on aggregators that are processes: killed in the middle, over the socket, on the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result
from support.mortal_verbs import listens
from support.tiny_fleet import TinyFleet
from support.waiting_fleet import waiting_fleet

from replayfleet.aggregator.cli import cli
from replayfleet.aggregator.control.caller import SOCKET, LocalControl
from replayfleet.aggregator.control.local import MAX_REQUEST_BYTES
from replayfleet.aggregator.control.membership import Plan
from replayfleet.aggregator.control.verbs import Exclude, Pause, VerbRefused
from replayfleet.aggregator.operator.journal import JOURNAL, read_journal
from replayfleet.aggregator.store import DATABASE
from tests.support.waiting import until

TESTS = Path(__file__).parents[1]
CHANGES = {
    "exclude": ["excluded", "uploads"],
    "readmit": ["excluded"],
    "pause": ["course"],
    "drain": ["course"],
    "resume": ["course"],
    "rollback cam-1": ["served", "version"],
    "rollback cam-1 --to 1": ["served", "version"],
    "rollback *": ["served", "version"],
    "rollback * --to 1": ["served", "version"],
    "round extend": ["extension_s"],
    "round close": ["phase"],
    "round open": ["begun"],
}


def test_a_verb_is_done_or_not_done_whenever_its_aggregator_is_killed(tmp_path: Path) -> None:
    path = f"{TESTS}{os.pathsep}{TESTS.parent}"
    command = [sys.executable, "-m", "support.mortal_verbs", str(tmp_path)]
    done = subprocess.run(
        command, cwd=TESTS, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert {one["exit"] for one in found} == {-9}
    assert all("broke off" in one["told"] for one in found)
    begun = {one["verb"]: (one["changed"], one["deeds"]) for one in found if one["kill_at"] == "deed-begun"}
    assert begun == {verb: ([], []) for verb in CHANGES}
    half = {one["verb"]: (one["changed"], one["deeds"]) for one in found if one["kill_at"] == "half"}
    assert half == {verb: ([], []) for verb in ("rollback *", "rollback * --to 1")}
    committed = {one["verb"]: (one["changed"], one["deeds"]) for one in found if one["kill_at"] == "deed-done"}
    deeds = {verb: [verb.partition(" ")[0] if verb.startswith("rollback") else verb] for verb in CHANGES}
    assert committed == {verb: (changes, deeds[verb]) for verb, changes in CHANGES.items()}
    served = {
        one["verb"]: one["served"] for one in found if one["kill_at"] == "deed-done" and "rollback" in one["verb"]
    }
    assert served == {
        "rollback cam-1": ["bb", "cc"],
        "rollback cam-1 --to 1": ["aa", "cc"],
        "rollback *": ["bb", "bb"],
        "rollback * --to 1": ["aa", "aa"],
    }


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TinyFleet]:
    """A round waits for its third client, and a thread turns its aggregator's loop."""
    with waiting_fleet(tmp_path) as made:
        yield made


def run(fleet: TinyFleet, *words: str) -> Result:
    return CliRunner().invoke(cli, [*words, "--data-dir", str(fleet.tmp_path / "aggregator")])


def test_the_command_line_says_what_will_happen_and_then_does_it(fleet: TinyFleet) -> None:
    looked = run(fleet, "exclude", "cam-3", "--dry-run")
    assert "Round 0 closes with 2 uploads, and has 2" in looked.output
    assert "nobody is here to say yes" in str(run(fleet, "exclude", "cam-3").exception)
    rows = {row["client"]: row for row in json.loads(run(fleet, "clients", "--json").output)}
    assert [rows[name]["waits"] for name in ("cam-1", "cam-3")] == [None, "upload"]
    assert "upload: round 0 has 2 uploads of 3; it waits for cam-3 (its upload: " in run(fleet, "status").output
    done = run(fleet, "exclude", "cam-3", "--because", "its lens is broken", "--yes")
    assert "done; `aggregator readmit cam-3` takes it back" in done.output
    listed = run(fleet, "clients").output
    assert "its lens is broken; `aggregator readmit cam-3` brings it back" in listed
    refused = run(fleet, "exclude", "cam-3", "--yes")
    assert isinstance(refused.exception, VerbRefused)
    assert "round 1 has begun already" in str(run(fleet, "round", "open", "--yes").exception)
    assert run(fleet, "backup", str(fleet.tmp_path / "backup")).exit_code == 0, "beside the socket"
    told = run(fleet, "history", "--deeds").output
    assert told.count("verb=exclude") == 1
    assert "client=cam-3" in told
    assert "round closed" in run(fleet, "history", "--last", "5").output
    typo = run(fleet, "history", "--client", "cam-33")
    assert (typo.stdout, "the journal has no event of client cam-33" in typo.stderr) == ("", True)


def test_history_tells_what_was_done_while_no_aggregator_ran_and_once_alone_when_it_is_back(tmp_path: Path) -> None:
    fleet, folder = TinyFleet(tmp_path), tmp_path / "aggregator"
    fleet.run(until=lambda: fleet.rounds.index == 1)
    fleet.kill_aggregator()
    assert run(fleet, "exclude", "cam-2", "--because", "its lens is broken", "--yes").exit_code == 0
    told = [run(fleet, "history", "--deeds").output]
    (folder / JOURNAL).rename(tmp_path / "elsewhere")
    told.append(run(fleet, "history", "--deeds").output)
    (tmp_path / "elsewhere").rename(folder / JOURNAL)
    fleet.new_service()
    fleet.run(until=lambda: fleet.service.ready)
    told.append(run(fleet, "history", "--deeds").output)
    fleet.kill_aggregator()
    (folder / DATABASE).write_bytes(b"damaged")
    told.append(run(fleet, "history", "--deeds").output)
    assert [text.count("verb=exclude") for text in told] == [1, 1, 1, 1]


def test_history_shows_what_operators_did_before_all_that_the_journal_still_knows(tmp_path: Path) -> None:
    fleet, journal = TinyFleet(tmp_path), tmp_path / "aggregator" / JOURNAL
    fleet.run(until=lambda: fleet.rounds.index == 1)
    fleet.kill_aggregator()
    assert run(fleet, "exclude", "cam-2", "--because", "its lens is broken", "--yes").exit_code == 0
    fleet.new_service()
    fleet.run(until=lambda: fleet.service.ready)
    fleet.kill_aggregator()
    assert journal.read_text().count('"verb": "exclude"') == 1
    journal.write_text('{"time": 2e9, "event": "round opened", "round": 40000}\n')  # the others were put aside twice
    told = run(fleet, "history").output.splitlines()
    assert ["verb=exclude" in line for line in told] == [True, False]
    assert run(fleet, "history", "--deeds").output.splitlines() == told[:1]


def test_a_running_aggregator_says_why_its_fleet_takes_no_classes(fleet: TinyFleet) -> None:
    refused = run(fleet, "add-class", "tram", "--dry-run")
    assert "method 'tiny' has networks that know how many classes there are" in str(refused.exception)
    assert fleet.service.growth is None


def test_what_needs_a_running_aggregator_says_so_and_what_does_not_works(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path)
    fleet.run(until=lambda: fleet.rounds.index == 1)
    fleet.kill_aggregator()
    assert run(fleet, "status").output.endswith("no aggregator runs\n")
    assert "no aggregator runs on" in str(run(fleet, "pause", "--yes").exception)
    assert "done" in run(fleet, "exclude", "cam-3", "--yes").output
    assert "did you mean" in str(run(fleet, "exclude", "cam-33", "--yes").exception)
    fleet.new_service()
    fleet.run(until=lambda: fleet.rounds.index == 2)
    assert set(fleet.store.uploads(1)) == {"cam-1", "cam-2"}
    told = [event for event in read_journal(tmp_path / "aggregator") if event["event"] == "operator"]
    assert [(event["verb"], event["client"]) for event in told] == [("exclude", "cam-3")]
    fleet.close()


def test_only_its_owner_reaches_the_socket_and_no_bytes_end_it(fleet: TinyFleet) -> None:
    folder = fleet.tmp_path / "aggregator"
    until(lambda: listens(folder))  # before that nobody can connect, whatever the file's mode
    assert stat.S_IMODE((folder / SOCKET).stat().st_mode) == 0o600
    hostile = [b"", b"\n", b"\x00" * 100, b"{" * 5000 + b"\n", b"x" * (2 * MAX_REQUEST_BYTES), b'{"ask": "do"}\n']
    hostile += [b'{"ask": "plan", "verb": {"verb": "exclude", "client": "\\u0000"}}\n', b'{"ask": "look", "x": 1}\n']
    for data in hostile:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(60)
            line.connect(str(folder / SOCKET))
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            try:
                answer = line.makefile("rb").readline()
            except ConnectionResetError:  # what wasn't read was too much
                continue
            assert json.loads(answer)["refused"]
    with contextlib.ExitStack() as stack:  # many who say nothing
        for _ in range(40):
            line = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            line.settimeout(60)
            with contextlib.suppress(BlockingIOError):
                line.connect(str(folder / SOCKET))
    until(lambda: listens(folder))
    assert LocalControl(folder).plan(Exclude("cam-3")).undo == "aggregator readmit cam-3"
    assert LocalControl(folder).do(Pause()).undo == "aggregator resume"
    assert fleet.rounds.is_paused
    assert fleet.service.health()["broker"], "the loop lives"


def test_status_of_an_aggregator_that_hangs_is_not_that_none_runs(
    fleet: TinyFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "replayfleet.aggregator.control.listing.current_waits",
        Mock(side_effect=VerbRefused("the aggregator broke off (timed out); see its log")),
    )
    assert "one runs, and doesn't answer: the aggregator broke off" in run(fleet, "status").output
    assert json.loads(run(fleet, "status", "--json").output)["running"] is True


def test_what_has_changed_since_it_was_shown_is_not_done_but_shown_again(
    fleet: TinyFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, asked = LocalControl.plan, []

    def outdated_once(control: LocalControl, verb: Any) -> Plan:
        asked.append(verb)
        plan = plans(control, verb)
        return plan if len(asked) > 1 else dataclasses.replace(plan, text="cam-3 and cam-4 take no part")

    monkeypatch.setattr(LocalControl, "plan", outdated_once)
    first, again, now, done = run(fleet, "exclude", "cam-3", "--yes").output.splitlines()
    assert first == "cam-3 and cam-4 take no part"
    assert again == "the fleet has changed meanwhile, and nothing was done; now:"
    assert now.startswith("cam-3 takes no part from now on")
    assert done.startswith("done")


def test_what_is_refused_for_another_reason_is_not_asked_again(
    fleet: TinyFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalControl, "do", Mock(side_effect=VerbRefused("the disk is full; nothing was changed")))
    refused = run(fleet, "exclude", "cam-3", "--yes")
    assert str(refused.exception) == "the disk is full; nothing was changed"
    assert len(refused.output.splitlines()) == 1
