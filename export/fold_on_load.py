"""Folds the BatchNorm behind a sub-generator's first layer into that layer, while a model is loaded. Needs no ``onnx``.

That layer is a matrix product whose columns are made maps of (see ``simplify.project_latents``), and ONNX Runtime folds
no BatchNorm through the reshaping. It is a fortieth of a 28-pixel image's time. Graphs of any other form, such as those
of a stranger, are left as they are.

Axes: Z latent, O channels, h and w sides of the first maps. Field numbers: ``onnx.proto3``, IR version 10.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from export.artefact import Array
from export.filling import protobuf_field, tensor_message
from export.inspection import wire_fields

_GRAPH, _NODE, _INITIALIZER, _OUTPUT = 7, 1, 5, 12
_IN, _OUT, _OPERATOR, _ATTRIBUTE = 1, 2, 4, 5
_EPSILON = 1e-5
"""ONNX's default."""


@dataclass(slots=True)
class _Node:
    raw: bytes
    operator: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, memoryview] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Chain:
    """weight -> reshape -> product -> maps -> norm, each read by the next alone."""

    product: _Node
    maps: _Node
    norm: _Node
    weight: str


def folded(graph: bytes, parameters: Mapping[str, Array]) -> tuple[bytes, dict[str, Array]]:
    """Return a graph and parameters that compute the same, one node shorter; the same ones where nothing fits.

    Args:
        graph: checked by ``inspect_graph``.
        parameters: what it leaves open, in its shapes; not changed.
    """
    parts = list(wire_fields(memoryview(graph)))
    at = next((index for index, (number, _) in enumerate(parts) if number == _GRAPH), -1)
    if at < 0:
        return graph, dict(parameters)
    inner = list(wire_fields(_bytes(parts[at][1])))
    nodes = [_node(_bytes(value)) for number, value in inner if number == _NODE]
    chain = _chain(nodes, [_text_of(_bytes(value)) for number, value in inner if number == _OUTPUT], parameters)
    if chain is None:
        return graph, dict(parameters)
    weight, bias = _scaled(chain, parameters)
    name = f"{chain.weight}/folded_bias"
    gone = set(chain.norm.inputs[1:])  # ONNX Runtime would not find whom to supply them to
    rest = [
        (number, value)
        for number, value in inner
        if number != _NODE and not (number == _INITIALIZER and _name_of(_bytes(value)) in gone)
    ]
    rewritten: list[tuple[int, int | memoryview | bytes]] = [(_NODE, each) for each in _rewritten(nodes, chain, name)]
    rewritten += [*rest, (_INITIALIZER, tensor_message(name, bias))]
    body = b"".join(protobuf_field(number, value) for number, value in rewritten)
    whole = [(number, body if index == at else value) for index, (number, value) in enumerate(parts)]
    kept = {key: value for key, value in parameters.items() if key not in gone}
    return b"".join(protobuf_field(number, value) for number, value in whole), {**kept, chain.weight: weight}


def _chain(nodes: Sequence[_Node], answers: Sequence[str], parameters: Mapping[str, Array]) -> _Chain | None:
    """Find what ``simplify.project_latents`` leaves; every step is checked, as a graph may be anybody's."""
    makers = {output: node for node in nodes for output in node.outputs}
    readers = Counter([*(name for node in nodes for name in node.inputs), *answers])

    def maker(name: str, operator: str) -> _Node | None:
        node = makers.get(name)
        return node if node is not None and node.operator == operator and readers[name] == 1 else None

    for norm in nodes:
        if norm.operator != "BatchNormalization" or len(norm.inputs) != 5 or len(norm.outputs) != 1:
            continue
        maps = maker(norm.inputs[0], "Reshape")
        product = None if maps is None else maker(maps.inputs[0], "MatMul")
        reshape = None if product is None else maker(product.inputs[1], "Reshape")
        if maps is None or product is None or reshape is None:
            continue
        weight = reshape.inputs[0]
        if any(readers[name] != 1 for name in norm.inputs[1:]):
            continue
        known = all(name in parameters and parameters[name].dtype == np.float32 for name in (weight, *norm.inputs[1:]))
        if not known or parameters[weight].ndim != 4 or readers[weight] != 1:
            continue
        size, *sides = parameters[weight].shape
        fits = all(parameters[name].shape == (sides[0],) for name in norm.inputs[1:])
        as_matrix, as_maps = _integers(makers.get(reshape.inputs[1])), _integers(makers.get(maps.inputs[1]))
        if fits and as_matrix == (size, int(np.prod(sides))) and as_maps == (0, *sides):
            return _Chain(product, maps, norm, weight)
    return None


