"""Float16 and INT8 graphs keep their ends and their answers, and pass a device's inspection."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from replayfleet.export.graphs.precision import to_float16, to_int8
from replayfleet.export.running.artefact import Array
from replayfleet.export.running.inspection import inspect_graph
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.errors import ArtefactRejected


def network(scale: float = 1.0) -> onnx.ModelProto:
    """Two convolutions with very different channels, a residual and a linear layer."""
    rng = np.random.default_rng(0)
    ranges = np.array([0.01, 1.0, 0.1, 3.0], np.float32).reshape(4, 1, 1, 1)
    tensors = {
        "w1": rng.standard_normal((4, 1, 3, 3)).astype(np.float32) * ranges,
        "b1": rng.standard_normal(4).astype(np.float32),
        "w2": rng.standard_normal((4, 4, 3, 3)).astype(np.float32) * scale,
        "head": rng.standard_normal((256, 10)).astype(np.float32) / 16,
        "flat": np.array([0, 256]),
    }
    nodes = [
        helper.make_node("Conv", ["images", "w1", "b1"], ["c1"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["r1", "c2"], ["sum"], name="sum"),
        helper.make_node("Reshape", ["sum", "flat"], ["vector"], name="vector"),
        helper.make_node("MatMul", ["vector", "head"], ["logits"], name="head"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def images(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, (count, 1, 8, 8)).astype(np.float32)


def answers(model: onnx.ModelProto, x: Array) -> Array:
    inspect_graph(model.SerializeToString())
    return OnnxModel(model.SerializeToString(), {}, num_threads=1).run(x)


@pytest.mark.parametrize("count", [1, 2, 33])
def test_a_float16_graph_takes_and_gives_float32_and_answers_nearly_the_same(count: int):
    whole = network()
    before = whole.SerializeToString()
    half = to_float16(whole)
    assert whole.SerializeToString() == before
    expected, found = answers(whole, images(count)), answers(half, images(count))
    assert found.dtype == np.float32
    assert 0 < np.abs(found - expected).max() < 0.01 * expected.std()
    assert {tensor.data_type for tensor in half.graph.initializer} == {TensorProto.FLOAT16, TensorProto.INT64}


def test_a_parameter_beyond_float16_is_refused_and_not_clipped():
    with pytest.raises(ArtefactRejected, match=r"parameter 'w2' reaches .* float16 ends at 65504"):
        to_float16(network(scale=1e5))


def test_an_int8_graph_has_weights_in_int8_by_channel_and_answers_nearly_the_same():
    whole = network()
    before = whole.SerializeToString()
    rounded = to_int8(whole, images(64, seed=1))
    assert whole.SerializeToString() == before
    expected = answers(whole, images(33))
    found = answers(rounded, images(33))
    assert 0 < np.abs(found - expected).max() < 0.1 * expected.std()
    np.testing.assert_allclose(answers(rounded, images(1)), found[:1], atol=1e-5)
    kinds = Counter(node.op_type for node in rounded.graph.node)
    assert kinds["QuantizeLinear"] > 3
    assert "DynamicQuantizeLinear" not in kinds
    stored = {tensor.name: tensor for tensor in rounded.graph.initializer}
    assert stored["w1_quantized"].data_type == TensorProto.INT8
    assert list(stored["w1_scale"].dims) == [4]
    assert stored["head"].data_type == TensorProto.FLOAT
    zero_points = [numpy_helper.to_array(tensor) for name, tensor in stored.items() if name.endswith("zero_point")]
    assert not any(point.any() for point in zero_points), "TensorRT takes symmetric ranges only"


def test_ranges_come_from_the_samples():
    wide, narrow = (to_int8(network(), size * images(64)) for size in (1.0, 0.1))
    scales = [
        next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "images_scale")
        for model in (wide, narrow)
    ]
    assert scales[0] == pytest.approx(10 * scales[1], rel=1e-5)
