"""A tiny detection problem: pictures of bright upright and dark lying rectangles on a noisy street."""

from __future__ import annotations

import torch

from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.models.specs import DetectionSpec

SHAPES = DetectionSpec(
    image_channels=3,
    image_height=64,
    image_width=64,
    class_names=("upright", "lying"),
    anchors=((0.2, 0.4), (0.45, 0.2)),
    width=4,
    stride=8,
    max_boxes=4,
)


def shape_pictures(num_pictures: int, seed: int = 0) -> RoundData:
    """Return pictures, each with one to three rectangles that don't overlap, one in each of four quarters at most."""
    rng = torch.Generator().manual_seed(seed)
    images = 0.1 * torch.randn(num_pictures, *SHAPES.image_shape, generator=rng)
    labels = torch.tensor([-1.0, 0.5, 0.5, 0.5, 0.5]).repeat(num_pictures, SHAPES.max_boxes, 1)
    for index in range(num_pictures):
        quarters = torch.randperm(4, generator=rng)[: 1 + index % 3].tolist()
        for place, quarter in enumerate(quarters):
            class_id = int(torch.randint(2, (1,), generator=rng))
            width, height = [(10, 24), (26, 12)][class_id]
            left = 32 * (quarter % 2) + int(torch.randint(32 - width, (1,), generator=rng))
            top = 32 * (quarter // 2) + int(torch.randint(32 - height, (1,), generator=rng))
            images[index, class_id, top : top + height, left : left + width] = [0.9, -0.9][class_id]
            box = [(left + width / 2) / 64, (top + height / 2) / 64, width / 64, height / 64]
            labels[index, place] = torch.tensor([float(class_id), *box])
    return RoundData(images.clamp(-1, 1), labels)
