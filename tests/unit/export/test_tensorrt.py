"""What is asked of NVIDIA's libraries, which doubles answer: neither they nor a GPU are at hand."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import replayfleet.export.engines.tensorrt
from replayfleet.export.engines.cache import EngineCache
from replayfleet.export.engines.maker import EngineFailed
from replayfleet.export.engines.tensorrt import TensorRt
from replayfleet.export.running.binding import BoundRuns
from replayfleet.export.running.inspection import inspect_graph
from replayfleet.export.running.provider_options import BatchProfile, largest_batch, without_engines
from replayfleet.export.running.runtime import OnnxModel, _in_portions
from replayfleet.federation.errors import ArtefactRejected

NEEDED = ("libcublas.so.13", "libnvinfer.so.10", "libcudart.so.13")


class Driver:
    """``libcuda.so.1`` of a board with one GPU, or none."""

    def __init__(self, gpus: int = 1) -> None:
        self._gpus = gpus

    def cuInit(self, flags: int) -> int:  # noqa: N802 - its name
        return 0 if self._gpus else 100

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        name.value = b"Orin"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = {75: 8, 76: 7}[attribute]
        return 0


def cuda_runtime() -> SimpleNamespace:
    def version(value: Any) -> int:
        value._obj.value = 13020
        return 0

    return SimpleNamespace(cudaRuntimeGetVersion=version)


def libraries(missing: str = "", gpus: int = 1) -> Any:
    def load(name: str) -> Any:
        if name == missing:
            raise OSError(f"{name}: cannot open shared object file")
        return {
            "libcuda.so.1": Driver(gpus),
            "libnvinfer.so.10": SimpleNamespace(getInferLibVersion=lambda: 101602),
            "libcudart.so.13": cuda_runtime(),
        }[name]

    return load


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(replayfleet.export.engines.tensorrt, "needed_libraries", lambda path: NEEDED)
    (tmp_path / "provider.so").write_bytes(b"")
    return tmp_path / "provider.so"


def test_an_engine_depends_on_the_gpu_and_on_the_very_libraries_that_the_provider_was_linked_with(provider: Path):
    assert TensorRt(libraries(), provider).platform() == {
        "device": "Orin (compute capability 8.7)",
        "onnxruntime": onnxruntime.__version__,
        "tensorrt": "101602",
        "cuda": "13020",
    }


@pytest.mark.parametrize("name", ["libcuda.so.1", "libnvinfer.so.10", "libcudart.so.13"])
def test_a_missing_library_is_named(provider: Path, name: str):
    with pytest.raises(EngineFailed, match=f"^{name} can't be found$"):
        TensorRt(libraries(missing=name), provider).platform()


def test_a_machine_without_a_gpu_is_told_apart(provider: Path):
    with pytest.raises(EngineFailed, match="finds no GPU"):
        TensorRt(libraries(gpus=0), provider).platform()


def test_here_nothing_stands_in_and_the_reason_is_one_line():
    with pytest.raises(EngineFailed, match=r"TensorrtExecutionProvider is not built into|can't be found"):
        TensorRt(ctypes.CDLL).platform()


def graph() -> bytes:
    nodes = [helper.make_node("Relu", ["images"], ["y"])]
    shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 1, 8, 8]) for name in ("images", "y")]
    model = helper.make_graph(nodes, "graph", shapes[:1], shapes[1:])
    return helper.make_model(model, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


def test_a_served_model_is_told_where_its_engine_lies_and_what_takes_over():
    tensorrt, cuda, cpu = TensorRt().providers(graph(), (1, 8, 8), Path("/e/engine"), BatchProfile(1, 2, 16))
    assert tensorrt[0] == "TensorrtExecutionProvider"
    assert tensorrt[1]["trt_engine_cache_path"] == "/e/engine"
    assert tensorrt[1]["trt_profile_max_shapes"] == "images:16x1x8x8"
    assert largest_batch(tensorrt[1]) == 16
    assert (cuda[0], cpu) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert largest_batch(cuda[1]) is None


def test_such_a_model_is_refused_where_tensorrt_is_missing():
    providers = TensorRt().providers(graph(), (1, 8, 8), Path("/e/engine"), BatchProfile())
    with pytest.raises(ArtefactRejected, match="TensorrtExecutionProvider can't be used"):
        OnnxModel(graph(), {}, num_threads=1, providers=providers)


def test_until_an_engine_is_built_cuda_serves_in_its_place():
    assert without_engines(("TensorrtExecutionProvider", "CPUExecutionProvider")) == (
        "CUDAExecutionProvider",
        "CPUExecutionProvider",
    )
    assert without_engines(("CPUExecutionProvider",)) == ("CPUExecutionProvider",)


@pytest.mark.parametrize("size", [1, 4, 5, 11])
def test_batches_larger_than_an_engine_takes_go_in_portions(size: int):
    sizes: list[int] = []

    def run(x: np.ndarray) -> np.ndarray:
        sizes.append(len(x))
        return x * 2

    x = np.arange(size, dtype=np.float32)
    np.testing.assert_array_equal(_in_portions(run, 4)(x), x * 2)
    assert sum(sizes) == size
    assert max(sizes) <= 4


SHAPES = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")
DOCUMENTED = {
    "TensorrtExecutionProvider": {
        *("device_id", "trt_max_workspace_size", "trt_engine_cache_enable", "trt_engine_cache_path", *SHAPES),
        *("trt_engine_cache_prefix", "trt_timing_cache_enable", "trt_timing_cache_path"),
    },
    "CUDAExecutionProvider": {
        *("device_id", "arena_extend_strategy", "cudnn_conv_algo_search", "do_copy_in_default_stream", "use_tf32"),
    },
}
"""Of onnxruntime.ai, "TensorRT Execution Provider" and "CUDA Execution Provider": what we use of their options."""


class FakeTensorRt:
    """``onnxruntime.InferenceSession`` as documented for TensorRT: checks what it is given, computes on the processor.

    It refuses options that the providers don't have and graphs whose tensors are elsewhere, compiles where it finds no
    engine of this graph, and compiles anew, which takes minutes, for a batch beyond its profile.
    """

    def __init__(self, graph: bytes, options: Any, *, providers: list[tuple[str, dict[str, str]]], **_: Any) -> None:
        names = [name for name, _ in providers]
        self._session = REAL_SESSION(graph, options, providers=["CPUExecutionProvider"])
        self._names = names
        if names[0] != "TensorrtExecutionProvider":
            return
        assert names == ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
        for name, given in providers[:2]:
            assert set(given) <= DOCUMENTED[name], f"{name} has no such option"
            assert all(isinstance(text, str) for text in given.values())
        trt = providers[0][1]
        assert {trt["trt_engine_cache_enable"], trt["trt_timing_cache_enable"]} == {"True"}
        assert not inspect_graph(graph).parameters, "TensorRT's parser reads the graph itself"
        (low, best, high) = (self._profile(trt[key]) for key in SHAPES)
        assert 1 <= low <= best <= high
        self._sizes = range(low, high + 1)
        folder = Path(trt["trt_engine_cache_path"])
        assert folder.is_dir()
        # By the graph, not by its parameters: github.com/microsoft/onnxruntime/issues/32254.
        engine = folder / f"{trt['trt_engine_cache_prefix']}_{len(graph)}.engine"
        if engine.is_file():
            HAPPENED.append("found")
        else:
            HAPPENED.append("compiled")
            engine.write_bytes(b"engine")
            (Path(trt["trt_timing_cache_path"]) / "timing.cache").write_bytes(b"timing")

    def _profile(self, text: str) -> int:
        name, _, shape = text.partition(":")
        batch, *rest = (int(side) for side in shape.split("x"))
        (asked,) = self._session.get_inputs()
        assert (name, rest) == (asked.name, asked.shape[1:])
        return batch

    def run(self, names: Any, inputs: dict[str, Any], options: Any = None) -> Any:
        if len(next(iter(inputs.values()))) not in self._sizes:
            HAPPENED.append("compiled anew")
        return self._session.run(names, inputs, options)

    def get_providers(self) -> list[str]:
        return self._names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


HAPPENED: list[str] = []
REAL_SESSION = onnxruntime.InferenceSession


def test_an_engine_is_compiled_once_kept_and_found_by_who_serves_in_batches_that_it_was_compiled_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    HAPPENED.clear()
    runtime = "replayfleet.export.running.runtime"
    monkeypatch.setattr(f"{runtime}.BoundRuns", functools.partial(BoundRuns, device="cpu"))
    monkeypatch.setattr(f"{runtime}.preload_gpu_libraries", lambda: HAPPENED.append("libraries"))
    available = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(f"{runtime}.ort.get_available_providers", lambda: available)
    monkeypatch.setattr(f"{runtime}.ort.InferenceSession", FakeTensorRt)
    maker, profile, told = TensorRt(), BatchProfile(1, 2, 16), []
    cache = EngineCache(tmp_path / "engines", {"device": "Orin"})
    with cache.workplace() as place:
        maker.build(graph(), place, profile, lambda part, of: told.append((part, of)))
        cache.store(place, "artefact", profile)
    engine = cache.find("artefact", profile)
    assert engine is not None
    providers = maker.providers(graph(), (1, 8, 8), engine, profile)
    served = OnnxModel(graph(), {}, num_threads=1, providers=providers)
    x = np.random.default_rng(0).standard_normal((40, 1, 8, 8)).astype(np.float32)
    np.testing.assert_array_equal(served.run(x), np.maximum(x, 0))
    assert HAPPENED == ["libraries", "compiled", "libraries", "found"], "each session needs CUDA's libraries first"
    assert cache.find("artefact", profile) == engine, "serving leaves the entry as it was stored"
    assert (served.runs_on, told) == ("TensorrtExecutionProvider", [(1, 1)])
