"""What a picture of the synthetic street costs: CPU time of drawing it, by town.

python -m benchmarks.camera.synthetic_street [--pictures 300] [--out benchmarks/results/synthetic_street.json]
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import cv2
import numpy as np

from benchmarks.harness import run
from replayfleet.federation.streams.street.looks import TOWNS
from replayfleet.federation.streams.street.street import Street


def drawn(town: str, num_pictures: int) -> dict[str, Any]:
    """Draw a drive at 10 pictures a second; returns CPU milliseconds of a picture, and its boxes."""
    street = Street(town, seed=3)
    taken, num_boxes = [], []
    for number in range(num_pictures):
        began = time.process_time()
        _, annotation = street.draw(number / 10)
        taken.append(1000 * (time.process_time() - began))
        num_boxes.append(len(annotation))
    p50, p95 = np.percentile(taken, [50, 95])
    return {"cpu_ms": {"p50": float(p50), "p95": float(p95), "max": max(taken)}, "boxes": float(np.mean(num_boxes))}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    cv2.setNumThreads(1)
    result: dict[str, Any] = {"pictures": options.pictures, "size": [640, 380], "load_before": os.getloadavg()[0]}
    result["towns"] = {town: drawn(town, options.pictures) for town in TOWNS}
    for town, numbers in result["towns"].items():
        print(f"{town:>8}: {numbers}")
    return result


if __name__ == "__main__":
    run(measure, __doc__, pictures=(300, "of each town"))
