from __future__ import annotations

import importlib.machinery
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.linked import linked_library

from replayfleet.devices import providers
from replayfleet.devices.installing import what_to_install
from replayfleet.devices.probing import Board
from replayfleet.devices.profiles import CPU, CUDA, TENSORRT, profile
from replayfleet.devices.providers import (
    PROBE_ANSWER,
    PROBE_MODEL,
    ProviderProof,
    Trial,
    prove_provider,
    try_apart,
    try_provider,
)
from replayfleet.federation.errors import ReplayfleetError, SettingsError

PC = Board(machine="x86_64", gpus=("NVIDIA GeForce RTX 4090",), num_cores=8)
JETPACK_6 = Board("NVIDIA Jetson Orin NX", ("nvidia,tegra234",), "aarch64", (36, 4, 3))


class LyingRuntime:
    """An InferenceSession that claims a provider and computes with ``answer``."""

    def __init__(self, claimed: str, answer: object) -> None:
        self.claimed, self.answer = claimed, answer

    def run(self, *_: Any) -> list[Any]:
        return [np.array(self.answer, dtype=np.float32).reshape(1, 1, 2, 2)]

    def get_providers(self) -> list[str]:
        return [self.claimed]


def _pretend(monkeypatch: pytest.MonkeyPatch, claimed: str, answer: object) -> None:
    real = onnxruntime.InferenceSession
    liar = LyingRuntime(claimed, answer)
    both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, *both])
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda model, options, providers, **more: (
            real(model, options, providers=providers, **more) if providers == both[1:] else liar
        ),
    )


def test_the_cpu_is_proved_by_a_real_answer() -> None:
    proof = prove_provider(profile("cpu"), PC)
    assert (proof.provider, proof.refused) == (CPU, ())
    assert proof.warning(profile("cpu"), PC) == ""
    assert prove_provider(profile("cuda"), PC, "cpu").provider == CPU


def test_cuda_that_is_not_usable_falls_to_the_cpu_with_one_clear_line() -> None:
    board = profile("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proof = prove_provider(board, PC)
    if proof.provider == CUDA:
        pytest.skip("this machine has a usable CUDA provider")
    line = proof.warning(board, PC)
    assert "--device cuda" in line
    assert "CPUExecutionProvider instead" in line
    assert "\n" not in line


@pytest.mark.parametrize("name", ["tensorrt", "cuda"])
def test_a_required_provider_that_does_not_compute_stops_the_start(name: str) -> None:
    wanted = {"tensorrt": TENSORRT, "cuda": CUDA}[name]
    trial = try_provider(wanted)
    if trial.works:
        pytest.skip(f"this machine has a usable {wanted}")
    with pytest.raises(SettingsError, match=f"--require-provider {name}: .*; not started"):
        prove_provider(profile("cpu"), PC, name)


def test_a_required_provider_is_the_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, TENSORRT, PROBE_ANSWER)
    assert prove_provider(profile("cuda"), PC, "tensorrt") == ProviderProof(TENSORRT)


def test_what_is_not_built_in_is_said_and_whether_there_is_a_driver() -> None:
    trial = try_provider(CUDA)
    if trial.listed:
        pytest.skip("this onnxruntime has CUDA built in")
    assert not trial.works
    assert trial.problem.startswith(f"not built into this onnxruntime {onnxruntime.__version__}")
    assert trial.missing in {(), ("libcuda.so.1",)}


