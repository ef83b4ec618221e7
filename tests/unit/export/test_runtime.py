"""The runtime that serves: exact about parameters, silent about nothing, and independent of torch and onnx."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from replayfleet.export.running.runtime import Array, OnnxModel, _session_options
from replayfleet.federation.errors import ArtefactRejected, Reason
from tests.support.matrix_product import matrix_product

WEIGHT = np.arange(6, dtype=np.float32).reshape(3, 2)
X = np.array([[1, 0, 0], [0, 1, 2]], dtype=np.float32)
REAL_SESSION = onnxruntime.InferenceSession


def load(parameters: dict[str, Array]) -> OnnxModel:
    return OnnxModel(matrix_product(), parameters, num_threads=1)


def refusal(parameters: dict[str, Array]) -> str:
    with pytest.raises(ArtefactRejected) as caught:
        load(parameters)
    assert caught.value.reason is Reason.LOAD_FAILED
    return caught.value.detail


def test_a_graph_joined_with_parameters_computes():
    model = load({"w": WEIGHT})
    np.testing.assert_array_equal(model.run(X), X @ WEIGHT)
    assert model.input_shape == (3,)
    assert model.active_providers == ["CPUExecutionProvider"]


def hidden_in_an_onnx_file(graph: bytes, folder: Path) -> bytes:
    """Return a graph in ONNX Runtime's own format that reads as an ONNX file of fields which nobody knows."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "graph.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    REAL_SESSION(graph, options, providers=["CPUExecutionProvider"])
    own = (folder / "graph.ort").read_bytes()
    assert own[4:8] == b"ORTM"
    # The first four bytes say where it begins, all else is told from there: what is behind the eighth may move. Here
    # they are a number 0 as field 15, and the head of another field 15, of one byte; RT is the head of a field 10.
    first = bytes([0x78, 0, 0x7A, 1])
    moved = int.from_bytes(first, "little") - int.from_bytes(own[:4], "little")
    rest = bytes(moved - 83 - 5) + own[8:]
    head = bytes([0x7A, *(len(rest) >> shift & 127 | 128 for shift in (0, 7, 14)), len(rest) >> 21])
    return first + b"ORTM" + bytes(83) + head + rest


def test_no_graph_is_taken_for_one_of_onnx_runtimes_own_format(tmp_path: Path):
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy"]
    axis = helper.make_tensor("axis", TensorProto.INT64, [], [1])
    graph = helper.make_graph([helper.make_node("CumSum", ["x", "axis"], ["y"])], "g", ends[:1], ends[1:], [axis])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    hidden = hidden_in_an_onnx_file(model.SerializeToString(), tmp_path)
    with pytest.raises(ArtefactRejected, match="can't load the graph"):
        OnnxModel(hidden, {}, num_threads=1)


def test_changing_the_callers_array_afterwards_changes_nothing():
    weight = WEIGHT.copy()
    model = load({"w": weight})
    weight[:] = 0
    np.testing.assert_array_equal(model.run(X), X @ WEIGHT)


def test_lent_arrays_are_not_copied():
    model = OnnxModel(matrix_product(), {"w": WEIGHT}, num_threads=1, lent=True)
    assert all(value._numpy_obj is WEIGHT for value in model._values)
    np.testing.assert_array_equal(model.run(X), X @ WEIGHT)


def test_arrays_in_another_memory_order_are_taken_by_value():
    model = load({"w": np.asfortranarray(WEIGHT)})
    np.testing.assert_array_equal(model.run(np.asfortranarray(X)), X @ WEIGHT)


def test_batchnorm_counters_are_ignored_and_nothing_else_is():
    load({"w": WEIGHT, "norm.num_batches_tracked": np.array(3)})
    assert "'v' has no place in the graph" in refusal({"w": WEIGHT, "v": WEIGHT})


def test_missing_parameters_are_named():
    assert "needs parameter 'w', which is missing" in refusal({})


