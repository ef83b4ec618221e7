"""Proves an execution provider with a real inference.

``onnxruntime.get_available_providers()`` lists CUDA and TensorRT on machines without a GPU, and sessions fall back to
the CPU silently. Only a session that was forbidden to fall back, and an answer that is right, tell the truth.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replayfleet.devices.installing import DRIVER, what_to_install
from replayfleet.devices.probing import Board
from replayfleet.devices.profiles import CPU, CUDA, TENSORRT, DeviceProfile, required_provider
from replayfleet.devices.shared_libraries import is_missing, missing_libraries
from replayfleet.federation.children import Child, ChildLost, Parent, child_command
from replayfleet.federation.errors import ReplayfleetError, SettingsError

PROBE_MODEL = base64.b64decode(
    "CAgSADpzCg8KAXgKAXcSAXkiBENvbnYSBXByb2JlKh8IAQgBCAIIAhABQgF3ShAAAIA/AAAAQAAAQEAAAIBAWhsKAXgSFgoUCAESEAoCCAEKAggB"
    "CgIIAwoCCANiGwoBeRIWChQIARIQCgIIAQoCCAEKAggCCgIIAkIECgAQDQ=="
)
"""ONNX, 127 bytes, opset 13: one convolution ``x`` (1, 1, 3, 3) -> ``y`` (1, 1, 2, 2) with kernel [[1, 2], [3, 4]]."""

PROBE_ANSWER = ((27.0, 37.0), (57.0, 67.0))
"""What ``PROBE_MODEL`` makes of 0..8; a provider that says anything else is not used."""

_LIBRARIES = {TENSORRT: "libonnxruntime_providers_tensorrt.so", CUDA: "libonnxruntime_providers_cuda.so"}
"""Which file of onnxruntime's folder ``capi`` a provider is."""

TRIAL_S = 600.0
"""For a provider to compute once in a process of its own: three of them take the half hour that systemd waits for."""

_SILENT = 4
_WARNINGS = 2
"""ONNX Runtime's log severities; the second is its default."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one provider.

    Attributes:
        provider: ONNX Runtime's name.
        problem: why it can't be used; empty if it gave the right answer.
        listed: whether ``get_available_providers()`` has it.
        missing: shared libraries that it lacks.
    """

    provider: str
    problem: str = ""
    listed: bool = True
    missing: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Whether it gave the right answer."""
        return not self.problem


@dataclass(frozen=True, slots=True)
class ProviderProof:
    """Which provider works here.

    Attributes:
        provider: the first that gave the right answer, of those that were asked for.
        refused: those tried before it.
    """

    provider: str
    refused: tuple[Trial, ...] = ()

    def warning(self, profile: DeviceProfile, board: Board) -> str:
        """One line if serving runs on less than the operator asked for, else an empty string."""
        if not self.refused:
            return ""
        why = "; ".join(f"{trial.provider}: {trial.problem}" for trial in self.refused)
        hint = what_to_install(self.refused[0].provider, self.refused[0].missing, board)
        return (
            f"--device {profile.name} can't use its first choice, serving with {self.provider} instead: {why} ({hint})"
        )


def prove_provider(
    profile: DeviceProfile, board: Board, require: str = "", tried: Callable[[str], Trial] | None = None
) -> ProviderProof:
    """Return the first provider of ``profile`` that really computes; the CPU always does.

    Args:
        profile: whose providers are tried, in their order.
        board: for what is said to install.
        require: a key of ``devices.profiles.REQUIRABLE``: this one or none; empty: any.
        tried: lets a provider compute once; ``try_provider`` if None.

    Raises:
        SettingsError: The required provider doesn't work here; says why and what to install.
        ReplayfleetError: Not even the CPU provider gives the right answer: this onnxruntime is broken.
        ImportError: onnxruntime is not installed.
    """
    tried = tried or try_provider
    if require:
        wanted = required_provider(require)
        trial = tried(wanted)
        if not trial.works:
            raise SettingsError(
                f"--require-provider {require}: {trial.problem}; "
                f"{what_to_install(wanted, trial.missing, board)}; not started"
            )
        return ProviderProof(wanted)
    refused: list[Trial] = []
    for provider in profile.execution_providers:
        trial = tried(provider)
        if trial.works:
            return ProviderProof(provider, tuple(refused))
        refused.append(trial)
    why = "; ".join(f"{trial.provider}: {trial.problem}" for trial in refused)
    hint = what_to_install(refused[-1].provider, refused[-1].missing, board)
    raise ReplayfleetError(f"no execution provider works: {why} ({hint})")


def try_apart(provider: str) -> Trial:
    """Do as ``try_provider`` in a process of its own, which takes its libraries' memory along, and may crash or hang.

    Raises:
        ImportError: onnxruntime is not installed.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")
    child: Child[Trial] = Child(child_command(__name__, provider), Trial, errors=subprocess.DEVNULL)
    try:
        said = child.receive(TRIAL_S)
    except ChildLost as lost:
        return Trial(provider, f"not usable: {lost}")
    finally:
        child.process.kill()
        child.close()
    return Trial(provider, f"not usable: it computes nothing in {TRIAL_S:.0f} s") if said is None else said[0]


def main() -> None:
    """Let the provider that is named compute once, and tell the parent what came of it."""
    parent, provider = Parent(), sys.argv[1]
    try:
        trial = try_provider(provider)
    except Exception as error:  # whatever a broken onnxruntime raises when it is imported
        trial = Trial(provider, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    parent.say(trial)


def try_provider(provider: str) -> Trial:
    """Let ``provider`` compute once.

    Raises:
        ImportError: onnxruntime is not installed.
    """
    import onnxruntime

    if provider not in onnxruntime.get_available_providers():
        return _not_built_in(provider, onnxruntime.__version__)
    if provider == CPU:
        return Trial(provider, _compute(provider))
    preload_gpu_libraries()
    onnxruntime.set_default_logger_severity(_SILENT)  # its own lines about missing files go to standard error, coloured
    try:
        problem = _compute(provider)
    finally:
        onnxruntime.set_default_logger_severity(_WARNINGS)
    missing = _missing(provider) if problem else ()
    if missing and DRIVER not in missing and is_missing(DRIVER):  # a provider may need it only once it is loaded
        missing = (*missing, DRIVER)
    if missing:
        problem = f"listed, but not usable: {', '.join(missing)} can't be found"
    return Trial(provider, problem, missing=missing)


def _not_built_in(provider: str, version: str) -> Trial:
    problem = f"not built into this onnxruntime {version}"
    if provider in _LIBRARIES and is_missing(DRIVER):
        return Trial(provider, f"{problem}, and {DRIVER} can't be found either", listed=False, missing=(DRIVER,))
    return Trial(provider, problem, listed=False)


def _compute(provider: str) -> str:
    """Return why ``provider`` can't be used, or an empty string if it computed the right answer."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if provider != CPU:
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


def preload_gpu_libraries() -> None:
    """Load the CUDA libraries that came as Python packages, which no loader path leads to.

    Each process that computes with CUDA or TensorRT needs it before its first session. Does nothing where there are
    none, and before ONNX Runtime 1.21, which can't.
    """
    import onnxruntime

    preload = getattr(onnxruntime, "preload_dlls", None)
    if preload is not None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):  # it prints what it misses
            preload()


def _missing(provider: str) -> tuple[str, ...]:
    found = importlib.util.find_spec("onnxruntime")
    if found is None or found.origin is None or provider not in _LIBRARIES:
        return ()
    library = Path(found.origin).parent / "capi" / _LIBRARIES[provider]
    return missing_libraries(library) if library.is_file() else ()
