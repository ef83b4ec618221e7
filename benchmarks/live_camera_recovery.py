"""How soon a lost RTSP camera is back: seconds from its return to the first picture that it took after it.

A small RTSP server in this process falls silent, sends noise or damaged pictures, asks for another password, or
refuses, for times that fall differently into the client's attempts. With the defaults of ``RtspCameraSettings``.

    python -m benchmarks.live_camera_recovery [--repeats 5] [--out benchmarks/results/live_camera_recovery.json]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.environment import write_result
from replayfleet.edge_client.cameras.live.rtsp import RtspCameraSettings
from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera
from replayfleet.federation.service.logs import configure_logging
from tests.support.rtsp_server import RtspServer

GOAL_S = 5.0
FIRST_OUTAGE_S = 2.5
STEP_S = 0.7


def fall_silent(server: RtspServer) -> None:
    server.silent = True


def send_noise(server: RtspServer) -> None:
    server.garbage = True


def send_damaged_pictures(server: RtspServer) -> None:
    server.damaged = True


def ask_for_another_password(server: RtspServer) -> None:
    server.status = "401 Unauthorized"
    server.hang_up()


def come_back(server: RtspServer) -> None:
    server.silent = server.garbage = server.damaged = False
    server.status = "200 OK"
    if not server.listens:
        server.accept()


FAILURES: dict[str, Callable[[RtspServer], None]] = {
    "silent": fall_silent,
    "noise": send_noise,
    "damaged pictures": send_damaged_pictures,
    "another password": ask_for_another_password,
    "refuses": RtspServer.refuse,
}


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
            come_back(server)
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


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/live_camera_recovery.json"))
    options = parser.parse_args()
    configure_logging(level="ERROR")
    result = {name: recoveries(fail, options.repeats) for name, fail in FAILURES.items()}
    for name, seconds in result.items():
        print(f"{name:>17}: at most {max(seconds):.2f} s (goal {GOAL_S:g}):", *(f"{value:.2f}" for value in seconds))
    write_result(options.out, {"goal_s": GOAL_S, "recovery_s": result})


if __name__ == "__main__":
    main()
