"""ONNX (graph and parameters) and TorchScript answer as the eager model does, for every architecture of the papers."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import sys

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import replayfleet.export.graphs.graph
from replayfleet.export.batches import BATCHES
from replayfleet.export.graphs.graph import (
    OPSET,
    _table_of_operators,
    operators_kept,
    sub_generator_graph,
    task_graph,
)
from replayfleet.export.graphs.join import join
from replayfleet.export.parity import TOLERANCE, ParityError, check_parity, eager_run
from replayfleet.export.running.artefact import Array, Run, check_probe, make_probe
from replayfleet.export.running.facts import own_facts
from replayfleet.export.running.inspection import inspect_graph
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.export.running.sampler import onnx_sampler
from replayfleet.export.torchscript import load_torchscript, torchscript_bytes
from replayfleet.federation.errors import ArtefactRejected
from replayfleet.models.build import build_generator, build_task_model, initialise
from replayfleet.models.specs import ADDED_MODELS, LATENT_SIZE, MixtureSpec, TaskSpec

CLASSES = tuple("abcdefghij")
SMALL = TaskSpec(1, 28, CLASSES)
TASKS = [SMALL, TaskSpec(3, 32, CLASSES), TaskSpec(3, 64, CLASSES, stem="imagenet")]
GENERATORS = [
    TaskSpec(channels, size, CLASSES, generator_width=width)
    for channels, size, width in [(1, 28, 16), (3, 32, 64), (3, 64, 128), (1, 28, 32), (3, 32, 128)]
]


def name(spec: TaskSpec) -> str:
    return f"{spec.image_size}px-{spec.generator_width}"


def as_if_trained(module: nn.Module, seed: int = 0) -> nn.Module:
    """Draw parameters large enough to tell models apart, and BatchNorm statistics that eval mode must use."""
    rng = torch.Generator().manual_seed(seed)
    initialise(module, rng)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_(0.0, 0.3, generator=rng)
                layer.running_var.uniform_(0.3, 3.0, generator=rng)
                layer.weight.uniform_(0.5, 1.5, generator=rng)
                layer.bias.normal_(0.0, 0.3, generator=rng)
                layer.num_batches_tracked.fill_(7)
            elif isinstance(layer, nn.ConvTranspose2d):
                layer.weight.mul_(5)
    return module


def arrays_of(module: nn.Module) -> dict[str, Array]:
    return {key: value.numpy().copy() for key, value in module.state_dict().items()}


def remembered(run: Run) -> Run:
    answers: dict[bytes, Array] = {}

    def recall(x: Array) -> Array:
        key = x.tobytes()
        if key not in answers:
            answers[key] = run(x)
        return answers[key]

    return recall


def agrees(module: nn.Module, graph: bytes, input_shape: tuple[int, ...]) -> None:
    assert BATCHES == (1, 2, 64)
    assert TOLERANCE == 1e-4
    reference = remembered(eager_run(module))
    spread = reference(np.random.default_rng(1).standard_normal((4, *input_shape), dtype=np.float32)).std()
    assert spread > 100 * TOLERANCE, "answers too small to tell models apart"
    parameters = arrays_of(module)
    split = OnnxModel(graph, parameters, num_threads=2)
    check_parity("onnx", split.run, reference, input_shape)
    joined = OnnxModel(join(graph, parameters), {}, num_threads=2)
    check_parity("onnx, one file", joined.run, reference, input_shape)
    data = torchscript_bytes(module, input_shape, {})
    script = load_torchscript(data, hashlib.sha256(data).hexdigest())
    check_parity("torchscript", eager_run(script), reference, input_shape)


@pytest.mark.parametrize("spec", TASKS, ids=name)
def test_the_exported_task_model_agrees_with_the_eager_one(spec: TaskSpec):
    agrees(as_if_trained(build_task_model(spec)), task_graph(spec), spec.image_shape)


@pytest.mark.parametrize("spec", GENERATORS, ids=name)
def test_the_exported_sub_generator_agrees_with_the_eager_one(spec: TaskSpec):
    agrees(as_if_trained(build_generator(spec)), sub_generator_graph(spec), (LATENT_SIZE,))


@pytest.mark.parametrize("architecture", ["cnn", "lenet", "linear", "resnet20-cosine", "resnet20-he"])
def test_every_other_architecture_can_be_served_too(architecture: str):
    spec = TaskSpec(3, 32, CLASSES, architecture=architecture)
    agrees(as_if_trained(build_task_model(spec)), task_graph(spec), spec.image_shape)


@pytest.mark.parametrize("spec", [MixtureSpec(SMALL, 32), MixtureSpec(TASKS[1], 8, 4)], ids=["gaussian", "mixture"])
def test_the_exported_gaussians_agree_with_the_eager_ones(spec: MixtureSpec):
    module, rng = build_generator(spec), torch.Generator().manual_seed(0)
    module.num_samples.copy_(torch.tensor([100, 1, 0, 50][: spec.num_components]))
    module.means.copy_(0.3 * torch.randn(module.means.shape, generator=rng))
    module.bases.copy_(0.1 * torch.randn(module.bases.shape, generator=rng))
    agrees(module, sub_generator_graph(spec), (LATENT_SIZE,))


def test_the_gate_notices_one_changed_running_mean():
    module = as_if_trained(build_task_model(SMALL))
    parameters = arrays_of(module)
    parameters["blocks.7.norm2.running_mean"][0] += 0.05
    model = OnnxModel(task_graph(SMALL), parameters, num_threads=1)
    with pytest.raises(ParityError):
        check_parity("onnx", model.run, eager_run(module), SMALL.image_shape)


@pytest.mark.parametrize(
    ("graph", "module"),
    [(task_graph, build_task_model(SMALL)), (sub_generator_graph, build_generator(SMALL))],
    ids=["task", "sub-generator"],
)
def test_a_graph_leaves_open_exactly_the_state_dict(graph, module):  # noqa: ANN001
    layout = {key: (tuple(value.shape), str(value.dtype)) for key, value in module.state_dict().items()}
    needed = inspect_graph(graph(SMALL)).parameters
    assert {key: (value.shape, f"torch.{value.dtype}") for key, value in needed.items()} == {
        key: value for key, value in layout.items() if not key.endswith(".num_batches_tracked")
    }


def test_a_graph_is_small_reproducible_and_silent_about_the_machine():
    graph = task_graph(SMALL)
    before = torch.get_rng_state()
    replayfleet.export.graphs.graph._task_graph.cache_clear()
    again = task_graph(SMALL)
    assert again == graph
    assert torch.equal(before, torch.get_rng_state())
    assert len(graph) < 32_000
    for trace in (replayfleet.export.graphs.graph.__file__.rsplit("/", 2)[0], "site-packages", "File ", "torch"):
        assert trace.encode() not in graph


def test_other_names_and_more_classes_cost_no_second_export(monkeypatch: pytest.MonkeyPatch) -> None:
    sub_generator = sub_generator_graph(SMALL), sub_generator_graph(MixtureSpec(SMALL, 32))
    task_graph(SMALL)
    monkeypatch.setattr(replayfleet.export.graphs.graph, "export_graph", lambda *_: pytest.fail("exported again"))
    named = dataclasses.replace(SMALL, class_names=CLASSES[::-1])
    assert json.loads(own_facts(inspect_graph(task_graph(named)).metadata)["classes"]) == list(CLASSES[::-1])
    grown = dataclasses.replace(SMALL, class_names=(*CLASSES, "one more"), architecture="lenet", stem="imagenet")
    assert (sub_generator_graph(grown), sub_generator_graph(MixtureSpec(grown, 32))) == sub_generator


def test_the_exporters_table_of_operators_is_kept_for_our_exports_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    as_it_was = vars(registry)["from_torchlib"]
    task_graph(SMALL)
    assert vars(registry)["from_torchlib"] is as_it_was
    with operators_kept():
        assert registry.from_torchlib(opset_version=OPSET) is registry().from_torchlib(opset_version=OPSET)
    monkeypatch.setitem(sys.modules, "torch.onnx._internal.exporter._registration", None)
    _table_of_operators.cache_clear()
    with operators_kept():
        assert vars(registry)["from_torchlib"] is as_it_was
    _table_of_operators.cache_clear()


def test_what_a_package_adds_may_read_its_classes_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader(nn.Module):
        def __init__(self, spec: TaskSpec) -> None:
            super().__init__()
            self.head = nn.Linear(spec.image_channels, spec.num_classes, bias=spec.class_names[0] == "a")

        def features(self, images: torch.Tensor) -> torch.Tensor:
            return images.mean(dim=(2, 3))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.features(images))
            return logits

    monkeypatch.setitem(ADDED_MODELS.built_in, "reader", Reader)
    found = [task_graph(TaskSpec(1, 28, names, architecture="reader")) for names in (("a", "b"), ("b", "a"))]
    assert [sorted(inspect_graph(graph).parameters) for graph in found] == [
        ["head.bias", "head.weight"],
        ["head.weight"],
    ]


def test_a_graph_says_what_it_is():
    facts = own_facts(inspect_graph(task_graph(SMALL)).metadata)
    assert facts["kind"] == "task"
    assert json.loads(facts["classes"]) == list(CLASSES)
    assert json.loads(facts["input"]) == [1, 28, 28]
    assert facts["opset"] == str(onnx.load_from_string(task_graph(SMALL)).opset_import[0].version) == "20"
    assert "pixel / 127.5 - 1" in facts["preprocessing"]


def test_joining_refuses_parameters_of_another_model():
    parameters = arrays_of(build_generator(SMALL))
    with pytest.raises(ArtefactRejected, match="wrong-layout"):
        join(task_graph(SMALL), parameters)
    with pytest.raises(ArtefactRejected, match=r"'layers\.0\.weight' is missing"):
        join(sub_generator_graph(SMALL), {"layers.1.weight": parameters["layers.1.weight"]})


def test_the_sampler_draws_what_the_eager_sub_generator_draws():
    module = as_if_trained(build_generator(SMALL)).eval()
    parameters = module.state_dict()
    latents = torch.randn(9, LATENT_SIZE, generator=torch.Generator().manual_seed(3))
    sampler = onnx_sampler(sub_generator_graph(SMALL), num_threads=1)
    draw = sampler(parameters)
    with torch.no_grad():
        expected = module(latents)
        for value in parameters.values():
            value.zero_()  # a draw is bound to the values that it was made with
    found = draw(latents)
    assert found.shape == (9, 1, 28, 28)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(draw(latents), found)


def test_a_golden_vector_made_in_torch_passes_in_onnx_runtime_and_fails_for_another_model():
    module, other = (as_if_trained(build_task_model(SMALL), seed) for seed in (1, 2))
    probe = make_probe(eager_run(module), SMALL.image_shape, seed=11)
    served = OnnxModel(task_graph(SMALL), arrays_of(module), num_threads=1)
    assert check_probe(served.run, probe, SMALL.image_shape, SMALL.output_shape) < 1e-4
    wrong = OnnxModel(task_graph(SMALL), arrays_of(other), num_threads=1)
    with pytest.raises(ArtefactRejected, match="probe-mismatch"):
        check_probe(wrong.run, probe, SMALL.image_shape, SMALL.output_shape)
