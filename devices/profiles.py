"""What a board can do: which execution providers to try, where to train, and with how many threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from federation.errors import SettingsError, nearest

JETSON_RELEASE_FILE = Path("/etc/nv_tegra_release")
"""Present on every JetPack installation; its first line names the L4T release."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A class of boards.

    Attributes:
        name: what ``--device`` takes.
        execution_providers: ONNX Runtime providers in order of preference; the last one always works.
        torch_device: where training would run best; the services train on the CPU for now (see ``docs/deploy.md``).
        inference_threads: intra-op threads of the serving session; training shares the cores.
        vendor_runtime: torch, OpenCV and ONNX Runtime come with the board's system image, not from PyPI.
    """

    name: str
    execution_providers: tuple[str, ...]
    torch_device: str
    inference_threads: int
    vendor_runtime: bool = False

    def __post_init__(self) -> None:
        if not self.execution_providers or self.execution_providers[-1] != "CPUExecutionProvider":
            raise ValueError(f"profile {self.name!r}: the last execution provider must be CPUExecutionProvider")
        if self.inference_threads < 1:
            raise ValueError(f"profile {self.name!r}: inference_threads is {self.inference_threads}, expected >= 1")


PROFILES = {
    "cpu": DeviceProfile("cpu", ("CPUExecutionProvider",), "cpu", inference_threads=1),
    "cuda": DeviceProfile("cuda", ("CUDAExecutionProvider", "CPUExecutionProvider"), "cuda", inference_threads=2),
    # TensorRT stays out: ONNX Runtime keys its engine cache by the graph, not by the parameters, so every round's
    # model would either load the old engine or wait minutes for a new one.
    "jetson": DeviceProfile(
        "jetson", ("CUDAExecutionProvider", "CPUExecutionProvider"), "cuda", inference_threads=2, vendor_runtime=True
    ),
}


def profile(name: str) -> DeviceProfile:
    """Return the profile that ``--device`` names.

    Raises:
        SettingsError: No such profile; names the nearest.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise SettingsError(f"unknown device {name!r}{nearest(name, PROFILES)}") from None


def default_training_threads() -> int:
    """Threads for the training process: half of the cores, at least one, so that frames and the network keep theirs."""
    return max(1, (os.cpu_count() or 2) // 2)


def board_note(board: DeviceProfile, release_file: Path = JETSON_RELEASE_FILE) -> str:
    """Return what is odd about running ``board`` here, or an empty string.

    PyPI's aarch64 ``onnxruntime-gpu`` installs on a Jetson but holds no kernels for its GPU, so the hint names the
    vendor's build.
    """
    if board.vendor_runtime and not release_file.exists():
        return f"--device {board.name} expects JetPack, but {release_file} doesn't exist; going on with what works"
    return ""
