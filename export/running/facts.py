"""What a served model says about itself, stored in the file next to the network."""

from __future__ import annotations

import json
from collections.abc import Mapping

from replayfleet.models.specs import (
    ARCHITECTURES,
    DETECTORS,
    LATENT_SIZE,
    AnyTaskSpec,
    DetectionSpec,
    GeneratorSpec,
    MixtureSpec,
    TaskSpec,
)

PREFIX = "replayfleet."
"""Every metadata key begins with it."""


def task_facts(spec: AnyTaskSpec) -> dict[str, str]:
    """Return a task model's facts: classes in the order of the logits, input shape, preprocessing.

    A detector's say besides how its raw outputs are to be read.
    """
    shared = {
        "classes": json.dumps(spec.class_names, ensure_ascii=False),
        "input": json.dumps(spec.image_shape),
        "preprocessing": "float32, pixel / 127.5 - 1, channels first, "
        + ("grey" if spec.image_channels == 1 else "RGB"),
    }
    other = {} if spec.architecture in {ARCHITECTURES[0], DETECTORS[0]} else {"architecture": spec.architecture}
    if isinstance(spec, DetectionSpec):
        return {
            "kind": "detector",
            **shared,
            "output": json.dumps(spec.output_shape),
            "anchors": json.dumps(spec.anchors),
            "stride": str(spec.stride),
            **other,
        }
    return {"kind": "task", **shared, "stem": spec.stem, **other}


def sub_generator_facts(spec: GeneratorSpec) -> dict[str, str]:
    """Return a sub-generator's facts; the class that it draws is no part of its architecture."""
    shared = {
        "kind": "sub-generator",
        "input": json.dumps([LATENT_SIZE]),
        "output": json.dumps(spec.image_shape),
        "preprocessing": "float32, standard normal",
    }
    if isinstance(spec, MixtureSpec):
        return {**shared, "components": str(spec.num_components), "dims": str(spec.num_dims)}
    return {**shared, "width": str(spec.generator_width)}


def sampler_facts(spec: TaskSpec, width: int, num_steps: int) -> dict[str, str]:
    """Return the facts of a diffusion model with the steps that draw from it."""
    return {
        "kind": "sampler",
        "input": json.dumps(spec.image_shape),
        "output": json.dumps(spec.image_shape),
        "preprocessing": "float32, standard normal",
        "width": str(width),
        "steps": str(num_steps),
        "solver": "DPM-Solver++ (2M)",
    }


def own_facts(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the facts among a file's metadata, without the prefix."""
    return {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
