from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from replayfleet.export.formats import find_format
from replayfleet.export.job import Exported, Request
from replayfleet.export.parity import Parity
from replayfleet.export.report import lines
from replayfleet.export.subject import Architecture
from replayfleet.models.specs import TaskSpec

TASK = Architecture("task", TaskSpec(1, 28, ("a", "b")))


@pytest.mark.parametrize(
    ("parity", "expected"),
    [
        (Parity(2e-6, (1, 2, 64), 1e-4), "batches 1, 2 and 64; 0.0001 is accepted"),
        (Parity(3e-3, (1, 2, 64), 1e-4), "; 0.0001 is accepted, or 1e-05 of its largest answer"),
        (Parity(0.02, (1, 64), 0.1, spread=1.0), "0.02 of its answers' standard deviation, 0.1 is accepted"),
        (Parity(0.0, (1, 64), 0.0, spread=0.0), "batches 1 and 64; 0 is accepted"),  # as of an untrained model
    ],
)
def test_parity_is_told_as_it_was_judged(parity: Parity, expected: str):
    request = Request(TASK, find_format("onnx"), Path("out"), 1)
    exported = Exported(((Path("out/task.onnx"), 5, "ab"),), 3, parity, None, None, {"eager": 0.001})
    (line,) = [line for line in lines(request, exported) if line.startswith("parity")]
    assert line.endswith(expected)


@pytest.mark.parametrize(("name", "split"), [("onnx", False), ("onnx", True), ("torchscript", False)])
def test_the_next_command_can_be_pasted_whatever_the_folder_is_called(name: str, split: bool):
    request = Request(TASK, find_format(name), Path("my models"), 1, split=split)
    first = Path("my models/task.safetensors") if split else request.path
    exported = Exported(((first, 5, "ab"),), 3, Parity(0.0, (1, 2), 1e-4), None, None, {"eager": 0.001})
    *_, last = lines(request, exported)
    expected = ["next", "model-export", "check", str(request.path)]
    expected += ["--parameters", str(first)] if split else []
    assert shlex.split(last) == [*expected, *(["--sha256", "ab"] if name == "torchscript" else [])]
