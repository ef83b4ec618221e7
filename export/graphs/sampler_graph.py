"""A diffusion model and all the steps that draw from it, as one flat ONNX graph: noise in, images out.

Lu et al. 2022, "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models", Algorithm 2 (2M), as
``federation.methods.steps.sub_generators.ddpm`` runs it. The network is written once for each step, its parameters
once in all: a loop would be a subgraph, which no device loads (``export.running.inspection``). What the network makes
of the timesteps doesn't depend on images, so it is computed here and stored, some kB a step.

The solver's own arithmetic stays float32 whatever the network is rounded to: its first step divides by 0.006.

Axes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from replayfleet.export.graphs.graph import OPSET, operators_kept
from replayfleet.export.graphs.simplify import drop_dead_nodes, replace_nodes
from replayfleet.export.running.artefact import Array, Run
from replayfleet.federation.methods.steps.sub_generators.ddpm import denoised, solver_schedule

Convert: TypeAlias = Callable[[onnx.ModelProto], onnx.ModelProto]
"""Rounds a float32 model, keeping the types of its first input and of its output."""

_PROBE_BATCH = 7
"""A prime, so that an axis of the batch is told from others by its length."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the solver, from images ``x_i`` and predicted noise ``e_i`` to ``x_{i+1}``.

    ``clean_i = from_images * x_i + from_noise * e_i``, the network's guess at the picture, and
    ``x_{i+1} = keep * x_i + towards * clean_i + before * clean_{i-1}``.

    Attributes:
        timestep: what the network is told.
        from_images: ``1 / alpha_i``.
        from_noise: ``-sigma_i / alpha_i``.
        keep: ``sigma_{i+1} / sigma_i``.
        towards: ``alpha_{i+1} (1 - exp(-h_i)) (1 + 1 / (2 r_i))``.
        before: ``-alpha_{i+1} (1 - exp(-h_i)) / (2 r_i)``; 0 in the first and last step, which are of first order.
    """

    timestep: int
    from_images: float
    from_noise: float
    keep: float
    towards: float
    before: float


def solver_steps(num_steps: int) -> list[Step]:
    """Return the steps of Algorithm 2 with ``lambda = log(alpha / sigma)`` and ``r_i = h_{i-1} / h_i``.

    The last step goes to ``sigma = 0``, where ``x`` is ``clean``.
    """
    timesteps, levels = solver_schedule(num_steps)
    alphas = [1 / np.sqrt(level**2 + 1) for level in levels]
    steps = []
    for index, timestep in enumerate(timesteps):
        here, there = levels[index], levels[index + 1]
        fraction = 1 - there / here  # 1 - exp(-h), for h = log(here / there)
        half = 0.0
        if 0 < index < num_steps - 1:
            half = 0.5 * float(np.log(here / there) / np.log(levels[index - 1] / here))  # 1 / (2 r)
        weight = float(alphas[index + 1] * fraction)
        keep = float(there * alphas[index + 1] / (here * alphas[index]))
        steps.append(Step(timestep, float(1 / alphas[index]), -here, keep, weight * (1 + half), -weight * half))
    return steps


def eager_sampler(module: nn.Module, num_steps: int) -> Run:
    """Return the sampler as PyTorch runs it: noise (B, C, H, W) float32 -> images in [-1, 1]."""
    module.eval()

    def run(noise: Array) -> Array:
        with torch.inference_mode():
            images: Array = denoised(module, torch.from_numpy(noise), num_steps).numpy()
            return images

    return run


@dataclass(frozen=True, slots=True)
class TimedNetwork:
    """A denoiser as ONNX, and what it makes of each of its timesteps.

    Attributes:
        model: noised images, and ``constants`` of one step, to the predicted noise.
        steps: of the solver.
        constants: for each step, input name -> value.
    """

    model: onnx.ModelProto
    steps: Sequence[Step]
    constants: Sequence[Mapping[str, Array]]


def timed_network(module: nn.Module, image_shape: tuple[int, ...], num_steps: int) -> TimedNetwork:
    """Return the denoiser ready for its steps. Takes ten seconds or more.

    Args:
        module: the denoiser with its parameters; set to eval mode.
        image_shape: (C, H, W).
        num_steps: how often it is called, 1 to 1000.
    """
    steps = solver_steps(num_steps)
    network = _exported(module, image_shape)
    _fix_shapes(network)
    _resize_by_joining(network.graph)
    drop_dead_nodes(network.graph)
    constants = _evaluate_times(network.graph, [step.timestep for step in steps])
    return TimedNetwork(network, steps, constants)


def sampler_model(network: TimedNetwork, image_shape: tuple[int, ...], convert: Convert) -> onnx.ModelProto:
    """Return the model that maps ``noise`` (B, C, H, W) to ``images`` (B, C, H, W) in [-1, 1], any B.

    Args:
        network: untouched.
        image_shape: (C, H, W).
        convert: rounds the network.
    """
    copied = onnx.ModelProto()
    copied.CopyFrom(network.model)
    return _unrolled(convert(copied), network.steps, network.constants, image_shape)


def _exported(module: nn.Module, image_shape: tuple[int, ...]) -> onnx.ModelProto:
    """Return the denoiser; one timestep serves the whole batch."""
    with operators_kept():
        program = torch.onnx.export(
            module.eval(),
            (torch.zeros(2, *image_shape), torch.zeros(1, dtype=torch.int64)),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)}, None),
            input_names=["x", "timestep"],
            output_names=["predicted"],
            opset_version=OPSET,
            optimize=True,
            verbose=False,
        )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program, though dynamo=True")
    model = onnx.ModelProto()
    model.CopyFrom(program.model_proto)
    del model.graph.value_info[:]
    for node in model.graph.node:
        if node.op_type == "Mul" and "timestep" in node.input:  # times as many ones as there are images
            _rename_reads(model.graph, {node.output[0]: "timestep"})
    return model


def _fix_shapes(model: onnx.ModelProto) -> None:
    """Write down every shape that the exporter computes from the batch size: only the first axis depends on it.

    That axis is copied from the input. If it were left to be computed, ONNX Runtime would take it for another number in
    every tensor, reuse no memory, and need half a minute to find out when it loads twenty steps.
    """
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = _PROBE_BATCH
    inferred = onnx.shape_inference.infer_shapes(fixed, strict_mode=True, data_prop=True).graph
    shapes = {info.name: _dims(info) for info in (*inferred.value_info, *inferred.input, *inferred.output)}
    for node in model.graph.node:
        if node.op_type != "Reshape" or node.input[0] not in shapes:
            continue
        first, *rest = shapes[node.output[0]]
        if first != _PROBE_BATCH:
            continue  # of constants, or of shapes that go when nobody reads them any more
        if shapes[node.input[0]][0] != _PROBE_BATCH or not all(side > 0 for side in rest):
            raise RuntimeError(f"the shape of {node.output[0]!r} can't be fixed: {[first, *rest]}")
        node.input[1] = f"{node.output[0]}_shape"
        model.graph.initializer.append(_tensor(node.input[1], np.array([0, *rest], np.int64)))
        del node.attribute[:]


def _resize_by_joining(graph: onnx.GraphProto) -> None:
    """Double maps by joining each pixel with itself, along rows and then along columns; exact, and always bounded.

    Raises:
        RuntimeError: A Resize does something else than repeat every pixel.
    """
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    inferred = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=_opset()))
    sides = {info.name: _dims(info) for info in inferred.graph.value_info}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type != "Resize":
            nodes.append(node)
            continue
        mode = next(item.s for item in node.attribute if item.name == "mode")
        if len(node.input) != 3 or values[node.input[2]].tolist() != [1, 1, 2, 2] or mode != b"nearest":
            raise RuntimeError(f"{node.output[0]!r} is resized in a way that is not written down here")
        name, source = node.output[0], node.input[0]
        _, channels, height, width = sides[source]
        apart, doubled = f"{name}_apart", f"{name}_doubled"
        shapes = {f"{apart}_shape": [0, channels, height, 1, width, 1]}
        shapes[f"{doubled}_shape"] = [0, channels, 2 * height, 2 * width]
        graph.initializer.extend(_tensor(key, np.array(shape, np.int64)) for key, shape in shapes.items())
        nodes += [
            helper.make_node("Reshape", [source, f"{apart}_shape"], [apart]),
            helper.make_node("Concat", [apart, apart], [f"{name}_rows"], axis=3),
            helper.make_node("Concat", [f"{name}_rows", f"{name}_rows"], [doubled], axis=5),
            helper.make_node("Reshape", [doubled, f"{doubled}_shape"], [name]),
        ]
    replace_nodes(graph, nodes)


def _evaluate_times(graph: onnx.GraphProto, timesteps: Sequence[int]) -> list[Mapping[str, Array]]:
    """Take out what depends on the timestep alone, and return its values for each; they become inputs of ``graph``."""
    timed, known = {"timestep"}, {tensor.name for tensor in graph.initializer}
    inside, outside = [], []
    for node in graph.node:
        if timed.intersection(node.input) and all(name in timed | known for name in node.input):
            timed.update(node.output)
            inside.append(node)
        else:
            outside.append(node)
    read = {name for node in outside for name in node.input}
    names = [name for node in inside for name in node.output if name in read]
    part = helper.make_graph(
        inside,
        "time",
        [helper.make_tensor_value_info("timestep", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
        graph.initializer,
    )
    evaluator = ReferenceEvaluator(helper.make_model(part, opset_imports=_opset()))
    values: list[Mapping[str, Array]] = []
    for timestep in timesteps:
        outputs: Any = evaluator.run(None, {"timestep": np.array([timestep])})
        values.append(dict(zip(names, outputs, strict=True)))
    replace_nodes(graph, outside)
    del graph.input[1:]
    for name in names:
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, values[0][name].shape))
    kept = [tensor for tensor in graph.initializer if any(tensor.name in node.input for node in outside)]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return values


def _unrolled(
    network: onnx.ModelProto,
    steps: Sequence[Step],
    constants: Sequence[Mapping[str, Array]],
    image_shape: tuple[int, ...],
) -> onnx.ModelProto:
    graph = network.graph
    shape: list[str | int] = ["batch", *image_shape]
    result = helper.make_graph(
        [],
        "graph",
        [helper.make_tensor_value_info("noise", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, shape)],
        graph.initializer,
    )
    shared = {tensor.name for tensor in graph.initializer}
    images, before = "noise", ""
    for index, (step, values) in enumerate(zip(steps, constants, strict=True)):
        names = {graph.input[0].name: images}
        for entry in graph.input[1:]:
            names[entry.name] = f"step{index}_{entry.name}"
            dtype = helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type)
            result.initializer.append(_tensor(names[entry.name], values[entry.name].astype(dtype)))
        for node in graph.node:
            copy = result.node.add()
            copy.CopyFrom(node)
            copy.name = f"step{index}_{node.name or node.output[0]}"
            for tensors in (copy.input, copy.output):
                for place, name in enumerate(tensors):
                    if name and name not in shared:
                        tensors[place] = names.setdefault(name, f"step{index}_{name}")
        images, before = _solve(result, index, step, (images, names[graph.output[0].name], before))
    result.initializer.extend([_scalar("lowest", -1.0), _scalar("highest", 1.0)])
    result.node.append(helper.make_node("Clip", [images, "lowest", "highest"], ["images"], name="clip"))
    return helper.make_model(result, opset_imports=_opset(), ir_version=network.ir_version)


def _solve(graph: onnx.GraphProto, index: int, step: Step, tensors: tuple[str, str, str]) -> tuple[str, str]:
    """Append one step of the solver to (images, predicted noise, last clean images); return (images, clean images)."""
    images, predicted, before = tensors
    clean = _weighted(graph, f"clean{index}", [(images, step.from_images), (predicted, step.from_noise)])
    terms = [(images, step.keep), (clean, step.towards), (before, step.before)]
    return _weighted(graph, f"images{index}", [(name, weight) for name, weight in terms if weight != 0.0]), clean


def _weighted(graph: onnx.GraphProto, name: str, terms: Sequence[tuple[str, float]]) -> str:
    """Append ``sum weight * tensor`` and return its name."""
    total = ""
    for place, (tensor, weight) in enumerate(terms):
        product = f"{name}_term{place}"
        graph.initializer.append(_scalar(f"{product}_weight", weight))
        graph.node.append(helper.make_node("Mul", [tensor, f"{product}_weight"], [product], name=product))
        if total:
            sum_name = f"{name}_sum{place}"
            graph.node.append(helper.make_node("Add", [total, product], [sum_name], name=sum_name))
            product = sum_name
        total = product
    return total


def _rename_reads(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)


def _dims(info: onnx.ValueInfoProto) -> list[int]:
    return [dim.dim_value for dim in info.type.tensor_type.shape.dim]


def _tensor(name: str, values: NDArray[np.generic]) -> TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(values), name)


def _scalar(name: str, value: float) -> TensorProto:
    return numpy_helper.from_array(np.array(value, np.float32), name)


def _opset() -> list[onnx.OperatorSetIdProto]:
    return [helper.make_opsetid("", OPSET)]
