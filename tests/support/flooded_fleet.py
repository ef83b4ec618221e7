"""A real aggregator process, honest clients and one that floods: what its memory, its rounds and its log do."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from support.tiny_fleet import FLEET, TinyClient

from replayfleet.federation.wire.transport.broker import open_broker
from tests.support.mosquitto import Mqtt

HERE = Path(__file__).parent
CHILDREN = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE.parents[1]}"}
MEMBER = "cam-9"
"""Floods, after it confirmed its download like any other; its rounds don't need it."""


@dataclass(frozen=True)
class Phase:
    """What some rounds cost.

    Attributes:
        rounds: how many were committed.
        seconds: they took.
        cpu_s: of the aggregator.
        memory_mb: its largest while they ran.
        warnings: lines of its log that don't tell a round's story.
        sent_messages: by the one who floods.
        sent_mb: by the same.
    """

    rounds: int
    seconds: float
    cpu_s: float
    memory_mb: float
    warnings: int
    sent_messages: int = 0
    sent_mb: float = 0.0

    @property
    def round_s(self) -> float:
        return self.seconds / max(1, self.rounds)


class Trainee(TinyClient):
    """Trains for a while, and meanwhile computes nothing here."""

    training_s = 0.0
    _since: tuple[int, float] = (-1, 0.0)

    def _train(self, now: float) -> None:
        ready = self.manifest.round if self.manifest is not None else -1
        if ready != self._since[0]:
            self._since = ready, now
        if now - self._since[1] >= self.training_s:
            super()._train(now)


class FloodedFleet:
    """The processes and the clients; one thread pumps."""

    def __init__(self, folder: Path, url: str, training_s: float) -> None:
        self.folder, self.url = folder, url
        self.log = folder / "log"
        command = [sys.executable, "-m", "support.tiny_aggregator_process", str(folder / "aggregator"), url]
        (folder / "aggregator").mkdir()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, "", "0", "100000"], cwd=HERE.parent, stderr=log, env=CHILDREN)
        self.memory = psutil.Process(self.process.pid)
        broker = Mqtt(url)
        names = ("cam-1", "cam-2", "cam-3", MEMBER)
        self.clients = {name: Trainee(broker, name, folder / name) for name in names}
        for client in self.clients.values():
            client.training_s = training_s
        self.clients[MEMBER].dies_in = 0  # never uploads

    def pump(self) -> None:
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        for client in self.clients.values():
            client.pump(time.monotonic())
        time.sleep(0.002)

    @property
    def round(self) -> int:
        said = [client.announcement.round for client in self.clients.values() if client.announcement is not None]
        return max(said, default=-1)

    def until_round(self, index: int, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while self.round < index:
            assert time.monotonic() < end, f"round {index} never came, this is {self.round}"
            self.pump()

    def rounds(
        self, at_least_s: float, at_least: int, limit_s: float, until: Callable[[], bool] = lambda: True
    ) -> Phase:
        """Let rounds pass."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # the peak counts from here
        began, before, lines, cpu = time.monotonic(), self.round, self.num_warnings, sum(self.memory.cpu_times()[:2])
        while time.monotonic() - began < at_least_s or self.round < before + at_least or not until():
            assert time.monotonic() - began < limit_s, f"{self.round - before} rounds in {limit_s} s"
            self.pump()
        return Phase(
            self.round - before,
            time.monotonic() - began,
            sum(self.memory.cpu_times()[:2]) - cpu,
            self.peak_mb,
            self.num_warnings - lines,
        )

    def flooded(self, kinds: list[str], at_least_s: float, at_least: int, limit_s: float) -> Phase:
        """Let rounds pass while one member floods."""
        self.clients.pop(MEMBER).session.stop() if MEMBER in self.clients else None
        member = [self.url, FLEET, MEMBER, str(self.folder / MEMBER)]
        # whoever floods does so with cores of its own, elsewhere: here it may have what the others leave
        command = ["nice", "-n", "19", sys.executable, "-m", "support.flood", *member, ",".join(kinds)]
        with subprocess.Popen(
            command, cwd=HERE.parent, env=CHILDREN, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as flood:
            said: list[bytes] = []
            reader = threading.Thread(target=lambda: said.extend(flood.stdout or ()))
            reader.start()
            try:
                end = time.monotonic() + limit_s
                while not said:
                    assert time.monotonic() < end, "the flood never began"
                    self.pump()
                found = self.rounds(at_least_s, at_least, limit_s, lambda: len(said) > 1)
                flood.stdin.close()
                reader.join(60)
                sent = json.loads(said[-1])
            finally:
                flood.kill()
                reader.join()
        return Phase(**{**asdict(found), "sent_messages": sent["messages"], "sent_mb": sent["bytes"] / 1e6})

    @property
    def num_warnings(self) -> int:
        return sum(line.split(" ", 2)[1:2] != ["INFO"] for line in self.log.read_text().splitlines())

    @property
    def peak_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:", 1)[1].split()[0]) * 1024 / 1e6

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for client in self.clients.values():
            client.session.stop()


@contextlib.contextmanager
def flooded_fleet(folder: Path, training_s: float = 0.0) -> Iterator[FloodedFleet]:
    """A broker and a fleet on it, whose first rounds are over; its clients train for ``training_s``."""
    ours = logging.getLogger("replayfleet")
    level = ours.level
    ours.setLevel(logging.ERROR)  # the clients' own; they hear what floods their topics
    try:
        with open_broker(log=logging.getLogger("test")) as broker:
            fleet = FloodedFleet(folder, broker.url, training_s)
            try:
                fleet.until_round(3, 120)
                yield fleet
            finally:
                fleet.stop()
    finally:
        ours.setLevel(level)
