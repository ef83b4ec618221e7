"""The task model of pFedGRP: a small basic-block ResNet.

"PFedGRP: Personalized Federated Continual Learning with Generative Replay", Table 6 ("ResNet20"): four stages of two
basic blocks, widths 16, 32, 64 and 128. Convolutions have no bias; shortcuts are 1x1 convolution and BatchNorm where
the shape changes. The architecture is fixed by the parameter and FLOPs counts that the paper reports.

Axes: B batch, C image channels, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.models.specs import STEMS

WIDTHS = (16, 32, 64, 128)
"""Channels of each stage."""

BLOCKS_PER_STAGE = 2


class BasicBlock(nn.Module):
    """``relu(shortcut(x) + norm(conv3x3(relu(norm(conv3x3(x))))))``; the first convolution carries the stride."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in, H, W) to (B, out, H/stride, W/stride)."""
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(out)))


class ResNet20(nn.Module):
    """Classifier of (B, C, H, W) images in [-1, 1].

    Args:
        image_channels: C.
        num_classes: K.
        stem: ``"cifar"`` is a 3x3 convolution with stride 1 and padding 1; ``"imagenet"`` is 5x5, stride 2, padding 1,
            which maps 64 pixels to 31.

    Raises:
        ValueError: Unknown stem.
    """

    def __init__(self, image_channels: int, num_classes: int, stem: str = "cifar") -> None:
        super().__init__()
        if stem not in STEMS:
            raise ValueError(f"stem is {stem!r}, expected one of {STEMS}")
        kernel, stride = (3, 1) if stem == "cifar" else (5, 2)
        self.num_classes = num_classes
        self.conv = nn.Conv2d(image_channels, WIDTHS[0], kernel, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTHS[0])
        blocks: list[nn.Module] = []
        in_channels = WIDTHS[0]
        for stage, width in enumerate(WIDTHS):
            for block in range(BLOCKS_PER_STAGE):
                blocks.append(BasicBlock(in_channels, width, 2 if stage > 0 and block == 0 else 1))
                in_channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(in_channels, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """Return what the head sees: (B, C, H, W) -> (B, 128), averaged over positions."""
        maps = self.blocks(F.relu(self.norm(self.conv(images))))
        return torch.mean(maps, dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits: (B, C, H, W) -> (B, K)."""
        logits: Tensor = self.head(self.features(images))
        return logits
