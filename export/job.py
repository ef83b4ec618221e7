"""One export from parameters to files: build, compare, measure, and only then write."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save as format_safetensors
from torch import nn

from export.artefact import Array, Run
from export.facts import sub_generator_facts, task_facts
from export.files import write_atomic
from export.graph import join, sub_generator_graph, task_graph
from export.latency import median_latencies_s
from export.parity import check_parity, eager_run, load_parameters
from export.runtime import OnnxModel
from export.torchscript import load_torchscript, torchscript_bytes
from models.build import build_generator, build_task_model
from models.counting import count_parameters
from models.specs import LATENT_SIZE, TaskSpec

SUFFIXES: Mapping[str, str] = {"onnx": ".onnx", "torchscript": ".pt"}
"""Format -> file name suffix."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to export.

    Attributes:
        kind: ``task`` or ``sub-generator``.
        spec: the architecture.
        format: a key of ``SUFFIXES``.
        split: ONNX only: the graph and the parameters in two files, as a fleet sends them.
        out: a folder, or a file whose name ends in the format's suffix.
        num_threads: of the comparison and the latency measurement.
    """

    kind: str
    spec: TaskSpec
    format: str
    split: bool
    out: Path
    num_threads: int

    @property
    def path(self) -> Path:
        """The model's file."""
        suffix = SUFFIXES[self.format]
        return self.out if self.out.suffix == suffix else self.out / f"{self.kind}{suffix}"


@dataclass(frozen=True, slots=True)
class Exported:
    """What came of it.

    Attributes:
        files: (path, size in bytes, sha256) in the order written.
        num_parameters: trainable scalars.
        worst_difference: from the eager model, over batches 1, 2 and 64.
        latency_s: ``eager`` and the format -> median at batch 1.
    """

    files: tuple[tuple[Path, int, str], ...]
    num_parameters: int
    worst_difference: float
    latency_s: Mapping[str, float]


def run_export(request: Request, parameters: Mapping[str, Array]) -> Exported:
    """Export and write, or raise and leave the disk as it was.

    Raises:
        ArtefactRejected: The parameters don't fit the architecture, or (ParityError) the export answers differently.
        OSError: The files can't be written.
    """
    module, input_shape = _build(request)
    load_parameters(module, parameters)
    eager = eager_run(module)
    files: dict[Path, bytes]
    if request.format == "onnx":
        files, candidate = _onnx(request, parameters)
    else:
        files, candidate = _torchscript(request, module, input_shape)
    x = np.zeros((1, *input_shape), dtype=np.float32)
    with _torch_threads(request.num_threads):
        worst = check_parity(request.format, candidate, eager, input_shape)
        latency = median_latencies_s({"eager": lambda: eager(x), request.format: lambda: candidate(x)})
    for path, data in files.items():
        write_atomic(path, data)
    written = tuple((path, len(data), hashlib.sha256(data).hexdigest()) for path, data in files.items())
    return Exported(written, count_parameters(module), worst, latency)


def _build(request: Request) -> tuple[nn.Module, tuple[int, ...]]:
    if request.kind == "task":
        return build_task_model(request.spec), request.spec.image_shape
    return build_generator(request.spec), (LATENT_SIZE,)


def _onnx(request: Request, parameters: Mapping[str, Array]) -> tuple[dict[Path, bytes], Run]:
    graph = task_graph(request.spec) if request.kind == "task" else sub_generator_graph(request.spec)
    if request.split:
        model = OnnxModel(graph, parameters, num_threads=request.num_threads)
        files = {request.path.with_suffix(".safetensors"): format_safetensors(dict(parameters)), request.path: graph}
        return files, model.run
    data = join(graph, parameters)
    return {request.path: data}, OnnxModel(data, {}, num_threads=request.num_threads).run


def _torchscript(request: Request, module: nn.Module, input_shape: tuple[int, ...]) -> tuple[dict[Path, bytes], Run]:
    facts = task_facts(request.spec) if request.kind == "task" else sub_generator_facts(request.spec)
    data = torchscript_bytes(module, input_shape, facts)
    return {request.path: data}, eager_run(load_torchscript(data, hashlib.sha256(data).hexdigest()))


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
