"""Training and evaluating the task model as functions of its parameters.

Axes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from replayfleet.federation.methods.kit.pace import Pace, ShouldStop, Stage, never, steps_per_epoch
from replayfleet.federation.methods.kit.records import Judge, Parameters
from replayfleet.federation.methods.steps.detection_loss import detection_loss
from replayfleet.federation.methods.steps.precision import computing_in
from replayfleet.models.build import build_task_model
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec

M = TypeVar("M", bound=nn.Module)

EVALUATION_BATCH = 64
"""On a CPU: what a convolution answers to more doesn't stay in the cache, and above 32 MB its memory is mapped anew."""

GPU_EVALUATION_BATCH = 256

DETECTION_BATCH_PIXELS = 2**20
"""Pixels of the pictures that a detector judges at a time: bounds memory, whatever their size."""

BatchLoss: TypeAlias = Callable[[Any, Tensor], Tensor]
"""(the task model in training, (B,) int64 indices of this step's samples) -> scalar to descend."""

TaskLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(what the task model returned for B images, their labels) -> scalar, mean over the batch."""

Watch: TypeAlias = Callable[[float], None]
"""Told the mean loss of the samples of an epoch, once it is over; while its parameters changed with every step."""

AfterBackward: TypeAlias = Callable[[nn.Module], None]
"""Called with the task model once a step's gradients are there; may change them before the step is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimisation:
    """Stochastic gradient descent with momentum, as appendix B.2 of pFedGRP sets it.

    Attributes:
        num_epochs: passes over the data.
        batch_size: samples per step; a last batch of one sample is dropped, for BatchNorm can't train on it.
        learning_rate: step size at the beginning.
        momentum: 0 switches it off.
        weight_decay: L2 penalty added to the gradient.
        precision: one of ``precision.PRECISIONS``; bfloat16 is about twice as fast where the processor multiplies it.
        schedule: how the step size falls within a round, ``constant``, ``cosine`` or ``step``.
        should_stop: asked after every step; True ends training early, with what it reached.
        watch: told each whole epoch's loss; None saves a GPU from waiting for it.
    """

    num_epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    precision: str = "float32"
    schedule: str = "constant"
    should_stop: ShouldStop = never
    watch: Watch | None = None

    @classmethod
    def of(cls, settings: Any) -> Optimisation:
        """Return a method's schedule of local training, by the names of its settings in ``TaskMethod``."""
        return cls(
            num_epochs=settings.local_epochs,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            precision=settings.precision,
            schedule=settings.learning_rate_schedule,
        )

    def rate(self, epoch: int) -> float:
        """Return the step size of an epoch, 0 the first.

        ``cosine``: Loshchilov & Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts", Eq. 5, down to 0
        behind the last epoch; a round is a restart. ``step``: a tenth from three fifths of the epochs on, a hundredth
        from seven tenths on, as in SDD's base session (Liu et al. 2025, section IV.B: 60 and 70 of 100).
        """
        share = epoch / self.num_epochs
        if self.schedule == "cosine":
            return self.learning_rate * (1 + math.cos(math.pi * share)) / 2
        if self.schedule == "step":
            return self.learning_rate * (0.1 if share >= 0.6 else 1.0) * (0.1 if share >= 0.7 else 1.0)
        return self.learning_rate

    def begin(self, epoch: int, optimiser: torch.optim.Optimizer) -> None:
        """Give an epoch's step size to an optimiser."""
        for group in optimiser.param_groups:
            group["lr"] = self.rate(epoch)

    def paced(self, num_samples: int, pace: Pace | None, ahead: Sequence[Stage] = ()) -> Optimisation:
        """Return this with an end where ``pace`` says; as it is without a pace. The training begins now.

        Args:
            num_samples: how many samples an epoch goes through.
            pace: who decides; None for the full length.
            ahead: sub-generators that are sure to be trained after it.
        """
        if pace is None:
            return self
        alone = num_samples % self.batch_size == 1  # BatchNorm learns nothing of a last batch of one, which is left out
        stage = Stage(self.num_epochs, steps_per_epoch(num_samples - alone, self.batch_size))
        return replace(self, should_stop=pace.task_model(stage, ahead))


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


