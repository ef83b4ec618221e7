"""AF-FCL's task model: the task model of pFedGRP with two more layers between features and head.

pFedGRP, Table 6 ("ResNet-20 (AF-FCL)"): 734,202 parameters at 28 pixels. AF-FCL's flow models the features in front of
those two layers; they and the head learn from replayed features.

Axes: B batch, K classes.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.models.build import build_like
from replayfleet.models.resnet import SHAPES, ResNet
from replayfleet.models.specs import TaskSpec

NUM_FEATURES = SHAPES["resnet20"].widths[-1]
"""F: entries of a feature vector."""


class ResNetPlus(ResNet):
    """``ResNet`` whose head sees ``act(fc2(act(fc1(features))))``; args and errors are those of ``ResNet``."""

    def __init__(self, image_channels: int, num_classes: int, stem: str = "cifar") -> None:
        super().__init__(image_channels, num_classes, stem)
        self.fc1 = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.fc2 = nn.Linear(NUM_FEATURES, NUM_FEATURES)

    def classify(self, features: Tensor) -> Tensor:
        """Return logits (B, K) of features (B, 128)."""
        logits: Tensor = self.head(F.leaky_relu(self.fc2(F.leaky_relu(self.fc1(features)))))
        return logits

    def forward(self, images: Tensor) -> Tensor:
        """Return logits: (B, C, H, W) -> (B, K)."""
        return self.classify(self.features(images))


def build_resnet_plus(spec: TaskSpec) -> ResNetPlus:
    """Return the model of ``spec`` on the meta device: names and shapes, for layouts and ``functional_call``."""
    return build_like(ResNetPlus, spec.image_channels, spec.num_classes, spec.stem, device="meta")
