"""Weighted means of parameter sets: the server step of federated averaging."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from federation.methods.records import Parameters


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
    average: dict[str, Tensor] = {}
    for name, example in parameter_sets[0].items():
        if not example.is_floating_point():
            average[name] = heaviest[name].clone()
            continue
        total = torch.zeros(example.shape, dtype=torch.float64, device=example.device)
        for weight, parameters in zip(weights.tolist(), parameter_sets, strict=True):
            total.add_(parameters[name].to(torch.float64), alpha=weight)
        average[name] = total.to(example.dtype)
    return average


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
    first = parameter_sets[0]
    for index, parameters in enumerate(parameter_sets[1:], start=1):
        if parameters.keys() != first.keys():
            odd = sorted(parameters.keys() ^ first.keys())
            raise ValueError(f"parameter set {index} differs from set 0 in keys: {', '.join(odd[:4])}")
        for name, tensor in parameters.items():
            expected = first[name]
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise ValueError(
                    f"{name} of parameter set {index} is {tuple(tensor.shape)} {tensor.dtype}, "
                    f"expected {tuple(expected.shape)} {expected.dtype}"
                )
