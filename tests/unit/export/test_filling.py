"""A graph whose parameters are beside it becomes one that needs none, without the ``onnx`` package."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from replayfleet.export.running.filling import filled
from replayfleet.export.running.inspection import inspect_graph
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.errors import ArtefactRejected

RNG = np.random.default_rng(0)
KERNEL = RNG.standard_normal((2, 1, 3, 3)).astype(np.float32)
SIDES = np.array([0, -1], dtype=np.int64)


def open_graph() -> bytes:
    """A convolution whose kernel is open, then a reshape whose shape stands in the graph."""
    kernel = numpy_helper.from_array(KERNEL, "conv.weight")
    kernel.ClearField("raw_data")
    kernel.data_location = TensorProto.EXTERNAL
    kernel.external_data.add(key="location", value="parameters")
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "conv.weight"], ["c"]), helper.make_node("Reshape", ["c", "sides"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])],
        [kernel, numpy_helper.from_array(SIDES, "sides")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    model.metadata_props.add(key="replayfleet.kind", value="task, with an ümlaut")
    return model.SerializeToString()


def test_a_filled_graph_is_valid_computes_the_same_and_keeps_its_facts():
    parameters = {"conv.weight": KERNEL, "norm.num_batches_tracked": np.array(3)}
    data = filled(open_graph(), parameters)
    model = onnx.load_from_string(data)
    onnx.checker.check_model(model)
    np.testing.assert_array_equal(numpy_helper.to_array(model.graph.initializer[0]), KERNEL)
    assert inspect_graph(data).parameters == {}
    assert inspect_graph(data).metadata == inspect_graph(open_graph()).metadata
    x = RNG.standard_normal((5, 1, 4, 4)).astype(np.float32)
    beside = OnnxModel(open_graph(), parameters, num_threads=1)
    np.testing.assert_array_equal(OnnxModel(data, {}, num_threads=1).run(x), beside.run(x))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.uint8, np.int8, np.int32, np.int64])
def test_every_dtype_and_a_scalar_keep_their_bits(dtype: type):
    for array in (np.arange(6).reshape(2, 3).astype(dtype), np.array(5, dtype)):
        model = onnx.load_from_string(open_graph())
        open_tensor = model.graph.initializer[0]
        open_tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        del open_tensor.dims[:]
        open_tensor.dims.extend(array.shape)
        data = filled(model.SerializeToString(), {"conv.weight": np.asfortranarray(array)})
        found = numpy_helper.to_array(onnx.load_from_string(data).graph.initializer[0])
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype


def test_a_graph_that_holds_everything_stays_as_it_is():
    data = filled(open_graph(), {"conv.weight": KERNEL})
    assert filled(data, {"conv.weight": KERNEL + 1}) == data


def test_a_graph_that_must_not_run_is_not_filled():
    with pytest.raises(ArtefactRejected, match="cut short"):
        filled(open_graph()[:-7], {"conv.weight": KERNEL})


def test_filling_needs_no_onnx():
    code = (
        "import sys\nfrom replayfleet.export.running import filling, binding, provider_options\n"
        "sys.exit('onnx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
