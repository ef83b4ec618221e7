from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from replayfleet.aggregator.operator import journal
from replayfleet.aggregator.operator.journal import JOURNAL, Journal, last_event, read_journal, rotated
from replayfleet.aggregator.service import AggregatorService
from replayfleet.federation.errors import SettingsError
from tests.support.no_file import KINDS, leave


def test_events_come_back_in_order_with_their_details(tmp_path: Path):
    with Journal(tmp_path, wall_clock=lambda: 12.3456) as journal:
        journal.add("round opened", round=0)
        journal.add("round committed", details={"weights": {"a": {"a": 1.0}}}, round=0)
    assert list(read_journal(tmp_path)) == [
        {"time": 12.346, "event": "round opened", "round": 0},
        {"time": 12.346, "event": "round committed", "round": 0, "weights": {"a": {"a": 1.0}}},
    ]


def test_a_line_torn_by_a_crash_costs_only_itself(tmp_path: Path):
    with Journal(tmp_path) as journal:
        journal.add("one")
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"time": 1, "eve')
    with Journal(tmp_path) as journal:
        journal.add("two")
    assert [event["event"] for event in read_journal(tmp_path)] == ["one", "two"]


def test_a_folder_without_a_journal_has_no_events(tmp_path: Path):
    assert list(read_journal(tmp_path)) == []


@pytest.mark.timeout(20)
def test_nobody_waits_for_who_writes_into_a_pipe_in_its_place(tmp_path: Path):
    os.mkfifo(tmp_path / JOURNAL)
    for read in (last_event, lambda folder: list(read_journal(folder))):
        with pytest.raises(SettingsError, match="it is no file"):
            read(tmp_path)


@pytest.mark.parametrize("what", ["dangling link", *KINDS])
def test_something_else_in_its_place_is_named(tmp_path: Path, what: str):
    path = tmp_path / JOURNAL
    path.symlink_to(tmp_path / "gone" / "away") if what == "dangling link" else leave(path, what)
    with pytest.raises(SettingsError, match=rf"{JOURNAL}: .*; move it away, and the journal begins anew"):
        Journal(tmp_path)


def test_an_aggregator_whose_database_is_gone_begins_no_new_fleet_in_its_place(tmp_path: Path):
    """It began one, and removed the models of the old one."""
    with Journal(tmp_path) as journal:
        journal.add("aggregator started", round=0)
        journal.add("round opened", round=0)
    nothing: Any = None
    for _ in range(2):  # an empty database is there the second time
        with pytest.raises(SettingsError, match=r"aggregator\.sqlite was lost: .*; restore a backup"):
            AggregatorService(nothing, tmp_path, nothing)


def kinds(folder: Path) -> list[str]:
    return [event["event"] for event in read_journal(folder)]


def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / JOURNAL).mkdir()
    with pytest.raises(SettingsError, match=r"events\.jsonl can't be read \(it is no file\)"):
        list(read_journal(tmp_path))


def test_a_full_file_is_put_aside_and_both_are_read(tmp_path: Path):
    with Journal(tmp_path, max_bytes=1000) as journal:
        for number in range(40):
            journal.add("round opened", round=number)
    rounds = [event["round"] for event in read_journal(tmp_path)]
    assert rounds == list(range(rounds[0], 40))
    assert len(rounds) > 15
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    with Journal(tmp_path, max_bytes=1000) as journal:
        assert rounds[0] in journal.numbers("round opened", "round"), "also in the file that was put aside"
        journal.add("after a restart")
    assert kinds(tmp_path)[-1] == "after a restart"


def test_a_disk_without_room_for_the_next_file_ends_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[OSError] = []
    with Journal(tmp_path, refused.append, max_bytes=100) as journal:
        journal.add("first")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            journal.add("lost", text="x" * 100)
        journal.add("fits")
        journal.add("second", text="x" * 100)
    assert [error.errno for error in refused] == [errno.ENOSPC]
    assert [entry["event"] for entry in read_journal(tmp_path)] == ["first", "fits", "second"]


def test_what_a_start_asks_of_a_full_journal_decodes_no_other_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decoded 128 MB, which held the loop up for seconds."""
    decoded: list[str] = []
    monkeypatch.setattr(journal.json, "loads", lambda line: decoded.append(line) or json.JSONDecoder().decode(line))
    with Journal(tmp_path) as written:
        for index in range(3):
            written.add("upload accepted", round=index)
            written.add("round committed", round=index)
        assert written.numbers("round committed", "round") == {0, 1, 2}
    assert len(decoded) == 3


def test_of_a_full_journal_the_newest_event_alone_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open console of an aggregator that had ended decoded all of it, each second."""
    assert last_event(tmp_path) == {}
    decoded: list[str] = []
    monkeypatch.setattr(journal.json, "loads", lambda line: decoded.append(line) or json.JSONDecoder().decode(line))
    monkeypatch.setattr(journal, "_PIECE_BYTES", 7)
    path = tmp_path / JOURNAL
    path.write_bytes(b'{"n": 1}\n{"n": 2, "said": "\xff"}\n[]\n{"torn\n')
    assert last_event(tmp_path) == {"n": 2, "said": "\ufffd"}
    assert len(decoded) == 4, "the end, the torn one, one that is none, and it"
    path.replace(rotated(path))
    path.touch()
    assert last_event(tmp_path)["n"] == 2
    rotated(path).unlink()
    assert last_event(tmp_path) == {}
    path.unlink()
    path.mkdir()
    with pytest.raises(SettingsError, match="can't be read"):
        last_event(tmp_path)


def test_a_file_that_somebody_took_away_costs_what_would_have_filled_it_and_no_more(tmp_path: Path):
    with Journal(tmp_path, max_bytes=1000) as journal:
        journal.add("round opened", round=0)
        (tmp_path / JOURNAL).unlink()
        for number in range(1, 40):
            journal.add("round opened", round=number)
    rounds = [event["round"] for event in read_journal(tmp_path)]
    assert rounds == list(range(rounds[0], 40))
    assert len(rounds) > 15


def test_what_clients_cause_at_will_is_written_a_few_times_and_then_counted(tmp_path: Path):
    now = 0.0
    with Journal(tmp_path, wall_clock=lambda: now) as journal:
        for _ in range(1000):
            now += 0.01
            journal.add("upload rejected", client="cam-1", reason="stale-version")
        journal.add("upload rejected", client="cam-2", reason="stale-version")
        now = 1000.0
        journal.add("round committed", round=0)
    events = list(read_journal(tmp_path))
    assert len(events) < 20
    assert [event["event"] for event in events[-3:]] == ["upload rejected", "more of these", "round committed"]
    told = [event for event in events if event["event"] == "more of these"]
    written = sum(event["event"] == "upload rejected" and event["client"] == "cam-1" for event in events)
    assert written + sum(event["count"] for event in told) == 1000


def test_what_rounds_consist_of_is_always_written(tmp_path: Path):
    with Journal(tmp_path, wall_clock=lambda: 0.0) as journal:
        for number in range(200):
            journal.add("upload accepted", client="cam", round=number)
    assert len(kinds(tmp_path)) == 200
