"""The golden vector that travels with every served model: made where it was exported, checked before it is served.

Needs numpy only, as a device that serves has neither torch nor onnx.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from federation.errors import ArtefactRejected, Reason
from federation.protocol.messages import Probe

Array: TypeAlias = npt.NDArray[Any]
Run: TypeAlias = Callable[[Array], Array]
"""(B, ...) float32 -> (B, ...) float32: a model, however it is run."""

PROBE_BATCH = 8
PROBE_TOLERANCE = 1e-3
"""Ten times the export's parity: another provider rounds in another order, another model is off by far more."""
MAX_PROBE_BATCH = 256
"""A manifest that asks for more is refused, for the device would pay for it in memory."""


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
    """Return the golden vector of a task model.

    Raises:
        ArtefactRejected: (not-finite) The model answers with NaN or infinity; it must not be published.
    """
    logits = run(probe_input(seed, batch_size, image_shape))
    if not np.isfinite(logits).all():
        raise ArtefactRejected(Reason.NOT_FINITE, "the model's own golden vector is not finite; it is not published")
    return Probe(seed, batch_size, tuple(float(logit) for logit in logits.ravel()), tolerance)


def check_probe(run: Run, probe: Probe, image_shape: tuple[int, ...], num_classes: int) -> float:
    """Return the worst absolute difference between what the model answers and what the manifest promises.

    Raises:
        ArtefactRejected: (probe-mismatch) It is larger than the probe's tolerance, or NaN, or the probe can't be run.
    """
    if not 1 <= probe.batch_size <= MAX_PROBE_BATCH or not 0 <= probe.seed < 2**63:
        raise _mismatch(f"the golden vector has batch {probe.batch_size} and seed {probe.seed}, both out of range")
    if len(probe.logits) != probe.batch_size * num_classes:
        raise _mismatch(
            f"the golden vector has {len(probe.logits)} logits, expected {probe.batch_size} x {num_classes}"
        )
    logits = run(probe_input(probe.seed, probe.batch_size, image_shape))
    if logits.shape != (probe.batch_size, num_classes):
        raise _mismatch(f"the model answers with {logits.shape}, expected ({probe.batch_size}, {num_classes})")
    expected = np.array(probe.logits, dtype=np.float64).reshape(logits.shape)
    worst = float(np.abs(logits.astype(np.float64) - expected).max())
    if not worst <= probe.tolerance:
        raise _mismatch(f"logits are off the golden vector by {worst:.3g}, at most {probe.tolerance:g} is accepted")
    return worst


def _mismatch(detail: str) -> ArtefactRejected:
    return ArtefactRejected(Reason.PROBE_MISMATCH, f"{detail}; the model in use stays")
