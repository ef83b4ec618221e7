"""A graph from the network is refused before ONNX Runtime sees it, unless it is plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from replayfleet.export.running import inspection
from replayfleet.export.running.inspection import PARAMETERS, TensorLayout, inspect_graph
from replayfleet.federation.errors import ArtefactRejected, Reason


def matrix_product() -> onnx.ModelProto:
    """``y = x @ w`` with ``w`` (3, 2) left open."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [leave_open(numpy_helper.from_array(np.zeros((3, 2), np.float32), "w"))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    model.metadata_props.add(key="replayfleet.kind", value="task")
    return model


def leave_open(tensor: TensorProto, location: str = PARAMETERS) -> TensorProto:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def refusal(graph: bytes) -> str:
    with pytest.raises(ArtefactRejected) as caught:
        inspect_graph(graph)
    assert caught.value.reason is Reason.LOAD_FAILED
    assert "it is not loaded" in caught.value.detail
    return caught.value.detail


def test_open_tensors_and_metadata_are_found():
    summary = inspect_graph(matrix_product().SerializeToString())
    assert summary.parameters == {"w": TensorLayout((3, 2), "float32")}
    assert summary.metadata == {"replayfleet.kind": "task"}


def test_a_tensor_with_values_needs_nothing():
    model = matrix_product()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((3, 2), np.float32), "w"))
    assert inspect_graph(model.SerializeToString()).parameters == {}


@pytest.mark.parametrize("location", ["secret.bin", "/etc/passwd", "../parameters", "*/_ORT_MEM_ADDR_/*", ""])
def test_a_tensor_that_names_a_file_or_an_address_is_refused(location: str):
    model = matrix_product()
    model.graph.initializer[0].external_data[0].value = location
    assert "'w' would be read from a file" in refusal(model.SerializeToString())


def test_an_offset_beside_the_right_location_is_refused():
    model = matrix_product()
    model.graph.initializer[0].external_data.add(key="offset", value="140000000")
    assert "would be read from a file" in refusal(model.SerializeToString())


def test_external_data_without_the_external_flag_is_refused():
    model = matrix_product()
    model.graph.initializer[0].data_location = TensorProto.DEFAULT
    assert "would be read from a file" in refusal(model.SerializeToString())


def add_node(**attributes: object) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        model.graph.node.append(helper.make_node(**{"inputs": ["y"], "outputs": ["z"], **attributes}))

    return edit


def add_constant_from_file(model: onnx.ModelProto) -> None:
    tensor = leave_open(numpy_helper.from_array(np.zeros(4, np.float32), "c"))
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))


def add_constants_from_files(model: onnx.ModelProto) -> None:
    tensor = leave_open(numpy_helper.from_array(np.zeros(4, np.float32), "c"))
    model.graph.node[0].attribute.add(name="values").tensors.append(tensor)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (add_node(op_type="EPContext", domain="com.microsoft"), "operator com.microsoft:EPContext"),
        (add_node(op_type="Relu", domain="evil"), "operator evil:Relu"),
        (add_node(op_type="Loop"), "operator ai.onnx:Loop"),
        (add_node(op_type="ConstantOfShape"), "operator ai.onnx:ConstantOfShape"),
        (add_node(op_type="Resize"), "operator ai.onnx:Resize"),
        (add_node(op_type="DynamicQuantizeLinear"), "operator ai.onnx:DynamicQuantizeLinear"),
        (add_node(op_type="Relu", body=matrix_product().graph), "subgraphs"),
        (lambda model: model.graph.node[0].attribute.add().graphs.add(), "subgraphs"),
        (lambda model: model.graph.node[0].attribute.add().sparse_tensor.SetInParent(), "sparse tensors"),
        (lambda model: model.graph.node[0].attribute.add().sparse_tensors.add(), "sparse tensors"),
        (add_constant_from_file, "attribute that would be read from a file"),
        (add_constants_from_files, "attribute that would be read from a file"),
        (lambda model: model.functions.add(name="f"), "functions"),
        (lambda model: model.training_info.add(), "training information"),
        (lambda model: model.graph.sparse_initializer.add(), "sparse"),
        (lambda model: model.graph.initializer.append(model.graph.initializer[0]), "'w' twice"),
        (lambda model: setattr(model.graph.initializer[0], "data_type", TensorProto.STRING), "element type 8"),
    ],
)
def test_everything_beyond_flat_arithmetic_is_refused(edit: Callable[[onnx.ModelProto], None], expected: str):
    model = matrix_product()
    edit(model)
    assert expected in refusal(model.SerializeToString())


def test_device_configurations_are_refused():
    field = bytes([26 << 3 & 127 | 128 | 2, 26 >> 4, 0])  # earlier versions of onnx have no name for it
    assert "device configurations" in refusal(matrix_product().SerializeToString() + field)


def test_a_second_graph_field_can_not_hide_a_node():
    hidden = onnx.ModelProto()
    hidden.graph.node.append(helper.make_node("Loop", [], []))
    assert "Loop" in refusal(matrix_product().SerializeToString() + hidden.SerializeToString())


@pytest.mark.parametrize("beyond", [1 << 32, 1 << 33, 7 << 32])
def test_a_field_number_of_which_onnx_runtime_reads_the_lower_bits_can_not_hide_a_graph(beyond: int):
    graph = matrix_product().graph.SerializeToString()
    tag = beyond | 7 << 3 | 2
    name = bytes(tag >> shift & 127 | (128 if shift < 28 else 0) for shift in range(0, 35, 7))
    hidden = name + bytes([len(graph) & 127 | 128, len(graph) >> 7]) + graph
    assert f"field number {tag >> 3}" in refusal(hidden)


def test_a_field_without_a_number_is_refused():
    assert "field number 0" in refusal(b"\x00O" + matrix_product().SerializeToString())


def test_size_is_checked_before_anything_is_parsed(monkeypatch: pytest.MonkeyPatch):
    graph = matrix_product().SerializeToString()
    monkeypatch.setattr(inspection, "MAX_GRAPH_BYTES", len(graph) - 1)
    assert "at most" in refusal(graph)


@pytest.mark.parametrize("damaged", [b"\xff" * 40, b"PK\x03\x04 not onnx", b"\x3a\x7f", b"\x0b", b"\x38\x01"])
def test_bytes_that_are_no_onnx_file_are_refused(damaged: bytes):
    refusal(damaged)


def test_a_graph_cut_short_is_refused():
    refusal(matrix_product().SerializeToString()[:-3])
