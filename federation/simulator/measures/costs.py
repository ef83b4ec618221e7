"""What models and their training cost: Table 6 of pFedGRP on our own modules, and the formula of Tables 7 to 9.

FLOPs are counted as the paper counts them (``models.counting``). A GAN is its generator and critic together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from replayfleet.federation.errors import SettingsError
from replayfleet.models.acgan import build_acgan
from replayfleet.models.build import build_critic, build_generator, build_task_model
from replayfleet.models.counting import count_flops, count_parameters
from replayfleet.models.data_free import LanderGenerator, MfclGenerator, TargetGenerator
from replayfleet.models.ddpm import Denoiser, build_denoiser
from replayfleet.models.flow import ConditionalFlow
from replayfleet.models.resnet_plus import NUM_FEATURES, build_resnet_plus
from replayfleet.models.specs import LATENT_SIZE, TaskSpec

_TEN = tuple("0123456789")

_DDPM_WIDTH = 128


@dataclass(frozen=True, slots=True)
class Series:
    """Data sets that the paper gives models of one size.

    Attributes:
        spec: their task, with ten classes.
        flow_width: hidden units of AF-FCL's flow.
        acgan_width: channels of the largest maps of FedCIL's ACGAN.
    """

    spec: TaskSpec
    flow_width: int
    acgan_width: int


SERIES: Mapping[str, Series] = {
    "mnist": Series(TaskSpec(1, 28, _TEN, "cifar", 16), 512, 64),
    "cifar": Series(TaskSpec(3, 32, _TEN, "cifar", 64), 1024, 128),
    "imagenet": Series(TaskSpec(3, 64, _TEN, "imagenet", 128), 2048, 128),
}
"""Columns of Table 6."""


@dataclass(frozen=True, slots=True)
class Size:
    """What one model is.

    Attributes:
        flops: of one sample forward.
        num_parameters: trainable scalars.
    """

    flops: int
    num_parameters: int


class NotBuilt(Exception):
    """The model can't be made here; the text says why in a few words."""


@functools.cache
def size_of(model: str, series: str) -> Size:
    """Return the size of one model of Table 6 in one series.

    Raises:
        NotBuilt: It can't be made here.
        KeyError: The paper has no such model or series.
    """
    with torch.device("meta"):
        parts = MODELS[model](SERIES[series])
    return Size(
        sum(count_flops(module, shape) for module, shape in parts),
        sum(count_parameters(module) for module, _ in parts),
    )


def training_cost(updates: float, epochs: float, flops: float, *, share: float = 1.0) -> float:
    """Return FLOPs per training sample: updates * share * epochs * FLOPs (Tables 7 to 9, "Total FLOPs per data").

    Args:
        updates: of the generator in all rounds.
        epochs: per update.
        flops: of the generator per sample.
        share: of a round's samples that one update sees; half for a sub-generator of one of two classes.
    """
    return updates * share * epochs * flops


Parts = list[tuple[nn.Module, tuple[int, ...]]]
"""Modules with the shape of one sample each; counted together."""


def _wgan(series: Series, factor: int = 1) -> Parts:
    spec = series.spec
    wide = TaskSpec(spec.image_channels, spec.image_size, _TEN, spec.stem, factor * spec.generator_width)
    return [(build_generator(wide), (LATENT_SIZE,)), (build_critic(wide), spec.image_shape)]


def _ddpm(series: Series) -> Parts:
    try:
        denoiser = build_denoiser(series.spec, _DDPM_WIDTH, device="meta")
    except SettingsError as error:
        raise NotBuilt("needs [ddpm]") from error
    return [(_AtOneStep(denoiser), series.spec.image_shape)]


def _acgan(series: Series) -> Parts:
    generator, critic = build_acgan(series.spec, series.acgan_width)
    return [(generator, (LATENT_SIZE + series.spec.num_classes,)), (critic, series.spec.image_shape)]


def _flow(series: Series) -> Parts:
    flow = _Joined(ConditionalFlow(NUM_FEATURES, series.spec.num_classes, series.flow_width))
    return [(flow, (NUM_FEATURES + series.spec.num_classes,))]


def _data_free(kind: Callable[[int, int], nn.Module], latent_size: int) -> Callable[[Series], Parts]:
    return lambda series: [(kind(series.spec.image_channels, series.spec.image_size), (latent_size,))]


MODELS: Mapping[str, Callable[[Series], Parts]] = {
    "task-model": lambda series: [(build_task_model(series.spec), series.spec.image_shape)],
    "affcl-task-model": lambda series: [(build_resnet_plus(series.spec), series.spec.image_shape)],
    "wgan-gp": _wgan,
    "wgan-gp-double": functools.partial(_wgan, factor=2),
    "ddpm": _ddpm,
    "acgan": _acgan,
    "flow": _flow,
    "target-generator": _data_free(TargetGenerator, 256),
    "mfcl-generator": _data_free(MfclGenerator, 1000),
    "lander-generator": _data_free(LanderGenerator, 512),
}
"""Rows of Table 6."""


class _Joined(nn.Module):
    """The flow as a function of one tensor: features and one-hot classes side by side."""

    def __init__(self, flow: ConditionalFlow) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, joined: Tensor) -> Tensor:
        """Return noise: (B, F + K) -> (B, F)."""
        noise: Tensor = self.flow(joined[:, :NUM_FEATURES], joined[:, NUM_FEATURES:])[0]
        return noise


class _AtOneStep(nn.Module):
    """A denoiser as a function of the images alone, at timestep 0."""

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, noised: Tensor) -> Tensor:
        """Return the noise: (B, C, H, W) -> (B, C, H, W)."""
        noise: Tensor = self.denoiser(noised, torch.zeros(len(noised), dtype=torch.int64, device=noised.device))
        return noise
