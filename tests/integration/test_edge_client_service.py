"""Whole clients, with real training processes and ONNX models, and a real aggregator over a broker in memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aggregator.rounds import RoundRules
from aggregator.service import AggregatorService, Fleet
from aggregator.serving import OnnxExporter
from edge_client.parts import Compute
from edge_client.service import ClientService, Identity
from edge_client.sources.base import Frame, Samples, paced
from edge_client.state_store import StateStore
from federation.methods.steps.replay import eager_sampler
from federation.protocol.codec import decode
from federation.protocol.messages import Presence
from federation.protocol.topics import state_topic
from federation.service.fleet_spec import make_spec, method_of
from federation.transport.interfaces import OnMessage, Session, Will
from federation.transport.memory import MemoryBroker
from models.specs import TaskSpec

TASK = TaskSpec(1, 28, ("dark", "bright", "left"), generator_width=1)
FEDAVG = {"local_epochs": "1", "batch_size": "8"}
PFEDGRP = {
    **FEDAVG,
    "sub_generator_epochs": "1",
    "first_sub_generator_epochs": "1",
    "gan_batch_size": "8",
    "gate_samples": "8",
    "max_tries_factor": "2",
    "replay_per_client": "16",
    "aggregation_epochs": "1",
}


class ToySource:
    """Two classes that differ in brightness; every round brings new noise."""

    def __init__(self, client: int, rounds: int = 99) -> None:
        self.client = client
        self.rounds = rounds
        self.asked: list[int] = []

    def samples(self, seed: int, count: int = 16) -> Samples:
        rng = np.random.default_rng([self.client, seed])
        labels = np.arange(count, dtype=np.int64) % 2
        images = rng.normal(0, 0.1, (count, 1, 28, 28)) + np.where(labels, 0.7, -0.7)[:, None, None, None]
        return Samples(np.clip(images, -1, 1).astype(np.float32), labels)

    def frames(self, stop: threading.Event) -> Iterator[Frame]:
        images = self.samples(999).images
        return paced(lambda: images, 100.0, stop, time.monotonic)

    def round_samples(self, round_index: int) -> Samples | None:
        self.asked.append(round_index)
        return self.samples(round_index) if round_index < self.rounds else None

    def test_samples(self, round_index: int) -> Samples | None:
        return self.samples(1000 + round_index, 40)

    def describe(self) -> str:
        return f"toy {self.client}"


class World:
    """A broker, an aggregator and clients, all pumped by the test's thread."""

    def __init__(self, folder: Path, method: str = "fedavg", *, num_clients: int = 2, num_rounds: int = 2) -> None:
        settings = FEDAVG if method == "fedavg" else PFEDGRP
        self.spec = make_spec("fleet", method, TASK, preset="tiny", overrides=settings, run_seed=3)
        built = method_of(self.spec)
        rules = RoundRules(num_clients, min_clients=1, deadline_s=60.0, num_rounds=num_rounds)
        self.fleet = Fleet(self.spec, built, eager_sampler(TASK), OnnxExporter(built, TASK), rules)
        self.folder = folder
        self.broker = MemoryBroker()
        self.clients: dict[str, ClientService] = {}
        self.sources: dict[str, ToySource] = {}
        self.aggregator = self.start_aggregator()

    def start_aggregator(self) -> AggregatorService:
        (self.folder / "aggregator").mkdir(exist_ok=True)
        service = AggregatorService(self.fleet, self.folder / "aggregator", self._connect)
        service.start()
        return service

    def start_client(self, client_id: str, number: int = 0, **options: Any) -> ClientService:
        folder = self.folder / client_id
        folder.mkdir(exist_ok=True)
        source = self.sources[client_id] = ToySource(number, options.pop("rounds", 99))
        identity = Identity("fleet", client_id, "cpu", Compute(sampler=options.pop("sampler", "onnx")))
        service = self.clients[client_id] = ClientService(identity, folder, self._connect, lambda _: source, **options)
        service.start()
        return service

    def pump(self) -> None:
        self.aggregator.pump(0.01)
        for client in self.clients.values():
            client.pump(0.01)

    def until(self, done: Callable[[], bool], limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < deadline, {name: c.status() for name, c in self.clients.items()}
            self.pump()

    def close(self) -> None:
        for client in self.clients.values():
            client.stop()
        self.aggregator.stop()

    def _connect(self, client_id: str, on_message: OnMessage, will: Will | None) -> Session:
        return self.broker.session(client_id, on_message=on_message, will=will)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*args: Any, **options: Any) -> World:
        made.append(World(tmp_path, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def events(world: World, kind: str) -> list[dict[str, Any]]:
    from aggregator.journal import read_journal

    return [entry for entry in read_journal(world.folder / "aggregator") if entry["event"] == kind]


@pytest.mark.parametrize("method", ["fedavg", "pfedgrp"])
def test_a_fleet_trains_its_rounds_serves_the_last_model_and_finishes(method: str, world: Any) -> None:
    fleet = world(method)
    for number, name in enumerate(("cam-0", "cam-1")):
        fleet.start_client(name, number)
    fleet.until(lambda: all(client.client.finished for client in fleet.clients.values()))
    for name, client in fleet.clients.items():
        assert client.status()["serving_version"] >= 2
        assert fleet.sources[name].asked == [0, 1]
        held = StateStore(fleet.folder / name).held()
        assert held is not None
        assert held.manifest.round == 2
    fleet.until(lambda: fleet.aggregator.coordinator.finish.waiting_for() == [])
    final = [entry for entry in events(fleet, "client report") if entry["round"] == 2]
    assert {entry["client"] for entry in final} == {"cam-0", "cam-1"}
    for entry in final:
        metrics = entry["metrics"]
        assert metrics["num_test"] == 40
        assert 0.0 <= metrics["accuracy"] <= 1.0
        assert metrics["bytes_up"] > 1e5
        assert metrics["bytes_down"] > 0
        assert metrics["swap_s"] > 0
        assert metrics["train_s"] > 0
        assert metrics["sub_generators_held"] == (2 if method == "pfedgrp" else 0)
    accepted = events(fleet, "upload accepted")
    assert sorted((entry["client"], entry["round"]) for entry in accepted) == [
        (client, round_index) for client in ("cam-0", "cam-1") for round_index in (0, 1)
    ]


def test_frames_are_answered_the_whole_time_and_every_version_change_only_rises(world: Any) -> None:
    fleet = world(num_clients=1, num_rounds=3)
    client = fleet.start_client("cam-0")
    seen: list[int] = []
    client._keep_newest = lambda prediction: seen.append(prediction.model_version)
    fleet.until(lambda: client.client.finished)
    counts = client.counts
    assert counts.num_failed == 0
    assert counts.num_frames > 20
    assert seen == sorted(seen)
    assert len(set(seen)) >= 3


def test_a_killed_training_process_costs_time_but_not_the_round(world: Any) -> None:
    fleet = world(num_clients=1, num_rounds=1)
    client = fleet.start_client("cam-0")
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
    deadline = time.monotonic() + 20
    while again.counts.num_frames == 0 and time.monotonic() < deadline:
        again.pump(0.01)
    assert again.counts.num_frames > 0
    assert again.status()["phase"] == "waiting for the aggregator"
    fleet.aggregator = fleet.start_aggregator()
    fleet.until(lambda: again.client.finished)
    assert fleet.sources["cam-0"].asked == []


def test_a_restarted_aggregator_gets_the_upload_that_it_did_not_acknowledge(world: Any) -> None:
    fleet = world(num_clients=2, num_rounds=1)
    fleet.start_client("cam-0")
    fleet.until(lambda: len(events(fleet, "upload accepted")) == 1)
    fleet.aggregator.stop()
    client = fleet.start_client("cam-1", 1)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and client.status()["phase"] != "waiting for the aggregator":
        client.pump(0.01)
    fleet.aggregator = fleet.start_aggregator()
    fleet.until(lambda: all(each.client.finished for each in fleet.clients.values()))
    assert len(events(fleet, "upload accepted")) == 2


def test_a_client_without_data_stays_and_serves_while_the_others_learn(world: Any) -> None:
    fleet = world(num_clients=1, num_rounds=2)
    idle = fleet.start_client("cam-0", rounds=0)
    fleet.start_client("cam-1", 1)
    fleet.until(lambda: all(client.client.finished for client in fleet.clients.values()))
    assert {entry["client"] for entry in events(fleet, "upload accepted")} == {"cam-1"}
    assert idle.status()["serving_version"] >= 2


def test_presence_tells_the_provider_and_the_goodbye(world: Any) -> None:
    fleet = world(num_clients=1, num_rounds=1)
    client = fleet.start_client("cam-0")
    topic = state_topic("fleet", "cam-0")
    fleet.until(lambda: topic in fleet.broker.retained)
    online = decode(fleet.broker.retained[topic])
    assert isinstance(online, Presence)
    assert (online.status, online.device, online.provider) == ("online", "cpu", "CPUExecutionProvider")
    fleet.until(lambda: client.client.finished)
    client.stop()
    stopped = decode(fleet.broker.retained[topic])
    assert isinstance(stopped, Presence)
    assert stopped.status == "stopped"
    assert stopped.sequence > online.sequence
    assert stopped.boot_id == online.boot_id
