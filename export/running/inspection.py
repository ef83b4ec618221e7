"""What an ONNX graph says about itself, read from its bytes without the ``onnx`` package.

A graph that comes over the network is hostile until shown otherwise. ONNX Runtime would read initializers that nobody
supplied from files of the working directory, and some operators load files, libraries or run loops. So before a byte
reaches it, this module walks the protobuf and refuses everything but a flat graph of arithmetic operators whose missing
tensors are marked to be supplied by name.

Field numbers: ``onnx.proto3``, IR version 10. Wire format: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from replayfleet.federation.errors import ArtefactRejected, Reason

MAX_GRAPH_BYTES = 256 * 2**20
"""Larger graphs are refused before they are parsed. Ours have 20 to 40 kB, self-contained ones a few MB and a diffusion
sampler as wide as its paper's 143 MB."""
MAX_SENT_GRAPH_BYTES = 64 * 2**20
"""Of a graph that comes over the network."""

PARAMETERS = "parameters"
"""External location that marks a tensor to be supplied by name. No other location is accepted."""

NUMPY_DTYPES: Mapping[int, str] = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 10: "float16"}
"""ONNX element types that parameters may have -> numpy names."""

OPERATORS = frozenset(
    (  # noqa: SIM905 - a column of quotes reads worse
        "Abs Add And AveragePool BatchNormalization Cast Clip Concat Constant Conv ConvTranspose DequantizeLinear "
        "Div Elu Equal Erf Exp Flatten Gelu Gemm GlobalAveragePool GlobalMaxPool Greater HardSigmoid HardSwish "
        "Identity InstanceNormalization LayerNormalization LeakyRelu Less MatMul Max MaxPool Min Mish Mul Neg Not Or "
        "PRelu Pow QuantizeLinear ReduceL2 ReduceMax ReduceMean ReduceSum Relu Reshape Selu Shape Sigmoid Slice "
        "Softmax Softplus Sqrt Squeeze Sub Tanh Transpose Unsqueeze Where"
    ).split()
)
"""Operators of the standard domain that compute from their inputs alone, in memory bounded by them."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shape and numpy dtype name of one tensor that must be supplied."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """What a graph needs and says.

    Attributes:
        parameters: tensors to supply, by name.
        metadata: the model's own key-value texts.
    """

    parameters: Mapping[str, TensorLayout]
    metadata: Mapping[str, str]


def inspect_graph(graph: bytes) -> GraphSummary:
    """Return what ``graph`` needs, having refused what must not run.

    Raises:
        ArtefactRejected: (load-failed) Too large, not protobuf, an operator outside ``OPERATORS``, subgraphs,
            functions, sparse tensors, a tensor that would be read from a file, or a parameter of a dtype that is not in
            ``NUMPY_DTYPES``.
    """
    if len(graph) > MAX_GRAPH_BYTES:
        raise _refuse(f"graph has {len(graph)} bytes, at most {MAX_GRAPH_BYTES} are read")
    parameters: dict[str, TensorLayout] = {}
    metadata: dict[str, str] = {}
    for number, value in wire_fields(memoryview(graph)):
        if number == 7:
            _read_graph(_message(value), parameters)
        elif number == 14:
            key, text = _entry(_message(value))
            metadata[key] = text
        elif number in {20, 25, 26}:
            raise _refuse("graph carries training information, functions or device configurations")
    return GraphSummary(parameters, metadata)


def input_names(graph: bytes) -> tuple[str, ...]:
    """Return the names of the graph's inputs.

    Raises:
        ArtefactRejected: (load-failed) It isn't protobuf.
    """
    parts = [_message(value) for number, value in wire_fields(memoryview(graph)) if number == 7]
    inputs = [_message(value) for part in parts for number, value in wire_fields(part) if number == 11]
    return tuple(_text(value) for each in inputs for number, value in wire_fields(each) if number == 1)


def _read_graph(graph: memoryview, parameters: dict[str, TensorLayout]) -> None:
    for number, value in wire_fields(graph):
        if number == 1:
            _check_node(_message(value))
        elif number == 5:
            name, layout = _read_tensor(_message(value))
            if layout is not None:
                if name in parameters:
                    raise _refuse(f"graph declares parameter {name!r} twice")
                parameters[name] = layout
        elif number == 15:
            raise _refuse("graph carries sparse tensors")


def _check_node(node: memoryview) -> None:
    operator = domain = ""
    for number, value in wire_fields(node):
        if number == 4:
            operator = _text(value)
        elif number == 7:
            domain = _text(value)
        elif number == 5:
            _check_attribute(_message(value))
    if domain not in {"", "ai.onnx"} or operator not in OPERATORS:
        raise _refuse(f"graph uses operator {domain or 'ai.onnx'}:{operator}, which is not on the list of allowed ones")


def _check_attribute(attribute: memoryview) -> None:
    for number, value in wire_fields(attribute):
        if number in {6, 11, 22, 23}:
            raise _refuse("graph carries subgraphs or sparse tensors")
        if number in {5, 10} and _read_tensor(_message(value))[1] is not None:
            raise _refuse("graph has an attribute that would be read from a file")


def _read_tensor(tensor: memoryview) -> tuple[str, TensorLayout | None]:
    """Return (name, layout) of a tensor; the layout is None if the tensor's values are in the graph."""
    shape: list[int] = []
    element_type, location, external, name = 0, 0, {}, ""
    for number, value in wire_fields(tensor):
        if number == 1:
            shape.extend([value] if isinstance(value, int) else _varints(value))
        elif number == 2:
            element_type = _number(value)
        elif number == 8:
            name = _text(value)
        elif number == 13:
            key, text = _entry(_message(value))
            external[key] = text
        elif number == 14:
            location = _number(value)
    if location == 0 and not external:
        return name, None
    if location != 1 or external != {"location": PARAMETERS}:
        raise _refuse(f"tensor {name!r} would be read from a file, expected values or a mark that they are supplied")
    if element_type not in NUMPY_DTYPES:
        raise _refuse(f"parameter {name!r} has ONNX element type {element_type}, expected one of {list(NUMPY_DTYPES)}")
    return name, TensorLayout(tuple(shape), NUMPY_DTYPES[element_type])


