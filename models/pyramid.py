"""A small detector for small things: its grid is fine where channels are few, and knows what coarser maps see.

Five 3x3 convolutions of stride 2, each with BatchNorm and a leaky ReLU of slope 0.1, make maps at 2, 4, 8, 16 and 32
pixels; two of stride 1 look around on the coarsest one, 191 pixels wide in all. From there up, each map is doubled by a
transposed convolution and added to the next finer one, as far as ``stride``: the top-down path of Lin et al. 2017,
"Feature Pyramid Networks for Object Detection". One more convolution and tiny YOLO's head follow.

Differences from the paper: maps are doubled by what is learned, lateral connections have no convolution, and the finest
map alone has a head. Tiny YOLO at a fine stride has its widest layers on the finest map, and pools at full resolution;
this has neither, and at stride 8 takes less than a fifth of the narrow one's arithmetic.
Axes: B batch, C image channels, H height, W width, A anchors, K classes.
"""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor, nn

from replayfleet.models.specs import DETECTION_STRIDES, STANDARD_WIDTH
from replayfleet.models.tiny_yolo import SLOPE, DetectionHead

CHANNEL_FACTORS = (1, 2, 4, 8, 8)
"""Channels of the maps at 2, 4, 8, 16 and 32 pixels in units of ``width``."""


class Pyramid(nn.Module):
    """Detector of (B, C, H, W) images in [-1, 1], H and W multiples of 32.

    Args:
        image_channels: C.
        num_classes: K.
        num_anchors: A.
        width: channels of the first convolution.
        stride: pixels per cell, one of ``DETECTION_STRIDES``.

    Raises:
        ValueError: Unknown stride.
    """

    def __init__(
        self, image_channels: int, num_classes: int, num_anchors: int, width: int = STANDARD_WIDTH, stride: int = 32
    ) -> None:
        super().__init__()
        if stride not in DETECTION_STRIDES:
            raise ValueError(f"stride is {stride}, expected one of {DETECTION_STRIDES}")
        channels = [factor * width for factor in CHANNEL_FACTORS]
        used = channels[int(math.log2(stride)) - 1 :]
        self.down = nn.ModuleList(
            _convolution(before, after, 2) for before, after in pairwise([image_channels, *channels])
        )
        self.around = nn.Sequential(*(_convolution(channels[-1], channels[-1], 1) for _ in range(2)))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(coarse, fine, 2, 2, bias=False) for fine, coarse in reversed(list(pairwise(used)))
        )
        self.last = _convolution(used[0], used[0], 1)
        self.head = DetectionHead(used[0], num_anchors, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return raw outputs: (B, C, H, W) -> (B, A * (5 + K), H / stride, W / stride)."""
        maps = [images]
        for halve in self.down:
            maps.append(halve(maps[-1]))
        merged = self.around(maps.pop())
        for double in self.up:
            merged = maps.pop() + double(merged)
        outputs: Tensor = self.head(self.last(merged))
        return outputs


def _convolution(before: int, after: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(SLOPE)
    )
