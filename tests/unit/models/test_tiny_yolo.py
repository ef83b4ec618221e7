"""The detector's architecture against the published one, and its specs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.counting import count_flops, count_parameters
from replayfleet.models.specs import NARROW_WIDTH, DetectionSpec
from replayfleet.models.tiny_yolo import Pool, TinyYolo
from tests.support.rng import rng

SPEC = DetectionSpec(3, 64, 96, ("car", "light"), ((0.1, 0.1), (0.4, 0.3), (0.2, 0.5)), width=2, stride=16)


def test_with_20_classes_and_5_anchors_it_holds_the_numbers_of_the_published_file():
    """tiny-yolo-voc.weights: 63,471,556 bytes, of which 16 are a header and 4 each number."""
    with torch.device("meta"):
        model = TinyYolo(3, 20, 5)
    statistics = sum(b.numel() for name, b in model.named_buffers() if not name.endswith("num_batches_tracked"))
    assert count_parameters(model) + statistics == 15_867_885 == (63_471_556 - 16) // 4


def test_its_arithmetic_at_416_pixels_is_the_published_one():
    """Darknet prints 6.97 billion operations for the convolutions, two for each multiply-accumulate."""
    with torch.device("meta"):
        model = TinyYolo(3, 20, 5)
    normalisations = sum(4 * c * (416 // s) ** 2 for c, s in zip((16, 32, 64, 128, 256), (1, 2, 4, 8, 16), strict=True))
    normalisations += 4 * (512 + 1024 + 1024) * 13**2
    assert 2 * (count_flops(model, (3, 416, 416)) - normalisations) / 1e9 == pytest.approx(6.97, abs=0.005)


def test_the_narrow_one_has_a_sixteenth_of_the_parameters():
    spec = DetectionSpec(3, 416, 416, ("car",), ((0.1, 0.1),))
    wide, narrow = (
        count_parameters(build_task_model(replace(spec, width=w), device="meta")) for w in (16, NARROW_WIDTH)
    )
    assert wide / narrow == pytest.approx(16, rel=0.03)


@pytest.mark.parametrize("stride", [8, 16, 32])
def test_a_finer_grid_costs_no_parameters_and_has_a_cell_for_every_stride(stride: int):
    spec = replace(SPEC, stride=stride)
    model = initialise(build_task_model(spec), rng()).eval()
    outputs = model(torch.zeros(2, *spec.image_shape))
    assert outputs.shape == (2, 3 * (5 + 2), 64 // stride, 96 // stride)
    assert outputs.shape[1:] == spec.output_shape
    assert count_parameters(model) == count_parameters(build_task_model(SPEC))


def test_a_pool_of_stride_1_looks_to_the_right_and_down_and_keeps_the_size():
    maps = torch.randn(2, 3, 5, 4, generator=rng())
    expected = F.max_pool2d(F.pad(maps, (0, 1, 0, 1), value=-math.inf), 2, 1)
    assert torch.equal(Pool(1)(maps), expected)


def test_before_training_every_anchor_is_as_unconfident_as_the_prior():
    model = initialise(build_task_model(SPEC), rng())
    confidence = model.head.bias.view(3, 7)[:, 4].sigmoid()
    assert torch.allclose(confidence, torch.full((3,), 0.01))
    assert model.head.bias.view(3, 7)[:, :4].abs().max() < 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"image_channels": 2}, "image_channels is 2, expected 1 or 3"),
        ({"image_width": 100}, "image_width is 100, expected 32 to 4096 pixels and a multiple of 16"),
        ({"image_height": 16}, "image_height is 16"),
        ({"stride": 4}, "stride is 4"),
        ({"class_names": ()}, "1 to 4096 classes, got 0"),
        ({"anchors": ()}, "1 to 64 anchors, got 0"),
        ({"anchors": ((0.1, math.nan),)}, "anchor is"),
        ({"anchors": ((0.1, 0.0),)}, "anchor is"),
        ({"anchors": ((10.0, 20.0),)}, "anchor is .* each above 0 and at most 2 pictures"),
        ({"width": 0}, "width is 0"),
        ({"max_boxes": 0}, "max_boxes is 0"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(change: dict[str, object], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        replace(SPEC, **change)
