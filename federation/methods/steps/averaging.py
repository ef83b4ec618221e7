"""Weighted means of parameter sets, the server step of federated averaging, and weights that sum to 1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.records import OnePiece, Parameters

_SMALL = 1 << 12
"""Elements up to which tensors are summed side by side: of a ResNet's tensors most are BatchNorm's, and tiny."""

_BLOCK = 1 << 18
"""Elements that are summed over all sets before the next ones, so that their float64 sum stays in a core's cache."""

_AT_HAND = 64
"""Sets that are summed before the next ones are looked at: those that lie on a disk are in memory only meanwhile."""


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
    if not parameter_sets:
        raise ValueError("nothing to average: no parameter sets")
    check_distribution(weights, len(parameter_sets))
    heaviest = parameter_sets[int(torch.argmax(weights))]
    shares: list[float] = weights.tolist()
    first = dict(parameter_sets[0])
    in_order = _in_one_piece(parameter_sets)
    groups = _groups(first) if in_order is None else [in_order]
    totals = [torch.zeros_like(_joined(first, names), dtype=torch.float64) for names in groups]
    for start in range(0, len(parameter_sets), _AT_HAND):
        if in_order is not None:
            _add_weighted(totals[0], [_floats(one) for one in parameter_sets[start : start + _AT_HAND]], shares[start:])
            continue
        at_hand = [dict(parameters) for parameters in parameter_sets[start : start + _AT_HAND]]
        check_equal_layouts([first, *at_hand], start - 1)
        for names, total in zip(groups, totals, strict=True):
            _add_weighted(total, [_joined(parameters, names) for parameters in at_hand], shares[start:])
    sums = [total.to(first[names[0]].dtype) for names, total in zip(groups, totals, strict=True)]
    return _separated(first, groups, sums, lambda name: heaviest[name].clone())


def _in_one_piece(parameter_sets: Sequence[Parameters]) -> list[str] | None:
    """Return the names of the floating tensors in their order, if all sets have theirs in one piece, and so alike."""
    first = parameter_sets[0]
    if not (isinstance(first, OnePiece) and first.in_order):
        return None
    alike = all(isinstance(one, OnePiece) and one.in_order is first.in_order for one in parameter_sets)
    return list(first.in_order) if alike else None


def _floats(parameters: Parameters) -> Tensor:
    assert isinstance(parameters, OnePiece)
    return parameters.floats()


def combined(
    parameter_sets: Sequence[Parameters],
    combine: Callable[[Sequence[Tensor]], Tensor],
    integers: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """Return one set made of N with equal layouts, entry by entry.

    Args:
        parameter_sets: the N sets.
        combine: N floating tensors (P,) -> a new one; each entry from its own N alone.
        integers: name of an integer buffer -> its value.
    """
    first = parameter_sets[0]
    groups = _groups(first)
    made = [combine([_joined(parameters, names) for parameters in parameter_sets]) for names in groups]
    return _separated(first, groups, made, integers)


def _groups(first: Parameters) -> list[list[str]]:
    """Return the names of a set's floating tensors: each large one alone, small ones of a kind together."""
    alone, together = [], defaultdict[tuple[torch.dtype, torch.device], list[str]](list)
    for name, example in first.items():
        if example.is_floating_point() and example.numel() > _SMALL:
            alone.append([name])
        elif example.is_floating_point():
            together[example.dtype, example.device].append(name)
    return [*alone, *together.values()]


def _joined(parameters: Parameters, names: Sequence[str]) -> Tensor:
    flat = [parameters[name].reshape(-1) for name in names]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _separated(
    first: Parameters, groups: Sequence[Sequence[str]], joined: Sequence[Tensor], integers: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Return the set whose groups ``joined`` are, with ``first``'s names and shapes in its order."""
    made: dict[str, Tensor] = {}
    for names, whole in zip(groups, joined, strict=True):
        pieces = whole.split([first[name].numel() for name in names])
        for name, piece in zip(names, pieces, strict=True):
            own = piece if len(names) == 1 else piece.clone()  # a view would keep all of its group
            made[name] = own.view(first[name].shape)
    return {name: made[name] if name in made else integers(name) for name in first}


def _add_weighted(total: Tensor, tensors: Sequence[Tensor], shares: Sequence[float]) -> None:
    """Add to a float64 ``total``: element by element and in the order given, block by block."""
    for start, end in blocks(total):
        for share, tensor in zip(shares, tensors, strict=False):
            total[start:end].add_(tensor[start:end], alpha=share)


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


def check_equal_layouts(parameter_sets: Sequence[Parameters], number: int = 0) -> None:
    """Raise ValueError unless there is at least one set and all have the first one's keys, shapes and dtypes.

    Args:
        parameter_sets: the sets.
        number: of the first one, as messages count them.
    """
    if not parameter_sets:
        raise ValueError("nothing to average: no parameter sets")
    first = {name: (tensor.shape, tensor.dtype) for name, tensor in parameter_sets[0].items()}
    for index, parameters in enumerate(parameter_sets[1:], start=number + 1):
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