def _scaled(chain: _Chain, parameters: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return the weight (Z, O, h, w) times the norm's scale, and the bias (O * h * w) that its shift is."""
    scale, shift, mean, variance = (parameters[name].astype(np.float64) for name in chain.norm.inputs[1:])
    epsilon = _EPSILON
    if "epsilon" in chain.norm.attributes:
        found = next((value for number, value in wire_fields(chain.norm.attributes["epsilon"]) if number == 2), b"")
        epsilon = struct.unpack("<f", _bytes(found))[0] if found else 0.0
    factor = scale / np.sqrt(variance + epsilon)
    weight = parameters[chain.weight]
    per_map = int(np.prod(weight.shape[2:]))
    bias = np.repeat(shift - mean * factor, per_map).astype(np.float32)
    return (weight * factor[:, None, None]).astype(np.float32), bias


def _rewritten(nodes: Sequence[_Node], chain: _Chain, bias: str) -> list[bytes]:
    """Return all nodes, the product with a bias, the maps under the norm's name, and no norm."""
    written = []
    for node in nodes:
        if node is chain.product:
            written.append(_plain("Gemm", [*node.inputs, bias], node.outputs))
        elif node is chain.maps:
            written.append(_plain("Reshape", node.inputs, chain.norm.outputs))
        elif node is not chain.norm:
            written.append(node.raw)
    return written


def _plain(operator: str, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """Return a node whose attributes are ONNX's defaults."""
    names = [(_IN, name) for name in inputs] + [(_OUT, name) for name in outputs] + [(_OPERATOR, operator)]
    return b"".join(protobuf_field(number, name.encode()) for number, name in names)


def _node(message: memoryview) -> _Node:
    node = _Node(bytes(message))
    for number, value in wire_fields(message):
        if number in {_IN, _OUT}:
            (node.inputs if number == _IN else node.outputs).append(bytes(_bytes(value)).decode())
        elif number == _OPERATOR:
            node.operator = bytes(_bytes(value)).decode()
        elif number == _ATTRIBUTE:
            node.attributes[_text_of(_bytes(value))] = _bytes(value)
    return node


def _integers(node: _Node | None) -> tuple[int, ...]:
    """Return the values of a Constant of integers, as ``simplify`` writes them; empty for anything else."""
    if node is None or node.operator != "Constant" or "value" not in node.attributes:
        return ()
    tensors = [_bytes(value) for number, value in wire_fields(node.attributes["value"]) if number == 5]
    raw = [bytes(_bytes(value)) for tensor in tensors for number, value in wire_fields(tensor) if number == 9]
    kinds = [value for tensor in tensors for number, value in wire_fields(tensor) if number == 2]
    if len(raw) != 1 or kinds != [7] or len(raw[0]) % 8:
        return ()
    return tuple(int(value) for value in np.frombuffer(raw[0], "<i8"))


def _text_of(message: memoryview) -> str:
    """Return field 1: the name of an attribute, or of an output."""
    return next((bytes(_bytes(value)).decode() for number, value in wire_fields(message) if number == 1), "")


def _name_of(tensor: memoryview) -> str:
    return next((bytes(_bytes(value)).decode() for number, value in wire_fields(tensor) if number == 8), "")


def _bytes(value: int | memoryview | bytes) -> memoryview:
    return memoryview(b"") if isinstance(value, int) else memoryview(value)
