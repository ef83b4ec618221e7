"""What a rounded format costs, in points; a model that loses more than it may is never written.

With labels the loss is what accuracy falls by, and may be negative. Without, the eager model's own answers take the
labels' place: its accuracy is then 100 by definition, and the loss is how often the two disagree. Drawn images have no
classes; there the loss is the mean difference of pixels in hundredths of their range.

Axes: N samples, K classes, B batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replayfleet.export.running.artefact import Array, Run
from replayfleet.export.running.detections import Detections, detections, num_found
from replayfleet.federation.errors import ArtefactRejected, Reason, SettingsError
from replayfleet.models.specs import AnyTaskSpec, DetectionRules, DetectionSpec

_PIXELS_PER_BATCH = 2**18
"""Bounds memory, whatever the size of the pictures."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found.

    Attributes:
        measure: what was measured and on what.
        reference: share of right answers of the eager model, 0 to 1.
        candidate: of the export.
        limit_points: how many points it may lose.
    """

    measure: str
    reference: float
    candidate: float
    limit_points: float

    @property
    def loss_points(self) -> float:
        """Points lost; 1 is a hundredth."""
        return 100 * (self.reference - self.candidate)


class GateError(ArtefactRejected):
    """An export lost more than it may; nothing was written.

    Attributes:
        verdict: what was found.
    """

    def __init__(self, name: str, verdict: Verdict) -> None:
        super().__init__(
            Reason.PROBE_MISMATCH,
            f"{name} loses {verdict.loss_points:.2f} points of {verdict.measure} ({100 * verdict.reference:.2f} to "
            f"{100 * verdict.candidate:.2f}), at most {verdict.limit_points:g} are accepted; nothing was written, give "
            "other calibration samples, another format, or --max-loss",
        )
        self.verdict = verdict


def check_gate(name: str, verdict: Verdict) -> Verdict:
    """Return the verdict if the loss is within its limit.

    Raises:
        GateError: It isn't, or is NaN.
    """
    if not verdict.loss_points <= verdict.limit_points + 1e-9:
        raise GateError(name, verdict)
    return verdict


def compare_on_labels(
    spec: AnyTaskSpec, images: Array, labels: Array, reference: Run, candidate: Run, limit_points: float
) -> Verdict:
    """Return what the candidate loses on held data.

    Args:
        spec: of the task.
        images: (N, C, H, W).
        labels: (N,) class ids, or (N, M, 5) boxes.
        reference: the eager model.
        candidate: the export.
        limit_points: how many points it may lose.

    Raises:
        SettingsError: A detector's held data has no box at all, or the model has nothing right that could be lost.
    """
    if isinstance(spec, DetectionSpec):
        truth = [_labelled(rows) for rows in labels]
        if not any(len(boxes) for boxes in truth):
            raise SettingsError("--held: there is no box in the labels; nothing can be measured with it")
        measure = f"F1 of boxes on {len(images):,} held pictures"
        exact, rounded = (_box_agreement(truth, _found(spec, run, images)) for run in (reference, candidate))
    else:
        measure = f"accuracy on {len(images):,} held samples"
        answers = (_answers(run, images).argmax(axis=1) for run in (reference, candidate))
        exact, rounded = (float((answer == labels).mean()) for answer in answers)
    if exact == 0:
        raise SettingsError(f"--held: the model itself has {measure} of 0, so nothing can be lost; give what it knows")
    return Verdict(measure, exact, rounded, limit_points)


def compare_answers(
    spec: AnyTaskSpec, images: Array, reference: Run, candidate: Run, limit_points: float, *, drawn: bool
) -> Verdict:
    """Return how far the candidate's answers are from the eager model's, whose own count as right.

    Args:
        spec: of the task.
        images: (N, ...) inputs.
        reference: the eager model.
        candidate: the export.
        limit_points: how many points it may lose.
        drawn: the answers are images in [-1, 1], and the inputs latents or noise.

    Raises:
        SettingsError: A detector finds nothing in these pictures.
    """
    if isinstance(spec, DetectionSpec):
        truth = _found(spec, reference, images)
        if not any(len(boxes) for boxes in truth):
            raise SettingsError(
                f"--calibration: the detector finds no box in the {len(images)} pictures of its gate; give pictures "
                "with things in them, or --held"
            )
        share = _box_agreement(truth, _found(spec, candidate, images))
        return Verdict(f"agreement on boxes of {len(images):,} pictures", 1.0, share, limit_points)
    expected, found = _answers(reference, images), _answers(candidate, images)
    if drawn:
        share = 1 - float(np.abs(found.astype(np.float64) - expected).mean()) / 2
        return Verdict(f"agreement on pixels of {len(images):,} drawn images", 1.0, share, limit_points)
    share = float((found.argmax(axis=1) == expected.argmax(axis=1)).mean())
    return Verdict(f"agreement on {len(images):,} samples", 1.0, share, limit_points)


def _answers(run: Run, images: Array) -> Array:
    """Return (N, ...) all answers; raises as ``_batches`` does."""
    return np.concatenate(list(_batches(run, images)))


def _batches(run: Run, images: Array) -> Iterator[Array]:
    """Yield the answers, (B, ...) some at a time.

    Raises:
        ArtefactRejected: (not-finite) One of them is NaN or infinity.
    """
    size = max(1, min(256, _PIXELS_PER_BATCH // images[0].size))
    for first in range(0, len(images), size):
        answers = run(images[first : first + size])
        if not np.isfinite(answers).all():
            raise ArtefactRejected(Reason.NOT_FINITE, "the model answers with NaN or infinity; nothing was written")
        yield answers


def _found(spec: DetectionSpec, run: Run, images: Array) -> list[Detections]:
    # Of a detector what it finds is small, and what it answers larger than the pictures: so no two batches at once.
    return [found for answers in _batches(run, images) for found in detections(spec, answers, DetectionRules())]


def _labelled(rows: NDArray[np.float32]) -> Detections:
    """Return the boxes of a label (M, 5) as if a detector had found them."""
    boxes = rows[rows[:, 0] >= 0]
    halves = boxes[:, 3:] / 2
    corners = np.concatenate([boxes[:, 1:3] - halves, boxes[:, 1:3] + halves], axis=1)
    return Detections(corners, np.ones(len(boxes), np.float32), boxes[:, 0].astype(np.int64))


def _box_agreement(truth: list[Detections], found: list[Detections]) -> float:
    """Return F1: twice the boxes that are in both, over the boxes in either."""
    matched = sum(
        num_found(ours.corners, ours.class_ids, theirs.corners, theirs.class_ids)
        for theirs, ours in zip(truth, found, strict=True)
    )
    total = sum(len(boxes) for boxes in truth) + sum(len(boxes) for boxes in found)
    return 2 * matched / total
