"""TensorRT's engines, through ONNX Runtime. Written from documentation: none of this ran on a GPU.

ONNX Runtime compiles while it makes the session, as the batch profile is explicit, and writes what came of it to the
engine's folder; a session that finds it there takes it, in seconds.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from replayfleet.devices.profiles import CPU, CUDA, TENSORRT
from replayfleet.devices.shared_libraries import needed_libraries
from replayfleet.export.engines.cache import Workplace
from replayfleet.export.engines.maker import EngineFailed, Progress
from replayfleet.export.running.inspection import input_names
from replayfleet.export.running.provider_options import BatchProfile, Provider, cuda_options, tensorrt_options

TENSORRT_MAKER = "replayfleet.export.engines.tensorrt:TensorRt"
"""What ``build.EngineBuild`` takes."""

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""``CUdevice_attribute`` in ``cuda.h``."""


class TensorRt:
    """Implements ``engines.EngineMaker``.

    Args:
        load: opens a shared library by name; raises OSError.
        provider: the file of ONNX Runtime's TensorRT provider; None looks into the installed package.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL, provider: Path | None = None) -> None:
        self._load = load
        self._provider = provider

    def platform(self) -> Mapping[str, str]:
        """Return the GPU's name and compute capability, and the versions of ONNX Runtime, TensorRT and CUDA.

        Raises:
            EngineFailed: A library is missing, or the driver finds no GPU.
        """
        provider = self._provider or _provider_file()
        needed = needed_libraries(provider) if provider.is_file() else ()
        if not needed:
            raise EngineFailed(f"{TENSORRT} is not built into onnxruntime {_version()}")
        inference = self._library(_named(needed, "libnvinfer.so"))
        runtime = self._library(_named(needed, "libcudart.so"))
        return {
            "device": self._device(),
            "onnxruntime": _version(),
            "tensorrt": str(inference.getInferLibVersion()),
            "cuda": str(_number(runtime.cudaRuntimeGetVersion)),
        }

    def build(self, model: bytes, place: Workplace, profile: BatchProfile, progress: Progress) -> None:
        """Build an engine; takes seconds to minutes.

        Raises:
            ArtefactRejected: (load-failed) TensorRT can't build it.
        """
        from replayfleet.export.running.runtime import OnnxModel

        progress(1, 1)
        shape = OnnxModel(model, {}, num_threads=1).input_shape
        providers = _providers(model, shape, place.engine, place.timing, profile)
        built = OnnxModel(model, {}, num_threads=1, providers=providers)
        for batch_size in sorted({profile.low, profile.best, profile.high}):
            built.run(np.zeros((batch_size, *shape), np.float32))

    def providers(
        self, graph: bytes, input_shape: tuple[int, ...], engine: Path, profile: BatchProfile
    ) -> tuple[Provider, ...]:
        """Return TensorRT with the engine's folder, and what takes over where it can't."""
        return _providers(graph, input_shape, engine, engine, profile)

    def _device(self) -> str:
        """Ask the driver (CUDA driver API, "Device Management")."""
        driver = self._library("libcuda.so.1")
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
            raise EngineFailed("NVIDIA's driver finds no GPU")
        driver.cuDeviceGetName(name, len(name), device)

        def attribute(which: int) -> int:
            return _number(lambda value: driver.cuDeviceGetAttribute(value, which, device))

        capability = f"{attribute(_CAPABILITY_MAJOR)}.{attribute(_CAPABILITY_MINOR)}"
        return f"{name.value.decode(errors='replace')} (compute capability {capability})"

    def _library(self, name: str) -> Any:
        try:
            return self._load(name)
        except OSError:
            raise EngineFailed(f"{name} can't be found") from None


def _providers(
    graph: bytes, input_shape: tuple[int, ...], engine: Path, timing: Path, profile: BatchProfile
) -> tuple[Provider, ...]:
    options = tensorrt_options(engine, timing, dict.fromkeys(input_names(graph), input_shape), profile)
    return (TENSORRT, options), (CUDA, cuda_options()), CPU


def _provider_file() -> Path:
    found = importlib.util.find_spec("onnxruntime")
    folder = Path() if found is None or found.origin is None else Path(found.origin).parent
    return folder / "capi" / "libonnxruntime_providers_tensorrt.so"


def _version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)


def _named(libraries: tuple[str, ...], beginning: str) -> str:
    """Return the library that the provider was linked with: TensorRT's versions live side by side."""
    return next((name for name in libraries if name.startswith(beginning)), beginning)


def _number(ask: Callable[[Any], int]) -> int:
    value = ctypes.c_int()
    if ask(ctypes.byref(value)):
        raise EngineFailed("NVIDIA's driver doesn't answer")
    return value.value
