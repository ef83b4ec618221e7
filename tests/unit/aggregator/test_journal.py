from __future__ import annotations

from pathlib import Path

from replayfleet.aggregator.operator.journal import JOURNAL, Journal, read_journal


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
