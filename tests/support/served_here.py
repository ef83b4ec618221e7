"""Models that answer in the test's own process, where a test asks nothing of the process: it saves a start per swap."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.serving.loading import load_model
from replayfleet.edge_client.serving.messages import Load


class ServedHere:
    """Stands for ``ServingProcess``; a model that a process refuses is refused alike."""

    memory_bytes = None

    def __init__(self, job: Load, command: Sequence[str], load_timeout_s: float) -> None:
        self._model = load_model(job)
        self.pid, self.runs_on, self.first_s = os.getpid(), self._model.runs_on, self._model.first_s

    def run(self, images: NDArray[np.float32], timeout_s: float) -> NDArray[np.float32]:
        return self._model.run(images)

    def close(self) -> None:
        """Nothing runs beside the calls."""

    kill = close
