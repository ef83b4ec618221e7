"""Averages that a few hostile or broken uploads can't pull wherever they like, in place of the mean.

All floating tensors count, BatchNorm's statistics included: a client could poison those alone.
Axes: N uploads, P entries of all floating tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.averaging import blocks, check_equal_layouts, combined, weighted_average

RULES = ("none", "median", "trimmed-mean", "krum", "multi-krum")


@dataclass(frozen=True, kw_only=True)
class RobustSettings:
    """Settings of a robust average, which a method inherits beside ``TaskMethod``'s.

    It declares no slots of its own, so that a method with slots can have it as a second base.

    Attributes:
        robust: ``none`` (the method's own mean), ``median``, ``trimmed-mean``, ``krum`` or ``multi-krum``. All but
            ``none`` count every upload alike, whatever number of samples it claims.
        hostile_share: share of a round's uploads that may be hostile, below 0.5; rounded up to whole uploads, as long
            as they stay a minority. What ``trimmed-mean`` leaves out at either end, and the number f of Krum.
    """

    __slots__ = ()

    robust: str = "none"
    hostile_share: float = 0.2

    def check_robust(self) -> None:
        """Raise ValueError if a setting is impossible."""
        checks.one_of(RULES, self, "robust")
        checks.within(0.0, 0.5, self, ["hostile_share"])
        if self.hostile_share == 0.5:
            raise ValueError("hostile_share is 0.5, expected less: honest uploads must be the majority")


@dataclass(frozen=True, slots=True)
class RobustAverage:
    """What a rule makes of N uploads.

    Attributes:
        parameters: their average.
        trusted: places of the uploads that the rule trusts, rising: all but the number that may be hostile.
    """

    parameters: Parameters
    trusted: tuple[int, ...]


def robust_average(parameter_sets: Sequence[Parameters], rule: str, hostile_share: float) -> RobustAverage:
    """Return the average of N sets by a rule of ``RULES``, any but ``none``.

    The order of the sets changes no bit unless two have the same score.

    Raises:
        ValueError: The sets disagree on keys, shapes or dtypes, or there are none.
    """
    check_equal_layouts(parameter_sets)
    num_sets = len(parameter_sets)
    num_hostile = tolerated(num_sets, hostile_share)
    if rule in {"krum", "multi-krum"}:
        order = krum_order(parameter_sets, num_hostile)
        trusted = tuple(sorted(order[: num_sets - num_hostile]))
        chosen = trusted if rule == "multi-krum" else order[:1]
        evenly = torch.full((len(chosen),), 1 / len(chosen), dtype=torch.float64)
        return RobustAverage(weighted_average([parameter_sets[place] for place in chosen], evenly), trusted)
    cut = num_hostile if rule == "trimmed-mean" else (num_sets - 1) // 2
    average = trimmed_mean(parameter_sets, cut)
    nearest: list[int] = squared_distances(parameter_sets, [average])[:, 0].sort(stable=True).indices.tolist()
    return RobustAverage(average, tuple(sorted(nearest[: num_sets - num_hostile])))


def tolerated(num_uploads: int, share: float) -> int:
    """Return how many of the uploads may be hostile: ``share`` of them, rounded up, but a minority."""
    return min(math.ceil(share * num_uploads - 1e-9), (num_uploads - 1) // 2)


def trimmed_mean(parameter_sets: Sequence[Parameters], cut: int) -> dict[str, Tensor]:
    """Return the mean of every coordinate without its ``cut`` smallest and ``cut`` largest values.

    Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", Definition 2; with
    ``cut = (N - 1) // 2`` it is the coordinate-wise median (Definition 1). An entry never leaves the range of any
    N - cut of its values, so ``cut`` uploads can't move it beyond what the others say.

    Args:
        parameter_sets: N sets with equal layouts.
        cut: fewer than half of N.

    Returns:
        New tensors; of integer buffers the lower one of those in the middle.
    """
    if not 0 <= 2 * cut < len(parameter_sets):
        raise ValueError(f"cut is {cut}, expected 0 or more and less than half of {len(parameter_sets)} sets")

    def middle(name: str) -> Tensor:
        values = torch.stack([parameters[name] for parameters in parameter_sets])
        return values.sort(dim=0).values[(len(values) - 1) // 2]

    return combined(parameter_sets, lambda tensors: _trimmed(tensors, cut), middle)


def _trimmed(tensors: Sequence[Tensor], cut: int) -> Tensor:
    example = tensors[0]
    result = torch.empty(example.shape, dtype=example.dtype, device=example.device)
    for start, end in blocks(example, len(tensors)):
        values = torch.stack([tensor[start:end] for tensor in tensors]).sort(dim=0).values[cut : len(tensors) - cut]
        result[start:end] = values.to(torch.float64).mean(dim=0)
    return result


def krum_order(parameter_sets: Sequence[Parameters], num_hostile: int) -> list[int]:
    """Return the places of N sets by Krum's score, the best first; of equal ones the first first.

    Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", section 4: the
    score of a set is the sum of its squared distances to the N - f - 2 nearest others. Their Proposition 4.2 holds from
    N = 2 f + 3 on. Here a set has at least one neighbour, so that smaller rounds are judged too, without that promise.

    Args:
        parameter_sets: N sets with equal layouts.
        num_hostile: f.
    """
    num_neighbours = max(1, len(parameter_sets) - num_hostile - 2)
    # the nearest is each set itself, at distance 0
    nearest = squared_distances(parameter_sets, parameter_sets).sort(dim=1).values[:, 1 : 1 + num_neighbours]
    order: list[int] = nearest.sum(dim=1).sort(stable=True).indices.tolist()
    return order


def squared_distances(parameter_sets: Sequence[Parameters], others: Sequence[Parameters]) -> Tensor:
    """Return squared Euclidean distances over all floating tensors, summed block by block.

    Args:
        parameter_sets: N sets.
        others: M sets; all layouts are equal.

    Returns:
        (N, M) float64, on the CPU.
    """
    total = torch.zeros(len(parameter_sets), len(others), dtype=torch.float64)
    for name, example in parameter_sets[0].items():
        if not example.is_floating_point():
            continue
        flat = example.reshape(-1)
        for start, end in blocks(flat, len(parameter_sets)):
            rows, columns = (
                torch.stack([one[name].reshape(-1)[start:end] for one in sets]).to(torch.float64)
                for sets in (parameter_sets, others)
            )
            # no products of huge entries: beside them the honest sets' distances would be lost in rounding
            total += torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist").square().cpu()
    return total
