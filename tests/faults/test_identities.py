"""Whole programs with what `aggregator enroll` gave them, at a mosquitto with the rules that it wrote."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from integration.test_members_at_the_broker import FLEET, Broker

from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.federation.wire.transport.broker import find_mosquitto
from replayfleet.scripts.launch.plan import FASHION_MNIST, aggregator_command, client_command, stream_source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 240.0
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    if find_mosquitto() is None:
        pytest.skip("no mosquitto on this machine")
    try:
        load_dataset(FASHION_MNIST)
    except SettingsError as error:
        pytest.skip(str(error))
    found = Broker(tmp_path)
    yield found
    found.end()


@pytest.fixture
def start(broker: Broker) -> Iterator[Start]:
    """What starts a program as a member: its identity folder is all that it has."""
    with ExitStack() as stack:

        def begin(member: str, words: Sequence[str], *, by_file: bool = False) -> subprocess.Popen[bytes]:
            files = broker.tls(member)
            assert files.ca_file is not None
            program = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
            own = ["--broker", f"mqtts://localhost:{broker.port}", "--identity", str(files.ca_file.parent)]
            if by_file:
                own += ["--tls-cert", str(files.certificate_file), "--tls-key", str(files.key_file)]
            log = stack.enter_context((broker.place / f"{member}.log").open("ab"))
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen([*program, *own], stderr=log, stdout=log, env=environment, cwd=broker.place)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield begin


def aggregator(broker: Broker, rounds: int) -> list[str]:
    return aggregator_command(
        broker.data_dir, FLEET, clients=2, rounds=rounds, method="fedavg", task=("--dataset", FASHION_MNIST),
        preset="tiny", seed=0,
    )  # fmt: skip


def client(broker: Broker, name: str, index: int) -> list[str]:
    source = stream_source("tiny", index, clients=2, rounds=4, seed=0, rate=1.0)
    return client_command(broker.place / name, FLEET, source)


def events(broker: Broker, kind: str) -> list[str]:
    return [entry.get("client", "") for entry in read_journal(broker.data_dir) if entry["event"] == kind]


def log_of(broker: Broker, member: str) -> list[str]:
    """What a program said of being refused."""
    lines = (broker.place / f"{member}.log").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "not authorized" in line or "refuses our client certificate" in line]


def until(done: Callable[[], bool], broker: Broker) -> None:
    end = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end, [path.read_text()[-1500:] for path in broker.place.glob("*.log")]
        time.sleep(0.2)


def test_a_fleet_of_members_goes_from_its_first_round_to_its_last(broker: Broker, start: Start) -> None:
    processes = [start("aggregator", aggregator(broker, 2))]
    processes += [start(name, client(broker, name, index)) for index, name in enumerate(("cam-1", "cam-2"))]
    until(lambda: all(process.poll() is not None for process in processes), broker)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(events(broker, "upload accepted")) == ["cam-1", "cam-1", "cam-2", "cam-2"]


def test_who_has_the_files_of_another_member_or_the_brokers_takes_no_part_and_says_so(
    broker: Broker, start: Start
) -> None:
    start("aggregator", aggregator(broker, 2))
    brokers = broker.data_dir / "members" / "cam-3"
    shutil.copytree(broker.data_dir / "members" / "cam-2", brokers)
    for name in ("crt", "key"):
        shutil.copy(broker.data_dir / "broker" / f"broker.{name}", brokers / f"member.{name}")
    clients = {"cam-2": client(broker, "cam-1", 0), "cam-3": client(broker, "cam-3", 1)}
    assert [start(name, words).wait(60) for name, words in clients.items()] == [2, 2]
    said = [(broker.place / f"{name}.log").read_text(encoding="utf-8") for name in clients]
    assert "is of 'cam-2', and this is 'cam-1'" in said[0]
    assert "is of 'localhost', and this is 'cam-3'" in said[1]
    processes = [start(name, words, by_file=True) for name, words in clients.items()]
    until(lambda: all(log_of(broker, name) for name in ("cam-2", "cam-3")), broker)
    assert [process.poll() for process in processes] == [None, None]
    assert events(broker, "client online") == []
