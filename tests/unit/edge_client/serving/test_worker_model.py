from __future__ import annotations

import os
from unittest.mock import Mock

import numpy as np
import pytest

from replayfleet.edge_client.serving import model, process
from replayfleet.edge_client.serving.messages import Load
from replayfleet.edge_client.serving.model import CPU, WorkerModel
from replayfleet.edge_client.serving.process import ServingProcess
from replayfleet.edge_client.serving.slot import ModelLost

JOB = Load("", "", "", (3, 32, 32), 1, CPU, {}, {})


@pytest.mark.parametrize("kind", [OSError, ModelLost])
def test_a_machine_that_starts_no_process_or_kills_each_is_asked_again_after_a_while_and_not_for_every_frame(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = 0.0, []

    def none_left(*_: object) -> None:
        asked.append(now)
        raise kind("no process is left")

    monkeypatch.setattr(model, "ServingProcess", none_left)
    worker = WorkerModel(JOB, clock=lambda: now)
    for frame in range(4 * 8):
        now = frame / 4
        with pytest.raises((OSError, ModelLost), match="no process is left"):
            worker(np.zeros((1, 3, 32, 32), np.float32))
    assert asked == [0.0, 0.25, 0.75, 1.75, 3.75, 7.75]


def test_a_process_for_which_no_descriptor_is_left_keeps_none_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, other) = os.pipe()
    os.close(other)
    monkeypatch.setattr(process, "memory_file", Mock(side_effect=[first, OSError("too many open files")]))
    with pytest.raises(OSError, match="too many open files"):
        ServingProcess(JOB)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
