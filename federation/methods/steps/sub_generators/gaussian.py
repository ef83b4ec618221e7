"""A sub-generator that is a mixture of Gaussians: its moments, from images in closed form, and merged with others'.

The moments of images are the number, the mean and the covariance, of which the D directions of largest variance are
kept (Tipping and Bishop 1999). Two such Gaussians merge into the one that has the moments of all their images together
(Chan et al. 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"), whatever rounds or
clients they come from. Number and mean stay exact; the covariance does as long as it has at most D directions, and else
loses those of least variance. A mixture of several joins all components and merges the closest pair until M are left.

Axes: N images, M components, D dimensions, P pixels of all channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import SubGenerator
from replayfleet.models.build import build_generator
from replayfleet.models.specs import MixtureSpec

_CLUSTERING_STEPS = 10
_FLAT = 1e-3
"""A direction with this much of the largest deviation is rounding."""
_MAX_SAMPLES = 2**40
_ELSEWHERE = 0.05
"""Of the variance, as the squared distance of two means: 20 images of one class lie so far from all of them."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Of some images.

    Attributes:
        num_samples: how many.
        mean: (P,) float32.
        factor: (R, P) float32, R <= D; ``factor.T @ factor`` is their covariance (biased).
    """

    num_samples: int
    mean: Tensor
    factor: Tensor


def moments_of(pixels: Tensor, num_dims: int) -> Moments:
    """Return the moments of images (N, P), of which there is at least one."""
    mean = pixels.mean(dim=0)
    return Moments(len(pixels), mean, _leading((pixels - mean) / math.sqrt(len(pixels)), num_dims))


def smoothed_like(images: Tensor, num_dims: int) -> Tensor:
    """Return images (N, C, H, W) of one class moved onto the mean and ``num_dims`` directions that all have together.

    They lose what a Gaussian of the class doesn't hold, and stay what they show.
    """
    pixels = images.flatten(1).to(torch.float32)
    moments = moments_of(pixels, num_dims)
    lengths = moments.factor.norm(dim=1)
    held = lengths > _FLAT * lengths.max()
    directions = moments.factor[held] / lengths[held].unsqueeze(1)
    smooth: Tensor = moments.mean + (pixels - moments.mean) @ directions.T @ directions
    return smooth.clamp(-1.0, 1.0).reshape(images.shape)


def merged(left: Moments, right: Moments, num_dims: int) -> Moments:
    """Return the moments of the images of both."""
    total = left.num_samples + right.num_samples
    share = right.num_samples / total
    apart = right.mean - left.mean
    rows = [
        math.sqrt(1 - share) * left.factor,
        math.sqrt(share) * right.factor,
        math.sqrt(share * (1 - share)) * apart.unsqueeze(0),
    ]
    return Moments(total, left.mean + share * apart, _leading(torch.cat(rows), num_dims))


def reduced(components: Sequence[Moments], num_components: int, num_dims: int) -> list[Moments]:
    """Merge those whose merging adds least variance, until ``num_components`` are left; the mixture's mean stays."""
    left = list(components)
    while len(left) > num_components:
        pairs = [(a, b) for a in range(len(left)) for b in range(a + 1, len(left))]
        first, second = min(pairs, key=lambda pair: _cost(left[pair[0]], left[pair[1]]))
        left[first] = merged(left[first], left.pop(second), num_dims)
    return left


def without_small(components: Sequence[Moments], num_dims: int) -> list[Moments]:
    """Merge those of fewer than D + 2 images with the closest, as long as there is another.

    N images lie N - 1 directions around their mean: with up to D + 1 of them a component would hold each one whole.
    """
    left, least = list(components), num_dims + 2
    while len(left) > 1 and min(one.num_samples for one in left) < least:
        one = left.pop(next(place for place, each in enumerate(left) if each.num_samples < least))
        closest = min(range(len(left)), key=lambda place: _cost(one, left[place]))
        left[closest] = merged(left[closest], one, num_dims)
    return left


def new_mixture(spec: MixtureSpec) -> SubGenerator:
    """Return one that has met no image, and draws grey ones."""
    return SubGenerator(dict(build_generator(spec).state_dict()), {})


def learned(spec: MixtureSpec, start: SubGenerator, images: Tensor, rng: torch.Generator) -> SubGenerator:
    """Return the mixture of all images that ``start`` has met and of these; ``start`` is left untouched.

    Args:
        spec: dimensions and components.
        start: what it knew.
        images: (N, C, H, W) float32 in [-1, 1], all of one class.
        rng: draws where the search for clusters begins; a single component needs none.

    Raises:
        ValueError: There are no images.
    """
    if len(images) == 0:
        raise ValueError("a sub-generator needs at least one image of its class")
    pixels = images.detach().flatten(1).to(torch.float32)
    fresh = [moments_of(part, spec.num_dims) for part in _clusters(pixels, spec.num_components, rng)]
    return SubGenerator(pooled(spec, [start.generator], without_small(fresh, spec.num_dims)), {})


