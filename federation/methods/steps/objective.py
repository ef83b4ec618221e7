"""What training a task model descends: the loss that a task's kind asks for.

Methods that train on samples as they come (FedAvg, DER, A-GEM, FedGP, ...) descend this, whatever the task.
Axes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.federation.methods.steps.detection_loss import detection_loss
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec

TaskLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(what the task model returned for B images, their labels) -> scalar, mean over the batch."""


def task_loss(spec: AnyTaskSpec) -> TaskLoss:
    """Return the loss of a task.

    For classification it is the cross-entropy of logits (B, K) and class ids (B,), for detection the three parts of
    ``steps.detection_loss`` on raw outputs and boxes (B, M, 5).
    """
    if isinstance(spec, DetectionSpec):
        return functools.partial(detection_loss, spec)
    return F.cross_entropy


def loss_of(spec: AnyTaskSpec, module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the task's loss of a module, in whatever mode it is, on a batch of labelled images."""
    return task_loss(spec)(module(images), labels)