def _entry(pair: memoryview) -> tuple[str, str]:
    texts = {number: _text(value) for number, value in wire_fields(pair)}
    return texts.get(1, ""), texts.get(2, "")


def wire_fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield (field number, integer or bytes) of a protobuf message; fixed-size fields come as bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        if not 8 <= tag < 1 << 32:  # ONNX Runtime reads 32 bits, so a larger one would be another field there
            raise _refuse(f"graph is not an ONNX file: field number {tag >> 3}")
        kind = tag & 7
        if kind == _VARINT:
            number, position = _varint(message, position)
            yield tag >> 3, number
            continue
        if kind == _BYTES:
            length, position = _varint(message, position)
        elif kind in {_FIXED32, _FIXED64}:
            length = 4 if kind == _FIXED32 else 8
        else:
            raise _refuse(f"graph is not an ONNX file: protobuf wire type {kind}")
        end = position + length
        if end > len(message):
            raise _refuse("graph is cut short or not an ONNX file")
        yield tag >> 3, message[position:end]
        position = end


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    if position < len(message) and message[position] < 0x80:  # most have one byte
        return message[position], position + 1
    result = 0
    for index in range(10):
        if position + index >= len(message):
            raise _refuse("graph is cut short or not an ONNX file")
        byte = message[position + index]
        result |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return result & (2**64 - 1), position + index + 1
    raise _refuse("graph is not an ONNX file: endless number")


def _varints(packed: memoryview) -> Iterator[int]:
    position = 0
    while position < len(packed):
        value, position = _varint(packed, position)
        yield value


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise _refuse("graph is not an ONNX file: a number where a message belongs")
    return value


def _number(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise _refuse("graph is not an ONNX file: a message where a number belongs")
    return value


def _text(value: int | memoryview) -> str:
    try:
        return bytes(_message(value)).decode()
    except UnicodeDecodeError as error:
        raise _refuse("graph is not an ONNX file: a name is not UTF-8") from error


def _refuse(detail: str) -> ArtefactRejected:
    return ArtefactRejected(Reason.LOAD_FAILED, f"{detail}; it is not loaded")
