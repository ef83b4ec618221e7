"""Options of ONNX Runtime's GPU providers, as texts that each of its versions since 1.20 takes.

Names and values: onnxruntime.ai, "CUDA Execution Provider" and "TensorRT Execution Provider", and
``tensorrt_provider_options.h``. TensorRT's switches take only ``True`` and ``False``, CUDA's take these too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from replayfleet.devices.profiles import CUDA, TENSORRT

Provider: TypeAlias = str | tuple[str, dict[str, Any]]
"""An execution provider's name, or (name, options), as ONNX Runtime takes it."""

GPU_PROVIDERS = (TENSORRT, CUDA)

WORKSPACE_BYTES = 256 << 20
"""What TensorRT may use while it tries kernels out and while it runs. Its own default is all of the device's memory,
which a Jetson shares with the camera; our networks need tens of MB."""


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """Batch sizes that an engine is built for: from ``low`` to ``high``, fastest at ``best``.

    Explicit, since ONNX Runtime otherwise rebuilds the engine whenever a larger or smaller batch comes along.
    """

    low: int = 1
    best: int = 1
    high: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.best <= self.high:
            raise ValueError(
                f"batch profile is {self.low}, {self.best}, {self.high}, expected 1 <= low <= best <= high"
            )


def cuda_options() -> dict[str, str]:
    """Return the CUDA provider's options.

    TensorFloat-32 is off: it keeps 10 bits of the mantissa, and answers must be those that the golden vector promises.
    The arena grows by what is asked for, not by powers of two, and kernels are chosen by rule: measuring them costs
    seconds at every new model.
    """
    return {
        "device_id": "0",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "do_copy_in_default_stream": "True",
        "use_tf32": "False",
    }


def tensorrt_options(
    engine: Path, timing: Path, inputs: Mapping[str, tuple[int, ...]], profile: BatchProfile
) -> dict[str, str]:
    """Return the TensorRT provider's options.

    Precision is the graph's: no switch for FP16 or INT8 and no calibration table, which TensorRT 11 no longer has.

    Args:
        engine: folder of one artefact's engine. ONNX Runtime names an engine by its graph, not by its parameters
            (github.com/microsoft/onnxruntime/issues/32254), so no two artefacts may share one.
        timing: folder of the timing cache, which knows layers, not parameters: all artefacts share it.
        inputs: name -> shape of one sample.
        profile: batch sizes.
    """
    return {
        "device_id": "0",
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(engine),
        "trt_engine_cache_prefix": "engine",
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": str(timing),
        "trt_max_workspace_size": str(WORKSPACE_BYTES),
        "trt_profile_min_shapes": _shapes(inputs, profile.low),
        "trt_profile_opt_shapes": _shapes(inputs, profile.best),
        "trt_profile_max_shapes": _shapes(inputs, profile.high),
    }


def largest_batch(options: Mapping[str, Any]) -> int | None:
    """Return the largest batch that an engine of these options takes; None for options of another provider."""
    shapes = str(options.get("trt_profile_max_shapes", ""))
    return int(shapes.partition(":")[2].partition("x")[0]) if shapes else None


def without_engines(providers: Sequence[str]) -> tuple[str, ...]:
    """Return the providers that serve until an engine is built: CUDA for TensorRT, which would build it first."""
    return tuple(dict.fromkeys(CUDA if name == TENSORRT else name for name in providers))


def _shapes(inputs: Mapping[str, tuple[int, ...]], batch_size: int) -> str:
    """Return ``images:8x1x28x28,...``."""
    return ",".join(f"{name}:{'x'.join(map(str, (batch_size, *shape)))}" for name, shape in inputs.items())
