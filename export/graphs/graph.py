"""One ONNX graph per architecture, its weights left out; needs torch and onnx.

The exporter's optimiser is off: it folds BatchNorm into other tensors, and then no initializer has the name that the
state dict gives it. ONNX Runtime folds the same when the parameters join the graph.

Graphs are reproducible: equal specs give equal bytes, in any directory and process, so a fleet transfers each once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
import torch
from onnx import TensorProto
from torch import nn

from replayfleet.export.graphs.simplify import (
    broadcast_norms,
    drop_dead_nodes,
    drop_zero_biases,
    leave_batches_open,
    project_latents,
    work_out_constants,
)
from replayfleet.export.running.facts import PREFIX, sub_generator_facts, task_facts
from replayfleet.export.running.inspection import PARAMETERS
from replayfleet.federation.imports import without_collections
from replayfleet.models.build import build_generator, build_task_model
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

OPSET = 20
"""Understood by ONNX Runtime >= 1.17 and TensorRT >= 10."""


def task_graph(spec: AnyTaskSpec) -> bytes:
    """Return the task model's graph, any B. Takes 1 to 3 s once, whatever the classes are called.

    It maps ``images`` (B, C, H, W) to ``logits`` (B, K); a detector's to raw ``outputs`` (B, A * (5 + K), Y, X), which
    ``export.running.detections`` reads.
    """
    network: Any = spec  # what another package adds may read the names
    if spec.architecture in {*ARCHITECTURES, *DETECTORS}:
        network = dataclasses.replace(network, class_names=tuple(f"class {i}" for i in range(spec.num_classes)))
    model = onnx.load_from_string(_task_graph(network))
    return finished(model, task_facts(spec))


def sub_generator_graph(spec: GeneratorSpec) -> bytes:
    """Return a sub-generator's graph: ``latents`` (B, Z) -> ``images`` (B, C, H, W) in [-1, 1], any B.

    It is the same when a fleet learns more classes, and whatever its task model is.
    """
    if isinstance(spec, MixtureSpec):
        return _sub_generator_graph(dataclasses.replace(spec, task=_pictures(spec.task)))
    return _sub_generator_graph(_pictures(spec))


def _pictures(spec: TaskSpec) -> TaskSpec:
    """Return a task of the same pictures and sub-generators; all else is left at its default."""
    return TaskSpec(spec.image_channels, spec.image_size, ("a", "b"), generator_width=spec.generator_width)


@functools.lru_cache(maxsize=32)
def _task_graph(spec: AnyTaskSpec) -> bytes:
    output = "outputs" if isinstance(spec, DetectionSpec) else "logits"
    return export_graph(build_task_model(spec), spec.image_shape, ("images", output), task_facts(spec))


@functools.lru_cache(maxsize=32)
def _sub_generator_graph(spec: GeneratorSpec) -> bytes:
    return export_graph(build_generator(spec), (LATENT_SIZE,), ("latents", "images"), sub_generator_facts(spec))


def export_graph(
    module: nn.Module, input_shape: tuple[int, ...], names: tuple[str, str], facts: Mapping[str, str]
) -> bytes:
    """Return the graph of ``module`` in eval mode, every parameter and buffer left open under its state-dict name.

    Args:
        module: not on the meta device; set to eval mode.
        input_shape: of one sample; the batch axis is dynamic.
        names: of the input and the output.
        facts: metadata to store, each under ``replayfleet.<key>``, with the opset.
    """
    with without_collections(), operators_kept():
        program = torch.onnx.export(
            module.eval(),
            (torch.zeros(2, *input_shape),),  # a batch of 1 would be taken for a constant
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            input_names=[names[0]],
            output_names=[names[1]],
            opset_version=OPSET,
            optimize=False,
            verbose=False,
        )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program, though dynamo=True")
    model = onnx.ModelProto()
    model.CopyFrom(program.model_proto)
    drop_zero_biases(model.graph)
    project_latents(model.graph)
    leave_batches_open(model.graph)
    broadcast_norms(model.graph)
    work_out_constants(model.graph)
    drop_dead_nodes(model.graph)
    for initializer in model.graph.initializer:
        _leave_open(initializer)
    return finished(model, facts)


@contextlib.contextmanager
def operators_kept() -> Iterator[None]:
    """Let the exporter keep its table of operators for the next of our exports: a quarter of what one takes.

    It parses the source of some 500 functions for it. What it exports stays the same to the byte. Where PyTorch has
    moved the table, which is no part of its API, each export makes its own.
    """
    registry, original, kept = _table_of_operators()
    if registry is None:
        yield
        return
    registry.from_torchlib = kept
    try:
        yield
    finally:
        registry.from_torchlib = original


@functools.cache
def _table_of_operators() -> tuple[Any, Any, Any]:
    """Return the exporter's registry, what makes its table, and the same that makes it once; None where it isn't."""
    try:
        registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
        return registry, vars(registry)["from_torchlib"], staticmethod(functools.cache(registry.from_torchlib))
    except (ImportError, AttributeError, KeyError):
        return None, None, None


def finished(model: onnx.ModelProto, facts: Mapping[str, str]) -> bytes:
    """Return the bytes of ``model`` with these facts and the opset as its only metadata, and no trace of who made it.

    Args:
        model: changed in place.
        facts: to store, each under ``replayfleet.<key>``.
    """
    _drop_traces(model)
    for key, value in sorted({**facts, "opset": str(OPSET)}.items()):
        model.metadata_props.add(key=PREFIX + key, value=value)
    return bytes(model.SerializeToString(deterministic=True))


def _leave_open(initializer: TensorProto) -> None:
    for field in ("raw_data", "float_data", "int32_data", "int64_data"):
        initializer.ClearField(field)
    del initializer.external_data[:]
    initializer.data_location = TensorProto.EXTERNAL
    initializer.external_data.add(key="location", value=PARAMETERS)


def _drop_traces(model: onnx.ModelProto) -> None:
    """Remove what tells of the machine and the exporter: stack traces with absolute paths, shapes, versions."""
    graph = model.graph
    model.producer_name, model.producer_version, model.doc_string, graph.doc_string = "replayfleet", "", "", ""
    graph.name = "graph"
    del graph.value_info[:]
    parts = [model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output]
    for part in parts:
        del part.metadata_props[:]
    for node in graph.node:
        node.doc_string = ""
