"""Basic-block ResNets: the task model of pFedGRP, and those of the other papers.

``resnet20``: "PFedGRP: Personalized Federated Continual Learning with Generative Replay", Table 6 ("ResNet20"): four
stages of two basic blocks; fixed by the parameter and FLOPs counts that the paper reports. ``resnet18`` and
``resnet20-he``: He et al. 2016, "Deep Residual Learning for Image Recognition", Table 1 and section 4.2.
Convolutions have no bias; shortcuts are 1x1 convolution and BatchNorm where the shape changes.

Axes: B batch, C image channels, D features, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.models.specs import STEMS


@dataclass(frozen=True, slots=True)
class ResNetShape:
    """What tells one ResNet from another.

    Attributes:
        widths: channels of each stage; the last one is D.
        blocks_per_stage: basic blocks.
        imagenet_kernel: side of the first convolution with stem ``imagenet``: 5 with padding 1, which maps 64 pixels to
            31, or 7 with padding 3 and 3x3 max pooling of stride 2 behind it. Both have stride 2.
    """

    widths: tuple[int, ...]
    blocks_per_stage: int
    imagenet_kernel: int


SHAPES = {
    "resnet20": ResNetShape((16, 32, 64, 128), 2, 5),
    "resnet20-he": ResNetShape((16, 32, 64), 3, 7),
    "resnet18": ResNetShape((64, 128, 256, 512), 2, 7),
}
"""By the first part of a task model's name; behind it may come ``-cosine``."""


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


class ResNet(nn.Module):
    """Classifier of (B, C, H, W) images in [-1, 1].

    Args:
        image_channels: C.
        num_classes: K.
        stem: ``"cifar"`` is a 3x3 convolution with stride 1 and padding 1; of ``"imagenet"`` see ``ResNetShape``.
        shape: of the network.
        cosine: with a ``CosineHead``, on features that may be negative.

    Raises:
        ValueError: Unknown stem.
    """

    head: nn.Linear | CosineHead

    def __init__(
        self,
        image_channels: int,
        num_classes: int,
        stem: str = "cifar",
        shape: ResNetShape = SHAPES["resnet20"],
        *,
        cosine: bool = False,
    ) -> None:
        super().__init__()
        if stem not in STEMS:
            raise ValueError(f"stem is {stem!r}, expected one of {STEMS}")
        kernel, stride = (3, 1) if stem == "cifar" else (shape.imagenet_kernel, 2)
        deep = kernel == 7
        self.num_classes = num_classes
        self.conv = nn.Conv2d(image_channels, shape.widths[0], kernel, stride, padding=3 if deep else 1, bias=False)
        self.norm = nn.BatchNorm2d(shape.widths[0])
        self.pool = nn.MaxPool2d(3, 2, padding=1) if deep else nn.Identity()
        blocks: list[nn.Module] = []
        in_channels = shape.widths[0]
        for stage, width in enumerate(shape.widths):
            for block in range(shape.blocks_per_stage):
                last = (stage, block) == (len(shape.widths) - 1, shape.blocks_per_stage - 1)
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(BasicBlock(in_channels, width, stride, signed=cosine and last))
                in_channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = CosineHead(in_channels, num_classes) if cosine else nn.Linear(in_channels, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """Return what the head sees: (B, C, H, W) -> (B, D), averaged over positions."""
        maps = self.blocks(self.pool(F.relu(self.norm(self.conv(images)))))
        return torch.mean(maps, dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits: (B, C, H, W) -> (B, K)."""
        logits: Tensor = self.head(self.features(images))
        return logits
