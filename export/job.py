"""One export from parameters to files: build, compare, measure, and only then write."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch

from replayfleet.export.calibration import Rounding, SampleSet, gather_samples
from replayfleet.export.formats import FORMATS, Format
from replayfleet.export.gate import Verdict, check_gate, compare_answers, compare_on_labels
from replayfleet.export.graphs.fold import fold
from replayfleet.export.graphs.graph import finished
from replayfleet.export.graphs.precision import to_float16, to_int8
from replayfleet.export.graphs.sampler_graph import Convert
from replayfleet.export.latency import median_latencies_s
from replayfleet.export.parameters import Model, is_saved_model
from replayfleet.export.parity import Parity, check_parity, check_rounding, eager_run
from replayfleet.export.running.artefact import Array, Run
from replayfleet.export.running.facts import own_facts
from replayfleet.export.running.inspection import MAX_GRAPH_BYTES, inspect_graph
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.export.subject import Architecture, Subject, build_subject
from replayfleet.export.torchscript import load_torchscript, torchscript_bytes, torchscript_facts
from replayfleet.federation.atomic import sync_folder, write_atomic
from replayfleet.federation.errors import ArtefactRejected, SettingsError


@dataclass(frozen=True, slots=True)
class Request:
    """What to export.

    Attributes:
        architecture: of the parameters.
        format: a row of the table.
        out: a folder, or a file whose name ends in the format's suffix.
        num_threads: of the comparison and the latency measurement.
        split: the graph and the parameters in two files, as a fleet sends them.
        rounding: of a gated format.

    Raises:
        SettingsError: No file can be there, or its name is one of another format.
    """

    architecture: Architecture
    format: Format
    out: Path
    num_threads: int
    split: bool = False
    rounding: Rounding | None = None

    def __post_init__(self) -> None:
        name, suffix = self.format.name, self.format.suffix
        if self.out.suffix in {row.suffix for row in FORMATS} - {suffix} and not self.out.is_dir():
            raise SettingsError(f"--out: {self.out} can't be {name}, which ends in {suffix}; give that, or a folder")
        nearest_there = next(path for path in self.path.absolute().parents if path.exists())
        if not nearest_there.is_dir():
            raise SettingsError(f"--out: {nearest_there} is a file, expected a folder")

    @property
    def path(self) -> Path:
        """The model's file."""
        if self.out.suffix == self.format.suffix and not self.out.is_dir():
            return self.out
        return self.out / self.format.file_name(self.architecture.kind)


