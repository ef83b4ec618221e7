from __future__ import annotations

import io
import re

from rich.console import Console, RenderableType
from support.demo_journal import journal

from replayfleet.scripts.launch.record import FleetRecord
from replayfleet.scripts.launch.table import event_line, live_view, rounds_table


def shown(what: RenderableType, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_finished_table_has_every_number_and_fits_80_columns():
    text = shown(rounds_table(FleetRecord(journal())))
    last = next(line for line in text.splitlines() if line.strip().startswith("2 "))
    assert re.split(r" {2,}", last.strip()) == [
        "2", "2 of 2", "85.0 %", "75.0 %", "80.0 %", "0 of 8", "2.0", "4.0", "12 s"
    ]  # fmt: skip
    assert "…" not in text


def test_before_the_first_upload_only_the_clients_show():
    text = shown(live_view(FleetRecord(journal()[:6]), elapsed_s=65, note="FedAvg: 1 of 3 rounds"))
    assert "1:05  round 0 (of 0 to 2): open, 0 of 2 uploads" in text
    assert "client-1" in text
    assert "rounds:" not in text
    assert text.rstrip().endswith("FedAvg: 1 of 3 rounds")


def test_a_client_keeps_its_accuracy_while_the_next_round_is_under_way():
    events = journal()
    cut = next(
        place for place, event in enumerate(events) if event["event"] == "upload accepted" and event["round"] == 1
    )
    text = shown(live_view(FleetRecord(events[: cut + 1]), elapsed_s=1))
    row = next(line for line in text.splitlines() if "client-0" in line)
    assert "uploaded" in row
    assert "90.0 %" in row
    assert "2 of 4" in row
    assert "40 ms" in row


def test_nothing_known_yet_is_shown_too():
    assert "starting the aggregator" in shown(live_view(FleetRecord(), elapsed_s=0))


def test_troubles_show():
    record = FleetRecord(journal())
    record.add({"event": "download refused", "client": "client-0", "round": 1, "detail": "probe mismatch"})
    assert "! round 1, client-0: download refused (probe mismatch)" in shown(live_view(record, elapsed_s=1))


def test_every_event_worth_a_line_has_one():
    record, lines = FleetRecord(), []
    for event in journal():
        record.add(event)
        lines.append(event_line(event, record))
    assert lines[0] == "aggregator: pfedgrp, 3 rounds of 2 clients"
    assert "round 1: client-0 uploaded 2 of 4 sub-generators, 1.2 MB (1 of 2 uploads)" in lines
    assert (
        "round 2: client-1 uploaded 0 of 4 sub-generators, all of classes met before, 1.0 MB (2 of 2 uploads)" in lines
    )
    assert lines[-1] == (
        "round 2: client-1 serves v4, accuracy 75.0 % on 120 test images, 2.0 MB down, swapped in 50 ms; "
        "mean of the fleet 80.0 %"
    )
    assert event_line({"event": "round closed"}, record) == ""


def test_a_rejection_is_told_with_its_fields():
    event = {"time": 1.0, "event": "upload rejected", "client": "client-0", "reason": "not-finite"}
    assert event_line(event, FleetRecord()) == "upload rejected: client client-0, reason not-finite"


def test_a_fleet_without_sub_generators_says_so_and_names_its_measure():
    events = [dict(event) for event in journal(sent=(0, 0, 0))]
    for event in events:
        if event["event"] == "upload accepted":
            event["facts"] = {}
        if event["event"] == "client report":
            event["metrics"] = {**event["metrics"], "sub_generators_held": 0.0}
    events[0]["spec"] = {**events[0]["spec"], "task": {"kind": "detection", "class_names": ["vehicle"]}}
    record = FleetRecord(events)
    assert "rounds: boxes found on all that was met so far" in shown(rounds_table(record))
    assert "0 of 0" not in shown(live_view(record, elapsed_s=1))
    upload = next(event for event in events if event["event"] == "upload accepted")
    assert event_line(upload, record).startswith("round 0: client-0 uploaded its task model, 1.0 MB")
