"""What ONNX Runtime does to a graph when it loads it, done before: constants computed, BatchNorm folded.

Float16 and INT8 need it in the file. A BatchNorm in float16 divides by the root of a rounded variance, and one in INT8
rounds twice where once is enough; folded into the convolution before it, it costs nothing.
``models.folding`` does the same to parameters that Eq. 3 descends through; here it is done to any graph.

Axes: I input and O output channels of a convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from replayfleet.export.graphs.simplify import replace_nodes
from replayfleet.export.running.artefact import Array
from replayfleet.federation.errors import ArtefactRejected, Reason

_EPSILON = 1e-5
"""ONNX's default for BatchNormalization."""

_COMPUTED = ("BatchNormalization", "Reshape")
_FOLDED_INTO = ("Conv", "ConvTranspose")


def fold(model: onnx.ModelProto) -> None:
    """Compute what depends on constants alone and fold every BatchNorm of ``model``, in place; it holds its parameters.

    Raises:
        ArtefactRejected: (wrong-layout) A BatchNorm follows something that it can't be folded into.
    """
    _lift_constants(model.graph)
    _compute_constants(model)
    for node in [node for node in model.graph.node if node.op_type == "BatchNormalization"]:
        _fold_one(model.graph, node)
    _drop_unused(model.graph)


@dataclass(frozen=True, slots=True)
class _Affine:
    """What a BatchNorm in eval mode is: ``scale * x + shift``, channel by channel; both (O,) float64."""

    scale: NDArray[np.float64]
    shift: NDArray[np.float64]


def _lift_constants(graph: onnx.GraphProto) -> None:
    """Turn Constant nodes into initializers: half as many bytes, and one place to look for values."""
    kept = []
    for node in graph.node:
        if node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].HasField("t"):
            tensor = graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
        else:
            kept.append(node)
    replace_nodes(graph, kept)


def _compute_constants(model: onnx.ModelProto) -> None:
    """Replace what ``simplify.project_latents`` and the exporter compute from parameters alone by its values."""
    graph = model.graph
    opsets = {opset.domain: opset.version for opset in model.opset_import}
    values = _values(graph)
    for node in list(graph.node):
        if node.op_type in _COMPUTED and all(name in values for name in node.input):
            feeds = {name: values[name] for name in node.input}
            computed: Any = ReferenceEvaluator(node, opsets=opsets).run(None, feeds)
            values[node.output[0]] = computed[0]
            graph.initializer.append(numpy_helper.from_array(computed[0], node.output[0]))
            graph.node.remove(node)


def _fold_one(graph: onnx.GraphProto, norm: onnx.NodeProto) -> None:
    values = _values(graph)
    affine = _affine(norm, values)
    producer = _only_producer(graph, norm.input[0])
    if producer is None or producer.op_type not in _FOLDED_INTO or not _is_own(graph, producer.input[1], values):
        raise _cannot(norm)
    _fold_convolution(graph, producer, affine, values)
    producer.output[0] = norm.output[0]
    graph.node.remove(norm)


def _affine(norm: onnx.NodeProto, values: Mapping[str, Array]) -> _Affine:
    epsilon = next((item.f for item in norm.attribute if item.name == "epsilon"), _EPSILON)
    weight, bias, mean, variance = (values[name].astype(np.float64) for name in norm.input[1:5])
    scale = weight / np.sqrt(variance + epsilon)
    return _Affine(scale, bias - mean * scale)


def _fold_convolution(
    graph: onnx.GraphProto, convolution: onnx.NodeProto, affine: _Affine, values: Mapping[str, Array]
) -> None:
    weight = values[convolution.input[1]]
    scale = affine.scale.reshape(-1, 1)  # a convolution's weight is (O, I / groups, ...)
    if convolution.op_type == "ConvTranspose":  # (I, O / groups, ...)
        groups = next((item.i for item in convolution.attribute if item.name == "group"), 1)
        scale = affine.scale.reshape(groups, -1).repeat(len(weight) // groups, axis=0)
    bias = values[convolution.input[2]].astype(np.float64) if len(convolution.input) == 3 else 0.0
    folded_bias = bias * affine.scale + affine.shift
    del convolution.input[2:]
    _set(graph, convolution.input[1], weight * scale.reshape(*scale.shape, *[1] * (weight.ndim - 2)))
    convolution.input.append(f"{convolution.output[0]}_bias")
    _set(graph, convolution.input[2], folded_bias)


def _only_producer(graph: onnx.GraphProto, name: str) -> onnx.NodeProto | None:
    """Return the node that makes a tensor which one other node reads, and nobody else."""
    if _num_readers(graph, name) != 1:
        return None
    return next((node for node in graph.node if name in node.output), None)


def _is_own(graph: onnx.GraphProto, name: str, values: Mapping[str, Array]) -> bool:
    """Return whether these are parameters of one node alone."""
    return name in values and _num_readers(graph, name) == 1


def _num_readers(graph: onnx.GraphProto, name: str) -> int:
    readers: int = sum(list(node.input).count(name) for node in graph.node)
    return readers + sum(int(output.name == name) for output in graph.output)


def _values(graph: onnx.GraphProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def _set(graph: onnx.GraphProto, name: str, value: NDArray[np.float64]) -> None:
    tensor = numpy_helper.from_array(value.astype(np.float32), name)
    for existing in graph.initializer:
        if existing.name == name:
            existing.CopyFrom(tensor)
            return
    graph.initializer.append(tensor)


def _drop_unused(graph: onnx.GraphProto) -> None:
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _cannot(norm: onnx.NodeProto) -> ArtefactRejected:
    return ArtefactRejected(
        Reason.WRONG_LAYOUT, f"normalisation {norm.name!r} can't be folded into what is before it; nothing was written"
    )
