"""Whole clients and a real aggregator, pumped by a test's thread, over a broker in memory or any other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from replayfleet.aggregator.founding import Fleet
from replayfleet.aggregator.leading import Claim
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.aggregator.rounds.machine import RoundRules
from replayfleet.aggregator.service import AggregatorService
from replayfleet.aggregator.serving import OnnxExporter
from replayfleet.edge_client.cameras.recorded.scene import SceneCamera
from replayfleet.edge_client.flow import PictureSource, Samples, Shown, Source
from replayfleet.edge_client.frames.views import WholePicture, to_pixels
from replayfleet.edge_client.learning.local_training import TrainerEvent
from replayfleet.edge_client.learning.training.job import TrainerReady, TrainJob
from replayfleet.edge_client.learning.training.trainer import answer
from replayfleet.edge_client.service import ClientService, Identity
from replayfleet.edge_client.serving.proc import Progress
from replayfleet.edge_client.sync.parts import Compute
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.service.data_dir import claim_data_dir
from replayfleet.federation.service.fleet.spec import make_spec, method_of
from replayfleet.federation.wire.transport.interfaces import OnMessage, Session, Will
from replayfleet.models.specs import TaskSpec
from tests.support.memory_broker import MemoryBroker
from tests.support.tiny_fleet import linked_keys

RATE_HZ = 20.0
"""Pictures of a client's camera; each costs an inference."""

TASK = TaskSpec(1, 28, ("dark", "bright", "left"), generator_width=1, architecture="lenet")
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
        scene = to_pixels(self.samples(999).images)
        camera = SceneCamera(RATE_HZ)
        camera.show(scene)
        self.source = Source(PictureSource((camera,), WholePicture(TASK), f"toy {client}"), self)

    def samples(self, seed: int, count: int = 16) -> Samples:
        rng = np.random.default_rng([self.client, seed])
        labels = np.arange(count, dtype=np.int64) % 2
        images = rng.normal(0, 0.1, (count, 1, 28, 28)) + np.where(labels, 0.7, -0.7)[:, None, None, None]
        return Samples(np.clip(images, -1, 1).astype(np.float32), labels)

    def watch(self, shown: Shown) -> None:
        pass

    def measures(self) -> dict[str, float]:
        return {}

    def round_samples(self, round_index: int) -> Samples | None:
        self.asked.append(round_index)
        return self.samples(round_index) if round_index < self.rounds else None

    def used_up(self, round_index: int) -> None:
        pass

    def test_samples(self, round_index: int) -> Samples | None:
        return self.samples(1000 + round_index, 40)


class TrainerThread:
    """Trains like ``TrainerProcess``, in this process: saves the seconds that a child takes to import torch."""

    pid = 0

    def __init__(self, on_event: Callable[[TrainerEvent], None], _idle: bool) -> None:
        self._on_event = on_event
        self._jobs: queue.SimpleQueue[TrainJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, job: TrainJob) -> None:
        self._jobs.put(job)

    def pause(self) -> None:
        """A thread can't be stopped from outside."""

    def resume(self) -> None:
        """It was never stopped."""

    def progress(self) -> Progress:
        return "works"

    def kill(self) -> None:
        """Nor can it be killed."""

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        self._on_event(TrainerReady())
        while (job := self._jobs.get()) is not None:
            answer(job, self._on_event)


class World:
    """A broker, an aggregator and clients, all pumped by the test's thread."""

    def __init__(
        self,
        folder: Path,
        method: str = "fedavg",
        *,
        num_clients: int = 2,
        num_rounds: int | None = 2,
        deadline_s: float = 60.0,
        task: TaskSpec = TASK,
        **more: str,
    ) -> None:
        settings = (PFEDGRP if method == "pfedgrp" else FEDAVG) | more
        self.spec = make_spec("fleet", method, task, preset="tiny", overrides=settings, run_seed=3)
        built = method_of(self.spec)
        rules = RoundRules(num_clients, min_clients=1, deadline_s=deadline_s, num_rounds=num_rounds)
        self.fleet = Fleet(self.spec, built, sampler_of(built), OnnxExporter(built, task), rules)
        self.folder = folder
        self.broker = MemoryBroker()
        self.clients: dict[str, ClientService] = {}
        self.sources: dict[str, ToySource] = {}
        self.others: list[AggregatorService] = []
        self.aggregator = self.start_aggregator()

    def start_aggregator(self, name: str = "aggregator") -> AggregatorService:
        (self.folder / name).mkdir(exist_ok=True)
        keys = linked_keys(self.folder / name, self.folder / "keys")
        service = AggregatorService(self.fleet, self.folder / name, self._connect, keys=keys)
        service.start()
        return service

    @property
    def round(self) -> int:
        return self.aggregator.coordinator.rounds.index

    def kill_aggregator(self) -> None:
        """As by kill -9: nobody says goodbye."""
        service = self.aggregator
        for session in (service.loop.control, service.loop.data):
            self.broker.kill(session.client_id)
        service._jobs.stop()
        service._parts.journal.close()
        service._store.close()

    def stand_by(self) -> AggregatorService:
        """Start a second aggregator, which waits for the first one's end."""
        second = self.start_aggregator("second")
        self.others.append(second)
        self.until(lambda: "standing by" in second.coordinator.notice)
        return second

    def start_client(self, client_id: str, number: int = 0, **options: Any) -> ClientService:
        folder = self.folder / client_id
        folder.mkdir(exist_ok=True)
        toy = self.sources[client_id] = ToySource(number, options.pop("rounds", 99))
        open_source = options.pop("open_source", lambda _: toy.source)
        watchers = options.pop("watchers", [])
        compute = options.pop("compute", None) or Compute(sampler=options.pop("sampler", "onnx"))
        identity = Identity("fleet", client_id, "cpu", compute)
        options.setdefault("spawn", TrainerThread)
        service = self.clients[client_id] = ClientService(identity, folder, self._connect, open_source, **options)
        service.watchers.extend(watchers)
        service.start()
        return service

    def pump(self) -> None:
        for aggregator in (self.aggregator, *self.others):
            aggregator.loop.pump(0.01)
        for client in self.clients.values():
            client.loop.pump(0.01)

    def until(self, done: Callable[[], bool], limit_s: float = 150.0) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < deadline, {name: c.status() for name, c in self.clients.items()}
            self.pump()

    def until_round(self, index: int, limit_s: float = 150.0) -> None:
        self.until(lambda: self.round >= index, limit_s)

    def close(self) -> None:
        for client in self.clients.values():
            client.stop()
        for aggregator in (self.aggregator, *self.others):
            aggregator.stop()

    def _connect(self, client_id: str, on_message: OnMessage, will: Will | None) -> Session:
        return self.broker.session(client_id, on_message=on_message, will=will)


def world_of_two(folder: Path) -> World:
    """Two clients without an end of rounds, whose aggregator, started again, asks whether another one leads."""
    world = World(folder, num_clients=2, num_rounds=None)
    world.fleet = replace(world.fleet, claim=Claim.ASK)
    claim_data_dir(folder / "aggregator", fleet="fleet", role="aggregator").close()
    for number in range(2):
        world.start_client(f"cam-{number}", number)
    return world


def events(world: World, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read_journal(world.folder / "aggregator") if entry["event"] == kind]
