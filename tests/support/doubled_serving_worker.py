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

from replayfleet.edge_client.serving.loading import LoadedModel, load_model
from replayfleet.edge_client.serving.messages import Load
from replayfleet.edge_client.serving.worker import main

HANG_S = 600.0
SLOW_S = 0.1
LEAK_BYTES = 1 << 19
LEAKED: list[bytearray] = []


def load(job: Load) -> LoadedModel:
    how = os.environ["MISBEHAVES"]
    if how == "dies on load":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hangs on load":
        time.sleep(HANG_S)
    if how == "finds no memory":
        raise MemoryError("none is left for 3 MB")
    loaded = load_model(job)

    def run(images: NDArray[np.float32]) -> NDArray[np.float32]:
        if how == "answers otherwise":
            return loaded.run(images) + 1
        shows_something = len(images) == 1 and images.any()
        says = misbehaves(how, images) if shows_something else None
        return loaded.run(images) if says is None else np.array([says], np.float32)

    return LoadedModel(run, loaded.output_shape, loaded.runs_on, loaded.first_s)


def misbehaves(how: str, image: NDArray[np.float32]) -> list[float] | None:
    """Do something, and return what to answer; None: what the model says."""
    if how == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how in {"hangs", "slow"}:
        time.sleep(HANG_S if how == "hangs" else SLOW_S)
    elif how == "leaks":
        LEAKED.append(bytearray(os.urandom(4096) * (LEAK_BYTES // 4096)))
    elif how == "finds no memory for pictures":
        raise MemoryError("none is left for 12 MB")
    always = {"not finite": [np.nan] * 3, "drifts": [0.0, 1.0, 0.0]}
    return [3.0 * float(image.mean()), 0.0, 0.0] if how == "tells dark from bright" else always.get(how)


if __name__ == "__main__":
    main(load)
