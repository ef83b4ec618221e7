"""The aggregator as a process over a real broker, killed with SIGKILL in the middle of its rounds."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tiny_fleet import TinyClient, TinyFleet
from support.tiny_method import TinyState

from replayfleet.aggregator.aggregation import restore_artefacts
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.aggregator.operator.status import read_status
from replayfleet.aggregator.steps import DEEDS, Step
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.broker import find_mosquitto, open_broker
from tests.support.mosquitto import Mqtt

TESTS = Path(__file__).parents[1]
ALWAYS = tuple(step for step in Step if step not in {Step.EPOCH_RAISED, *DEEDS})
KILLED_AT = (Step.UPLOAD_STORED, Step.COMMITTED)

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="needs mosquitto")


@pytest.fixture
def url() -> Iterator[str]:
    with open_broker(log=logging.getLogger("test")) as broker:
        yield broker.url


def started(folder: Path, url: str, step: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "support.tiny_aggregator_process", str(folder), url, step, "0"]
    return subprocess.Popen(command, cwd=TESTS, env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"})


def pumped_until_it_ends(process: subprocess.Popen[bytes], clients: list[TinyClient], limit_s: float = 60) -> int:
    end = time.monotonic() + limit_s
    while process.poll() is None:
        assert time.monotonic() < end, "the aggregator neither died nor finished"
        for client in clients:
            client.pump(time.monotonic())
        time.sleep(0.01)
    return process.returncode


@pytest.mark.parametrize(
    "steps", [KILLED_AT, pytest.param(ALWAYS, marks=pytest.mark.slow)], ids=["two steps", "every step"]
)
def test_an_aggregator_killed_over_and_over_ends_with_the_same_bits(
    steps: tuple[Step, ...], tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.fsync", lambda handle: None)
    folder = tmp_path / "mqtt"
    folder.mkdir()
    clients = [TinyClient(Mqtt(url), name, tmp_path / name) for name in ("cam-1", "cam-2", "cam-3")]
    try:
        for step in steps:
            assert pumped_until_it_ends(started(folder, url, step.value), clients) == -signal.SIGKILL
        assert pumped_until_it_ends(started(folder, url, ""), clients) == 0
    finally:
        for client in clients:
            client.session.stop()

    undisturbed = TinyFleet(tmp_path / "memory")
    store = AggregatorStore(folder)
    try:
        undisturbed.run()
        assert store.state() == undisturbed.store.state()
        state = TinyState.unpack(restore_artefacts(store.state(), DiskBlobStore(folder / "blobs")))
        assert dict(state.times) == {"cam-1": 3, "cam-2": 3, "cam-3": 3}
    finally:
        store.close()
        undisturbed.close()
    committed = [event["round"] for event in read_journal(folder) if event["event"] == "round committed"]
    assert set(committed) <= {0, 1, 2}
    assert read_status(folder).round == 3