def test_a_listed_provider_names_the_libraries_that_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The provider's library is a real one, linked here; a session that fails stands in for ONNX Runtime's."""
    _pretend(monkeypatch, CPU, PROBE_ANSWER)
    folder = tmp_path / "onnxruntime"
    (folder / "capi").mkdir(parents=True)
    (folder / "capi" / "libonnxruntime_providers_cuda.so").symlink_to(linked_library(tmp_path, "gpu", "absent"))
    spec = importlib.machinery.ModuleSpec("onnxruntime", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    trial = try_provider(CUDA)
    assert trial.listed
    assert trial.problem.startswith("listed, but not usable: libabsent.so")
    assert trial.missing in {("libabsent.so",), ("libabsent.so", "libcuda.so.1")}


@pytest.mark.parametrize(
    ("provider", "missing", "board", "advice"),
    [
        (CUDA, ("libcublasLt.so.13", "libcuda.so.1"), PC, "NVIDIA's driver"),
        (CUDA, ("libcublasLt.so.13",), PC, "replayfleet\\[cuda\\]"),
        (TENSORRT, ("libnvinfer.so.10",), PC, "tensorrt-cu13<11"),
        (CUDA, (), JETPACK_6, "JetPack 6.*jetson-ai-lab.io/jp6/cu126"),
        (CUDA, ("libcuda.so.1",), JETPACK_6, "--runtime nvidia"),
        (TENSORRT, ("libnvinfer.so.10",), JETPACK_6, "apt install nvidia-jetpack"),
        (CUDA, (), replace(JETPACK_6, l4t=(38, 2, 0)), "JetPack 7 build onnxruntime"),
        (CUDA, (), replace(JETPACK_6, l4t=(35, 4, 1)), "Jetson_Zoo"),
        (CUDA, (), replace(JETPACK_6, l4t=None), "vendor's onnxruntime, not PyPI's"),
        (CPU, (), PC, "install it again"),
    ],
)
def test_what_to_install_depends_on_the_board_and_on_what_is_missing(
    provider: str, missing: tuple[str, ...], board: Board, advice: str
) -> None:
    assert re.search(advice, what_to_install(provider, missing, board))
    warning = ProviderProof(CPU, (Trial(provider, "no", missing=missing),)).warning(profile("cuda"), board)
    assert re.search(advice, warning)


@pytest.fixture
def _no_library_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the installed build's providers lack says nothing about one that only pretends."""
    monkeypatch.setattr(providers, "_LIBRARIES", {})


@pytest.mark.usefixtures("_no_library_is_looked_at")
def test_a_provider_that_is_listed_but_falls_back_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "CPUExecutionProvider", PROBE_ANSWER)
    proof = prove_provider(profile("cuda"), PC)
    assert proof.provider == "CPUExecutionProvider"
    assert "fell back" in proof.refused[0].problem


@pytest.mark.usefixtures("_no_library_is_looked_at")
@pytest.mark.parametrize("answer", [(0, 0, 0, 0), (float("nan"),) * 4])
def test_a_provider_that_computes_wrongly_is_not_believed(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    _pretend(monkeypatch, "CUDAExecutionProvider", answer)
    proof = prove_provider(profile("cuda"), PC)
    assert proof.provider == "CPUExecutionProvider"
    assert "wrong answer" in proof.refused[0].problem


def test_a_provider_that_computes_rightly_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "CUDAExecutionProvider", PROBE_ANSWER)
    assert prove_provider(profile("cuda"), PC).provider == "CUDAExecutionProvider"


@pytest.mark.parametrize(
    ("loading", "problem"),
    [
        ("os.abort()", "not usable: its process was ended by SIGABRT"),
        ("time.sleep(60)", "not usable: it computes nothing in 1 s"),
        ("raise ImportError('no libcudart.so.12')", "ImportError: no libcudart.so.12"),
    ],
)
def test_a_library_that_crashes_hangs_or_is_broken_takes_only_the_process_of_its_own_along(
    loading: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "onnxruntime.py").write_text(f"import os, time\n{loading}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(providers, "TRIAL_S", 1.0 if "sleep" in loading else providers.TRIAL_S)
    assert try_apart(CPU) == Trial(CPU, problem)
    with pytest.raises(ReplayfleetError, match=f"no execution provider works: {CPU}: {re.escape(problem)} .*again"):
        prove_provider(profile("cpu"), PC, tried=try_apart)


def test_a_provider_that_is_tried_apart_leaves_nothing_in_this_process() -> None:
    code = (
        "import sys\nfrom replayfleet.devices.providers import CPU, Trial, try_apart\n"
        "assert try_apart(CPU) == Trial(CPU)\nassert 'onnxruntime' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[3])


def test_the_probe_model_is_small_and_valid() -> None:
    assert len(PROBE_MODEL) == 127
    session = onnxruntime.InferenceSession(PROBE_MODEL, providers=["CPUExecutionProvider"])
    answer: Any = session.run(None, {"x": np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)})[0]
    assert answer[0, 0].tolist() == [list(row) for row in PROBE_ANSWER]
