from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.demo_journal import CLIENTS, journal, report

from replayfleet.scripts.launch.record import FleetRecord, JournalTail


def test_a_report_counts_for_the_round_before_its_download():
    record = FleetRecord(journal())
    assert [found.mean_accuracy for found in record.committed_rounds()] == pytest.approx([0.8, 0.7, 0.8])
    assert record.rounds[1].clients["client-0"].num_test == 80
    assert record.clients["client-0"].first_bytes == 5_000


def test_the_mean_waits_for_every_expected_client():
    events = journal()
    assert FleetRecord(events[:-1]).rounds[2].mean_accuracy is None
    assert FleetRecord(events).rounds[2].mean_accuracy is not None


def test_only_a_round_of_known_classes_is_a_revisit():
    record = FleetRecord(journal())
    assert [found.clients["client-1"].known_before for found in record.committed_rounds()] == [False, False, True]
    assert [found.clients["client-1"].classes for found in record.committed_rounds()] == [(0, 1), (2, 3), (0, 1)]
    assert [found.clients["client-1"].held for found in record.committed_rounds()] == [2, 4, 4]


def test_bytes_and_sub_generators_are_summed_over_clients():
    found = FleetRecord(journal()).rounds[1]
    assert (found.total("sent"), found.total("held")) == (4, 8)
    assert found.total("bytes_up") == 2_400_000
    assert found.num_uploads == 2


def test_states_follow_the_events():
    events = journal()
    states = []
    record = FleetRecord()
    for event in events:
        record.add(event)
        if "client-0" in record.clients and (not states or states[-1] != record.clients["client-0"].state):
            states.append(record.clients["client-0"].state)
    assert states == ["online", *["training", "uploaded", "waiting"] * 3, "done"]


def test_refusals_are_kept_as_sentences():
    record = FleetRecord(journal())
    record.add({"event": "upload rejected", "client": "client-0", "round": 1, "reason": "not-finite", "detail": "NaN"})
    assert record.troubles == ["round 1, client-0: upload rejected (NaN)"]


def test_unknown_events_change_nothing():
    record = FleetRecord(journal())
    before = (record.names, sorted(record.rounds), record.finished)
    record.add({"event": "something new", "time": 5000.0})
    assert (record.names, sorted(record.rounds), record.finished) == before


def test_a_client_that_reports_nothing_new_leaves_no_accuracy():
    record = FleetRecord([*journal()[:6], report(CLIENTS[0], 1, {"bytes_down": 10.0})])
    assert record.rounds[0].clients[CLIENTS[0]].accuracy is None
    assert record.rounds[0].mean_accuracy is None


def test_a_line_still_being_written_waits(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    tail = JournalTail(path)
    assert tail.new_events() == []
    first, second = json.dumps({"event": "a"}), json.dumps({"event": "b"})
    path.write_text(f"{first}\n{second[:5]}")
    assert tail.new_events() == [{"event": "a"}]
    path.write_text(f"{first}\n{second}\ntorn\n[1]\n")
    assert tail.new_events() == [{"event": "b"}]
    assert tail.new_events() == []


def test_a_detectors_share_of_boxes_and_what_the_stream_showed_place_by_place_are_taken():
    metrics = {
        "boxes_found": 0.25,
        "stream_accuracy": 0.5,
        "num_stream": 8.0,
        "stream_accuracy/Town01": 0.75,
        "stream_accuracy/Town02": 0.25,
    }
    record = FleetRecord(journal())
    assert (record.measure, record.stores_data) == ("accuracy", False)
    record.add({"event": "aggregator started", "spec": {"task": {"kind": "detection"}}, "stores_data": True})
    record.add(report("client-0", 3, metrics))
    found = record.rounds[2].clients["client-0"]
    assert (record.measure, record.stores_data) == ("boxes found", True)
    assert (found.accuracy, found.stream_accuracy, found.num_stream) == (0.25, 0.5, 8)
    assert found.place_accuracy == {"Town01": 0.75, "Town02": 0.25}


def test_a_journal_that_is_put_aside_between_two_looks_loses_no_line(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    tail = JournalTail(path)
    path.write_text('{"event": "a"}\n')
    assert tail.new_events() == [{"event": "a"}]
    with path.open("a") as file:
        file.write('{"event": "b"}\n')
    path.replace(tmp_path / "events.jsonl.1")
    path.write_text('{"event": "c"}\n')
    assert tail.new_events() == [{"event": "b"}, {"event": "c"}]
    assert tail.new_events() == []
    assert [event["event"] for event in JournalTail(path).new_events()] == ["a", "b", "c"]
