from __future__ import annotations

import dataclasses
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.tiny_fleet import TinyFleet

from replayfleet.aggregator.control.exported import MAX_MEMBERS, FleetCollector
from replayfleet.aggregator.control.verbs import VerbRefused
from replayfleet.aggregator.control.view import FleetView, MemberView
from replayfleet.aggregator.members.enrolment import BROKER_DAYS, Terms, opened
from replayfleet.aggregator.operator.journal import Journal
from replayfleet.aggregator.operator.metrics import MAX_REPORTED, PREFIX, Metrics
from replayfleet.federation.errors import Reason


def values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """(name, labels' values in order) -> value, without the prefix."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        assert family.name.startswith(f"{PREFIX}_")
        for sample in family.samples:
            shown = [value for name, value in sorted(sample.labels.items())]
            found[(sample.name.removeprefix(f"{PREFIX}_"), *shown)] = sample.value
    return found


def test_the_journal_counts_what_it_leaves_out_too(tmp_path: Path) -> None:
    metrics = Metrics()
    with Journal(tmp_path, listeners=(metrics.told,)) as journal:
        for _ in range(100):
            journal.add("upload rejected", client="a", round=0, reason="not-finite", bytes=10)
    assert (tmp_path / "events.jsonl").read_text().count("upload rejected") < 100
    found = values(metrics)
    assert found["uploads_rejected_total", "not-finite"] == 100
    assert found["uploads_total", "rejected"] == 100
    assert found["transfer_bytes_total", "up"] == 1000


def test_what_strangers_say_becomes_no_label() -> None:
    metrics = Metrics()
    for number in range(50):
        metrics.told("download refused", {"client": "a", "reason": f"made up {number}"})
        metrics.told("model rolled back", {"client": "a", "reason": "<b>"})
    found = values(metrics)
    assert found["downloads_refused_total", "other"] == 50
    assert len([key for key in found if key[0] == "downloads_refused_total"]) == len(Reason) + 1
    assert found["rollbacks_total", "other"] == 50
    for number in range(2 * MAX_REPORTED):
        metrics.told("client report", {"client": f"c{number}", "metrics": {"accuracy": 0.5, "made/up": 1.0}})
    assert len(metrics.reported) == MAX_REPORTED
    assert metrics.reported["c0"] == {"accuracy": 0.5}


def test_rounds_are_told_by_phase() -> None:
    metrics = Metrics()
    metrics.told("round opened", {"round": 4})
    metrics.told("round extended", {"round": 4})
    metrics.told("round closed", {"round": 4, "by": "deadline", "open_s": 30.0})
    metrics.told("round committed", {"round": 4, "round_s": 33.0, "aggregate_s": 2.0, "publish_s": 1.0})
    metrics.told("round committed", {"round": 3, "recovered": True})
    found = values(metrics)
    assert found[("round",)] == 4
    assert found[("rounds_total",)] == 1
    assert found["rounds_closed_total", "deadline"] == found[("rounds_extended_total",)] == 1
    sums = [found["round_phase_seconds_sum", phase] for phase in ("open", "aggregate", "publish")]
    assert sums == [30.0, 2.0, 1.0]


def test_every_member_is_there_with_why_it_is_waited_for(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path)
    fleet.clients["cam-1"].says = {"labels_waiting": 12, "picture_age_s": 40.0}
    fleet.run(until=lambda: fleet.rounds.index == 1)
    fleet.clients["cam-3"].dies_in = 1
    fleet.run(until=lambda: len(fleet.rounds.accepted) == 2)
    metrics = fleet.service._parts.metrics
    metrics.registry.unregister(next(c for c in metrics.registry._collector_to_names if isinstance(c, FleetCollector)))
    control, now = fleet.service.coordinator.control, fleet.service._clock()

    def collector(**changed: Any) -> FleetCollector:
        given = {"connected": lambda: True, "problem": lambda: ""} | changed
        return FleetCollector(lambda: control.look(now), metrics.reported, tmp_path / "aggregator", **given)

    metrics.registry.register(collector())
    found = values(metrics)
    assert found[("members",)] == 3
    assert [found["member_awaited", f"cam-{number}"] for number in (1, 2, 3)] == [0, 0, 1]
    assert [key[1] for key in found if key[0] == "member_waits"] == ["cam-3"]
    assert found["round_phase", "open"] == 1
    assert found[("round_uploads",)] == 2
    assert found[("disk_free_bytes",)] > 0
    assert found["member_model_version", "cam-1"] > 0
    assert found["uploads_total", "accepted"] >= 5
    labels = {key[1]: value for key, value in found.items() if key[0] == "member_labels_waiting"}
    assert labels == {"cam-1": 12}, "whose client doesn't say how many has none"
    assert 40 <= found["member_camera_age_seconds", "cam-1"] < 60, "it grows between heartbeats"
    fleet.close()


def test_who_was_revoked_is_no_member_any_more_and_keeps_no_label_from_one(tmp_path: Path) -> None:
    gone = MemberView("", True, True, True, True, None, False, None, "", "", "", -1, -1, 0, 0, False, False, None)
    former = [dataclasses.replace(gone, client=f"cam-{number:04}", live=not number) for number in range(MAX_MEMBERS)]
    there = dataclasses.replace(gone, client="cam-9999", revoked=False, live=True)
    view = FleetView("fleet", "tiny", True, 3, "open", "running", (), 1, 1, 60.0, (*former, there))
    metrics = Metrics()
    metrics.registry.register(
        FleetCollector(lambda: view, {}, tmp_path, connected=lambda: True, problem=lambda: "")  # as two years leave it
    )
    found = values(metrics)
    assert found[("members",)] == found[("members_online",)] == 1
    assert found["member_up", "cam-9999"] == 1
    assert found["member_taking_part", "cam-0000"] == 0


def test_when_the_broker_s_certificate_ends_is_told_as_a_member_s_is(tmp_path: Path) -> None:
    now = datetime(2026, 11, 23, 12, tzinfo=timezone.utc)
    with opened(tmp_path, new=True, now=now) as registry:
        registry.enrol("cam-1", Terms(days=30))
    view = FleetView("fleet", "tiny", True, 3, "open", "running", (), 1, 1, 60.0, ())
    metrics = Metrics()
    metrics.registry.register(FleetCollector(lambda: view, {}, tmp_path, connected=lambda: True, problem=lambda: ""))
    found = values(metrics)
    days = {name: found["certificate_end_timestamp_seconds", name] - now.timestamp() for name in ("cam-1", "broker")}
    assert {name: round(left_s / 86400) for name, left_s in days.items()} == {"cam-1": 30, "broker": BROKER_DAYS}


def test_a_loop_that_doesnt_answer_fails_the_scrape(tmp_path: Path) -> None:
    def look() -> Any:
        raise VerbRefused("the aggregator is busy")

    metrics = Metrics()
    metrics.registry.register(
        FleetCollector(look, {}, tmp_path, connected=lambda: True, problem=lambda: "")
    )  # without asking it
    with pytest.raises(OSError, match="busy"):
        generate_latest(metrics.registry)
