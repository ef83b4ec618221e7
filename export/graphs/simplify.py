"""Rewrites of an exported graph that keep every initializer's name and value.

The exporter's own optimiser would fold parameters into each other; these only remove what the exporter added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from replayfleet.export.running.inspection import OPERATORS


def drop_zero_biases(graph: onnx.GraphProto) -> None:
    """Remove the zero bias that the exporter computes, in five nodes, for every convolution that has none."""
    producers = _producers(graph)
    for node in graph.node:
        if node.op_type == "Conv" and len(node.input) == 3 and _is_zero(node.input[2], producers):
            del node.input[2]


def project_latents(graph: onnx.GraphProto) -> None:
    """Turn the transposed convolution of a 1x1 map, and the norm behind it, into one matrix product with a bias.

    ONNX Runtime's transposed convolution works sample by sample; the product makes batches of replay about a fifth
    faster and single images a tenth. A norm in eval mode scales and shifts each channel, and ONNX Runtime folds none
    through the reshaping that makes maps of the product's columns. So the norm is applied to the weight, without its
    shift, and to zeros, which gives the bias. Both depend on parameters alone, so they are computed once, when the
    graph is loaded, and the parameters keep their names and shapes.
    """
    producers = _producers(graph)
    shapes = {initializer.name: list(initializer.dims) for initializer in graph.initializer}
    norms = {node.input[0]: node for node in graph.node if node.op_type == "BatchNormalization"}
    vector = graph.input[0].name if len(graph.input[0].type.tensor_type.shape.dim) == 2 else ""
    nodes: list[onnx.NodeProto] = []
    made: set[str] = set()
    for node in graph.node:
        norm = norms.get(node.output[0]) if node.op_type == "ConvTranspose" else None
        if norm is not None and _vector_behind(node.input[0], producers) == vector:
            nodes += _product(vector, node.input[1], shapes[node.input[1]], norm)
            made.add(norm.output[0])
        elif node.output[0] not in made:
            nodes.append(node)
    replace_nodes(graph, nodes)


def _product(latents: str, weight: str, shape: list[int], norm: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return ``norm(latents (B, Z) x weight (Z, O, h, w))`` as nodes, the last of which makes the norm's output."""
    in_channels, out_channels, *sides = shape
    columns = out_channels * int(np.prod(sides))
    scale, shift, mean, variance = norm.input[1:]
    name = norm.output[0]

    def normed(x: str, shift: str, mean: str, output: str) -> onnx.NodeProto:
        node = helper.make_node("BatchNormalization", [x, scale, shift, mean, variance], [output])
        node.attribute.extend(norm.attribute)
        return node

    return [
        _constant(f"{name}_zero", np.zeros(out_channels, np.float32)),
        _constant(f"{name}_zeros", np.zeros((1, out_channels, *sides), np.float32)),
        _constant(f"{name}_matrix_shape", np.array([in_channels, columns])),
        _constant(f"{name}_bias_shape", np.array([columns])),
        _constant(f"{name}_map_shape", np.array([0, out_channels, *sides])),
        normed(weight, f"{name}_zero", f"{name}_zero", f"{name}_scaled"),
        normed(f"{name}_zeros", shift, mean, f"{name}_shift"),
        helper.make_node("Reshape", [f"{name}_scaled", f"{name}_matrix_shape"], [f"{name}_matrix"]),
        helper.make_node("Reshape", [f"{name}_shift", f"{name}_bias_shape"], [f"{name}_bias"]),
        helper.make_node("Gemm", [latents, f"{name}_matrix", f"{name}_bias"], [f"{name}_flat"]),
        helper.make_node("Reshape", [f"{name}_flat", f"{name}_map_shape"], [name]),
    ]


def leave_batches_open(graph: onnx.GraphProto) -> None:
    """Let a Reshape that keeps the batch axis say -1 for it, where the exporter would read the input's shape.

    A flattened map is written so; boards run no operator that reads shapes.
    """
    producers = _producers(graph)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        shape = producers.get(node.input[1]) if node.op_type == "Reshape" else None
        if shape is not None and shape.op_type == "Concat" and _is_batch(shape.input[0], graph, producers):
            sides = [_integers(producers.get(name)) for name in shape.input[1:]]
            if all(len(side) == 1 and side[0] > 0 for side in sides):
                name = f"{node.output[0]}_shape"
                nodes.append(_constant(name, np.array([-1, *(side[0] for side in sides)])))
                node.input[1] = name
        nodes.append(node)
    replace_nodes(graph, nodes)


