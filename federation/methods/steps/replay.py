"""Generative replay: how much of each class to draw, and drawing it (sections 4.1.3 and 4.1.4 of pFedGRP).

Axes: B batch, C channels, H height, W width, K classes, Z latent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.records import Draw, Judge, Parameters, Sampler
from replayfleet.models.build import build_generator
from replayfleet.models.specs import LATENT_SIZE, GeneratorSpec, TaskSpec

DRAW_BATCH = 256
"""Latents per call of a sub-generator: bounds memory, and is the batch that exported graphs are warmed up for."""


def generation_scale(seen: Mapping[int, int], now: Mapping[int, int]) -> dict[int, int]:
    """Return how many samples of each class to replay beside this round's data (4.1.4).

    ``seen`` is scaled by the largest ``now[c] / seen[c]`` over this round's classes, every class is capped at the
    count of the class that set the scale, and what the round brings itself is subtracted. Scaled counts are rounded
    down; of several classes with the same ratio the one with most samples sets the cap.

    Args:
        seen: class id -> real samples met so far, this round's included.
        now: class id -> real samples of this round.

    Returns:
        Class id -> samples to draw, for every class of ``seen``; 0 where the round has enough itself.

    Raises:
        ValueError: The round is empty, a count is not positive, or a class has fewer samples seen than now.
    """
    if not now:
        raise ValueError("the round has no samples, so there is no scale to generate at")
    for class_id, count in now.items():
        if not 0 < count <= seen.get(class_id, 0):
            raise ValueError(
                f"class {class_id}: {count} samples now but {seen.get(class_id, 0)} seen; expected 0 < now <= seen"
            )
    # 4.1.4: the class whose share of what was ever met is largest sets scale and cap.
    leader = max(now, key=lambda c: (now[c] / seen[c], now[c], -c))
    cap = now[leader]
    return {
        class_id: max(0, min(count * cap // seen[leader], cap) - now.get(class_id, 0))
        for class_id, count in sorted(seen.items())
    }


def counts_for_distribution(seen: Mapping[int, int], total: int) -> dict[int, int]:
    """Split ``total`` samples over classes in proportion to ``seen`` (largest remainders; at least 1 per class)."""
    weight = sum(seen.values())
    exact = {class_id: total * count / weight for class_id, count in sorted(seen.items()) if count > 0}
    counts = {class_id: max(1, int(share)) for class_id, share in exact.items()}
    by_remainder = sorted(exact, key=lambda c: (counts[c] - exact[c], c))
    for class_id in by_remainder[: max(0, total - sum(counts.values()))]:
        counts[class_id] += 1
    return counts


def eager_sampler(spec: GeneratorSpec) -> Sampler:
    """Return a sampler that runs sub-generators in PyTorch, in eval mode; threads can share it, but not one draw."""

    def bind(parameters: Parameters) -> Draw:
        module = build_generator(spec, device="meta").eval()
        module.load_state_dict(parameters, assign=True)
        device = next(iter(parameters.values())).device

        @torch.no_grad()
        def draw(latents: Tensor) -> Tensor:
            images: Tensor = module(latents.to(device))
            return images

        return draw

    return bind


@dataclass(frozen=True, slots=True)
class Replay:
    """Generated samples of several classes.

    Attributes:
        images: (B, C, H, W) float32 in [-1, 1].
        labels: (B,) int64, the class that each image stands for.
        num_tries: latents drawn in all.
        num_filled: samples kept although the judge didn't recognise them, because the tries ran out.
    """

    images: Tensor
    labels: Tensor
    num_tries: int
    num_filled: int


def draw_replay(
    sub_generators: Mapping[int, Parameters],
    counts: Mapping[int, int],
    sampler: Sampler,
    judge: Judge | None,
    rng: torch.Generator,
    *,
    spec: TaskSpec,
    max_tries_factor: int = 8,
) -> Replay:
    """Draw ``counts[c]`` samples from each class's sub-generator, keeping what ``judge`` takes for that class (4.1.3).

    Args:
        sub_generators: class id -> parameters; must hold every class with a positive count.
        counts: class id -> samples wanted.
        sampler: binds and runs a sub-generator.
        judge: the task model that filters, or None to keep everything (ablation AS1).
        rng: source of the latents.
        spec: gives the image shape.
        max_tries_factor: a class gets at most this many latents per sample wanted; the rest is filled with the
            rejected samples that the judge finds most likely.

    Raises:
        ValueError: A class with a positive count has no sub-generator.
    """
    images: list[Tensor] = []
    labels: list[Tensor] = []
    num_tries = num_filled = 0
    for class_id, count in sorted(counts.items()):
        if count <= 0:
            continue
        if class_id not in sub_generators:
            raise ValueError(
                f"class {class_id} is to be replayed but has no sub-generator; known: {sorted(sub_generators)}"
            )
        draw = sampler(sub_generators[class_id])
        chosen, tries, filled = _draw_class(draw, class_id, count, judge, rng, max_tries_factor)
        images.append(chosen)
        labels.append(torch.full((count,), class_id, dtype=torch.int64, device=chosen.device))
        num_tries += tries
        num_filled += filled
    if not images:
        return Replay(torch.empty(0, *spec.image_shape), torch.empty(0, dtype=torch.int64), 0, 0)
    return Replay(torch.cat(images), torch.cat(labels), num_tries, num_filled)


def _draw_class(
    draw: Draw, class_id: int, count: int, judge: Judge | None, rng: torch.Generator, max_tries_factor: int
) -> tuple[Tensor, int, int]:
    kept: list[Tensor] = []
    rejected: list[Tensor] = []
    rejected_scores: list[Tensor] = []
    missing, tries, limit = count, 0, count * max_tries_factor
    while missing > 0 and tries < limit:
        size = min(DRAW_BATCH, missing if judge is None else 2 * missing, limit - tries)
        batch = draw(torch.randn(size, LATENT_SIZE, generator=rng))
        tries += size
        if judge is None:
            kept.append(batch)
            missing -= size
            continue
        log_probabilities = judge(batch).log_softmax(dim=1)
        recognised = log_probabilities.argmax(dim=1) == class_id  # 4.1.3: kept if the judge takes it for its class
        good = batch[recognised][:missing]
        kept.append(good)
        missing -= len(good)
        rejected.append(batch[~recognised])
        rejected_scores.append(log_probabilities[~recognised, class_id])
    if missing > 0:
        best = torch.cat(rejected_scores).topk(missing).indices
        kept.append(torch.cat(rejected)[best])
    return torch.cat(kept), tries, missing


def draw_labelled_replay(
    draw: Draw,
    counts: Mapping[int, int],
    judge: Judge,
    rng: torch.Generator,
    *,
    spec: TaskSpec,
    max_tries_factor: int = 8,
) -> Replay:
    """Draw from one generator of all classes until ``judge`` has taken ``counts[c]`` samples for each class c.

    The replay of pFedGRP's ablation AS3: nobody can ask such a generator for a class, so the judge labels what comes.

    Args:
        draw: the bound generator.
        counts: class id -> samples wanted.
        judge: the task model that labels.
        rng: source of the latents.
        spec: gives the image shape.
        max_tries_factor: at most this many latents per sample wanted, over all classes; the rest is filled with samples
            that the judge takes for other classes but finds most likely, each used once.
    """
    wanted = {class_id: count for class_id, count in sorted(counts.items()) if count > 0}
    total = sum(wanted.values())
    if total == 0:
        return Replay(torch.empty(0, *spec.image_shape), torch.empty(0, dtype=torch.int64), 0, 0)
    batches: list[Tensor] = []
    scores: list[Tensor] = []
    missing, tries = total, 0
    while missing > 0 and tries < total * max_tries_factor:
        size = min(DRAW_BATCH, 2 * missing, total * max_tries_factor - tries)
        batches.append(draw(torch.randn(size, LATENT_SIZE, generator=rng)))
        scores.append(judge(batches[-1]).log_softmax(dim=1))
        tries += size
        found = torch.cat(scores).argmax(dim=1)
        missing = sum(max(0, count - int((found == class_id).sum())) for class_id, count in wanted.items())
    images, log_probabilities = torch.cat(batches), torch.cat(scores)
    places = _placed(log_probabilities, wanted)
    labels = torch.tensor(list(wanted)).repeat_interleave(torch.tensor(list(wanted.values())))
    return Replay(images[places], labels.to(images.device), tries, missing)


def _placed(log_probabilities: Tensor, wanted: Mapping[int, int]) -> Tensor:
    """Return which samples stand for which class, class by class: first recognised ones, then the most likely left.

    Args:
        log_probabilities: (B, K), at least as many samples as are wanted.
        wanted: class id -> samples, ids rising.
    """
    found = log_probabilities.argmax(dim=1)
    own = {class_id: (found == class_id).nonzero().flatten()[:count] for class_id, count in wanted.items()}
    free = torch.ones(len(found), dtype=torch.bool, device=found.device)
    free[torch.cat(list(own.values()))] = False
    for class_id, count in wanted.items():
        likely = log_probabilities[:, class_id].masked_fill(~free, -math.inf)
        extra = likely.topk(count - len(own[class_id])).indices
        free[extra] = False
        own[class_id] = torch.cat([own[class_id], extra])
    return torch.cat(list(own.values()))


def recognised_share(draw: Draw, class_id: int, judge: Judge, rng: torch.Generator, num_samples: int) -> float:
    """Return the share of samples that ``judge`` takes for the sub-generator's class: ACC_c of the gate (4.1.2)."""
    recognised = 0
    for start in range(0, num_samples, DRAW_BATCH):
        size = min(DRAW_BATCH, num_samples - start)
        predictions = judge(draw(torch.randn(size, LATENT_SIZE, generator=rng))).argmax(dim=1)
        recognised += int((predictions == class_id).sum())
    return recognised / num_samples
