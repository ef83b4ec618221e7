"""A BatchNorm disappears into the layer before it, only where that is surely right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from export.artefact import Array
from export.fold_on_load import folded
from export.graph import join, sub_generator_graph, task_graph
from export.parity import eager_run
from export.runtime import OnnxModel
from models.build import build_generator, build_task_model
from models.specs import LATENT_SIZE, TaskSpec

SPEC = TaskSpec(1, 28, ("a", "b"), generator_width=2)
FIRST = "layers.0.weight"


def trained(module: torch.nn.Module, seed: int = 0) -> dict[str, Array]:
    """Parameters as training leaves them: norms that scale and shift."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, value in module.state_dict().items():
        array = value.numpy()
        if name.endswith("running_var"):
            array = rng.uniform(0.2, 3, array.shape).astype(np.float32)
        elif array.dtype == np.float32:
            array = rng.normal(0.1, 0.4, array.shape).astype(np.float32)
        arrays[name] = array
        module.state_dict()[name].copy_(torch.from_numpy(array))
    return arrays


def run(model: bytes, x: Array) -> Array:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    answers: Array = session.run(None, {session.get_inputs()[0].name: x})[0]
    return answers


def generator() -> tuple[bytes, dict[str, Array]]:
    arrays = trained(build_generator(SPEC))
    return sub_generator_graph(SPEC), {name: array for name, array in arrays.items() if "num_batches" not in name}


def operators(graph: bytes) -> list[str]:
    return [node.op_type for node in onnx.load_from_string(graph).graph.node]


@pytest.mark.parametrize("size", [28, 64])
def test_a_folded_sub_generator_draws_what_the_eager_one_draws(size: int):
    spec = TaskSpec(1, size, ("a", "b"), generator_width=2)
    module = build_generator(spec)
    arrays = trained(module)
    open_arrays = {name: array for name, array in arrays.items() if "num_batches" not in name}
    graph, parameters = folded(sub_generator_graph(spec), open_arrays)
    before = operators(sub_generator_graph(spec))
    assert operators(graph).count("BatchNormalization") == before.count("BatchNormalization") - 1
    assert operators(graph).count("Gemm") == 1
    model = join(graph, parameters)
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    x = np.random.default_rng(1).standard_normal((3, LATENT_SIZE)).astype(np.float32)
    np.testing.assert_allclose(run(model, x), eager_run(module)(x), atol=2e-5)


def test_our_runtime_loads_what_was_folded_and_draws_the_same():
    graph, parameters = generator()
    x = np.random.default_rng(1).standard_normal((2, LATENT_SIZE)).astype(np.float32)
    model = OnnxModel(graph, parameters, num_threads=1)
    np.testing.assert_allclose(model.run(x), run(join(graph, parameters), x), atol=2e-5)


def test_the_callers_parameters_are_not_changed():
    graph, parameters = generator()
    before = {name: array.copy() for name, array in parameters.items()}
    folded(graph, parameters)
    for name, array in before.items():
        np.testing.assert_array_equal(parameters[name], array)


def test_a_task_model_is_left_as_it_is():
    arrays = trained(build_task_model(SPEC))
    graph, parameters = folded(task_graph(SPEC), arrays)
    assert graph == task_graph(SPEC)
    assert parameters.keys() == arrays.keys()


def other_shape(name: str, values: list[int]) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if node.output[0].endswith(name):
                node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array(values, np.int64), node.output[0]))

    return change


def read_by_another(operator: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        made = next(node for node in model.graph.node if node.op_type == operator).output[0]
        model.graph.node.append(onnx.helper.make_node("Relu", [made], ["other"]))

    return change


def drop_shapes(model: onnx.ModelProto) -> None:
    """Shapes that come from elsewhere, not from constants."""
    for node in model.graph.node:
        if node.op_type == "Constant":
            node.op_type = "Identity"


@pytest.mark.parametrize(
    "change",
    [
        other_shape("_map_shape", [0, 4, 16, 2]),
        other_shape("_matrix_shape", [-1, 128]),
        read_by_another("MatMul"),
        read_by_another("Reshape"),
        drop_shapes,
    ],
    ids=["other maps", "other matrix", "product read twice", "reshape read twice", "shapes not constant"],
)
def test_a_graph_of_any_other_form_is_left_as_it_is(change: Callable[[onnx.ModelProto], Any]):
    graph, parameters = generator()
    model = onnx.load_from_string(graph)
    change(model)
    changed = model.SerializeToString()
    assert folded(changed, parameters)[0] == changed


@pytest.mark.parametrize("name", [FIRST, "layers.1.running_var"])
def test_parameters_that_arent_there_leave_the_graph_as_it_is(name: str):
    graph, parameters = generator()
    del parameters[name]
    assert folded(graph, parameters)[0] == graph


def test_a_norm_with_another_epsilon_is_folded_with_it():
    graph, parameters = generator()
    model = onnx.load_from_string(graph)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 0.5
    changed = model.SerializeToString()
    x = np.random.default_rng(1).standard_normal((2, LATENT_SIZE)).astype(np.float32)
    np.testing.assert_allclose(run(join(*folded(changed, parameters)), x), run(join(changed, parameters), x), atol=2e-5)
