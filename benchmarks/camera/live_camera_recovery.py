"""How soon a lost RTSP camera is back: seconds from its return to the first picture that it took after it.

A small RTSP server in this process falls silent, sends noise or damaged pictures, asks for another password, or
refuses, for times that fall differently into the client's attempts. With the defaults of ``RtspCameraSettings``.

    python -m benchmarks.camera.live_camera_recovery [--repeats 5] [--out benchmarks/results/live_camera_recovery.json]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import run
from replayfleet.edge_client.cameras.live.rtsp import RtspCameraSettings
from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera
from replayfleet.federation.service.logs import configure_logging
from tests.support.rtsp_server import FAILURES, RtspServer

GOAL_S = 5.0
FIRST_OUTAGE_S = 2.5
STEP_S = 0.7


def recoveries(fail: Callable[[RtspServer], None], repeats: int) -> list[float]:
    """Return the seconds of each return."""
    newest = [0.0]
    stop = threading.Event()
    with RtspServer() as server:
        camera = SupervisedCamera(RtspCameraSettings(server.url), "bench")

        def watch() -> None:
            for picture in camera.pictures(stop):
                newest[0] = picture.captured_at

        watcher = threading.Thread(target=watch)
        watcher.start()
        seconds_to_next(newest)
        taken = []
        for turn in range(repeats):
            fail(server)
            time.sleep(FIRST_OUTAGE_S + turn * STEP_S)
            server.come_back()
            taken.append(seconds_to_next(newest))
        stop.set()
        watcher.join()
    assert camera.counts.num_lost == repeats
    return taken


def seconds_to_next(newest: list[float]) -> float:
    """Wait for a picture that was taken after now."""
    began = time.monotonic()
    while newest[0] < began:
        time.sleep(0.005)
    return time.monotonic() - began


def measure(options: argparse.Namespace) -> dict[str, Any]:
    configure_logging(level="ERROR")
    result = {name: recoveries(fail, options.repeats) for name, fail in FAILURES.items()}
    for name, seconds in result.items():
        print(f"{name:>17}: at most {max(seconds):.2f} s (goal {GOAL_S:g}):", *(f"{value:.2f}" for value in seconds))
    return {"goal_s": GOAL_S, "recovery_s": result}


if __name__ == "__main__":
    run(measure, __doc__, repeats=5)