@dataclass(frozen=True, slots=True)
class Exported:
    """What came of it.

    Attributes:
        files: (path, size in bytes, sha256) in the order written.
        num_parameters: trainable scalars.
        parity: how far the export is off the eager model.
        float32_bytes: size of the same model as ``onnx``; None where it wasn't made.
        verdict: of the gate; None if the format has none.
        latency_s: ``eager`` and the format -> median at batch 1.
    """

    files: tuple[tuple[Path, int, str], ...]
    num_parameters: int
    parity: Parity
    float32_bytes: int | None
    verdict: Verdict | None
    latency_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An export that is not written yet."""

    files: Mapping[Path, bytes]
    run: Run
    float32_bytes: int | None
    samples: SampleSet | None = None


def run_export(request: Request, parameters: Mapping[str, Array]) -> Exported:
    """Export and write, or raise and leave the disk as it was.

    Raises:
        ArtefactRejected: The parameters don't fit the architecture, or the export answers differently (ParityError) or
            worse than it may (GateError).
        SettingsError: Samples can't be had, the file would be too large to be loaded, or another file is in its place.
        OSError: The files can't be written.
    """
    _check_replaceable(request.path, request.architecture.kind)
    subject = build_subject(request.architecture, parameters)
    with _torch_threads(request.num_threads):
        candidate = _make(request, subject, parameters)
        parity = _parity(request, subject, candidate)
        verdict = _verdict(request, subject, candidate)
        x = np.zeros((1, *subject.input_shape), dtype=np.float32)
        name = request.format.name
        latency = median_latencies_s({"eager": lambda: subject.eager(x), name: lambda: candidate.run(x)})
    made = [folder for folder in request.path.absolute().parents if not folder.exists()]
    parts = {path: path.with_name(f".{path.name}.part") for path in candidate.files}
    try:
        for path, data in candidate.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            write_atomic(parts[path], data)
        for path, part in parts.items():  # all of them, or none
            part.replace(path)
            sync_folder(path.parent)
    except OSError as error:
        for part in parts.values():
            with suppress(OSError):
                part.unlink()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        names = {str(part): str(path) for path, part in parts.items()}
        error.filename = names.get(str(error.filename), error.filename or str(request.path))
        raise
    written = tuple((path, len(data), hashlib.sha256(data).hexdigest()) for path, data in candidate.files.items())
    return Exported(written, subject.num_parameters, parity, candidate.float32_bytes, verdict, latency)


def _check_replaceable(path: Path, kind: str) -> None:
    """Raise SettingsError if something else than an earlier export of this kind is in its place."""
    if not path.exists() or path.is_dir():  # a folder says so itself
        return
    if not path.is_file():
        raise SettingsError(f"--out: {path} is no file; choose another --out")
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_GRAPH_BYTES else b""
        facts = own_facts(inspect_graph(data).metadata) if path.suffix == ".onnx" else torchscript_facts(data)
    except ArtefactRejected:
        facts = {}
    if facts.get("kind") != kind:
        raise SettingsError(f"--out: {path} is there, and is no export of a {kind}; choose another --out, or move it")


def _make(request: Request, subject: Subject, parameters: Mapping[str, Array]) -> _Candidate:
    facts = {**subject.facts, "format": request.format.name}
    if request.format.name == "torchscript":
        data = torchscript_bytes(subject.module, subject.input_shape, facts)
        script = load_torchscript(data, hashlib.sha256(data).hexdigest())
        return _Candidate({request.path: data}, eager_run(script), None)
    if request.split:
        architecture = request.architecture
        graph, tensors = subject.graph(), Model(architecture.kind, architecture.spec, parameters).encode()
        split = OnnxModel(graph, parameters, num_threads=request.num_threads)
        beside = request.path.with_suffix(".safetensors")
        if beside.exists() and not is_saved_model(beside):
            raise SettingsError(f"--out: {beside} is there, and not of an export; choose another --out, or move it")
        files = {beside: tensors, request.path: graph}
        return _Candidate(files, split.run, len(graph) + len(tensors))
    samples = None
    exact = finished(subject.whole(lambda model: model), facts)
    if request.rounding is None:
        data = exact
    else:
        samples = gather_samples(request.architecture, request.format, subject.input_shape, request.rounding)
        data = finished(subject.whole(rounding(request.format, samples)), {**facts, **samples.facts})
    if len(data) > MAX_GRAPH_BYTES:
        raise SettingsError(
            f"--format: {request.format.name} of this model has {len(data):,} bytes, at most {MAX_GRAPH_BYTES:,} are "
            "loaded; use a narrower network, fewer steps or a smaller format"
        )
    run = OnnxModel(data, {}, num_threads=request.num_threads).run
    return _Candidate({request.path: data}, run, len(exact), samples)


def rounding(row: Format, samples: SampleSet) -> Convert:
    """Return what turns the float32 network into the format's."""

    def convert(model: onnx.ModelProto) -> onnx.ModelProto:
        fold(model)
        return to_int8(model, samples.calibrating) if row.calibrated else to_float16(model)

    return convert


def _parity(request: Request, subject: Subject, candidate: _Candidate) -> Parity:
    name, max_spreads = request.format.name, request.format.max_spreads
    if candidate.samples is None or max_spreads is None:
        worst = check_parity(
            name,
            candidate.run,
            subject.eager,
            subject.input_shape,
            batches=subject.batches,
            tolerance=subject.tolerance,
        )
        return Parity(worst, subject.batches, subject.tolerance)
    batches = [candidate.samples.judging[:size] for size in subject.batches]
    return check_rounding(name, candidate.run, subject.eager, batches, max_spreads)


def _verdict(request: Request, subject: Subject, candidate: _Candidate) -> Verdict | None:
    samples, rounding = candidate.samples, request.rounding
    if samples is None or rounding is None:
        return None
    spec, limit = request.architecture.spec, rounding.max_loss_points
    if samples.labels is not None:
        verdict = compare_on_labels(spec, samples.judging, samples.labels, subject.eager, candidate.run, limit)
    else:
        drawn = request.architecture.kind in {"sub-generator", "sampler"}
        verdict = compare_answers(spec, samples.judging, subject.eager, candidate.run, limit, drawn=drawn)
    return check_gate(request.format.name, verdict)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
