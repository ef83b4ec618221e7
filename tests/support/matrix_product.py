"""The smallest graph that leaves a parameter open: three numbers times a matrix."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from replayfleet.export.running.inspection import PARAMETERS


def matrix_product(location: str = PARAMETERS) -> bytes:
    """Return ``x (B, 3) times w (3, 2)``, its ``w`` to be found at ``location``."""
    weight = numpy_helper.from_array(np.zeros((3, 2), np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
