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
    """``relu(shortcut(x) + norm(conv3x3(relu(norm(conv3x3(x))))))``; the first convolution carries the stride.

    The outer relu is left out where ``signed``.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, *, signed: bool = False) -> None:
        super().__init__()
        self._signed = signed
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
        total = self.shortcut(x) + self.norm2(self.conv2(out))
        return total if self._signed else F.relu(total)


class CosineHead(nn.Module):
    """Logits ``scale cos(f, w_k)`` of features f and one weight vector per class, so that none wins by its length.

    Hou et al. 2019, "Learning a Unified Classifier Incrementally via Rebalancing", section 3.2.

    Attributes:
        weight: (K, D).
        scale: (1,), learned.
    """

    FIRST_SCALE = 10.0
    """The paper doesn't say: at 1 a softmax over ten classes can't get further than 0.45."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, num_features))
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits: (B, D) -> (B, K)."""
        return self.scale * F.linear(F.normalize(features, dim=-1), F.normalize(self.weight, dim=-1))


class ResNet20(nn.Module):
    """Classifier of (B, C, H, W) images in [-1, 1].

    Args:
        image_channels: C.
        num_classes: K.
        stem: ``"cifar"`` is a 3x3 convolution with stride 1 and padding 1; ``"imagenet"`` is 5x5, stride 2, padding 1,
            which maps 64 pixels to 31.
        cosine: with a ``CosineHead``, on features that may be negative.

    Raises:
        ValueError: Unknown stem.
    """

    head: nn.Linear | CosineHead

    def __init__(self, image_channels: int, num_classes: int, stem: str = "cifar", *, cosine: bool = False) -> None:
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
                last = (stage, block) == (len(WIDTHS) - 1, BLOCKS_PER_STAGE - 1)
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(BasicBlock(in_channels, width, stride, signed=cosine and last))
                in_channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = CosineHead(in_channels, num_classes) if cosine else nn.Linear(in_channels, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """Return what the head sees: (B, C, H, W) -> (B, 128), averaged over positions."""
        maps = self.blocks(F.relu(self.norm(self.conv(images))))
        return torch.mean(maps, dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits: (B, C, H, W) -> (B, K)."""
        logits: Tensor = self.head(self.features(images))
        return logits
