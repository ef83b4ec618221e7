from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnxruntime
import pytest

from devices.profiles import profile
from devices.providers import PROBE_ANSWER, PROBE_MODEL, prove_provider


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
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: both)
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda model, options, providers, **more: (
            real(model, options, providers=providers, **more) if providers == both[1:] else liar
        ),
    )


def test_the_cpu_is_proved_by_a_real_answer() -> None:
    proof = prove_provider(profile("cpu"))
    assert (proof.provider, proof.refused) == ("CPUExecutionProvider", ())
    assert proof.warning(profile("cpu")) == ""


def test_cuda_that_is_not_usable_falls_to_the_cpu_with_one_clear_line() -> None:
    board = profile("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proof = prove_provider(board)
    if proof.provider == "CUDAExecutionProvider":
        pytest.skip("this machine has a usable CUDA provider")
    line = proof.warning(board)
    assert "--device cuda" in line
    assert "CPUExecutionProvider instead" in line
    assert "\n" not in line


def test_a_provider_that_is_listed_but_falls_back_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "CPUExecutionProvider", PROBE_ANSWER)
    proof = prove_provider(profile("cuda"))
    assert proof.provider == "CPUExecutionProvider"
    assert "fell back" in proof.refused[0][1]


@pytest.mark.parametrize("answer", [(0, 0, 0, 0), (float("nan"),) * 4])
def test_a_provider_that_computes_wrongly_is_not_believed(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    _pretend(monkeypatch, "CUDAExecutionProvider", answer)
    proof = prove_provider(profile("cuda"))
    assert proof.provider == "CPUExecutionProvider"
    assert "wrong answer" in proof.refused[0][1]


def test_a_provider_that_computes_rightly_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "CUDAExecutionProvider", PROBE_ANSWER)
    assert prove_provider(profile("cuda")).provider == "CUDAExecutionProvider"


def test_the_probe_model_is_small_and_valid() -> None:
    assert len(PROBE_MODEL) == 127
    session = onnxruntime.InferenceSession(PROBE_MODEL, providers=["CPUExecutionProvider"])
    answer: Any = session.run(None, {"x": np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)})[0]
    assert answer[0, 0].tolist() == [list(row) for row in PROBE_ANSWER]