def broadcast_norms(graph: onnx.GraphProto) -> None:
    """Let a division by a vector's length broadcast it, where the exporter would expand it to the vector's shape."""
    producers = _producers(graph)
    for node in graph.node:
        expand = producers.get(node.input[1]) if node.op_type == "Div" else None
        if expand is None or expand.op_type != "Expand":
            continue
        clip = producers.get(expand.input[0])
        norm = producers.get(clip.input[0]) if clip is not None and clip.op_type == "Clip" else None
        if norm is not None and norm.op_type == "ReduceL2" and norm.input[0] == node.input[0]:
            node.input[1] = expand.input[0]


def _is_batch(name: str, graph: onnx.GraphProto, producers: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether this is the number of samples that the graph is asked about."""
    node = producers.get(name)
    while node is not None and node.op_type in {"Reshape", "Squeeze", "Unsqueeze"}:
        node = producers.get(node.input[0])
    if node is None or node.op_type != "Shape" or node.input[0] != graph.input[0].name:
        return False
    bounds = {attribute.name: attribute.i for attribute in node.attribute}
    return bounds.get("start", 0) == 0 and bounds.get("end") == 1


def _integers(node: onnx.NodeProto | None) -> list[int]:
    """Return what a Constant of integers holds; nothing of any other node."""
    if node is None or node.op_type != "Constant":
        return []
    attribute = node.attribute[0]
    if attribute.name == "value_ints":
        return list(attribute.ints)
    return [int(each) for each in numpy_helper.to_array(attribute.t).ravel()] if attribute.name == "value" else []


def drop_dead_nodes(graph: onnx.GraphProto) -> None:
    """Remove nodes whose outputs nobody reads, and then those that only fed them."""
    while True:
        used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
        live = [node for node in graph.node if used.intersection(node.output)]
        if len(live) == len(graph.node):
            return
        replace_nodes(graph, live)


def _producers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    return {output: node for node in graph.node for output in node.output}


def _is_zero(name: str, producers: Mapping[str, onnx.NodeProto]) -> bool:
    node = producers.get(name)
    if node is None:
        return False
    if node.op_type == "Constant":
        return all(item.HasField("t") and not numpy_helper.to_array(item.t).any() for item in node.attribute)
    return node.op_type in {"Expand", "CastLike"} and _is_zero(node.input[0], producers)


def _vector_behind(name: str, producers: Mapping[str, onnx.NodeProto]) -> str:
    node = producers.get(name)
    while node is not None and node.op_type == "Unsqueeze":
        name = node.input[0]
        node = producers.get(name)
    return name


def _constant(name: str, values: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(values, name))


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Put these nodes in the place of all that the graph has; they may be some of its own."""
    kept = list(nodes)
    del graph.node[:]
    graph.node.extend(kept)


def work_out_constants(graph: onnx.GraphProto) -> None:
    """Compute now what follows from constants by operators that a device doesn't run, and drop casts to float32.

    The exporter writes such for a bound of a Clip or the channels of a GroupNorm. It casts whatever it can't tell from
    a float32 tensor's neighbour; no tensor of our graphs but float32 is cast so.
    """
    known: dict[str, np.ndarray] = {}
    for node in graph.node:
        if node.op_type == "CastLike" and node.input[0] in known:
            node.CopyFrom(_constant(node.output[0], known[node.input[0]].astype(np.float32)))
        elif node.op_type == "CastLike":
            node.op_type = "Identity"
            del node.input[1:]
        if all(name in known for name in node.input) and not node.op_type.startswith("Random"):
            with contextlib.suppress(Exception):  # what can't be worked out stays, for the list to judge
                (value,) = ReferenceEvaluator(node).run(None, {name: known[name] for name in node.input})
                known[node.output[0]] = np.asarray(value)
        if node.op_type not in OPERATORS and node.output[0] in known:
            node.CopyFrom(_constant(node.output[0], known[node.output[0]]))
