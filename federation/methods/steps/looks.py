"""How replay and real samples look: a model that can tell them apart learns that instead of their classes.

What replays earlier classes is smooth, and the samples of a round's classes are sharp. Real pictures of earlier
classes, which come again in use and in tests, are then taken for those of the round.
Axes: N images, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.methods.steps.replay import Replay
from replayfleet.federation.methods.steps.sub_generators.gaussian import smoothed_like

SMOOTH_DIMS = 32
"""Directions of a class in which its smoothed samples differ, as many as ``pca-gaussian`` has."""


def smoothed(real: RoundData, share: float, rng: torch.Generator) -> RoundData:
    """Return ``share`` of some samples as a Gaussian of their class holds them; those of up to 33 stay as they are."""
    copies = real.images.clone()
    for class_id in real.counts():
        own = real.labels == class_id
        copies[own] = smoothed_like(real.images[own], SMOOTH_DIMS)
    chosen = _some(len(copies), share, rng, copies.device)
    return RoundData(copies[chosen], real.labels[chosen])


def partly_detailed(replay: Replay, real: Tensor, share: float, rng: torch.Generator) -> Replay:
    """Return replay, ``share`` of it ``detailed``."""
    images = replay.images.to(real.device, copy=True)
    chosen = _some(len(images), share, rng, images.device)
    images[chosen] = detailed(images[chosen], real, rng)
    return replace(replay, images=images)


def detailed(replay: Tensor, real: Tensor, rng: torch.Generator) -> Tensor:
    """Return replay (N, C, H, W) with what a 3 x 3 mean takes from real images, one drawn for each: their detail."""
    drawn = real[torch.randint(len(real), (len(replay),), generator=rng).to(real.device)]
    smooth = functional.avg_pool2d(functional.pad(drawn, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return (replay.to(real.device) + drawn - smooth).clamp(-1, 1)


def _some(count: int, share: float, rng: torch.Generator, device: torch.device) -> Tensor:
    return (torch.rand(count, generator=rng) < share).to(device)
