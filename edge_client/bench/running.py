"""One measurement after the other: which runtimes there are, how quick they are, and how many frames a second."""

from __future__ import annotations

import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from replayfleet.devices.probing import probe
from replayfleet.devices.profiles import CPU, CUDA, TENSORRT
from replayfleet.devices.providers import try_provider
from replayfleet.edge_client.bench.frames import FrameRate, measure_frames
from replayfleet.edge_client.bench.messages import Measured, Trial, Unusable
from replayfleet.edge_client.bench.settings import DEFAULT_SOURCE, BenchSettings
from replayfleet.edge_client.bench.subject import Subject, from_data_dir, from_file, of_our_own
from replayfleet.federation.children import Child, ChildLost, child_command
from replayfleet.federation.errors import ReplayfleetError, SettingsError

WORKER_COMMAND = child_command("replayfleet.edge_client.bench.worker")

TRIAL_LIMIT_S = 1800.0
"""Beyond what the measurement itself takes: building an engine may take minutes."""

_PROVIDERS = {"TensorRT": TENSORRT, "CUDA": CUDA, "CPU": CPU}
"""ONNX Runtime's runtimes, quickest first, and the execution provider of each."""

_NAMES = {"torchscript": "TorchScript", "eager": "eager"}


@dataclass(frozen=True, slots=True)
class Row:
    """One runtime in one precision: measured, or why it isn't."""

    runtime: str
    precision: str
    outcome: Measured | Unusable


@dataclass(frozen=True, slots=True)
class Bench:
    """All that was measured.

    Attributes:
        subject: the model's name.
        threads: of one inference.
        rows: runtimes, those that this machine lacks included.
        frames: None if no source was asked for, or none can be served.
        no_frames: why not.
        machine: what it was measured on.
    """

    subject: str
    threads: int
    rows: tuple[Row, ...]
    frames: FrameRate | None
    no_frames: str
    machine: dict[str, str]


def run_bench(settings: BenchSettings, on_row: Callable[[Row], None] = lambda row: None) -> Bench:
    """Measure.

    Args:
        settings: what.
        on_row: told of every row as soon as it is known.

    Raises:
        SettingsError: The model or the source can't be used.
        ImportError: onnxruntime is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        subject = _subject(settings, Path(folder))
        broken = {provider: try_provider(provider).problem for provider in dict.fromkeys(_PROVIDERS.values())}
        # First: a source that can't be used is refused before minutes of measuring are lost with it.
        frames, no_frames = _frames(settings, subject, broken)
        rows = []
        for row in _rows(settings, subject, broken):
            rows.append(row)
            on_row(row)
    machine = {"board": probe().describe(), "python": platform.python_version(), "load": f"{os.getloadavg()[0]:.1f}"}
    return Bench(subject.name, settings.threads, tuple(rows), frames, no_frames, machine)


def _subject(settings: BenchSettings, folder: Path) -> Subject:
    if settings.model is not None:
        return from_file(settings.model, settings.parameters)
    if settings.data_dir is not None:
        return from_data_dir(settings.data_dir, folder)
    return of_our_own(folder)


def _rows(settings: BenchSettings, subject: Subject, broken: dict[str, str]) -> Iterator[Row]:
    """Yield what can't be had at the end: it is the same for every precision."""
    task = None if subject.task is None else msgspec.to_builtins(subject.task)
    for variant in subject.variants:
        for runtime in _PROVIDERS if variant.form == "onnx" else (_NAMES[variant.form],):
            if not broken.get(_PROVIDERS.get(runtime, "")):
                trial = Trial(runtime, variant, task, settings.batches, settings.threads, settings.seconds)
                yield Row(runtime, variant.precision, _tried(trial))
    for runtime, provider in _PROVIDERS.items():
        if broken[provider]:
            yield Row(runtime, "any", Unusable(broken[provider]))
    for form, why in subject.lacking:
        precision = form if form in {"fp16", "int8"} else "fp32"
        yield Row(_NAMES.get(form, "ONNX Runtime"), precision, Unusable(why))


def _tried(trial: Trial) -> Measured | Unusable:
    limit_s = TRIAL_LIMIT_S + 3 * trial.seconds * len(trial.batches)
    with tempfile.TemporaryFile() as errors:
        child: Child[Measured | Unusable] = Child(
            WORKER_COMMAND, Measured | Unusable, errors=errors, environment={"NVIDIA_TF32_OVERRIDE": "0"}
        )
        try:
            child.send(trial)
            heard = child.receive(limit_s)
            return Unusable(f"it took longer than {limit_s:g} s") if heard is None else heard[0]
        except ChildLost:
            code = child.close()
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            return Unusable(f"its process ended with {code}: {lines[-1][:200] if lines else 'it said nothing'}")
        finally:
            child.close()


def _frames(settings: BenchSettings, subject: Subject, broken: dict[str, str]) -> tuple[FrameRate | None, str]:
    variant = next((variant for variant in subject.variants if variant.form == "onnx"), None)
    if not settings.frames:
        return None, "no source was asked for"
    if variant is None:
        return None, "clients serve ONNX files"
    if subject.task is None:
        return None, "the file doesn't say what its pictures and answers are, or it has none"
    provider = CPU if broken[CUDA] else CUDA
    labels = logging.getLogger("replayfleet.edge_client.learning.labels")
    level = labels.level
    labels.setLevel(logging.ERROR)  # nobody learns here
    try:
        return (
            measure_frames(
                variant,
                subject.task,
                settings.source or DEFAULT_SOURCE,
                provider=provider,
                num_threads=settings.threads,
                seconds=settings.seconds,
            ),
            "",
        )
    except SettingsError:
        raise
    except ReplayfleetError as error:
        return None, str(error)
    finally:
        labels.setLevel(level)
