"""Whether a generator shows the samples that it was trained on: distances to them against distances to held-out ones.

Two questions, each with the answer that chance alone gives:

- Are generated samples nearer to training samples than to held-out ones of the same class? A nearest-neighbour test for
  data copying, after Meehan et al. 2020, "A Non-Parametric Test to Detect Data-Copying in Generative Models".
- Can somebody who holds generated samples tell training samples from held-out ones, by the distance to the nearest
  generated one? The black-box attack of Chen et al. 2020, "GAN-Leaks", section 5.2.

A generator that kept nothing of single samples can't tell the two sets apart, however bad it is: they are exchangeable.
So their labels are shuffled, and what shuffled labels give is the noise floor. It says nothing of what a cleverer
attack finds: a test that fails to find copies is no proof that there are none.

Axes: G generated, N training and as many held-out samples, D numbers per sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SHUFFLES = 999


@dataclass(frozen=True, slots=True)
class AgainstChance:
    """A measure whose value is 0.5 where nothing was memorised, and 1 where all was.

    Attributes:
        value: what was measured.
        floor_std: standard deviation of what shuffled labels give, around 0.5.
        p: share of shuffled labels that give as much or more; one-sided, at least 1 / (shuffles + 1).
    """

    value: float
    floor_std: float
    p: float


@dataclass(frozen=True, slots=True)
class Memorisation:
    """Of one generator.

    Attributes:
        nearer: share of generated samples whose nearest real one was trained on.
        membership: area under the ROC curve of telling training samples by their nearest generated one.
        distance_ratio: median distance of generated samples to the nearest training sample, over that of held-out
            samples. Far below 1 are copies; far above, the generator draws something else than the class.
    """

    nearer: AgainstChance
    membership: AgainstChance
    distance_ratio: float


def memorisation(generated: Tensor, trained: Tensor, held_out: Tensor, rng: torch.Generator) -> Memorisation:
    """Measure a generator.

    Args:
        generated: (G, ...) samples of it.
        trained: (N, ...) samples that it was trained on.
        held_out: (N, ...) samples of the same distribution that it never saw.
        rng: shuffles labels, and orders the real samples, so that of equal distances neither set wins.

    Raises:
        ValueError: There are no samples, or not as many held-out ones as training ones.
    """
    if not len(generated) or not len(trained) or len(trained) != len(held_out):
        raise ValueError(
            f"{len(generated)} generated, {len(trained)} training and {len(held_out)} held-out samples; "
            "expected some, and as many held-out as training ones"
        )
    num = len(trained)
    order = torch.randperm(2 * num, generator=rng)
    real = torch.cat([trained, held_out]).flatten(1).to(torch.float64)[order]
    member = (order < num).to(torch.float64)
    distances = torch.cdist(generated.flatten(1).to(torch.float64), real)  # (G, 2N)

    nearest = distances.argmin(dim=1)
    # from the nearest generated sample on: ranks from 1, the mean of their places where distances are equal
    closeness = -distances.amin(dim=0)
    ranks = (closeness[:, None] > closeness).sum(dim=1) + 0.5 * ((closeness[:, None] == closeness).sum(dim=1) + 1)

    def nearer_share(labels: Tensor) -> float:
        return float(labels[nearest].mean())

    def area(labels: Tensor) -> float:
        """Mann and Whitney's U over its largest value."""
        return float(((ranks * labels).sum() - num * (num + 1) / 2) / num**2)

    shuffled = [member[torch.randperm(2 * num, generator=rng)] for _ in range(NUM_SHUFFLES)]
    to_trained = torch.cdist(held_out.flatten(1).to(torch.float64), trained.flatten(1).to(torch.float64)).amin(dim=1)
    ratio = distances[:, member > 0].amin(dim=1).median() / to_trained.median()
    return Memorisation(
        _against(nearer_share(member), [nearer_share(labels) for labels in shuffled]),
        _against(area(member), [area(labels) for labels in shuffled]),
        float(ratio),
    )


def _against(value: float, chance: list[float]) -> AgainstChance:
    floor = torch.tensor(chance, dtype=torch.float64)
    # a rounding error is no difference
    as_much = int((floor >= value - 1e-12).sum())
    return AgainstChance(value, float(((floor - 0.5) ** 2).mean().sqrt()), (1 + as_much) / (1 + len(chance)))
