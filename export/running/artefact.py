"""The golden vector that travels with every served model: made where it was exported, checked before it is served.

Needs numpy only, as a device that serves has neither torch nor onnx.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.wire.protocol.messages import Probe

Array: TypeAlias = npt.NDArray[Any]
Run: TypeAlias = Callable[[Array], Array]
"""(B, ...) float32 -> (B, ...) float32: a model, however it is run."""

PROBE_SEED = 0
"""Of the golden vectors that the aggregator and a device make."""
PROBE_BATCH = 8
PICTURE_PROBE_BATCH = 2
"""Of a detector's golden vector: pictures are large, and the device runs them all at once."""
PROBE_TOLERANCE = 1e-3
"""Ten times the export's parity: another provider rounds in another order, another model is off by far more."""
DETECTOR_PROBE_TOLERANCE = 1e-2
"""Likewise of a detector's raw outputs."""
USUAL_ANSWER = 10.0
"""Up to this size of answers tolerances hold as they are."""
MAX_PROBE_BATCH = 256
"""A manifest that asks for more is refused, for the device would pay for it in memory."""
PROBED_ENTRIES = 256
"""Of a detector's raw outputs for one picture, which are too many for a manifest: evenly spaced from first to last."""


def probe_input(seed: int, batch_size: int, image_shape: tuple[int, ...]) -> Array:
    """Return the input that ``seed`` stands for: (batch_size, *image_shape) float32 in [-1, 1)."""
    return np.random.default_rng(seed).uniform(-1, 1, (batch_size, *image_shape)).astype(np.float32)


def make_probe(
    run: Run,
    image_shape: tuple[int, ...],
    *,
    seed: int,
    batch_size: int = PROBE_BATCH,
    tolerance: float = PROBE_TOLERANCE,
) -> Probe:
    """Return the golden vector of a task model: all logits, or some of a detector's raw outputs.

    Its tolerance is ``tolerance`` times the answers' ``scale``.

    Raises:
        ArtefactRejected: (not-finite) The model answers with NaN or infinity; it must not be published.
    """
    answers = run(probe_input(seed, batch_size, image_shape))
    if not np.isfinite(answers).all():
        raise ArtefactRejected(Reason.NOT_FINITE, "the model's own golden vector is not finite; it is not published")
    accepted = tolerance * scale(answers)
    return Probe(seed, batch_size, tuple(float(entry) for entry in _probed(answers).ravel()), accepted)


def scale(answers: Array) -> float:
    """Return what differences between answers are measured in: a tenth of the largest one's size, or 1 if that is less.

    Rounding is relative: a model that learned to answer in thousands rounds a hundred times as much as one that answers
    in tens, and tells classes apart no less.
    """
    return max(1.0, float(np.abs(answers).max(initial=0.0)) / USUAL_ANSWER)


def check_probe(run: Run, probe: Probe, image_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> float:
    """Return the worst absolute difference between what the model answers and what the manifest promises.

    Args:
        run: the model.
        probe: from the manifest.
        image_shape: of one input, as the fleet's task has it.
        output_shape: of one answer, likewise.

    Raises:
        ArtefactRejected: (probe-mismatch) It is larger than the probe's tolerance, or NaN, or the probe can't be run.
    """
    if not 1 <= probe.batch_size <= MAX_PROBE_BATCH or not 0 <= probe.seed < 2**63:
        raise _mismatch(f"the golden vector has batch {probe.batch_size} and seed {probe.seed}, both out of range")
    entries = len(_places(output_shape))
    if len(probe.logits) != probe.batch_size * entries:
        raise _mismatch(f"the golden vector has {len(probe.logits)} entries, expected {probe.batch_size} x {entries}")
    answers = run(probe_input(probe.seed, probe.batch_size, image_shape))
    if answers.shape != (probe.batch_size, *output_shape):
        raise _mismatch(f"the model answers with {answers.shape}, expected {(probe.batch_size, *output_shape)}")
    expected = np.array(probe.logits, dtype=np.float64).reshape(probe.batch_size, entries)
    worst = float(np.abs(_probed(answers).astype(np.float64) - expected).max())
    if not worst <= probe.tolerance:
        raise _mismatch(f"answers are off the golden vector by {worst:.3g}, at most {probe.tolerance:g} is accepted")
    return worst


def _probed(answers: Array) -> Array:
    """Return (B, n), the entries of answers (B, ...) that a golden vector holds."""
    probed: Array = answers.reshape(len(answers), -1)[:, _places(answers.shape[1:])]
    return probed


def _places(output_shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return which entries of one flattened answer a golden vector holds: every logit, or some raw outputs."""
    size = math.prod(output_shape)
    if len(output_shape) == 1 or size <= PROBED_ENTRIES:
        return np.arange(size)
    return np.linspace(0, size - 1, PROBED_ENTRIES).astype(np.int64)


def _mismatch(detail: str) -> ArtefactRejected:
    return ArtefactRejected(Reason.PROBE_MISMATCH, f"{detail}; the model in use stays")
