"""A sub-generator's first layer becomes one product; constants are worked out; parameters keep their names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from replayfleet.export.graphs.graph import export_graph
from replayfleet.export.graphs.join import join
from replayfleet.export.graphs.precision import to_float16
from replayfleet.export.graphs.simplify import project_latents, work_out_constants
from replayfleet.export.parity import eager_run
from replayfleet.export.running.inspection import inspect_graph
from replayfleet.models.build import build_generator
from replayfleet.models.specs import LATENT_SIZE, TaskSpec


def trained(size: int) -> nn.Module:
    """A sub-generator as training leaves it: norms that scale and shift."""
    module = build_generator(TaskSpec(1, size, ("a", "b"), generator_width=2))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in module.state_dict().values():
            if value.is_floating_point():
                value.normal_(0.1, 0.4, generator=rng)
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_var.uniform_(0.2, 3, generator=rng)
    return module


@pytest.mark.parametrize(("size", "epsilon"), [(28, 1e-5), (64, 0.5)])
def test_onnx_runtime_loads_a_sub_generator_without_norms_and_draws_what_the_eager_one_draws(
    size: int, epsilon: float, tmp_path: Path
):
    module = trained(size)
    module.layers[1].eps = epsilon
    graph = export_graph(module, (LATENT_SIZE,), ("latents", "images"), {})
    whole = join(graph, {name: value.numpy() for name, value in module.state_dict().items()})
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(whole, options, providers=["CPUExecutionProvider"])
    loaded = [node.op_type for node in onnx.load(tmp_path / "loaded.onnx").graph.node]
    if sys.version_info >= (3, 11):  # the last ONNX Runtime for 3.10 keeps norms
        assert loaded == ["Gemm", "Reshape", *["Relu", "ConvTranspose"] * 3, "Tanh"]
    latents = np.random.default_rng(1).standard_normal((3, LATENT_SIZE), dtype=np.float32)
    found = session.run(None, {"latents": latents})[0]
    np.testing.assert_allclose(found, eager_run(module)(latents), atol=2e-5)


@pytest.mark.parametrize("sides", [(), (1, 1)], ids=["no norm", "latents that are maps"])
def test_other_transposed_convolutions_are_left_as_they_are(sides: tuple[int, ...]):
    behind = helper.make_node("BatchNormalization", ["y", "s", "s", "s", "s"], ["z"])
    nodes = [helper.make_node("ConvTranspose", ["x", "w"], ["y"]), *([behind] if sides else [])]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, *sides])],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, [3, 2, 4, 4], [0.0] * 96)],
    )
    project_latents(graph)
    assert list(graph.node) == nodes


def test_what_cannot_be_worked_out_stays_for_the_list_to_judge():
    draws = helper.make_node("RandomNormal", [], ["r"], shape=[2])
    halves = helper.make_node("Split", ["c"], ["a", "b"], num_outputs=2)
    values = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.FLOAT, [2], [1.0, 2.0]))
    graph = helper.make_graph([values, halves, draws], "graph", [], [])
    work_out_constants(graph)
    assert [node.op_type for node in graph.node] == ["Constant", "Split", "RandomNormal"]


class Modern(nn.Module):
    """What a package's task model may be made of."""

    def __init__(self) -> None:
        super().__init__()
        norms = (nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm([4, 6, 6]))
        turns = (nn.GELU(), nn.SiLU(), nn.ELU(), nn.SELU(), nn.Mish(), nn.Softplus(), nn.PReLU(4), nn.Hardtanh())
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), *norms, *turns, nn.AdaptiveMaxPool2d(1), nn.Flatten())
        self.head = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(images)) * 2 - 1


@pytest.mark.parametrize(("convert", "tolerance"), [(None, 1e-5), (to_float16, 0.03)], ids=["float32", "float16"])
def test_group_norms_and_activations_of_a_packages_model_run_on_a_device(
    convert: Callable[[onnx.ModelProto], onnx.ModelProto] | None, tolerance: float
):
    rng, module = torch.Generator().manual_seed(0), Modern()
    with torch.no_grad():
        for value in module.parameters():
            value.normal_(0.1, 0.4, generator=rng)
    graph = export_graph(module, (1, 8, 8), ("images", "logits"), {})
    assert inspect_graph(graph).parameters.keys() == module.state_dict().keys()
    images = torch.randn(5, 1, 8, 8, generator=rng)
    whole = join(graph, {name: value.numpy() for name, value in module.state_dict().items()})
    if convert is not None:
        whole = convert(onnx.load_from_string(whole)).SerializeToString()
    with torch.no_grad():
        expected = module.eval()(images).numpy()
    session = onnxruntime.InferenceSession(whole)
    np.testing.assert_allclose(session.run(None, {"images": images.numpy()})[0], expected, atol=tolerance)
