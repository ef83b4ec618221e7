"""Heat and power slow training: sensors are numbers here, the process that stands still is real."""

from __future__ import annotations

import itertools
import logging
import queue
import sys
import threading
import time

import pytest

from replayfleet.devices.budget import TrainingAllowance
from replayfleet.devices.limits import Reading, Throttle
from replayfleet.edge_client.learning.local_training import LocalTraining, TrainerEvent, TrainerProcess
from replayfleet.edge_client.learning.training import brake as brakes
from replayfleet.edge_client.learning.training.brake import TrainingBrake
from replayfleet.edge_client.learning.training.job import TrainerReady, TrainJob
from replayfleet.federation.wire.protocol.messages import FleetSpec, Manifest
from tests.support.processes import state_of
from tests.support.waiting import until

BUSY = """
import sys, threading
sys.stdout.write('{"type":"ready"}\\n'); sys.stdout.flush()
def end():
    sys.stdin.read()
    import os; os._exit(0)
threading.Thread(target=end, daemon=True).start()
while True: pass
"""


class Recorded:
    def __init__(self) -> None:
        self.paused: list[bool] = []

    def pause(self, *, paused: bool) -> None:
        self.paused.append(paused)


def brake_at(time_share: float) -> tuple[TrainingBrake, Recorded]:
    throttle, training = Throttle(TrainingAllowance()), Recorded()
    throttle.time_share = time_share
    return TrainingBrake(Reading, throttle, training), training


@pytest.mark.parametrize(("time_share", "num_paused"), [(1.0, 0), (0.75, 5), (0.1, 18), (0.0, 20)])
def test_training_runs_for_its_share_of_every_second(time_share: float, num_paused: int) -> None:
    brake, training = brake_at(time_share)
    for tenth in range(20):
        brake.tick(500.01 + tenth / 10)
    assert training.paused.count(True) == pytest.approx(num_paused, abs=1)


def test_one_line_is_logged_when_training_is_slowed_and_one_when_it_is_free_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    degrees = iter([50.0, 81.0, 82.0, 83.0, 90.0, *[60.0] * 12])

    def read() -> Reading:
        temperature_c = next(degrees)
        return Reading(temperature_c, "cpu", temperature_c - 80.0)

    brake = TrainingBrake(read, Throttle(TrainingAllowance()), Recorded())
    with caplog.at_level(logging.INFO, logger="replayfleet.edge_client.learning.training.brake"):
        for _ in range(17):
            brake.update()
    states = [record.__dict__["fields"]["state"] for record in caplog.records]
    assert states == ["slowed", "stopped", "slowed", "full"]
    assert brake.reading.temperature_c == 60.0
    assert (brake.time_share, brake.reason) == (1.0, "")


@pytest.mark.parametrize(("comes_back", "share"), [(True, 0.0), (False, 1.0)])
def test_sensors_that_break_are_read_again_and_training_gets_its_time_back_meanwhile(
    comes_back: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brakes, "READ_EVERY_S", 0.0)
    num_read, enough = itertools.count(), threading.Event()

    def read() -> Reading:
        number = next(num_read)
        if number >= 15:
            enough.set()
        if number == 3 or (number > 3 and not comes_back):
            raise ValueError("a line that nobody understands")
        return Reading(95.0, "cpu", 15.0)

    brake = TrainingBrake(read, Throttle(TrainingAllowance()), Recorded())
    brake.start()
    assert enough.wait(60)
    brake.stop()
    assert brake.time_share == share


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_real_process_stands_still_goes_on_and_ends_while_it_stands_still() -> None:
    events: queue.Queue[TrainerEvent] = queue.Queue()
    training = LocalTraining(lambda _idle: TrainerProcess(events.put, command=(sys.executable, "-c", BUSY)))
    manifest = Manifest("down", "fleet", "c1", 0, 1, (), b"\x80")
    training.begin(TrainJob("/data", "c1", FleetSpec("fleet", "fedavg", {}, {}, 7), manifest, 2, "onnx", 1, ""))
    try:
        assert events.get(timeout=60) == TrainerReady()
        throttle = Throttle(TrainingAllowance())
        throttle.time_share = 0.5
        brake = TrainingBrake(Reading, throttle, training)
        for now, expected in ((7.0, "R"), (7.6, "T"), (8.1, "R"), (8.9, "T")):
            brake.tick(now)
            until(lambda expected=expected: state_of(training.pid) == expected, said=lambda: state_of(training.pid))
    finally:
        began = time.monotonic()
        training.stop()
    assert time.monotonic() - began < 30
