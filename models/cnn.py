"""Small networks of the federated papers' tables: no residuals, no BatchNorm.

``cnn``: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", section 3
(5x5 convolutions with 32 and 64 channels, 2x2 max pooling after each, 512 hidden units). ``lenet``: PyTorch's MNIST
example of old, with which FedGP's code runs (10 and 20 channels, 50 hidden units, no padding), without its dropout.
``linear``: a linear layer on what a frozen encoder said (FedGP, appendix A), which lies in the pixels of an image.

Axes: B batch, C image channels, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHAPES = {"cnn": ((32, 64), 512, 2), "lenet": ((10, 20), 50, 0)}
"""Architecture -> (channels of each convolution, hidden units, padding)."""


class SmallCnn(nn.Module):
    """Classifier of (B, C, H, W) images in [-1, 1].

    Args:
        image_channels: C.
        num_classes: K.
        image_size: H and W.
        architecture: a key of ``SHAPES``.
    """

    def __init__(self, image_channels: int, num_classes: int, image_size: int, architecture: str) -> None:
        super().__init__()
        channels, hidden, padding = SHAPES[architecture]
        self.num_classes = num_classes
        self.convs = nn.ModuleList()
        side, before = image_size, image_channels
        for after in channels:
            self.convs.append(nn.Conv2d(before, after, 5, padding=padding))
            side, before = (side + 2 * padding - 4) // 2, after
        self.hidden = nn.Linear(before * side * side, hidden)
        self.head = nn.Linear(hidden, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """Return what the head sees: (B, C, H, W) -> (B, hidden units)."""
        maps = images
        for conv in self.convs:
            maps = F.relu(F.max_pool2d(conv(maps), 2))
        return F.relu(self.hidden(torch.flatten(maps, 1)))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits: (B, C, H, W) -> (B, K)."""
        logits: Tensor = self.head(self.features(images))
        return logits


class LinearHead(nn.Module):
    """Classifier of features that lie in the pixels of (B, C, H, W) images; the encoder behind them isn't here.

    Args:
        num_features: C H W.
        num_classes: K.
    """

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.head = nn.Linear(num_features, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """Return what the head sees: (B, C, H, W) -> (B, C H W)."""
        return torch.flatten(images, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits: (B, C, H, W) -> (B, K)."""
        logits: Tensor = self.head(self.features(images))
        return logits
