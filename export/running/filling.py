"""Puts parameters into a graph's bytes, without the ``onnx`` package.

The CPU and CUDA providers take parameters beside the graph. TensorRT's parser reads the graph itself, and versions of
ONNX Runtime before 1.24 hand it graphs whose tensors are elsewhere (github.com/microsoft/onnxruntime/pull/26721), so
what it builds an engine from is self-contained.

Field numbers: ``onnx.proto3``, IR version 10. Wire format: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from replayfleet.export.running.artefact import Array
from replayfleet.export.running.inspection import NUMPY_DTYPES, inspect_graph, wire_fields

_GRAPH, _INITIALIZER = 7, 5
_DIMS, _DATA_TYPE, _NAME, _RAW_DATA = 1, 2, 8, 9
_ELEMENT_TYPES = {name: number for number, name in NUMPY_DTYPES.items()}


def filled(graph: bytes, parameters: Mapping[str, Array]) -> bytes:
    """Return ``graph`` with every tensor that it leaves open filled in; without open tensors, the same bytes.

    Args:
        graph: an ONNX file's bytes.
        parameters: at least the open tensors, in the graph's shapes and dtypes; checked by ``OnnxModel`` before.

    Raises:
        ArtefactRejected: (load-failed) The graph must not be run (see ``inspect_graph``).
    """
    if not inspect_graph(graph).parameters:
        return graph
    parts = []
    for number, value in wire_fields(memoryview(graph)):
        parts.append(_field(number, _filled_graph(value, parameters) if number == _GRAPH else value))
    return b"".join(parts)


def _filled_graph(graph: int | memoryview, parameters: Mapping[str, Array]) -> bytes:
    assert isinstance(graph, memoryview)
    parts = []
    for number, value in wire_fields(graph):
        name = _name(value) if number == _INITIALIZER and isinstance(value, memoryview) else ""
        parts.append(_field(number, _tensor_message(name, parameters[name]) if name in parameters else value))
    return b"".join(parts)


def _name(tensor: memoryview) -> str:
    return next((bytes(text).decode() for number, text in wire_fields(tensor) if number == _NAME), "")


def _tensor_message(name: str, array: Array) -> bytes:
    """Return an initializer that holds its values."""
    raw = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    dims = b"".join(_field(_DIMS, side) for side in array.shape)
    kind = _field(_DATA_TYPE, _ELEMENT_TYPES[array.dtype.name])
    return dims + kind + _field(_NAME, name.encode()) + _field(_RAW_DATA, raw)


def _field(number: int, value: int | bytes | memoryview) -> bytes:
    """Return one protobuf field: a varint, or bytes with their length. Models and graphs have no other kinds."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + bytes(value)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