def judge_with(spec: AnyTaskSpec, parameters: Parameters) -> Judge:
    """Return the task model with these parameters as a function, in eval mode.

    It maps images (B, C, H, W) to logits (B, K), or to a detector's raw outputs (B, A * (5 + K), Y, X).
    """
    module = build_task_model(spec, device="meta").eval()
    fixed = dict(parameters)
    parts = portions
    if isinstance(spec, DetectionSpec):
        batch_size = max(1, DETECTION_BATCH_PIXELS // (spec.image_height * spec.image_width))
        parts = functools.partial(torch.split, split_size_or_sections=batch_size)

    @torch.no_grad()
    def judge(images: Tensor) -> Tensor:
        if len(images) == 0:
            return torch.empty(0, *spec.output_shape, device=images.device)
        return torch.cat([functional_call(module, fixed, (part,)) for part in parts(images)])

    return judge


def portions(rows: Tensor) -> Sequence[Tensor]:
    """Return images, or what belongs to each, in the batches that a model is evaluated on without gradients."""
    parts: Sequence[Tensor] = rows.split(EVALUATION_BATCH if rows.device.type == "cpu" else GPU_EVALUATION_BATCH)
    return parts


def aligned_loss(
    logits: Tensor, labels: Tensor, teacher: Tensor, mask: Tensor, weight: float, prior: Tensor | None = None
) -> Tensor:
    """Return Eq. 2 per sample: ``mean_B CE + weight * sum_{B in mask} MSE(logits, teacher) / B``.

    The MSE of one sample is the mean over its K logits.

    Args:
        logits: (B, K) of the model in training.
        labels: (B,) int64.
        teacher: (B, K), rows outside the mask ignored.
        mask: (B,) bool.
        weight: lambda.
        prior: (K,) added to the logits that the cross-entropy sees; None for nothing.
    """
    loss = F.cross_entropy(logits if prior is None else logits + prior, labels)
    if weight == 0.0 or not bool(mask.any()):
        return loss
    distance = F.mse_loss(logits[mask], teacher[mask], reduction="none").mean(dim=1).sum()
    return loss + weight * distance / len(labels)  # Eq. 2


def train_task_model(  # noqa: PLR0913  # the last two have defaults
    spec: AnyTaskSpec,
    parameters: Parameters,
    images: Tensor,
    labels: Tensor,
    optimisation: Optimisation,
    rng: torch.Generator,
    *,
    alignment: Alignment | None = None,
    prior: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the parameters after SGD on the task's loss, plus the alignment term of Eq. 2 if given.

    Args:
        spec: the task.
        parameters: where training starts; left untouched.
        images: (B, C, H, W) float32 in [-1, 1].
        labels: (B,) int64, for detection (B, M, 5) float32.
        optimisation: epochs, batches and step sizes.
        rng: draws the order of samples.
        alignment: second term of Eq. 2; of classification only.
        prior: (K,) added to the logits that the loss sees; of classification only.

    Raises:
        ValueError: Fewer than two samples, which BatchNorm can't be trained on, or an alignment of detectors.
    """
    if alignment is not None and isinstance(spec, DetectionSpec):
        raise ValueError("Eq. 2 aligns class logits, which a detection task has not")
    loss = task_loss(spec)

    def batch_loss(module: nn.Module, batch: Tensor) -> Tensor:
        logits = module(images[batch])
        if alignment is None:
            return loss(logits if prior is None else logits + prior, labels[batch])
        return aligned_loss(
            logits, labels[batch], alignment.logits[batch], alignment.mask[batch], alignment.weight, prior
        )

    return descend(spec, parameters, len(images), optimisation, rng, batch_loss)


def descend(
    spec: AnyTaskSpec,
    parameters: Parameters,
    num_samples: int,
    optimisation: Optimisation,
    rng: torch.Generator,
    batch_loss: BatchLoss,
    after_backward: AfterBackward | None = None,
) -> dict[str, Tensor]:
    """Return the task model's parameters after SGD on a loss of the caller's.

    Args:
        spec: the task.
        parameters: where training starts, on the torch device that trains; left untouched.
        num_samples: how many samples an epoch goes through.
        optimisation: epochs, batches and step sizes.
        rng: draws the order of samples; on the CPU.
        batch_loss: what a step descends; it may add parameters' own terms (FedProx), for the module is at hand.
        after_backward: may change a step's gradients (A-GEM); momentum and weight decay come after it.

    Raises:
        ValueError: Fewer than two samples, which BatchNorm can't be trained on.
    """
    if num_samples < 2:
        raise ValueError(f"training needs at least 2 samples, got {num_samples}")
    device = next(iter(parameters.values())).device
    module = trainable_task_model(spec, parameters)
    optimiser = torch.optim.SGD(
        module.parameters(),
        lr=optimisation.learning_rate,
        momentum=optimisation.momentum,
        weight_decay=optimisation.weight_decay,
    )
    for epoch in range(optimisation.num_epochs):
        optimisation.begin(epoch, optimiser)
        losses, sizes = [], []
        for batch in torch.randperm(num_samples, generator=rng).to(device).split(optimisation.batch_size):
            if len(batch) < 2:
                continue
            with computing_in(optimisation.precision, device):
                loss = batch_loss(module, batch)
            losses.append(loss.detach())
            sizes.append(len(batch))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            if after_backward is not None:
                after_backward(module)
            optimiser.step()
            if optimisation.should_stop():
                return trained_parameters(module)
        if optimisation.watch is not None:
            optimisation.watch(sum(float(one) * size for one, size in zip(losses, sizes, strict=True)) / sum(sizes))
    return trained_parameters(module)


def trainable_task_model(spec: AnyTaskSpec, parameters: Parameters) -> Any:
    """Return a task model in training mode with a copy of these parameters.

    Its convolutions are laid out channels last, in which the CPU trains it about a third faster.
    """
    return trainable(build_task_model(spec, device="meta"), parameters).to(memory_format=torch.channels_last)


def trainable(module: M, parameters: Parameters) -> M:
    """Return ``module``, made on the meta device, in training mode and with a copy of these parameters."""
    module.load_state_dict({name: tensor.clone() for name, tensor in parameters.items()}, assign=True)
    module.requires_grad_(True)
    return module.train()


def trained_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers, detached and laid out as ever.

    Strides too: ``contiguous`` keeps those of channels-last where a side is 1, and convolutions then round otherwise
    than after a model has been on a disk.
    """
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in module.state_dict().items()
    }
