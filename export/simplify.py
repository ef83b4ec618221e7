"""Rewrites of an exported graph that keep every initializer's name and value.

The exporter's own optimiser would fold parameters into each other; these three only remove what the exporter added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper


def drop_zero_biases(graph: onnx.GraphProto) -> None:
    """Remove the zero bias that the exporter computes, in five nodes, for every convolution that has none."""
    producers = _producers(graph)
    for node in graph.node:
        if node.op_type == "Conv" and len(node.input) == 3 and _is_zero(node.input[2], producers):
            del node.input[2]


def project_latents(graph: onnx.GraphProto) -> None:
    """Turn the transposed convolution of a 1x1 map into the matrix product that it is.

    ONNX Runtime's transposed convolution works sample by sample; the product makes batches of replay about a fifth
    faster and single images a tenth. The weight keeps its name and shape and is reshaped when the graph is loaded.
    """
    producers = _producers(graph)
    shapes = {initializer.name: list(initializer.dims) for initializer in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        latents = _vector_behind(node.input[0], producers) if node.op_type == "ConvTranspose" else ""
        if latents != graph.input[0].name or len(graph.input[0].type.tensor_type.shape.dim) != 2:
            nodes.append(node)
            continue
        weight, output = node.input[1], node.output[0]
        in_channels, *rest = shapes[weight]
        nodes += [
            _integers(f"{output}_matrix_shape", [in_channels, int(np.prod(rest))]),
            _integers(f"{output}_map_shape", [0, *rest]),
            helper.make_node("Reshape", [weight, f"{output}_matrix_shape"], [f"{output}_matrix"]),
            helper.make_node("MatMul", [latents, f"{output}_matrix"], [f"{output}_flat"]),
            helper.make_node("Reshape", [f"{output}_flat", f"{output}_map_shape"], [output]),
        ]
    _replace(graph, nodes)


def drop_dead_nodes(graph: onnx.GraphProto) -> None:
    """Remove nodes whose outputs nobody reads, and then those that only fed them."""
    while True:
        used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
        live = [node for node in graph.node if used.intersection(node.output)]
        if len(live) == len(graph.node):
            return
        _replace(graph, live)


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


def _integers(name: str, values: list[int]) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(values, np.int64), name))


def _replace(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    kept = list(nodes)
    del graph.node[:]
    graph.node.extend(kept)
