"""Proves an execution provider with a real inference.

``onnxruntime.get_available_providers()`` lists CUDA and TensorRT on machines without a GPU, and sessions fall back to
the CPU silently. Only a session that was forbidden to fall back, and an answer that is right, tell the truth.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from devices.profiles import DeviceProfile

PROBE_MODEL = base64.b64decode(
    "CAgSADpzCg8KAXgKAXcSAXkiBENvbnYSBXByb2JlKh8IAQgBCAIIAhABQgF3ShAAAIA/AAAAQAAAQEAAAIBAWhsKAXgSFgoUCAESEAoCCAEKAggB"
    "CgIIAwoCCANiGwoBeRIWChQIARIQCgIIAQoCCAEKAggCCgIIAkIECgAQDQ=="
)
"""ONNX, 127 bytes, opset 13: one convolution ``x`` (1, 1, 3, 3) -> ``y`` (1, 1, 2, 2) with kernel [[1, 2], [3, 4]]."""

PROBE_ANSWER = ((27.0, 37.0), (57.0, 67.0))
"""What ``PROBE_MODEL`` makes of 0..8; a provider that says anything else is not used."""


@dataclass(frozen=True, slots=True)
class ProviderProof:
    """Which provider works here.

    Attributes:
        provider: the first of the profile's providers that gave the right answer.
        refused: (provider, why) of those tried before it.
    """

    provider: str
    refused: tuple[tuple[str, str], ...] = ()

    def warning(self, board: DeviceProfile) -> str:
        """One line if serving runs on less than the operator asked for, else an empty string."""
        if not self.refused:
            return ""
        why = "; ".join(f"{provider}: {reason}" for provider, reason in self.refused)
        hint = " (on a Jetson install the vendor's onnxruntime, not PyPI's)" if board.vendor_runtime else ""
        return f"--device {board.name} can't use its first choice, serving with {self.provider} instead: {why}{hint}"


def prove_provider(board: DeviceProfile) -> ProviderProof:
    """Return the first provider of ``board`` that really computes; the CPU always does.

    Raises:
        RuntimeError: Not even the CPU provider gives the right answer: this onnxruntime is broken.
        ImportError: onnxruntime is not installed.
    """
    refused: list[tuple[str, str]] = []
    for provider in board.execution_providers:
        reason = _try(provider)
        if not reason:
            return ProviderProof(provider, tuple(refused))
        refused.append((provider, reason))
    raise RuntimeError(f"no execution provider works: {refused}")


def _try(provider: str) -> str:
    """Return why ``provider`` can't be used, or an empty string if it computed the right answer."""
    import onnxruntime

    if provider not in onnxruntime.get_available_providers():
        return f"not built into this onnxruntime {onnxruntime.__version__}"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the library's own lines about missing .so files bypass logging
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if provider != "CPUExecutionProvider":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = onnxruntime.InferenceSession(PROBE_MODEL, options, providers=[provider], enable_fallback=0)
        answer: Any = session.run(["y"], {"x": np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)})[0]
    except Exception as error:  # onnxruntime's exceptions share no base class
        return " ".join(str(error).split())[:200]
    if session.get_providers()[0] != provider:
        return f"session fell back to {session.get_providers()[0]}"
    if not np.allclose(answer[0, 0], PROBE_ANSWER, rtol=0, atol=0.1):  # NaN fails too
        return f"gave a wrong answer: {answer.ravel().tolist()}"
    return ""
