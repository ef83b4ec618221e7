"""Which samples a rounded format is calibrated with, and which others its gate judges it on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from replayfleet.export.formats import DEFAULT_SAMPLES, DEFAULT_SEED, Format
from replayfleet.export.parameters import read_parameters
from replayfleet.export.parity import eager_run, load_parameters
from replayfleet.export.running.artefact import Array
from replayfleet.export.samples import Source, latents, read_held, read_images, shares, shuffled
from replayfleet.export.subject import Architecture
from replayfleet.federation.errors import SettingsError
from replayfleet.models.build import build_generator
from replayfleet.models.specs import LATENT_SIZE, AnyTaskSpec, TaskSpec

NUM_JUDGED: Mapping[str, int] = {"task": 2000, "sub-generator": 256, "detector": 256, "sampler": 8}
"""Most samples that a gate without labels judges on, by kind: what takes seconds on a small CPU."""

MIN_JUDGED = 50
"""Fewer say nothing of a loss of one point."""

_DRAWN_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a gated format is made and judged.

    Attributes:
        max_loss_points: what it may lose, 0 to 100.
        sources: of samples; none for a sub-generator or sampler, which get latents.
        num_samples: to calibrate with.
        seed: of replay, latents and choice.
        held: file of images and labels for the gate.

    Raises:
        SettingsError: No model could lose so much.
    """

    max_loss_points: float
    sources: tuple[Source, ...] = ()
    num_samples: int = DEFAULT_SAMPLES
    seed: int = DEFAULT_SEED
    held: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_loss_points <= 100:
            raise SettingsError(f"--max-loss: {self.max_loss_points} points, expected 0 to 100")


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Samples for one export.

    Attributes:
        calibrating: (N, ...) inputs that ranges are measured on; none for a format without ranges.
        judging: (M, ...) other inputs, for gate and parity.
        labels: of the judging ones, if there are any.
        facts: metadata that says what the model was calibrated with.
    """

    calibrating: Array
    judging: Array
    labels: Array | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


def gather_samples(
    architecture: Architecture, row: Format, input_shape: tuple[int, ...], rounding: Rounding
) -> SampleSet:
    """Return the samples for one export. Equal arguments and files give equal samples.

    Raises:
        SettingsError: There are too few, or a file can't be used.
        ArtefactRejected: A sub-generator's parameters don't fit.
    """
    num_judged = NUM_JUDGED[architecture.kind]
    num_calibrating = rounding.num_samples if row.calibrated else 0
    spec = architecture.spec
    if architecture.kind in {"sub-generator", "sampler"}:
        pool = latents(input_shape, num_calibrating + num_judged, rounding.seed)
        return _split(pool, num_calibrating, rounding, None, None)
    if rounding.held is None and not rounding.sources:
        raise SettingsError(
            f"--format: {row.name} is judged before it is written; give --held FILE (images and labels) or "
            "--calibration (images, or sub-generators to draw replay from)"
        )
    if row.calibrated and not rounding.sources:
        raise SettingsError(
            f"--calibration: {row.name} needs samples to measure ranges on, other ones than --held; give a file of "
            "images, or CLASS=FILE for sub-generators to draw replay from"
        )
    if rounding.held is not None and rounding.sources and not row.calibrated:
        raise SettingsError(f"--calibration: {row.name} has no ranges to measure, and --held judges it; leave it out")
    held = read_held(rounding.held, spec) if rounding.held is not None else None
    if held is not None and len(held.images) < MIN_JUDGED:
        raise SettingsError(
            f"--held: {len(held.images)} images; at least {MIN_JUDGED} are needed to tell a loss of accuracy"
        )
    if held is not None and not row.calibrated:
        return SampleSet(held.images[:0], held.images, held.labels)
    # As many whether there is held data or not: how a model is judged mustn't change it.
    pool = _pool(spec, rounding, num_calibrating + num_judged)
    if held is not None:
        return _split(pool, num_calibrating, rounding, held.images, held.labels)
    if len(pool) < num_calibrating + MIN_JUDGED:
        raise SettingsError(
            f"--calibration: gives {len(pool)} images; {num_calibrating} calibrate and at least {MIN_JUDGED} others "
            "are needed for the gate; give more, or lower --samples, or give --held"
        )
    return _split(pool[: num_calibrating + num_judged], num_calibrating, rounding, None, None)


def _split(
    pool: Array, num_calibrating: int, rounding: Rounding, judging: Array | None, labels: Array | None
) -> SampleSet:
    calibrating = pool[:num_calibrating]
    if len(calibrating) < num_calibrating:
        raise SettingsError(
            f"--calibration: gives {len(calibrating)} images, {num_calibrating} are to calibrate with; give more, or "
            "lower --samples"
        )
    facts = {}
    if num_calibrating:
        digest = hashlib.sha256(np.ascontiguousarray(calibrating).tobytes()).hexdigest()
        facts["calibration"] = f"{num_calibrating} samples, seed {rounding.seed}, sha256 {digest}"
    return SampleSet(calibrating, pool[num_calibrating:] if judging is None else judging, labels, facts)


def _pool(spec: AnyTaskSpec, rounding: Rounding, wanted: int) -> Array:
    """Return images of the files, and as much replay as is wanted from the sub-generators, mixed."""
    images = [read_images(source.path, spec) for source in rounding.sources if not source.class_name]
    drawing = [source for source in rounding.sources if source.class_name]
    if isinstance(spec, TaskSpec):
        counts = shares(wanted, len(drawing)) if drawing else ()
        for index, (source, count) in enumerate(zip(drawing, counts, strict=True)):
            images.append(_replay(spec, source, count, rounding.seed + index))
    return shuffled(np.concatenate(images), rounding.seed)


def _replay(spec: TaskSpec, source: Source, count: int, seed: int) -> Array:
    """Return (count, C, H, W) drawn by a sub-generator, whose width its parameters tell."""
    parameters = read_parameters(source.path)
    first = parameters.get("layers.0.weight")
    if first is None or first.ndim != 4 or first.shape[0] != LATENT_SIZE or first.shape[1] % 4:
        raise SettingsError(f"{source.path}: holds no sub-generator of {'x'.join(map(str, spec.image_shape))} images")
    try:
        width = TaskSpec(spec.image_channels, spec.image_size, spec.class_names, generator_width=first.shape[1] // 4)
    except ValueError as error:
        raise SettingsError(f"{source.path}: {error}") from error
    module = build_generator(width)
    load_parameters(module, parameters)
    draw = eager_run(module)
    points = latents((LATENT_SIZE,), count, seed)
    parts = [draw(points[start : start + _DRAWN_AT_A_TIME]) for start in range(0, count, _DRAWN_AT_A_TIME)]
    return np.concatenate(parts) if parts else np.empty((0, *spec.image_shape), np.float32)
