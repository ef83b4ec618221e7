"""What training a task model descends: the loss that a task's kind asks for.

Methods that train on samples as they come (FedAvg, DER, A-GEM, FedGP, ...) descend this, whatever the task.
Axes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

from models.specs import TaskSpec

TaskLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(what the task model returned for B images, their labels) -> scalar, mean over the batch."""


def task_loss(spec: TaskSpec) -> TaskLoss:
    """Return the loss of a task: for classification, cross-entropy of logits (B, K) and class ids (B,)."""
    del spec
    return F.cross_entropy


def loss_of(spec: TaskSpec, module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the task's loss of a module, in whatever mode it is, on a batch of labelled images."""
    return task_loss(spec)(module(images), labels)
