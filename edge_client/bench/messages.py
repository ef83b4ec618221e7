"""What ``edge-client bench`` tells the process that measures one runtime, and what it hears of it, as JSON."""

from __future__ import annotations

from typing import Any

import msgspec


class Variant(msgspec.Struct, frozen=True):
    """One form of the model, as files that a child process reads.

    Attributes:
        form: ``onnx``, ``torchscript`` or ``eager``.
        precision: ``fp32``, ``fp16``, ``int8`` or ``unknown``.
        model: the file: a graph, a TorchScript file; unused for ``eager``.
        parameters: safetensors; empty if the file holds them.
    """

    form: str
    precision: str
    model: str
    parameters: str = ""


class Trial(msgspec.Struct, frozen=True):
    """One runtime to measure.

    Attributes:
        runtime: ``TensorRT``, ``CUDA``, ``CPU``, ``TorchScript`` or ``eager``.
        variant: of the model.
        task: a ``TaskSpec`` or ``DetectionSpec``, for ``eager`` and ``TorchScript`` of a model that is no file yet.
        batches: batch sizes.
        num_threads: of one inference.
        seconds: for each batch size.
    """

    runtime: str
    variant: Variant
    task: dict[str, Any] | None
    batches: tuple[int, ...]
    num_threads: int
    seconds: float


class Latency(msgspec.Struct, frozen=True):
    """How long one batch takes, in seconds.

    Attributes:
        p50: the median.
        p95: 19 of 20 runs take no longer.
        p99: 99 of 100.
        num_runs: that this was measured on.
    """

    p50: float
    p95: float
    p99: float
    num_runs: int


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """What came of a trial.

    Attributes:
        runs_on: what really computed.
        load_s: until it could answer; for TensorRT with building its engine.
        latency_s: batch size -> seconds.
        resident_bytes: of the whole process, after the runs.
        model_bytes: of that, what the runtime and the model added to an empty Python process.
    """

    runs_on: str
    load_s: float
    latency_s: dict[int, Latency]
    resident_bytes: int
    model_bytes: int


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """The runtime isn't usable for this model here."""

    why: str


def percentile(ordered: list[float], share: float) -> float:
    """Return the smallest value that ``share`` of all values don't exceed (nearest rank)."""
    rank = max(1, -(-int(share * 10_000) * len(ordered) // 10_000))
    return ordered[rank - 1]


def latency_of(samples: list[float]) -> Latency:
    """Return the percentiles of at least one run."""
    ordered = sorted(samples)
    return Latency(percentile(ordered, 0.5), percentile(ordered, 0.95), percentile(ordered, 0.99), len(ordered))
