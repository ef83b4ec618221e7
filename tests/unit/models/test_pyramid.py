"""The small detector's shapes and counts in closed form, and its spec."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.counting import count_flops, count_parameters
from replayfleet.models.pyramid import Pyramid
from replayfleet.models.specs import DetectionSpec, plain_task

SPEC = DetectionSpec(
    3, 64, 96, ("car", "light"), ((0.1, 0.1), (0.4, 0.3)), width=2, stride=8, architecture="pyramid"
)  # fmt: skip


@pytest.mark.parametrize("stride", [8, 16, 32])
def test_there_is_a_cell_for_every_stride(stride: int):
    spec = replace(SPEC, stride=stride)
    model = initialise(build_task_model(spec), torch.Generator().manual_seed(0)).eval()
    outputs = model(torch.zeros(2, *spec.image_shape))
    assert outputs.shape == (2, 2 * (5 + 2), 64 // stride, 96 // stride)
    assert outputs.shape[1:] == spec.output_shape


@pytest.mark.parametrize(
    ("stride", "merged"),
    [(32, [128]), (16, [128, 128]), (8, [64, 128, 128])],
)
def test_its_parameters_and_arithmetic_are_those_of_its_convolutions(stride: int, merged: list[int]):
    with torch.device("meta"):
        model = Pyramid(3, 5, 6, 16, stride)
    pairs = [(3, 16), (16, 32), (32, 64), (64, 128), (128, 128)]
    fine, outputs = merged[0], 6 * (5 + 5)
    parameters = sum(9 * before * after + 2 * after for before, after in [*pairs, *2 * [(128, 128)]])
    parameters += sum(4 * coarse * finer for finer, coarse in pairwise(merged))
    parameters += 9 * fine * fine + 2 * fine + fine * outputs + outputs
    assert count_parameters(model) == parameters

    pixels = 640 * 384
    flops = sum((9 * before + 4) * after * pixels // 4**level for level, (before, after) in enumerate(pairs, start=1))
    flops += 2 * (9 * 128 + 4) * 128 * pixels // 32**2
    for step, (finer, coarse) in enumerate(pairwise(merged)):
        flops += 4 * coarse * finer * pixels // (stride * 2**step) ** 2  # counted as ``counting`` does: all four taps
    flops += (9 * fine + 4) * fine * pixels // stride**2 + fine * outputs * pixels // stride**2
    assert count_flops(model, (3, 384, 640)) == flops


def test_a_fine_cell_knows_what_is_far_away():
    model = initialise(build_task_model(SPEC), torch.Generator().manual_seed(0)).eval()
    images = torch.zeros(1, *SPEC.image_shape)
    changed = images.clone()
    changed[..., 64:] = 1.0
    assert not torch.equal(model(images)[..., 1], model(changed)[..., 1])  # cells of pixels 8 to 15


def test_a_task_says_its_network_only_where_it_isnt_tiny_yolo():
    assert "architecture" not in plain_task(replace(SPEC, architecture="tiny-yolo"))
    assert plain_task(SPEC)["architecture"] == "pyramid"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architecture": "yolo"}, "architecture is 'yolo', expected one of"),
        ({"image_width": 80}, "image_width is 80, expected 32 to 4096 pixels and a multiple of 32"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(change: dict[str, object], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        replace(SPEC, **change)


def test_an_unknown_stride_is_refused():
    with pytest.raises(ValueError, match="stride is 4"):
        Pyramid(3, 5, 6, 16, 4)
