"""Making images without data: what a frozen task model says about them, and the losses that use it.

Sources: MFCL (Babakniya et al. 2023, section 3.1), TARGET (Zhang et al. 2023), LANDER (Tran et al. 2024); BatchNorm
statistics as a target go back to DeepInversion (Yin et al. 2020).
Axes: B batch, C channels, H height, W width, K classes, D features, L BatchNorm layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.task_model import trainable_task_model
from replayfleet.models.resnet import ResNet
from replayfleet.models.specs import TaskSpec

VARIANCE_FLOOR = 1e-8
"""Added to both variances of a divergence."""

BLUR_SIZE = 5
"""Side of the smoothness prior's kernel."""

AGREEMENTS = ("agree", "disagree")
"""Where the adversarial term counts: where student and teacher name the same class, or where they don't."""


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """One BatchNorm layer's input, beside what the layer remembers of real data.

    Attributes:
        mean: (C,) of this batch, differentiable.
        variance: (C,) of this batch, biased, differentiable.
        running_mean: (C,) of the layer.
        running_variance: (C,) of the layer.
    """

    mean: Tensor
    variance: Tensor
    running_mean: Tensor
    running_variance: Tensor


@dataclass(frozen=True, slots=True)
class Observation:
    """What the frozen task model makes of a batch.

    Attributes:
        features: (B, D), what its head sees.
        logits: (B, K).
        layers: statistics of its L BatchNorm layers in the order in which they ran.
    """

    features: Tensor
    logits: Tensor
    layers: tuple[LayerStatistics, ...]


def frozen_task_model(spec: TaskSpec, parameters: Parameters) -> ResNet:
    """Return the task model in eval mode with a copy of these parameters, which need no gradients."""
    module: ResNet = trainable_task_model(spec, parameters).requires_grad_(False).eval()
    return module


class Ensemble(nn.Module):
    """Frozen task models that answer together: the mean of their logits (SDD, Eq. 4)."""

    def __init__(self, members: Sequence[ResNet]) -> None:
        super().__init__()
        self._members = tuple(members)
        self.members = nn.ModuleList(members)

    def features(self, images: Tensor) -> Tensor:
        """Return what each member's head sees: (B, C, H, W) -> (M, B, D)."""
        return torch.stack([member.features(images) for member in self._members])

    def head(self, features: Tensor) -> Tensor:
        """Return the mean of the logits: (M, B, D) -> (B, K)."""
        answers = [member.head(own) for member, own in zip(self._members, features, strict=True)]
        return torch.stack(answers).mean(dim=0)

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean of the logits: (B, C, H, W) -> (B, K)."""
        return self.head(self.features(images))


Teacher: TypeAlias = ResNet | Ensemble


def observe(teacher: Teacher, images: Tensor) -> Observation:
    """Run a frozen teacher on images (B, C, H, W) and keep the batch statistics of every BatchNorm's input.

    The layers normalise with their running statistics, in eval mode; the batch's are computed beside that.
    """
    layers: list[LayerStatistics] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.BatchNorm2d)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        variance, mean = torch.var_mean(inputs[0], dim=(0, 2, 3), correction=0)
        layers.append(LayerStatistics(mean, variance, layer.running_mean, layer.running_var))

    norms = [layer for layer in teacher.modules() if isinstance(layer, nn.BatchNorm2d)]
    handles = [norm.register_forward_pre_hook(note) for norm in norms]
    try:
        features = teacher.features(images)
        logits: Tensor = teacher.head(features)
    finally:
        for handle in handles:
            handle.remove()
    return Observation(features, logits, tuple(layers))


def batch_norm_divergence(layers: Sequence[LayerStatistics]) -> Tensor:
    """Return MFCL's Eq. 3: the mean over layers of ``KL(N(running) || N(batch))``, each the mean over its channels.

    ``KL = log(sd_batch / sd_run) - (1 - (var_run + (mean_run - mean_batch)^2) / var_batch) / 2``. 0 without layers.
    """
    divergences = [torch.zeros(())] if not layers else []
    for layer in layers:
        batch, running = layer.variance + VARIANCE_FLOOR, layer.running_variance + VARIANCE_FLOOR
        ratio = (running + (layer.running_mean - layer.mean) ** 2) / batch
        # MFCL, Eq. 3
        divergences.append((0.5 * torch.log(batch / running) - 0.5 * (1 - ratio)).mean())
    return torch.stack(divergences).mean()


History = Sequence[tuple[Tensor, Tensor]]
"""Mean and variance (C,) of each layer over the rounds of synthesis so far; empty before the first."""


def batch_norm_distance(layers: Sequence[LayerStatistics], history: History, momentum: float) -> Tensor:
    """Return TARGET's: the sum over layers of ``|mean_run - mean|_2 + |var_run - var|_2``.

    ``mean`` and ``var`` are ``momentum * history + (1 - momentum) * batch``; the batch's alone without a history. 0
    without layers.
    """
    total = torch.zeros((), device=layers[0].mean.device if layers else None)
    blended = blend_statistics(history, layers, momentum)
    for layer, (mean, variance) in zip(layers, blended, strict=True):
        total = total + (layer.running_mean - mean).norm() + (layer.running_variance - variance).norm()
    return total


def blend_statistics(
    history: History, layers: Sequence[LayerStatistics], momentum: float
) -> list[tuple[Tensor, Tensor]]:
    """Return ``momentum * history + (1 - momentum) * batch`` for each layer's mean and variance."""
    if not history:
        return [(layer.mean, layer.variance) for layer in layers]
    return [
        (momentum * mean + (1 - momentum) * layer.mean, momentum * variance + (1 - momentum) * layer.variance)
        for (mean, variance), layer in zip(history, layers, strict=True)
    ]


