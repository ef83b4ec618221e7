"""Exports are compared at batches that fit into memory, whatever the size of the pictures."""

from __future__ import annotations

import pytest

from replayfleet.export.batches import batches_for
from replayfleet.export.subject import Architecture, build_subject
from replayfleet.models.build import build_task_model
from replayfleet.models.specs import DetectionSpec


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 28, 28), (1, 2, 64)),
        ((3, 192, 320), (1, 2, 64)),
        ((3, 640, 640), (1, 2, 13)),
        ((3, 1088, 1920), (1, 2)),
        ((3, 0, 0), (1, 2, 64)),
    ],
)
def test_the_larger_the_pictures_the_fewer_at_once(shape: tuple[int, ...], expected: tuple[int, ...]):
    assert batches_for(shape) == expected


def test_a_detector_of_large_pictures_is_compared_at_two_at_most():
    spec = DetectionSpec(3, 1088, 1920, ("car",), ((0.1, 0.1),), width=4)
    parameters = {name: tensor.numpy() for name, tensor in build_task_model(spec).state_dict().items()}
    assert build_subject(Architecture("detector", spec), parameters).batches == (1, 2)
