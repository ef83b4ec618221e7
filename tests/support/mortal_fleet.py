"""A fleet of real processes that die, stop and lose each other at random moments: what it says and leaves, as JSON.

    python -m tests.support.mortal_fleet '{"folder": ..., "method": "fedavg", "kills": 100}'

Processes are forked from this one, which has imported everything and has no thread, so that a start takes no time: it
is kill -9 and what lies on the disk that are under test. Only the broker and the processes that serve are programs of
their own. A fault comes when some share of a usual round has passed, and at most four come in a round, so that rounds
end on any machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.aggregator.founding import Fleet
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.aggregator.rounds.machine import RoundRules
from replayfleet.aggregator.service import AggregatorService
from replayfleet.aggregator.serving import OnnxExporter
from replayfleet.aggregator.steps import Step
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.edge_client.service import ClientService, Identity
from replayfleet.edge_client.sync.parts import Compute
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.service.fleet.spec import make_spec, method_of
from replayfleet.federation.service.logs import configure_logging
from replayfleet.federation.service.torch_setup import prepare_torch
from replayfleet.federation.wire.transport.broker import find_mosquitto
from replayfleet.federation.wire.transport.interfaces import OnMessage, Session, Will
from replayfleet.federation.wire.transport.mqtt import MqttSession
from replayfleet.scripts.fleet.tcp_link import LineQuality, TcpLink
from tests.support.client_world import FEDAVG, PFEDGRP, TASK, ToySource, TrainerThread
from tests.support.ports import free_port

CLIENTS = ("cam-0", "cam-1")
KEEPALIVE_S = 2
FAULTS_PER_ROUND = 4
STARVED_S = 10.0
LIMIT_S = 900.0


class Plan(msgspec.Struct, frozen=True):
    """What happens to the fleet.

    Attributes:
        folder: for all that it leaves.
        method: which it runs.
        rounds: at least so many.
        kills: SIGKILLs, of all parties in turn at random.
        steps: marked steps; the aggregator dies at each, one after the other, as soon as it comes there.
        stops_s: every party is stopped for so long, one after the other; 0: none is.
        jumps_s: wall clocks jump by so much at every fault, forwards and back.
        line: quality of everybody's line to the broker; None: straight.
        partitions: how often a member's line carries nothing for a while.
        starved: the broker's configuration for the first ``STARVED_S``.
        seed: of all that is random.
    """

    folder: str
    method: str = "fedavg"
    rounds: int = 3
    kills: int = 0
    steps: tuple[str, ...] = ()
    stops_s: float = 0.0
    jumps_s: float = 0.0
    line: dict[str, float] | None = None
    partitions: int = 0
    starved: tuple[str, ...] = ()
    seed: int = 0


class MortalFleet:
    """Broker, aggregator and clients, each a process."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.folder = Path(plan.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rng = random.Random(plan.seed)
        self.port = free_port()
        self.pids: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.deaths: dict[str, int] = {}
        self.steps = list(plan.steps)
        self.problems: list[str] = []
        self.num_rounds: int | None = None  # until every fault was survived
        self.broker: subprocess.Popen[bytes] | None = None
        self.broker_lines: tuple[str, ...] = plan.starved
        self._offset = self.folder / "clock"
        self._offset.write_text("0")
        spec = make_spec(
            "fleet",
            plan.method,
            TASK,
            preset="tiny",
            overrides=PFEDGRP if plan.method == "pfedgrp" else FEDAVG,
            run_seed=3,
        )
        self.spec, self.method = spec, method_of(spec)
        self.ports = {name: free_port() if plan.line is not None else self.port for name in ("aggregator", *CLIENTS)}

    # What lives

    def start(self, party: str) -> None:
        if party == "broker":
            self._start_broker()
        elif party.startswith("line "):
            self._fork(party, lambda: self._line(party.removeprefix("line ")))
        elif party == "aggregator":
            self._fork(party, self._aggregator)
        else:
            self._fork(party, lambda: self._client(party))

    def kill(self, party: str) -> None:
        """As the kernel does when memory ends; it starts again at once."""
        self.deaths[party] = self.deaths.get(party, 0) + 1
        if party == "broker":
            self.broker.kill()
            self.broker.wait()
        else:
            os.kill(self.pids[party], signal.SIGKILL)
            os.waitpid(self.pids.pop(party), 0)
        self.start(party)

    def send(self, party: str, sign: int) -> None:
        pid = self.broker.pid if party == "broker" and self.broker is not None else self.pids[party]
        os.kill(pid, sign)

    @property
    def mortals(self) -> list[str]:
        """Who can be hit now."""
        return ["broker", *(name for name in ("aggregator", *CLIENTS) if name in self.pids)]

    def rounds_done(self) -> int:
        return sum(entry["event"] == "round committed" for entry in read_journal(self.folder / "aggregator"))

    def look(self) -> None:
        """Note who ended by himself."""
        for party, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[party]
                code = os.waitstatus_to_exitcode(status)
                if party == "aggregator" and self.steps and code == -signal.SIGKILL:
                    self.steps.pop(0)
                    self.deaths[party] = self.deaths.get(party, 0) + 1
                    self.start(party)
                else:
                    self.done[party] = code
        if self.broker is not None and self.broker.poll() is not None:
            self.done["broker"] = self.broker.returncode
            self._start_broker()

    def end(self) -> None:
        for party in list(self.pids):
            with contextlib.suppress(ProcessLookupError):
                self.send(party, signal.SIGKILL)
            os.waitpid(self.pids.pop(party), 0)
        if self.broker is not None:
            self.broker.kill()
            self.broker.wait()

    # What each of them is

    def _start_broker(self) -> None:
        config = self.folder / "mosquitto.conf"
        user = ["user root"] if os.geteuid() == 0 else []
        config.write_text(
            "\n".join([f"listener {self.port} 127.0.0.1", "allow_anonymous true", *self.broker_lines, *user])
        )
        with (self.folder / "broker.log").open("ab") as log:
            self.broker = subprocess.Popen([str(find_mosquitto()), "-c", config], stdout=log, stderr=log)

    def _fork(self, party: str, live: Callable[[], bool]) -> None:
        pid = os.fork()
        if pid:
            self.pids[party] = pid
            return
        code = 1
        try:
            log = os.open(self.folder / f"{party}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if self.plan.jumps_s:
                real_s, real_ns = time.time, time.time_ns
                time.time = lambda: real_s() + self._jumped_s()
                time.time_ns = lambda: real_ns() + int(self._jumped_s() * 1e9)
            configure_logging()
            prepare_torch(1)
            code = 0 if live() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _connect(self, party: str) -> Callable[[str, OnMessage, Will | None], Session]:
        url = f"mqtt://127.0.0.1:{self.ports[party]}"
        return lambda client_id, on_message, will: MqttSession(
            url, client_id, on_message=on_message, will=will, keepalive_s=KEEPALIVE_S if self.plan.stops_s else 20
        )

    def _aggregator(self) -> bool:
        rules = RoundRules(len(CLIENTS), min_clients=1, deadline_s=86400.0, num_rounds=self.num_rounds)
        fleet = Fleet(self.spec, self.method, eager_sampler(TASK), OnnxExporter(self.method, TASK), rules)
        (self.folder / "aggregator").mkdir(exist_ok=True)

        def dies(step: Step) -> None:
            if [step.value] == self.steps[:1]:
                os.kill(os.getpid(), signal.SIGKILL)

        service = AggregatorService(fleet, self.folder / "aggregator", self._connect("aggregator"), checkpoint=dies)
        return service.run(threading.Event())

    def _client(self, name: str) -> bool:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        source = ToySource(CLIENTS.index(name), 10_000).source
        identity = Identity("fleet", name, "cpu", Compute(sampler="onnx"))
        service = ClientService(identity, folder, self._connect(name), lambda _: source, spawn=TrainerThread)
        return service.run(threading.Event())

    def _line(self, party: str) -> bool:
        quality = LineQuality(**(self.plan.line or {}))
        rng = random.Random(f"{self.plan.seed}/{party}")
        asyncio.run(TcpLink(self.port, quality, rng, lambda _: None).serve(self.ports[party], lambda _: None))
        return False

    def _jumped_s(self) -> float:
        return float(self._offset.read_text())

    def jump(self) -> None:
        """Wall clocks jump, forwards or back."""
        if self.plan.jumps_s:
            whole = self._offset.with_suffix(".new")
            whole.write_text(str(self.rng.choice((-1, 1)) * self.rng.random() * self.plan.jumps_s))
            whole.replace(self._offset)


def faults(fleet: MortalFleet) -> Iterator[Callable[[], None]]:
    """Everything that is done to the fleet, one thing after the other."""
    plan, rng = fleet.plan, fleet.rng

    def stopped(party: str, for_s: float) -> None:
        fleet.send(party, signal.SIGSTOP)
        time.sleep(for_s)
        fleet.send(party, signal.SIGCONT)

    if plan.starved:
        yield lambda: fleet.kill("broker")  # comes back with memory
    for _ in range(plan.kills):
        yield lambda: fleet.kill(rng.choice(("broker", "aggregator", rng.choice(CLIENTS))))
    for party in ("broker", "aggregator", CLIENTS[0]) if plan.stops_s else ():
        yield lambda party=party: stopped(party, plan.stops_s)
    for _ in range(plan.partitions):
        yield lambda: stopped(f"line {rng.choice(('aggregator', *CLIENTS))}", 3.0)


def live(plan: Plan) -> dict[str, Any]:
    """Run the fleet until its rounds are over and everybody has gone home."""
    fleet = MortalFleet(plan)
    lines = [f"line {name}" for name in fleet.ports] if plan.line is not None else []
    began = time.monotonic()
    try:
        for party in ("broker", *lines, "aggregator", *CLIENTS):
            fleet.start(party)
        coming, num_faults, rounds, usual_s, since = faults(fleet), 0, 0, 2.0, began
        due: float | None = began + (STARVED_S if plan.starved else usual_s)
        while any(name in fleet.pids for name in ("aggregator", *CLIENTS)):
            now = time.monotonic()
            assert now - began < LIMIT_S, f"{fleet.rounds_done()} rounds, {num_faults} faults: {fleet.deaths}"
            fleet.look()
            done = fleet.rounds_done()
            if done > rounds:
                usual_s = min(2 * usual_s, (now - since) / (done - rounds))
                rounds, since = done, now
            if due is not None and now >= due and num_faults < FAULTS_PER_ROUND * (done + 1):
                fleet.broker_lines = ()
                fault = next(coming, None)
                if fault is None and fleet.steps:
                    time.sleep(0.01)
                    continue  # it has yet to come there
                if fault is None:
                    due = None
                    if fleet.num_rounds is None:  # all was survived: two more rounds in peace, then home
                        fleet.num_rounds = max(done + 2, plan.rounds)
                        fleet.kill("aggregator")
                    continue
                fleet.jump()
                fault()
                num_faults += 1
                due = time.monotonic() + fleet.rng.uniform(0.0, usual_s / 2)
            time.sleep(0.01)
    finally:
        fleet.end()
    rounds, found = left_by(fleet.folder / "aggregator")
    return {
        "method": plan.method,
        "rounds": rounds,
        "faults": num_faults,
        "deaths": fleet.deaths,
        "exits": fleet.done,
        "digest": found,
        "seconds": round(time.monotonic() - began, 1),
        "tracebacks": [
            f"{log.name}: {text[text.index('Traceback') :][:2000]}"
            for log in fleet.folder.glob("*.log")
            if "Traceback" in (text := log.read_text(errors="replace"))
        ],
    }


def left_by(folder: Path) -> tuple[int, str]:
    """Return how many rounds a run had, and a digest of the method's state and all downloads but their versions."""
    with contextlib.closing(AggregatorStore(folder)) as store:
        state, seen = store.state(), hashlib.sha256()
        seen.update(repr((sorted((blob.name, blob.digest) for blob in state.blobs), state.facts)).encode())
        for client in sorted(store.clients()):
            download = store.download(client)
            parts = sorted((blob.name, blob.digest) for blob in download.blobs)
            seen.update(repr((client, download.round, parts, download.facts)).encode())
        return store.round().index, seen.hexdigest()


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(live(msgspec.json.decode(sys.argv[1], type=Plan))).decode())
