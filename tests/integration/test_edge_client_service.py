"""Whole clients, with real training processes and ONNX models, and a real aggregator over a broker in memory."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from support.client_world import TrainerThread, events

from replayfleet.edge_client.flow import LabelProgress, Shown
from replayfleet.edge_client.learning.local_training import TrainerProcess
from replayfleet.edge_client.serving.probation.probation import ProbationRules
from replayfleet.edge_client.state_store import StateStore
from replayfleet.edge_client.sync.parts import Compute
from replayfleet.federation.errors import Reason
from replayfleet.federation.wire.protocol.codec import decode
from replayfleet.federation.wire.protocol.messages import Presence
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.federation.wire.transport.seal import unseal
from tests.support.memory_broker import MemoryBroker


@pytest.mark.parametrize("method", ["fedavg", "pfedgrp", "der"])
def test_a_fleet_trains_its_rounds_serves_the_last_model_and_finishes(method: str, world: Any) -> None:
    fleet = world(method)
    for number, name in enumerate(("cam-0", "cam-1")):
        fleet.start_client(name, number, spawn=TrainerProcess if number and method == "pfedgrp" else TrainerThread)
    fleet.until(lambda: all(client.client.finished for client in fleet.clients.values()))
    for name, client in fleet.clients.items():
        assert client.status()["serving_version"] >= 2
        assert (client.status()["method"], client.status()["stores_data"]) == (method, method == "der")
        assert fleet.sources[name].asked == [0, 1]
        held = StateStore(fleet.folder / name).held()
        assert held.manifest.round == 2
    fleet.until(lambda: fleet.aggregator.coordinator.finish.waiting_for(time.monotonic()) == [])
    final = [entry for entry in events(fleet, "client report") if entry["round"] == 2]
    assert {entry["client"] for entry in final} == {"cam-0", "cam-1"}
    for entry in final:
        metrics = entry["metrics"]
        assert metrics["num_test"] == 40
        assert 0.0 <= metrics["accuracy"] <= 1.0
        assert metrics["bytes_up"] > 8e4
        assert metrics["bytes_down"] > 0
        assert metrics["swap_s"] > 0
        assert metrics["train_s"] > 0
        assert metrics["sub_generators_held"] == (2 if method == "pfedgrp" else 0)
    accepted = events(fleet, "upload accepted")
    assert sorted((entry["client"], entry["round"]) for entry in accepted) == [
        (client, round_index) for client in ("cam-0", "cam-1") for round_index in (0, 1)
    ]


@pytest.mark.usefixtures("served_here")
def test_what_privacy_cost_is_in_uploads_reports_and_status_and_adds_up(world: Any) -> None:
    fleet = world("pfedgrp", num_clients=1, dp_noise_multiplier="2", gate="false")
    client = fleet.start_client("cam-0")
    fleet.until(lambda: client.client.finished)
    fleet.until(lambda: fleet.aggregator.coordinator.finish.waiting_for(time.monotonic()) == [])
    first, second = (entry["facts"]["privacy"] for entry in events(fleet, "upload accepted"))
    assert [account["trainings"]["0"] for account in (first, second)] == [[[2.0, 1.0, 1]], [[2.0, 1.0, 2]]]
    assert second["epsilons"]["0"] > first["epsilons"]["0"]
    reported = [entry["metrics"] for entry in events(fleet, "client report") if entry["round"] == 2]
    assert {(metrics["dp_epsilon"], metrics["dp_delta"]) for metrics in reported} == {(second["epsilons"]["0"], 1e-5)}
    assert client.status()["privacy"] == f"epsilon {second['epsilons']['0']:.3g} at delta 1e-05"


def test_frames_are_answered_the_whole_time_and_every_version_change_only_rises(world: Any) -> None:
    fleet = world(num_clients=1, num_rounds=3)
    seen: list[int] = []

    def watch(shown: Shown) -> None:
        if shown.prediction is not None:
            seen.append(shown.prediction.model_version)

    client = fleet.start_client("cam-0")
    client.watchers.append(watch)
    fleet.until(lambda: client.client.finished and client.counts.num_frames > 20)
    counts = client.counts
    assert counts.num_failed == 0
    assert counts.num_frames > 20
    assert seen == sorted(seen)
    assert len(set(seen)) >= 3


@pytest.mark.usefixtures("served_here")
def test_a_killed_training_process_costs_time_but_not_the_round(world: Any) -> None:
    fleet = world(num_clients=1, num_rounds=1)
    client = fleet.start_client("cam-0", spawn=TrainerProcess)
    fleet.until(lambda: client.status()["trainer_pid"] is not None)
    pid = client.status()["trainer_pid"]
    os.kill(pid, signal.SIGKILL)
    fleet.until(lambda: client.client.finished)
    assert client.status()["trainer_pid"] != pid
    assert len(events(fleet, "upload accepted")) == 1


def test_a_client_that_comes_back_serves_from_disk_before_it_reaches_anybody(world: Any) -> None:
    fleet = world(num_clients=1, num_rounds=1)
    fleet.start_client("cam-0")
    fleet.until(lambda: fleet.clients["cam-0"].client.finished)
    fleet.clients.pop("cam-0").stop()
    fleet.aggregator.stop()
    fleet.broker = MemoryBroker()  # nobody answers here
    again = fleet.start_client("cam-0")
    deadline = time.monotonic() + 60
    while again.counts.num_frames == 0 and time.monotonic() < deadline:
        again.loop.pump(0.01)
    assert again.counts.num_frames > 0
    assert again.status()["phase"] == "waiting for the aggregator"
    fleet.aggregator = fleet.start_aggregator()
    fleet.until(lambda: again.client.finished)
    assert fleet.sources["cam-0"].asked == []


@pytest.mark.usefixtures("served_here")
def test_a_restarted_aggregator_gets_the_upload_that_it_did_not_acknowledge(world: Any) -> None:
    fleet = world(num_clients=2, num_rounds=1)
    fleet.start_client("cam-0")
    fleet.until(lambda: len(events(fleet, "upload accepted")) == 1)
    fleet.aggregator.stop()
    client = fleet.start_client("cam-1", 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and client.status()["phase"] != "waiting for the aggregator":
        client.loop.pump(0.01)
    fleet.aggregator = fleet.start_aggregator()
    fleet.until(lambda: all(each.client.finished for each in fleet.clients.values()))
    assert len(events(fleet, "upload accepted")) == 2


@pytest.mark.usefixtures("served_here")
def test_a_client_that_stays_after_the_run_says_that_it_is_finished(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = world("fedavg")
    for number, name in enumerate(("cam-0", "cam-1")):
        fleet.start_client(name, number, spawn=TrainerThread)
    stays, stop = fleet.clients["cam-0"], threading.Event()
    monkeypatch.setattr(stays, "start", lambda: None)  # it runs already, pumped by the test
    fleet.until(lambda: all(client.client.finished for client in fleet.clients.values()))
    ends = threading.Timer(0.3, stop.set)
    ends.start()
    assert stays.run(stop, stay=True)
    assert stop.is_set()  # it did stay


@pytest.mark.usefixtures("served_here")
def test_a_client_that_is_stopped_early_says_that_the_run_is_not_finished(world: Any) -> None:
    fleet, stop = world("fedavg"), threading.Event()
    fleet.start_client("cam-0", 0, spawn=TrainerThread)
    client = fleet.clients["cam-0"]
    client.start = lambda: None
    stop.set()
    assert not client.run(stop)


@pytest.mark.usefixtures("served_here")
def test_a_client_without_data_stays_and_serves_while_the_others_learn(world: Any) -> None:
    fleet = world(num_clients=1, num_rounds=2)
    idle = fleet.start_client("cam-0", rounds=0)
    fleet.start_client("cam-1", 1)
    fleet.until(lambda: all(client.client.finished for client in fleet.clients.values()))
    assert {entry["client"] for entry in events(fleet, "upload accepted")} == {"cam-1"}
    assert idle.status()["serving_version"] >= 2


@pytest.mark.usefixtures("served_here")
def test_presence_tells_the_provider_and_the_goodbye(world: Any) -> None:
    fleet = world(num_clients=1, num_rounds=1)
    client = fleet.start_client("cam-0")
    topic = topic_of("fleet", "state", "cam-0")
    fleet.until(lambda: topic in fleet.broker.retained)
    online = decode(unseal(topic, fleet.broker.retained[topic]).frame)
    assert isinstance(online, Presence)
    assert (online.status, online.device, online.provider) == ("online", "cpu", "CPUExecutionProvider")
    fleet.until(lambda: client.client.finished)
    client.stop()
    stopped = decode(unseal(topic, fleet.broker.retained[topic]).frame)
    assert isinstance(stopped, Presence)
    assert stopped.status == "stopped"
    assert stopped.sequence > online.sequence
    assert stopped.boot_id == online.boot_id


@pytest.mark.usefixtures("served_here")
def test_what_a_presence_says_of_labels_is_of_the_round_that_it_names(world: Any, monkeypatch: Any) -> None:
    """A round that begins at so many labels would begin by those that the round before used up."""
    heard: list[Presence] = []
    fleet = world(num_clients=1, num_rounds=3)
    client = fleet.start_client("cam-0")
    known, said = client.known, client.loop.say

    def say(topic: str, frame: bytes, **how: Any) -> None:
        message = decode(frame)
        if isinstance(message, Presence):
            heard.append(message)
        said(topic, frame, **how)

    monkeypatch.setattr(client.loop, "say", say)
    monkeypatch.setattr(client, "known", lambda: replace(known(), labels=LabelProgress(client.client.round, 1, 0, 0)))
    fleet.until(lambda: client.client.finished)
    told = {(presence.round, presence.labels_waiting) for presence in heard if presence.round >= 0}
    assert told == {(0, 0), (1, 1), (2, 2), (3, 3)}


@pytest.mark.usefixtures("served_here")
def test_a_version_that_answers_well_passes_its_probation(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    fleet = world(num_clients=1, num_rounds=1)
    rules = ProbationRules(duration_s=0.3, num_answered=10)
    client = fleet.start_client("cam-0", compute=Compute(probation=rules))
    with caplog.at_level(logging.INFO, "replayfleet.edge_client.serving.probation.guard"):
        fleet.until(lambda: client.status()["serving_version"] >= 2)  # the first one has nothing to go back to
        fleet.until(lambda: "probation passed" in caplog.messages)
    assert client.status()["probation_version"] is None
    assert client.status()["rollbacks"] == 0


@pytest.mark.usefixtures("served_here")
def test_a_roll_back_reaches_the_aggregator_and_the_disk_and_the_version_never_returns(world: Any) -> None:
    fleet = world(num_clients=1, num_rounds=1)
    client = fleet.start_client("cam-0")
    fleet.until(lambda: client.status()["probation_version"] is not None)
    bad = client.status()["probation_version"]
    assert client._slot.roll_back(bad, Reason.DRIFTED, "by hand") is not None
    fleet.until(lambda: events(fleet, "model rolled back") != [])
    (event,) = events(fleet, "model rolled back")
    assert (event["client"], event["version"], event["reason"]) == ("cam-0", bad, "drifted")
    fleet.until(lambda: client.client.finished)
    assert (client.status()["rollbacks"], client.status()["serving_version"]) == (1, event["serving"])
    fleet.clients.pop("cam-0").stop()
    again = fleet.start_client("cam-0")
    fleet.until(lambda: events(fleet, "download refused") != [])
    assert events(fleet, "download refused")[-1]["reason"] == "rolled-back"
    fleet.until(lambda: again.status()["serving_version"] == event["serving"])
    held = StateStore(fleet.folder / "cam-0").held()
    assert held.manifest.version == event["serving"]


@pytest.mark.usefixtures("served_here")
def test_a_round_that_waits_for_a_client_that_rolled_its_model_back_gives_it_another_version(world: Any) -> None:
    fleet = world(num_clients=1, num_rounds=2, deadline_s=5.0)
    client = fleet.start_client("cam-0", rounds=1)
    fleet.until(lambda: client.status()["probation_version"] is not None)
    bad = client.status()["probation_version"]
    assert client._slot.roll_back(bad, Reason.CRASHED, "killed by hand") is not None
    fleet.until(lambda: events(fleet, "model rolled back") != [])
    fleet.sources["cam-0"].rounds = 99
    fleet.until(lambda: client.client.finished)
    confirmed = [(entry["round"], entry["version"]) for entry in events(fleet, "download confirmed")]
    assert [version for round_index, version in confirmed if round_index == 1] == [bad, bad + 1]
    assert [entry["round"] for entry in events(fleet, "upload accepted")] == [0, 1]
