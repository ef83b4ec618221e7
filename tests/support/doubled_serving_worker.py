"""The serving process with a model that misbehaves as ``MISBEHAVES`` says: real deaths, real hangs, real leaks.

The warm-up shows a blank picture and the golden vector several, so a model that is meant to pass both misbehaves on
single pictures that show something.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np
from numpy.typing import NDArray

from edge_client.serving.loading import LoadedModel, load_model
from edge_client.serving.messages import Load
from edge_client.serving.worker import main

HANG_S = 600.0
LEAK_BYTES = 2 << 20


def load(job: Load) -> LoadedModel:
    how = os.environ["MISBEHAVES"]
    if how == "dies on load":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hangs on load":
        time.sleep(HANG_S)
    loaded = load_model(job)
    leaked: list[bytearray] = []

    def run(images: NDArray[np.float32]) -> NDArray[np.float32]:
        if how == "answers otherwise":
            return loaded.run(images) + 1
        if len(images) == 1 and images.any():
            if how == "dies":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif how == "hangs":
                time.sleep(HANG_S)
            elif how == "not finite":
                return np.full((1, 3), np.nan, np.float32)
            elif how == "tells dark from bright":
                return np.array([[3 * images.mean(), 0, 0]], np.float32)
            elif how == "drifts":
                return np.array([[0, 1, 0]], np.float32)
            elif how == "slow":
                time.sleep(0.1)
            elif how == "leaks":
                leaked.append(bytearray(os.urandom(4096) * (LEAK_BYTES // 4096)))
        return loaded.run(images)

    return LoadedModel(run, loaded.output_shape, loaded.runs_on, loaded.first_s)


if __name__ == "__main__":
    main(load)
