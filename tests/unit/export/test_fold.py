"""Folding changes no answer, whatever BatchNorm follows, and refuses what it can't do exactly."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from replayfleet.export.graphs.fold import fold
from replayfleet.export.graphs.precision import to_int8
from replayfleet.export.running.artefact import Array
from replayfleet.federation.errors import ArtefactRejected

NORM = helper.make_node("BatchNormalization", ["y", "scale", "shift", "mean", "variance"], ["z"], epsilon=1e-3)


def model(
    nodes: list[onnx.NodeProto], shape: tuple[int, ...], tensors: Mapping[str, Array], channels: int = 5
) -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    norm = {name: rng.uniform(0.5, 2, channels) for name in ("scale", "shift", "mean", "variance")}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v, np.float32), k) for k, v in {**norm, **tensors}.items() if k != "map"],
    )
    if "map" in tensors:
        graph.initializer.append(numpy_helper.from_array(tensors["map"], "map"))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def same_answers(whole: onnx.ModelProto, shape: tuple[int, ...]) -> onnx.ModelProto:
    x = np.random.default_rng(2).standard_normal((3, *shape)).astype(np.float32)
    folded = onnx.ModelProto()
    folded.CopyFrom(whole)
    fold(folded)
    expected, found = (ReferenceEvaluator(each).run(None, {"x": x})[0] for each in (whole, folded))
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)
    assert "BatchNormalization" not in [node.op_type for node in folded.graph.node]
    return folded


def weights(*shape: int) -> Array:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def test_a_convolution_takes_scale_and_shift_with_or_without_a_bias():
    convolution = helper.make_node("Conv", ["x", "w"], ["y"])
    bare = same_answers(model([convolution, NORM], (2, 6, 6), {"w": weights(5, 2, 3, 3)}), (2, 6, 6))
    assert {tensor.name for tensor in bare.graph.initializer} == {"w", "y_bias"}
    biased = helper.make_node("Conv", ["x", "w", "b"], ["y"])
    same_answers(model([biased, NORM], (2, 6, 6), {"w": weights(5, 2, 3, 3), "b": weights(5)}), (2, 6, 6))


@pytest.mark.parametrize("sides", [(6,), (3, 3, 3)])
def test_convolutions_have_one_side_or_three_too(sides: tuple[int, ...]):
    """As a network of another package may have that learns sequences: their weights got another shape."""
    for kind, channels in (("Conv", (5, 2)), ("ConvTranspose", (2, 5))):
        convolution = helper.make_node(kind, ["x", "w"], ["y"])
        same_answers(model([convolution, NORM], (2, *sides), {"w": weights(*channels, *[2] * len(sides))}), (2, *sides))


def test_a_transposed_convolution_has_its_channels_on_the_other_axis():
    transposed = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2])
    same_answers(model([transposed, NORM], (2, 4, 4), {"w": weights(2, 5, 4, 4)}), (2, 4, 4))


def test_a_transposed_convolution_in_groups_has_the_channels_of_one_on_that_axis():
    """As a network of another package may have: rounding it ended with a traceback of NumPy's."""
    first = helper.make_node("ConvTranspose", ["x", "w"], ["y"], "first", strides=[2, 2], group=2)
    last = helper.make_node("ConvTranspose", ["z", "v"], ["out"], "last")
    tensors = {"w": weights(4, 3, 2, 2), "v": weights(6, 1, 1, 1)}
    exact = model([first, NORM, last], (4, 4, 4), tensors, channels=6)
    x = np.random.default_rng(2).standard_normal((3, 4, 4, 4)).astype(np.float32)
    folded = onnx.ModelProto()
    folded.CopyFrom(exact)
    fold(folded)
    answers = []
    for each in (exact, folded, to_int8(folded, x)):  # onnx's own evaluator knows no groups here
        each.ir_version = 10
        answers.append(onnxruntime.InferenceSession(each.SerializeToString()).run(None, {"x": x})[0])
    np.testing.assert_allclose(answers[1], answers[0], atol=2e-5, rtol=1e-5)
    assert np.abs(answers[2] - answers[0]).max() < 0.1 * answers[0].std()


def test_what_depends_on_constants_alone_is_computed():
    nodes = [
        helper.make_node("BatchNormalization", ["w", *NORM.input[1:]], ["scaled"], epsilon=1e-3),
        helper.make_node("Constant", [], ["matrix_shape"], value=numpy_helper.from_array(np.array([6, 20]), "c")),
        helper.make_node("Reshape", ["scaled", "matrix_shape"], ["matrix"]),
        helper.make_node("Gemm", ["x", "matrix"], ["flat"]),
        helper.make_node("Reshape", ["flat", "map"], ["y"]),
    ]
    folded = same_answers(model(nodes, (6,), {"w": weights(6, 5, 2, 2), "map": np.array([0, 5, 2, 2])}), (6,))
    assert [node.op_type for node in folded.graph.node] == ["Gemm", "Reshape"]
    assert {tensor.name for tensor in folded.graph.initializer} == {"matrix", "map"}


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Relu", ["x"], ["y"]), NORM],
        [
            helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1]),
            NORM,
            helper.make_node("Add", ["y", "z"], ["sum"]),
        ],
        [
            helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1]),
            NORM,
            helper.make_node("Conv", ["z", "w"], ["again"], pads=[1, 1, 1, 1]),
        ],
    ],
    ids=["behind an activation", "another reader", "shared weights"],
)
def test_what_can_not_be_folded_exactly_is_refused(nodes: list[onnx.NodeProto]):
    whole = model(nodes, (5, 6, 6), {"w": weights(5, 5, 3, 3)})
    with pytest.raises(ArtefactRejected, match="can't be folded"):
        fold(whole)
