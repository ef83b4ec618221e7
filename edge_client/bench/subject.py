"""What is measured: a model file, a client's served model, or one that comes with this package."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save as format_safetensors

from replayfleet.edge_client.bench.messages import Variant
from replayfleet.export.files import read_file
from replayfleet.export.parameters import read_parameters
from replayfleet.export.running.artefact import Array
from replayfleet.export.running.facts import own_facts
from replayfleet.export.running.inspection import inspect_graph
from replayfleet.federation.errors import ArtefactRejected, SettingsError
from replayfleet.models.specs import ARCHITECTURES, DETECTORS, AnyTaskSpec, DetectionSpec, TaskSpec

OUR_TASK = TaskSpec(1, 28, tuple(f"class {number}" for number in range(10)))
"""Of the model that comes with this package: the task model for 28 pixels, its parameters drawn at random."""

TORCHSCRIPT_SUFFIX = ".pt"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured.

    Attributes:
        name: for people.
        variants: forms that exist.
        lacking: (form or precision, why it doesn't).
        task: what its pictures are; None where it answers none.
    """

    name: str
    variants: tuple[Variant, ...]
    lacking: tuple[tuple[str, str], ...]
    task: AnyTaskSpec | None


def from_file(model: Path, parameters: Path | None) -> Subject:
    """Return a file of ``model-export``.

    Args:
        model: ONNX, or TorchScript, which is code: this operator's own.
        parameters: of a graph that was exported with ``--split``.

    Raises:
        SettingsError: A file can't be read, or isn't such a file.
    """
    if model.suffix == TORCHSCRIPT_SUFFIX:
        read_file(model)
        if parameters is not None:
            raise SettingsError("--parameters: a TorchScript file holds its own")
        lacking = (("onnx", f"{model.name} is a TorchScript file"), ("eager", _NO_EAGER))
        return Subject(str(model), (Variant("torchscript", "fp32", str(model)),), lacking, None)
    graph = read_file(model)
    try:
        summary = inspect_graph(graph)
    except ArtefactRejected as error:
        raise SettingsError(f"{model}: {error.detail}") from error
    arrays = {} if parameters is None else read_parameters(parameters)
    missing = [name for name in summary.parameters if name not in arrays]
    if missing:
        raise SettingsError(f"{model}: its parameters are in a file of their own; name it with --parameters")
    facts = own_facts(summary.metadata)
    said = {"onnx": "fp32", "onnx-fp16": "fp16", "onnx-int8": "int8"}.get(facts.get("format", ""), "unknown")
    precision = "fp32" if summary.parameters else said  # only a file of model-export says what it computes in
    variant = Variant("onnx", precision, str(model), "" if parameters is None else str(parameters))
    lacking = (("torchscript", f"{model.name} is an ONNX file"), ("eager", _NO_EAGER))
    return Subject(str(model), (variant,), lacking, task_of_facts(facts))


def from_data_dir(data_dir: Path, folder: Path) -> Subject:
    """Return what a client serves, or served last; looks only, so the client may run.

    Args:
        data_dir: of ``edge-client start``.
        folder: for files that live as long as the measurement.

    Raises:
        SettingsError: No model was ever served there, or it is of another format.
    """
    from replayfleet.edge_client.learning.training.job import BLOBS
    from replayfleet.edge_client.state_store import StateStore
    from replayfleet.federation.service.data_dir import read_client
    from replayfleet.federation.service.fleet.task import task_of
    from replayfleet.federation.wire.protocol.messages import TASK_GRAPH, spoken
    from replayfleet.federation.wire.transport.blob_store import look_up

    if not (data_dir / BLOBS).is_dir():
        raise SettingsError(f"data dir {data_dir}: no client has run there")
    read_client(data_dir)
    held = StateStore(data_dir, read_only=True).held()
    if held is None or held.manifest.serving is None:
        raise SettingsError(f"data dir {data_dir}: nothing is served there yet")
    served = held.served
    digests = {entry.name: entry.digest for entry in served.blobs}
    serving = served.serving
    assert serving is not None  # the download's has one
    # A rounded graph stands alone; what it was made of is there too, and tells how the other forms do.
    names = {"task.onnx": TASK_GRAPH, "task.safetensors": serving.model, "served.onnx": serving.graph}
    graph, parameters, own = (folder / name for name in names)
    try:
        for path, name in zip((graph, parameters, own), names.values(), strict=True):
            path.write_bytes(look_up(data_dir / BLOBS, digests[name]))
    except (KeyError, ArtefactRejected) as error:
        raise SettingsError(f"data dir {data_dir}: the served model can't be read ({error})") from error
    name, precision = f"version {spoken(held.manifest.version)} of {data_dir}", serving.precision
    subject = _with_torch(name, graph, parameters, task_of(held.spec), folder)
    if serving.graph == TASK_GRAPH:
        return subject
    others = (variant for variant in subject.variants if variant.precision != precision)
    lacking = tuple(row for row in subject.lacking if row[0] != precision)
    return replace(subject, variants=(Variant("onnx", precision, str(own)), *others), lacking=lacking)


