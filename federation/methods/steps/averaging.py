"""Weighted means of parameter sets, the server step of federated averaging, and weights that sum to 1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.records import Parameters

_SMALL = 1 << 12
"""Elements up to which tensors are summed side by side: of a ResNet's tensors most are BatchNorm's, and tiny."""

_BLOCK = 1 << 18
"""Elements that are summed over all sets before the next ones, so that their float64 sum stays in a core's cache."""


def weighted_average(parameter_sets: Sequence[Parameters], weights: Tensor) -> dict[str, Tensor]:
    """Return ``sum_i weights[i] * parameter_sets[i]``, key by key.

    The server step of FedAvg (McMahan et al. 2017, Algorithm 1). Sums run in float64 in the order given,
    so equal inputs give equal bits; callers sort clients by id.

    Args:
        parameter_sets: N sets with equal keys, shapes and dtypes.
        weights: (N,) non-negative, summing to 1.

    Returns:
        New tensors. Integer buffers (BatchNorm's ``num_batches_tracked``) can't be averaged and
        are copied from the set with the largest weight, the first one of equals.

    Raises:
        ValueError: The sets disagree on keys, shapes or dtypes, or the weights are not a distribution.
    """
    check_equal_layouts(parameter_sets)
    check_distribution(weights, len(parameter_sets))
    heaviest = parameter_sets[int(torch.argmax(weights))]
    shares: list[float] = weights.tolist()
    return combined(parameter_sets, lambda tensors: _weighted_sum(tensors, shares), lambda name: heaviest[name].clone())


def combined(
    parameter_sets: Sequence[Parameters],
    combine: Callable[[Sequence[Tensor]], Tensor],
    integers: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """Return one set made of N with equal layouts, entry by entry.

    Args:
        parameter_sets: the N sets.
        combine: N floating tensors of one shape with at least one axis -> a new one; each entry from its own N alone.
        integers: name of an integer buffer -> its value.
    """
    first = parameter_sets[0]
    made: dict[str, Tensor] = {}
    side_by_side: defaultdict[tuple[torch.dtype, torch.device], list[str]] = defaultdict(list)
    for name, example in first.items():
        if not example.is_floating_point():
            made[name] = integers(name)
        elif example.numel() <= _SMALL:
            side_by_side[example.dtype, example.device].append(name)
        else:
            made[name] = combine([parameters[name] for parameters in parameter_sets])
    for names in side_by_side.values():
        joined = combine([_joined(parameters, names) for parameters in parameter_sets])
        pieces = joined.split([first[name].numel() for name in names])
        made |= {name: piece.clone().view(first[name].shape) for name, piece in zip(names, pieces, strict=True)}
    return {name: made[name] for name in first}


def _joined(parameters: Parameters, names: Sequence[str]) -> Tensor:
    tensors = (parameters[name] for name in names)
    return torch.cat([tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors])


def _weighted_sum(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the sum in the tensors' dtype: element by element in float64 and in the order given, block by block."""
    example = tensors[0]
    total = torch.zeros(example.shape, dtype=torch.float64, device=example.device)
    buffer: Tensor | None = None
    for start, end in blocks(example):
        block = total[start:end]
        buffer = torch.empty_like(block) if buffer is None else buffer  # the first block is the largest
        widened = buffer[: len(block)]
        for share, tensor in zip(shares, tensors, strict=True):
            block.add_(widened.copy_(tensor[start:end]), alpha=share)
    return total.to(example.dtype)


def blocks(tensor: Tensor, copies: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (start, end) along the first axis: ``copies`` blocks of entries in float64 stay in a core's cache."""
    rows = max(1, _BLOCK * len(tensor) // max(1, tensor.numel()) // copies)
    for start in range(0, len(tensor), rows):
        yield start, min(start + rows, len(tensor))


def check_distribution(weights: Tensor, num_sets: int) -> None:
    """Raise ValueError unless ``weights`` is (num_sets,), non-negative and sums to 1 within 1e-5; NaN fails too."""
    if tuple(weights.shape) != (num_sets,):
        raise ValueError(f"weights have shape {tuple(weights.shape)}, expected ({num_sets},)")
    total = float(weights.to(torch.float64).sum())
    if not (abs(total - 1.0) <= 1e-5 and bool((weights >= 0).all())):
        raise ValueError(
            f"weights must be non-negative and sum to 1, got sum {total} and minimum {float(weights.min())}"
        )


def check_equal_layouts(parameter_sets: Sequence[Parameters]) -> None:
    """Raise ValueError unless there is at least one set and all have the first one's keys, shapes and dtypes."""
    if not parameter_sets:
        raise ValueError("nothing to average: no parameter sets")
    first = {name: (tensor.shape, tensor.dtype) for name, tensor in parameter_sets[0].items()}
    for index, parameters in enumerate(parameter_sets[1:], start=1):
        if parameters.keys() != first.keys():
            odd = sorted(parameters.keys() ^ first.keys())
            raise ValueError(f"parameter set {index} differs from set 0 in keys: {', '.join(odd[:4])}")
        for name, tensor in parameters.items():
            if (tensor.shape, tensor.dtype) != first[name]:
                shape, dtype = first[name]
                raise ValueError(
                    f"{name} of parameter set {index} is {tuple(tensor.shape)} {tensor.dtype}, "
                    f"expected {tuple(shape)} {dtype}"
                )


def project_to_simplex(points: Tensor) -> Tensor:
    """Return the nearest points (Euclidean) with non-negative entries that sum to 1, row by row.

    Duchi et al. 2008, "Efficient Projections onto the l1-Ball", Algorithm 1: sort, find the threshold, clip.

    Moving a point along (1, ..., 1) doesn't move its projection, so each is first moved to a largest entry of 0: beside
    entries of 1e10 the 1 that they must sum to would be lost in rounding.

    Args:
        points: (..., N), finite.
    """
    points = points - points.amax(dim=-1, keepdim=True)
    ordered, _ = points.sort(dim=-1, descending=True)
    excess = ordered.cumsum(dim=-1) - 1
    ranks = torch.arange(1, points.shape[-1] + 1, device=points.device, dtype=points.dtype)
    support = (ordered - excess / ranks > 0).sum(dim=-1, keepdim=True)
    threshold = excess.gather(-1, support - 1) / support.to(points.dtype)
    return (points - threshold).clamp_min(0)
