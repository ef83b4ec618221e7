"""Compares an exported model with the eager one; an export that differs is never written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from replayfleet.export.batches import batches_for
from replayfleet.export.running.artefact import Array, Run, scale
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.wire.protocol.tensors import TORCH_NAMES

TOLERANCE = 1e-4
DETECTOR_TOLERANCE = 1e-3
"""Of a detector's raw outputs: there are thousands, sums over more channels, and they reach tens where logits reach
ones. A score moves by at most a quarter of it."""


class ParityError(ArtefactRejected):
    """An exported model answers differently than the model that it was made from.

    Attributes:
        worst: the largest absolute difference found, or NaN.
    """

    def __init__(self, name: str, batch_size: int, worst: float, tolerance: float) -> None:
        super().__init__(
            Reason.PROBE_MISMATCH,
            f"{name} differs from the eager model by {worst:.3g} at batch {batch_size}, at most {tolerance:g} is "
            "accepted; nothing was written",
        )
        self.worst = worst


@dataclass(frozen=True, slots=True)
class Parity:
    """How far an export is off the eager model.

    Attributes:
        worst: largest absolute difference.
        batches: sizes that were compared.
        tolerance: largest difference accepted, per unit of the answers' ``scale``.
        spread: standard deviation of the eager model's answers, where the tolerance is a multiple of it, else None.
    """

    worst: float
    batches: tuple[int, ...]
    tolerance: float
    spread: float | None = None


def eager_run(module: nn.Module) -> Run:
    """Return a function that runs ``module``, set to eval mode, on arrays."""
    module.eval()

    def run(x: Array) -> Array:
        with torch.inference_mode():
            result: Array = module(torch.from_numpy(x)).numpy()
            return result

    return run


def check_parity(
    name: str,
    candidate: Run,
    reference: Run,
    input_shape: tuple[int, ...],
    *,
    batches: Sequence[int] | None = None,
    tolerance: float = TOLERANCE,
) -> float:
    """Return the worst absolute difference over standard normal inputs of every batch size, ``batches_for`` if None.

    Raises:
        ParityError: It is larger than ``tolerance`` times the answers' ``scale``, or NaN, or the shapes differ.
    """
    overall = 0.0
    for batch_size in batches or batches_for(input_shape):
        x = np.random.default_rng(batch_size).standard_normal((batch_size, *input_shape), dtype=np.float32)
        expected, found = reference(x), candidate(x)
        worst = float(np.abs(found - expected).max()) if found.shape == expected.shape else float("inf")
        accepted = tolerance * scale(expected)
        if not worst <= accepted < float("inf"):  # of a model that answers with infinity anything would do
            raise ParityError(name, batch_size, worst, accepted)
        overall = max(overall, worst)
    return overall


def check_rounding(name: str, candidate: Run, reference: Run, batches: Sequence[Array], max_spreads: float) -> Parity:
    """Return how far a float16 or INT8 export is off, on inputs as it will meet them.

    Noise would say little: ranges are measured on real inputs, and beyond them answers are clipped.

    Args:
        name: of the format.
        candidate: the export.
        reference: the eager model.
        batches: (B, ...) inputs, for each batch size.
        max_spreads: largest difference accepted, in standard deviations of the eager model's answers.

    Raises:
        ParityError: It is larger, or NaN, or the shapes differ.
    """
    expected = [reference(x) for x in batches]
    spread = float(np.concatenate([answers.ravel() for answers in expected]).astype(np.float64).std())
    tolerance, overall = max_spreads * spread, 0.0
    for x, answers in zip(batches, expected, strict=True):
        found = candidate(x)
        worst = float(np.abs(found - answers).max()) if found.shape == answers.shape else float("inf")
        if not worst <= tolerance:
            raise ParityError(name, len(x), worst, tolerance)
        overall = max(overall, worst)
    return Parity(overall, tuple(len(x) for x in batches), tolerance, spread)


def load_parameters(module: nn.Module, parameters: Mapping[str, Array]) -> None:
    """Fill ``module`` with ``parameters``: exactly its state dict, shapes and dtypes included.

    Raises:
        ArtefactRejected: (wrong-layout, not-finite) Says which entry and what was expected.
    """
    layout = module.state_dict()
    for name in sorted(layout.keys() ^ parameters.keys()):
        found = "is missing" if name in layout else "has no place in the model"
        raise ArtefactRejected(Reason.WRONG_LAYOUT, f"parameter {name!r} {found}")
    for name, tensor in layout.items():
        array = parameters[name]
        if array.shape != tensor.shape or TORCH_NAMES.get(array.dtype) != str(tensor.dtype):
            raise ArtefactRejected(
                Reason.WRONG_LAYOUT,
                f"parameter {name!r} is {array.shape} {array.dtype}, the model needs {tuple(tensor.shape)} "
                f"{str(tensor.dtype).removeprefix('torch.')}",
            )
        if not np.isfinite(array).all():
            raise ArtefactRejected(Reason.NOT_FINITE, f"parameter {name!r} holds NaN or infinity")
    for name, tensor in layout.items():  # a tensor of the state dict is the module's own
        tensor.numpy()[...] = parameters[name]