def of_our_own(folder: Path) -> Subject:
    """Return the model that comes with this package, in every precision that can be made here."""
    graph, parameters = folder / "task.onnx", folder / "task.safetensors"
    data = files("replayfleet.edge_client.bench").joinpath("data").joinpath("task.onnx").read_bytes()
    graph.write_bytes(data)
    parameters.write_bytes(format_safetensors(_drawn(data)))
    return _with_torch("the task model for 28 pixels, untrained", graph, parameters, OUR_TASK, folder)


def task_of_facts(facts: Mapping[str, str]) -> AnyTaskSpec | None:
    """Return the task that a model file says it was made for; None if it says none, or is no task model."""
    try:
        channels, height, width = (int(side) for side in json.loads(facts["input"]))
        names = tuple(str(name) for name in json.loads(facts["classes"]))
        if facts["kind"] == "detector":
            anchors = tuple((float(wide), float(high)) for wide, high in json.loads(facts["anchors"]))
            stride, network = int(facts["stride"]), facts.get("architecture", DETECTORS[0])
            return DetectionSpec(channels, height, width, names, anchors, stride=stride, architecture=network)
        if facts["kind"] != "task":
            return None
        architecture = facts.get("architecture", ARCHITECTURES[0])
        return TaskSpec(channels, height, names, stem=facts["stem"], architecture=architecture)
    except (KeyError, ValueError, TypeError):
        return None


def task_from(facts: Mapping[str, Any]) -> AnyTaskSpec:
    """Return a task that travelled as JSON."""
    kind: type[AnyTaskSpec] = DetectionSpec if "anchors" in facts else TaskSpec
    return msgspec.convert(facts, kind)


_NO_EAGER = "a model file isn't PyTorch's source; bench a data dir, or nothing, to see it beside the others"


def _with_torch(name: str, graph: Path, parameters: Path, task: AnyTaskSpec, folder: Path) -> Subject:
    """Return a model whose graph and parameters are apart, in all the forms that PyTorch and ``onnx`` make of it."""
    variants = [Variant("onnx", "fp32", str(graph), str(parameters))]
    lacking = []
    if importlib.util.find_spec("torch") is None:
        lacking += [(form, "PyTorch is not installed") for form in ("torchscript", "eager")]
    else:
        variants += [Variant(form, "fp32", str(graph), str(parameters)) for form in ("torchscript", "eager")]
    if importlib.util.find_spec("onnx") is None:
        lacking += [(precision, "the package onnx, which makes it, is not installed") for precision in ("fp16", "int8")]
    else:
        from replayfleet.edge_client.bench.rounding import rounded

        try:
            made = rounded(graph.read_bytes(), read_parameters(parameters), task.image_shape)
        except ArtefactRejected as error:
            made = {}
            lacking += [(precision, error.detail) for precision in ("fp16", "int8")]
        for precision, data in made.items():
            path = folder / f"{precision}.onnx"
            path.write_bytes(data)
            variants.append(Variant("onnx", precision, str(path)))
    return Subject(name, tuple(variants), tuple(lacking), task)


def _drawn(graph: bytes) -> dict[str, Array]:
    """Return parameters that fit the graph: variances are 1, everything else is small and random."""
    rng = np.random.default_rng(0)
    return {
        name: np.ones(layout.shape, layout.dtype)
        if name.endswith("running_var")
        else rng.normal(0, 0.05, layout.shape).astype(layout.dtype)
        for name, layout in inspect_graph(graph).parameters.items()
    }
