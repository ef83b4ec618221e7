"""The detector: tiny YOLO of "YOLO9000: Better, Faster, Stronger" (Redmon & Farhadi 2017).

Eight 3x3 convolutions, each with BatchNorm and a leaky ReLU of slope 0.1, with a halving max pool behind each of the
first five, a max pool of stride 1 behind the sixth, and a 1x1 convolution at the end. The architecture is fixed by the
published one for 20 classes and 5 anchors: its file holds 15,867,885 numbers, BatchNorm's running statistics included.

Differences from the paper: ``width`` scales all channels. For a finer grid the last halving pools become pools of
stride 1, as the sixth is: the parameters stay, and small things (lights of 6 x 12 pixels) get cells of their own.
Axes: B batch, C image channels, H height, W width, A anchors, K classes.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.models.specs import DETECTION_STRIDES, STANDARD_WIDTH

CHANNEL_FACTORS = (1, 2, 4, 8, 16, 32, 64, 64)
"""Channels of each convolution in units of ``width``."""

SLOPE = 0.1
"""Of the leaky ReLU below 0."""


class Pool(nn.Module):
    """Maximum over 2x2 pixels: (B, C, H, W) -> (B, C, H / stride, W / stride).

    With stride 1 the window is the pixel and its neighbours to the right and below, as far as there are any.
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, maps: Tensor) -> Tensor:
        """Return the maxima."""
        if self.stride == 2:
            return F.max_pool2d(maps, 2, 2)
        return F.max_pool2d(maps, 2, 1, padding=1)[:, :, 1:, 1:]


class DetectionHead(nn.Conv2d):
    """The last convolution, 1x1 with bias: for every cell and anchor 4 numbers of the box, 1 of confidence, K classes.

    Args:
        in_channels: of the features.
        num_anchors: A.
        num_classes: K.
    """

    PRIOR = 0.01
    """Confidence of every anchor before training. At 1/2 the thousands of anchors that see nothing would throw
    everything else over in the first steps (Lin et al. 2017, "Focal Loss for Dense Object Detection", section 4.1)."""

    def __init__(self, in_channels: int, num_anchors: int, num_classes: int) -> None:
        super().__init__(in_channels, num_anchors * (5 + num_classes), 1)
        self.num_anchors = num_anchors

    def start_unconfident(self) -> None:
        """Set the confidences' biases to what ``PRIOR`` is the sigmoid of; call without gradients."""
        if self.bias is not None:
            self.bias.view(self.num_anchors, -1)[:, 4] = math.log(self.PRIOR / (1 - self.PRIOR))


class TinyYolo(nn.Module):
    """Detector of (B, C, H, W) images in [-1, 1], H and W multiples of ``stride``.

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
        num_halvings = int(math.log2(stride))
        layers: list[nn.Module] = []
        in_channels = image_channels
        for index, factor in enumerate(CHANNEL_FACTORS):
            layers += [
                nn.Conv2d(in_channels, factor * width, 3, padding=1, bias=False),
                nn.BatchNorm2d(factor * width),
                nn.LeakyReLU(SLOPE),
            ]
            if index < 6:
                layers.append(Pool(2 if index < num_halvings else 1))
            in_channels = factor * width
        self.layers = nn.Sequential(*layers)
        self.head = DetectionHead(in_channels, num_anchors, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return raw outputs: (B, C, H, W) -> (B, A * (5 + K), H / stride, W / stride)."""
        outputs: Tensor = self.head(self.layers(images))
        return outputs
