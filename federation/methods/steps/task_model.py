"""Training and evaluating the task model as functions of its parameters.

Axes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from federation.methods.records import Parameters
from federation.methods.steps.replay import Judge
from models.build import build_task_model
from models.specs import TaskSpec

EVALUATION_BATCH = 256


class TaskModelSettings(Protocol):
    """The settings of a method that trains a task model; ``Optimisation`` says what they mean."""

    @property
    def local_epochs(self) -> int:
        """Epochs per round."""

    @property
    def batch_size(self) -> int:
        """Samples per step."""

    @property
    def learning_rate(self) -> float:
        """Step size."""

    @property
    def momentum(self) -> float:
        """Of SGD."""

    @property
    def weight_decay(self) -> float:
        """Of SGD."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimisation:
    """Stochastic gradient descent with momentum, as appendix B.2 of pFedGRP sets it.

    Attributes:
        num_epochs: passes over the data.
        batch_size: samples per step; a last batch of one sample is dropped, for BatchNorm can't train on it.
        learning_rate: step size.
        momentum: 0 switches it off.
        weight_decay: L2 penalty added to the gradient.
    """

    num_epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float

    @classmethod
    def of(cls, settings: TaskModelSettings) -> Optimisation:
        """Return a method's schedule of local training."""
        return cls(
            num_epochs=settings.local_epochs,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which samples to keep near a teacher, and how strongly (second term of Eq. 2).

    Attributes:
        mask: (B,) bool, true for the samples that the term covers.
        logits: (B, K) the teacher's logits; rows outside the mask are ignored.
        weight: lambda.
    """

    mask: Tensor
    logits: Tensor
    weight: float


def judge_with(spec: TaskSpec, parameters: Parameters) -> Judge:
    """Return the task model with these parameters as a function: images (B, C, H, W) -> logits (B, K), eval mode."""
    with torch.device("meta"):
        module = build_task_model(spec).eval()
    fixed = dict(parameters)

    @torch.no_grad()
    def judge(images: Tensor) -> Tensor:
        if len(images) == 0:
            return torch.empty(0, spec.num_classes)
        return torch.cat([functional_call(module, fixed, (part,)) for part in images.split(EVALUATION_BATCH)])

    return judge


def aligned_loss(logits: Tensor, labels: Tensor, teacher: Tensor, mask: Tensor, weight: float) -> Tensor:
    """Return Eq. 2 per sample: ``mean_B CE + weight * sum_{B in mask} MSE(logits, teacher) / B``.

    The MSE of one sample is the mean over its K logits.

    Args:
        logits: (B, K) of the model in training.
        labels: (B,) int64.
        teacher: (B, K), rows outside the mask ignored.
        mask: (B,) bool.
        weight: lambda.
    """
    loss = F.cross_entropy(logits, labels)
    if weight == 0.0 or not bool(mask.any()):
        return loss
    distance = F.mse_loss(logits[mask], teacher[mask], reduction="none").mean(dim=1).sum()
    return loss + weight * distance / len(labels)


def train_task_model(
    spec: TaskSpec,
    parameters: Parameters,
    images: Tensor,
    labels: Tensor,
    optimisation: Optimisation,
    rng: torch.Generator,
    *,
    alignment: Alignment | None = None,
) -> dict[str, Tensor]:
    """Return the parameters after SGD on cross-entropy, plus the alignment term of Eq. 2 if given.

    Args:
        spec: the task.
        parameters: where training starts; left untouched.
        images: (B, C, H, W) float32 in [-1, 1].
        labels: (B,) int64.
        optimisation: epochs, batches and step sizes.
        rng: draws the order of samples.
        alignment: second term of Eq. 2.

    Raises:
        ValueError: Fewer than two samples, which BatchNorm can't be trained on.
    """
    if len(images) < 2:
        raise ValueError(f"training needs at least 2 samples, got {len(images)}")
    with torch.device("meta"):
        module = build_task_model(spec)
    module.load_state_dict({name: tensor.clone() for name, tensor in parameters.items()}, assign=True)
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    module.train()
    optimiser = torch.optim.SGD(
        module.parameters(),
        lr=optimisation.learning_rate,
        momentum=optimisation.momentum,
        weight_decay=optimisation.weight_decay,
    )
    for _ in range(optimisation.num_epochs):
        for batch in torch.randperm(len(images), generator=rng).split(optimisation.batch_size):
            if len(batch) < 2:
                continue
            logits = module(images[batch])
            if alignment is None:
                loss = F.cross_entropy(logits, labels[batch])
            else:
                loss = aligned_loss(
                    logits, labels[batch], alignment.logits[batch], alignment.mask[batch], alignment.weight
                )
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}
