"""What is asked of NVIDIA's libraries, which doubles answer: neither they nor a GPU are at hand."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import replayfleet.export.engines.tensorrt
from replayfleet.export.engines.maker import EngineFailed
from replayfleet.export.engines.tensorrt import TensorRt
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