def pooled(spec: MixtureSpec, mixtures: Sequence[Parameters], fresh: Sequence[Moments] = ()) -> dict[str, Tensor]:
    """Return the mixture of what several have met, of several clients for example, and of ``fresh``."""
    components = [one for parameters in mixtures for one in components_of(parameters)]
    kept = reduced([*components, *fresh], spec.num_components, spec.num_dims)
    device = kept[0].mean.device if kept else torch.device("cpu")
    state = {name: tensor.to(device) for name, tensor in build_generator(spec).state_dict().items()}
    for place, one in enumerate(kept):
        state["num_samples"][place] = one.num_samples
        state["means"][place] = one.mean.to(torch.float16)
        state["bases"][place, : len(one.factor)] = one.factor.to(torch.float16)
    return state


def components_of(parameters: Parameters) -> list[Moments]:
    """Return those components of a mixture that have met an image."""
    return [
        Moments(int(count), mean.to(torch.float32), basis.to(torch.float32))
        for count, mean, basis in zip(parameters["num_samples"], parameters["means"], parameters["bases"], strict=True)
        if count > 0
    ]


def tells_more(own: Parameters, held: Parameters, growth: float) -> bool:
    """Whether a mixture has met ``growth`` times as many images as ``held``, or shows them elsewhere."""
    num_held, centre, _ = _overall(held)
    num_own, mean, variance = _overall(own)
    return num_own >= growth * num_held or float((mean - centre).square().sum()) > _ELSEWHERE * variance


def _overall(mixture: Parameters) -> tuple[int, Tensor, float]:
    """Return (how many, mean (P,), variance of all pixels together) of the images that a mixture has met."""
    counts = mixture["num_samples"].to(torch.float32)
    shares = counts / counts.sum().clamp(min=1.0)
    means, bases = mixture["means"].to(torch.float32), mixture["bases"].to(torch.float32)
    mean = shares @ means
    spread = bases.square().sum(dim=(1, 2)) + (means - mean).square().sum(dim=1)
    return int(mixture["num_samples"].sum()), mean, float(shares @ spread)


def counted_as(mixture: Parameters, most: int) -> dict[str, Tensor]:
    """Return a mixture whose images count for about ``most`` at most, and each component that has any for one at least.

    However many images somebody else says that it met, one's own then count as much.
    """
    counts = mixture["num_samples"]
    share = min(1.0, most / max(1, int(counts.sum())))
    fewer = (counts.to(torch.float64) * share).to(torch.int64).clamp(min=1)
    return {**mixture, "num_samples": torch.where(counts > 0, fewer, counts)}


def check_mixture(parameters: Parameters) -> None:
    """Raise ValueError for counts that no images give; values of any size are clipped as they are drawn."""
    counts = [int(count) for count in parameters["num_samples"]]
    if min(counts) < 0 or not 0 < sum(counts) <= _MAX_SAMPLES:
        raise ValueError(f"a mixture counts {counts[:8]} images, expected none below 0 and at least 1 in all")


def _leading(rows: Tensor, num_dims: int) -> Tensor:
    """Return at most ``num_dims`` rows (D, P) whose outer products sum to those of ``rows`` (R, P), or nearly."""
    exact = rows.to(torch.float64)
    if len(rows) > rows.shape[1]:
        _, values, directions = torch.linalg.svd(exact, full_matrices=False)
        found: Tensor = values[:num_dims, None] * directions[:num_dims]
    else:  # R rows have at most R directions: the smaller Gram matrix tells them, in a tenth of the time
        _, vectors = torch.linalg.eigh(exact @ exact.T)
        found = vectors.flip(1)[:, :num_dims].T @ exact
    return found.to(torch.float32)


def _cost(left: Moments, right: Moments) -> float:
    """Return by how much the squared distances of all images from their mean grow where both are merged (Ward 1963)."""
    share = left.num_samples * right.num_samples / (left.num_samples + right.num_samples)
    return share * float((left.mean - right.mean).square().sum())


def _clusters(pixels: Tensor, num_clusters: int, rng: torch.Generator) -> list[Tensor]:
    """Part images (N, P) by k-means, from an image drawn at random and the farthest ones; no part is empty."""
    if num_clusters == 1:
        return [pixels]
    centres = pixels[torch.randint(len(pixels), (1,), generator=rng).to(pixels.device)]
    while len(centres) < min(num_clusters, len(pixels)):
        farthest = torch.cdist(pixels, centres).amin(dim=1).argmax()
        centres = torch.cat([centres, pixels[farthest].unsqueeze(0)])
    for _ in range(_CLUSTERING_STEPS):
        nearest = torch.cdist(pixels, centres).argmin(dim=1)
        parts = [pixels[nearest == place] for place in nearest.unique().tolist()]
        centres = torch.stack([part.mean(dim=0) for part in parts])
    return parts
