"""A graph and its parameters as one file; needs no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from replayfleet.export.running.artefact import Array
from replayfleet.export.running.runtime import UNUSED_SUFFIXES
from replayfleet.federation.errors import ArtefactRejected, Reason


def join(graph: bytes, parameters: Mapping[str, Array]) -> bytes:
    """Return a self-contained ONNX file: ``graph`` with its open tensors filled in.

    Raises:
        ArtefactRejected: (wrong-layout) A tensor is missing, superfluous, or of another shape or dtype.
    """
    model = onnx.load_from_string(graph)
    names = {initializer.name for initializer in model.graph.initializer}
    for name in parameters:
        if name not in names and not name.endswith(UNUSED_SUFFIXES):
            raise ArtefactRejected(Reason.WRONG_LAYOUT, f"parameter {name!r} has no place in the graph")
    for initializer in model.graph.initializer:
        if initializer.data_location != TensorProto.EXTERNAL:
            continue
        array = parameters.get(initializer.name)
        shape, dtype = tuple(initializer.dims), onnx.helper.tensor_dtype_to_np_dtype(initializer.data_type)
        if array is None or array.shape != shape or array.dtype != dtype:
            found = "missing" if array is None else f"{array.shape} {array.dtype}"
            raise ArtefactRejected(
                Reason.WRONG_LAYOUT, f"parameter {initializer.name!r} is {found}, graph needs {shape} {dtype}"
            )
        initializer.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), initializer.name))
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))