def information_loss(logits: Tensor) -> Tensor:
    """Return ``1 + sum_k p_k log p_k / log K`` for the batch's mean probabilities ``p``: 0 if balanced, at most 1.

    MFCL's Eq. 2 in the scale of its reference. One class leaves nothing to balance: 0.

    Args:
        logits: (B, K) of the classes to balance.
    """
    if logits.shape[1] < 2:
        return logits.sum() * 0.0
    mean = logits.softmax(dim=1).mean(dim=0)
    negative_entropy: Tensor = (mean * mean.clamp_min(1e-12).log()).sum()
    return 1.0 + negative_entropy / math.log(logits.shape[1])  # MFCL, Eq. 2


def own_label_loss(logits: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of ``logits / temperature`` with the class that they name themselves (MFCL's Eq. 1).

    Args:
        logits: (B, K).
        temperature: "content temperature": 1000 makes the term's gradient nearly the same for every image.
    """
    return F.cross_entropy(logits / temperature, logits.detach().argmax(dim=1))  # MFCL, Eq. 1


def smoothness_loss(images: Tensor) -> Tensor:
    """Return ``MSE(x, blurred(x))``, the image prior (MFCL's Eq. 4)."""
    return F.mse_loss(images, blurred(images))  # MFCL, Eq. 4


def blurred(images: Tensor) -> Tensor:
    """Return images under a 5x5 Gaussian kernel, mirrored at the border: (B, C, H, W) -> (B, C, H, W)."""
    channels = images.shape[1]
    kernel = blur_kernel().to(images.device, images.dtype).expand(channels, 1, BLUR_SIZE, BLUR_SIZE)
    padded = F.pad(images, [BLUR_SIZE // 2] * 4, mode="reflect")
    return F.conv2d(padded, kernel, groups=channels)


def blur_kernel(sigma: float = 1.0) -> Tensor:
    """Return the kernel (5, 5): ``exp(-(d / (2 sigma))^2)`` for the distance d to the centre, scaled to sum 1.

    The exponent is the reference's: a Gaussian whose standard deviation is ``sqrt(2) sigma``, not ``sigma``.
    """
    steps = torch.arange(BLUR_SIZE, dtype=torch.float32) - BLUR_SIZE // 2
    squared = steps[:, None] ** 2 + steps[None, :] ** 2
    kernel = torch.exp(-squared / (2 * sigma) ** 2)
    return kernel / kernel.sum()


def adversarial_loss(teacher: Tensor, student: Tensor, where: str) -> Tensor:
    """Return ``-sum_{B counted} KL(teacher || student) / B``: images on which a student still has something to learn.

    Args:
        teacher: (B, K) logits.
        student: (B, K) logits.
        where: one of ``AGREEMENTS``: which images count. TARGET's text says "disagree", its reference takes "agree".
    """
    divergence = F.kl_div(student.log_softmax(dim=1), teacher.log_softmax(dim=1), reduction="none", log_target=True)
    same = teacher.argmax(dim=1) == student.argmax(dim=1)
    counted = same if where == "agree" else ~same
    return -(divergence.sum(dim=1) * counted).mean()


def bounding_loss(features: Tensor, anchors: Tensor, radius: float) -> Tensor:
    """Return ``mean_B relu(MSE(feature, anchor) - radius)``: free inside a ball around the label's anchor (LANDER).

    Args:
        features: (B, D).
        anchors: (B, D), the anchor of each sample's label.
        radius: of the ball, in mean squared distance per entry.
    """
    return F.relu((features - anchors).square().mean(dim=1) - radius).mean()


def label_anchors(num_classes: int, num_features: int, norm: float) -> Tensor:
    """Return one vector of length ``norm`` per label, (K, D), orthogonal as long as K <= D, with no entry below 0.

    They stand in for a language model's embeddings of the class names (LANDER): the same for everybody at all times,
    told apart as well as possible, and without meaning. Features are means after a ReLU, so a ball around a vector
    with negative entries could never be entered. Each label has features of its own: ``d % K == k`` for label k. More
    classes than features get independent directions.
    """
    if num_classes <= num_features:
        own = torch.arange(num_features)[None] % num_classes == torch.arange(num_classes)[:, None]
        return norm * F.normalize(own.to(torch.float32), dim=1)
    rng = torch.Generator()
    rng.manual_seed(0)
    return norm * F.normalize(torch.randn(num_classes, num_features, generator=rng).abs(), dim=1)


def augmented(images: Tensor, padding: int, rng: torch.Generator) -> Tensor:
    """Return each image shifted by up to ``padding`` pixels, zeros moving in, and mirrored with probability 1/2.

    Differentiable. The reference's random crop and horizontal flip, drawn for each image by itself.

    Args:
        images: (B, C, H, W) in [0, 1].
        padding: 0 only mirrors.
        rng: on the CPU.
    """
    num_images, _, height, width = images.shape
    offsets = torch.randint(2 * padding + 1, (2, num_images, 1), generator=rng)
    mirrored = torch.randint(2, (num_images, 1), generator=rng) == 1
    rows = offsets[0] + torch.arange(height)
    columns = offsets[1] + torch.arange(width)
    columns = torch.where(mirrored, columns.flip(dims=(1,)), columns)
    index = torch.arange(num_images)[:, None, None], rows[:, :, None], columns[:, None, :]
    sample, row, column = (part.to(images.device) for part in index)
    padded = F.pad(images, [padding] * 4)
    return padded[sample, :, row, column].permute(0, 3, 1, 2)


def to_bytes(images: Tensor) -> Tensor:
    """Return images as uint8, [-1, 1] onto 0 to 255; what lies outside is clipped."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def from_bytes(images: Tensor) -> Tensor:
    """Return uint8 images as float32 in [-1, 1]."""
    return images.to(torch.float32) / 127.5 - 1


def all_finite(parameters: Parameters) -> bool:
    """Whether no tensor has a NaN or an infinity: a teacher of absurd parameters must not end a generator for good."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in parameters.values() if tensor.is_floating_point())
