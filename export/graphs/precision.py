"""A float32 graph in float16, or in INT8 with fixed ranges. Precision stands in the graph, so every runtime sees it.

TensorRT 11 takes it from nowhere else, and ONNX Runtime's CPU provider runs the same file. Dynamic INT8 is not made:
its convolutions take five times as long on a CPU, and TensorRT has none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from replayfleet.export.graphs.simplify import replace_nodes
from replayfleet.export.running.artefact import Array
from replayfleet.federation.errors import ArtefactRejected, Reason

MAX_FLOAT16 = 65504.0

CALIBRATION_BATCH = 32
"""Samples that are run at a time while ranges are measured: bounds memory."""

QUANTIZED = ("Add", "Conv", "ConvTranspose", "Gemm", "LeakyRelu", "MatMul", "MaxPool", "Relu", "Reshape", "Slice")
"""What computes in INT8. Means over positions, tanh and whatever else there is stay float32."""

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def to_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model`` in float16, its first input and its outputs as before.

    Args:
        model: self-contained, without BatchNorm (see ``export.graphs.fold``).

    Raises:
        ArtefactRejected: (not-finite) A parameter is too large for float16.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.size and not (largest := float(np.abs(values).max())) <= MAX_FLOAT16:
            raise ArtefactRejected(
                Reason.NOT_FINITE,
                f"parameter {tensor.name!r} reaches {largest:.3g}, float16 ends at {MAX_FLOAT16:g}; nothing was "
                "written, export onnx or onnx-int8",
            )
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    kept = [model.graph.input[0].name, *(output.name for output in model.graph.output)]
    converted: onnx.ModelProto = convert_float_to_float16(copied, keep_io_types=kept)
    _sort(converted.graph)
    return converted


def to_int8(model: onnx.ModelProto, samples: Array) -> onnx.ModelProto:
    """Return ``model`` with INT8 weights and activations, ranges measured on ``samples`` (N, ...) float32.

    Ranges are symmetric, as TensorRT wants them; weights have one for each output channel. The last layer stays
    float32: its answers would have 255 values otherwise. Weights use 7 of the 8 bits: x86 processors without VNNI add
    products in pairs to 16 bits, which larger weights overflow, and whoever exports can't know who will run it.

    Args:
        model: self-contained, without BatchNorm (see ``export.graphs.fold``).
        samples: inputs as the model will meet them, at least one.
    """
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    last = [node.name for node in model.graph.node if node.op_type in _WEIGHTED][-1:]
    transposed = [node for node in model.graph.node if node.op_type == "ConvTranspose"]
    grouped = [node.name for node in transposed if any(item.name == "group" and item.i > 1 for item in node.attribute)]
    prepared = onnx.ModelProto()
    prepared.CopyFrom(model)
    prepared.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")  # it would warn otherwise
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        quantize_static(
            prepared,
            path,
            _Reader(model.graph.input[0].name, samples),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(QUANTIZED),
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            reduce_range=True,
            nodes_to_exclude=last + grouped,  # ONNX Runtime's tool can't round a transposed convolution in groups
            calibrate_method=CalibrationMethod.MinMax,
            extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
        )
        return onnx.load(path)


class _Reader:
    """Gives samples to the calibrator, batch by batch."""

    def __init__(self, input_name: str, samples: Array) -> None:
        self._batches: Iterator[Array] = iter(
            [samples[first : first + CALIBRATION_BATCH] for first in range(0, len(samples), CALIBRATION_BATCH)]
        )
        self._input_name = input_name

    def get_next(self) -> dict[str, Array] | None:
        """Return the next input, None at the end."""
        batch = next(self._batches, None)
        return None if batch is None else {self._input_name: batch}


def _sort(graph: onnx.GraphProto) -> None:
    """Put nodes behind those that they read from, else in their order; the converter appends its casts at the end."""
    made_here = {name for node in graph.node for name in node.output}
    waiting: Sequence[Any] = list(graph.node)
    done: set[str] = set()
    order: list[Any] = []
    while waiting:
        later = []
        for node in waiting:
            if all(name in done or name not in made_here for name in node.input):
                order.append(node)
                done.update(node.output)
            else:
                later.append(node)
        if len(later) == len(waiting):
            raise RuntimeError("the graph has a cycle")
        waiting = later
    replace_nodes(graph, order)
