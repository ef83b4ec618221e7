"""One live camera through its capture process: age of its pictures when they arrive, CPU, memory, drops.

A small RTSP server in a process of its own sends MJPEG; what is measured is everything behind it. The age is from the
grab in the capture process to the picture in the parent. Each process's memory is noted every second.

    python -m benchmarks.camera.live_camera [--seconds 60] [--out benchmarks/results/live_camera.json]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import cpu_s, resident_mb, run
from replayfleet.edge_client.cameras.live.rtsp import RtspCameraSettings
from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera

SIZE = (640, 384)
"""RTP carries JPEG sizes in units of 8 pixels, so not 640x380."""

SERVER = """
import sys
from tests.support.rtsp_server import RtspServer
with RtspServer(({width}, {height}), {rate}) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def served_camera(rate_hz: float) -> Iterator[SupervisedCamera]:
    """Provide a camera whose server runs in a process of its own."""
    script = SERVER.format(width=SIZE[0], height=SIZE[1], rate=rate_hz)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield SupervisedCamera(RtspCameraSettings(server.stdout.readline().strip()), "bench")


def read(camera: SupervisedCamera, seconds: float) -> dict[str, Any]:
    """Return ages in ms, CPU in shares of a core, memory in MB, and counts; the first second doesn't count."""
    ages: list[float] = []
    memory: dict[str, list[float]] = {"parent": [], "capture": []}
    began, cpu_before = 0.0, {"parent": 0.0, "capture": 0.0}
    first = time.monotonic()
    for picture in camera.pictures(threading.Event()):
        now = time.monotonic()
        processes = {"parent": os.getpid(), "capture": camera.pid or 0}
        if not began and now - first >= 1.0:
            began, cpu_before = now, {name: cpu_s(pid) for name, pid in processes.items()}
        if not began:
            continue
        ages.append(now - picture.captured_at)
        if now - began >= len(memory["parent"]):
            for name, pid in processes.items():
                memory[name].append(resident_mb(pid))
        if now - began >= seconds:
            used = {name: (cpu_s(pid) - cpu_before[name]) / (now - began) for name, pid in processes.items()}
            break
    counts = camera.counts
    return {
        "age_ms": spread_ms(ages),
        "pictures_per_s": len(ages) / seconds,
        "cpu_cores": used,
        "memory_mb": {name: course(values) for name, values in memory.items()},
        "captured": counts.num_captured,
        "dropped": counts.num_dropped,
        "lost": counts.num_lost,
    }


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles and the largest of some durations, in milliseconds."""
    shares = {f"p{share}": float(1000 * np.percentile(seconds, share)) for share in (50, 95, 99)}
    return shares | {"max": 1000 * max(seconds)}


def course(values: Sequence[float]) -> dict[str, float]:
    """Return how a measured quantity went over time."""
    return {"first": values[0], "last": values[-1], "max": max(values)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with served_camera(options.rate) as camera:
        numbers = read(camera, options.seconds)
    return shown({"size": SIZE, "rate_hz": options.rate, "seconds": options.seconds} | numbers)


def shown(result: dict[str, Any]) -> dict[str, Any]:
    """Print what is returned."""
    for key, value in result.items():
        print(f"{key:>22}: {value}")
    return result


if __name__ == "__main__":
    run(measure, __doc__, seconds=60.0, rate=30.0)