@pytest.mark.parametrize("weight", [WEIGHT.T, WEIGHT.astype(np.float64), WEIGHT.astype(np.float16), WEIGHT[:2]])
def test_a_parameter_of_another_shape_or_dtype_is_refused_with_both(weight: Array):
    detail = refusal({"w": np.ascontiguousarray(weight)})
    assert str(weight.shape) in detail
    assert weight.dtype.name in detail
    assert "graph needs (3, 2) float32" in detail


@pytest.mark.parametrize("shape", [["batch", 3, "height", "width"], [None, 3, None, None], []])
def test_a_graph_that_leaves_the_size_of_its_inputs_open_is_refused(shape: list[int | str | None]):
    """As detectors from elsewhere do: whoever made an input of that size got a traceback."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    with pytest.raises(ArtefactRejected, match="expected a batch of inputs of one size"):
        OnnxModel(model.SerializeToString(), {}, num_threads=1)


def test_no_file_is_read_even_if_the_graph_names_one_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("parameters", "secret.bin"):
        Path(name).write_bytes(WEIGHT.tobytes())
    with pytest.raises(ArtefactRejected, match="read from a file"):
        OnnxModel(matrix_product("secret.bin"), {}, num_threads=1)
    with pytest.raises(ArtefactRejected, match="missing"):
        OnnxModel(matrix_product(), {}, num_threads=1)


def test_a_graph_that_onnx_runtime_can_not_load_is_refused_in_one_line():
    model = onnx.load_from_string(matrix_product())
    model.graph.node[0].op_type = "Relu"
    with pytest.raises(ArtefactRejected, match="ONNX Runtime can't load the graph") as caught:
        OnnxModel(model.SerializeToString(), {"w": WEIGHT}, num_threads=1)
    assert "\n" not in str(caught.value)


def test_a_graph_with_two_outputs_is_refused():
    model = onnx.load_from_string(matrix_product())
    model.graph.node.append(helper.make_node("Relu", ["y"], ["z"]))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 2]))
    with pytest.raises(ArtefactRejected, match="1 inputs and 2 outputs"):
        OnnxModel(model.SerializeToString(), {"w": WEIGHT}, num_threads=1)


@pytest.mark.parametrize("x", [X.astype(np.float64), X[:, :2], X[0], X[:0], np.float32(1)])
def test_a_wrong_batch_is_a_value_error_that_says_what_fits(x: Array):
    with pytest.raises(ValueError, match=r"expected \(B, 3\) float32 with B >= 1"):
        load({"w": WEIGHT}).run(np.asarray(x))


def test_threads_sleep_between_runs_and_memory_is_returned_if_asked():
    options = _session_options(3, arena=False)
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert not options.enable_cpu_mem_arena
    assert options.log_severity_level >= 3


def test_no_threads_is_refused():
    with pytest.raises(ValueError, match="num_threads is 0"):
        OnnxModel(matrix_product(), {"w": WEIGHT}, num_threads=0)


@pytest.mark.parametrize("provider", ["CUDAExecutionProvider", "TensorrtExecutionProvider"])
def test_a_gpu_that_was_asked_for_is_never_replaced_silently(provider: str):
    with pytest.raises(ArtefactRejected, match=f"{provider} can't be used") as caught:
        OnnxModel(matrix_product(), {"w": WEIGHT}, num_threads=1, providers=(provider, "CPUExecutionProvider"))
    assert caught.value.reason is Reason.LOAD_FAILED
    assert "not built into this onnxruntime" in caught.value.detail or ".so" in caught.value.detail
    assert "\n" not in caught.value.detail


def test_a_gpu_that_works_but_not_on_this_graph_is_refused_with_the_graphs_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("replayfleet.export.running.runtime._why_not", lambda provider: "")
    with pytest.raises(ArtefactRejected, match="CUDAExecutionProvider can't be used: RuntimeError"):
        OnnxModel(matrix_product(), {"w": WEIGHT}, num_threads=1, providers=("CUDAExecutionProvider",))


def test_no_providers_are_refused():
    with pytest.raises(ValueError, match="providers is empty"):
        OnnxModel(matrix_product(), {"w": WEIGHT}, num_threads=1, providers=())
