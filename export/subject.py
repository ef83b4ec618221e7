"""What is exported: an architecture filled with parameters, as the eager model and as one float32 ONNX file."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
from safetensors.numpy import save as format_safetensors
from torch import nn

from replayfleet.export.batches import batches_for
from replayfleet.export.graphs.graph import sub_generator_graph, task_graph
from replayfleet.export.graphs.join import join
from replayfleet.export.graphs.sampler_graph import Convert, TimedNetwork, eager_sampler, sampler_model, timed_network
from replayfleet.export.parity import DETECTOR_TOLERANCE, TOLERANCE, eager_run, load_parameters
from replayfleet.export.running.artefact import Array, Run
from replayfleet.export.running.facts import sampler_facts, sub_generator_facts, task_facts
from replayfleet.models.build import build_generator, build_task_model
from replayfleet.models.counting import count_parameters
from replayfleet.models.ddpm import build_denoiser
from replayfleet.models.specs import LATENT_SIZE, AnyTaskSpec, TaskSpec

SAMPLER_TOLERANCE = 1e-3
"""Of a sampler's images: every step carries on the rounding of those before it."""

SAMPLER_BATCHES = (1, 2, 5)
"""A sampler runs its network once for every step, so 64 images would take minutes."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Which network the parameters belong to.

    Attributes:
        kind: one of ``export.formats.KINDS``.
        spec: the task; a sub-generator's and a sampler's give the image shape.
        width: of a sampler's denoiser.
        num_steps: of a sampler.
    """

    kind: str
    spec: AnyTaskSpec
    width: int = 0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """An architecture with its parameters.

    Attributes:
        module: in eval mode; a sampler's denoiser.
        eager: the model as PyTorch runs it; every export is compared with it.
        input_shape: of one input.
        batches: sizes that an export is compared at.
        tolerance: absolute difference that a float32 export may have.
        graph: makes the ONNX graph with the parameters left open, as a fleet sends it; a sampler has none.
        whole: makes the self-contained ONNX model, its network rounded by what it is given.
        facts: metadata.
    """

    module: nn.Module
    eager: Run
    input_shape: tuple[int, ...]
    batches: tuple[int, ...]
    tolerance: float
    graph: Callable[[], bytes]
    whole: Callable[[Convert], onnx.ModelProto]
    facts: Mapping[str, str]

    @property
    def num_parameters(self) -> int:
        """Trainable scalars."""
        return count_parameters(self.module)


def build_subject(architecture: Architecture, parameters: Mapping[str, Array]) -> Subject:
    """Return the architecture filled with the parameters.

    Raises:
        ArtefactRejected: (wrong-layout, not-finite) They don't fit.
        SettingsError: A sampler needs an extra that isn't installed.
    """
    spec = architecture.spec
    if architecture.kind == "sampler":
        return _sampler(architecture, parameters)
    module: nn.Module
    if architecture.kind == "sub-generator" and isinstance(spec, TaskSpec):
        drawing = spec
        module, facts = build_generator(drawing), sub_generator_facts(drawing)
        input_shape: tuple[int, ...] = (LATENT_SIZE,)
        tolerance = TOLERANCE

        def graph() -> bytes:
            return sub_generator_graph(drawing)
    else:
        module, facts, input_shape = build_task_model(spec), task_facts(spec), spec.image_shape
        tolerance = TOLERANCE if isinstance(spec, TaskSpec) else DETECTOR_TOLERANCE

        def graph() -> bytes:
            return task_graph(spec)

    def whole(convert: Convert) -> onnx.ModelProto:
        return convert(onnx.load_from_string(join(graph(), parameters)))

    load_parameters(module, parameters)
    facts = {**facts, "parameters_sha256": parameters_digest(parameters)}
    return Subject(module, eager_run(module), input_shape, batches_for(input_shape), tolerance, graph, whole, facts)


def parameters_digest(parameters: Mapping[str, Array]) -> str:
    """Return the sha256 of the parameters as a safetensors file that says nothing of them."""
    return hashlib.sha256(format_safetensors(dict(parameters))).hexdigest()


def _sampler(architecture: Architecture, parameters: Mapping[str, Array]) -> Subject:
    spec = architecture.spec
    if not isinstance(spec, TaskSpec):
        raise TypeError(f"a sampler draws the images of a TaskSpec, got {type(spec).__name__}")
    module = build_denoiser(spec, architecture.width)
    load_parameters(module, parameters)
    facts = {
        **sampler_facts(spec, architecture.width, architecture.num_steps),
        "parameters_sha256": parameters_digest(parameters),
    }

    @functools.cache
    def network() -> TimedNetwork:
        return timed_network(module, spec.image_shape, architecture.num_steps)

    def graph() -> bytes:
        raise TypeError("a sampler's parameters can't be left open")

    def whole(convert: Convert) -> onnx.ModelProto:
        return sampler_model(network(), spec.image_shape, convert)

    eager = eager_sampler(module, architecture.num_steps)
    return Subject(module, eager, spec.image_shape, SAMPLER_BATCHES, SAMPLER_TOLERANCE, graph, whole, facts)
