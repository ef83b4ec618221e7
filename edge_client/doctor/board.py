"""The board itself, Python, and the three packages that come from a vendor on some boards."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from replayfleet.devices.probing import Board
from replayfleet.devices.profiles import GIB, DeviceProfile
from replayfleet.edge_client.doctor.findings import Finding, failure, ok, warning

MEMORY_SHARE = 0.8
"""Of a module's memory; the rest is the firmware's, the GPU's carve-outs and the kernel's."""

_PACKAGES = {
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime", "onnxruntime-training", "onnxruntime-openvino"),
    "cv2": ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
}
"""Which packages bring a module. Two of them in one folder overwrite one another's files."""


@dataclass(frozen=True, slots=True)
class Package:
    """Where an installed package comes from.

    Attributes:
        name: of the package as it was installed, for example ``onnxruntime-gpu``.
        version: its own.
        folder: that it lies in.
        installer: ``pip``, ``uv``, ...; empty if it doesn't say, as what a system's package manager installed.
        rivals: other packages that install the same module.
    """

    name: str
    version: str
    folder: str
    installer: str = ""
    rivals: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line."""
        origin = self.installer or ("the system's package manager" if "/dist-packages" in self.folder else "unknown")
        return f"{self.name} {self.version} in {self.folder}, installed by {origin}"


def look_at_board(board: Board, profile: DeviceProfile, note: str) -> list[Finding]:
    """Return what was found, and which profile it means."""
    found = f"{board.describe()}: --device {profile.name}, which serves {profile.precision} models quickest"
    facts = {
        "model": board.model,
        "machine": board.machine,
        "l4t": ".".join(map(str, board.l4t or ())),
        "jetpack": board.jetpack,
        "cuda": board.cuda,
        "driver": board.driver,
        "gpus": list(board.gpus),
        "num_cores": board.num_cores,
        "memory_bytes": board.memory_bytes,
        "profile": profile.name,
        "precision": profile.precision,
    }
    if note:
        return [warning("board", f"{found}. {note}", "start with --device auto", **facts)]
    if 0 < board.memory_bytes < MEMORY_SHARE * profile.min_memory_bytes:
        least = f"boards of this profile have {profile.min_memory_bytes / GIB:.0f} GiB and more"
        return [warning("board", f"{found}; {least}", "give this container or machine more memory", **facts)]
    return [ok("board", found, **facts)]


def look_at_python() -> list[Finding]:
    """Return the interpreter's version and place."""
    version = ".".join(map(str, sys.version_info[:3]))
    environment = "" if sys.prefix == sys.base_prefix else f", virtual environment {sys.prefix}"
    facts = {"version": version, "executable": sys.executable, "prefix": sys.prefix}
    return [ok("python", f"{version}, {sys.executable}{environment}", **facts)]


def look_at_packages(board: Board) -> list[Finding]:
    """Return versions and origins of onnxruntime, OpenCV and torch, without importing what says so by itself."""
    vendor = "from JetPack or its index, see docs/deploy.md" if board.is_jetson else "pip install 'replayfleet[cpu]'"
    runtime = _found("package.onnxruntime", installed("onnxruntime"))
    if runtime is None:
        runtime = failure("package.onnxruntime", "not installed: nothing can be served", f"install it: {vendor}")
    cv2 = _found("package.opencv", installed("cv2"))
    if cv2 is None:
        system = "apt install python3-opencv" if board.is_jetson else "pip install opencv-python-headless"
        cv2 = warning("package.opencv", "not installed: no cameras, films or folder:// sources", system)
    torch = _found("package.torch", installed("torch"))
    if torch is None:
        torch = warning("package.torch", "not installed: this device serves, but can't train", f"install it: {vendor}")
    return [runtime, cv2, torch]


def installed(module: str) -> Package | None:
    """Return what provides ``module``; None if nothing does. Imports it only if nobody noted its version."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    folder = str(Path(spec.origin).parent.parent)
    names = _distributions(module, folder)
    if not names:
        version = getattr(importlib.import_module(module), "__version__", "of unknown version")
        return Package(module, version, folder)
    distribution = importlib.metadata.distribution(names[0])
    installer = (distribution.read_text("INSTALLER") or "").strip()
    return Package(names[0], distribution.version, folder, installer, tuple(names[1:]))


def _distributions(module: str, folder: str) -> list[str]:
    """Return which packages put ``module`` into ``folder``."""
    names = []
    for name in _PACKAGES.get(module, (module,)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if str(importlib.metadata.distribution(name).locate_file("")) == folder:
                names.append(name)
    return names


def _found(check: str, package: Package | None) -> Finding | None:
    if package is None:
        return None
    facts = {
        "name": package.name,
        "version": package.version,
        "folder": package.folder,
        "installer": package.installer,
        "rivals": list(package.rivals),
    }
    if package.rivals:
        both = ", ".join((package.name, *package.rivals))
        return warning(
            check,
            f"{package.describe()}; more than one package brings the same files: {both}",
            f"pip uninstall {both.replace(',', '')}, then install one of them again",
            **facts,
        )
    return ok(check, package.describe(), **facts)
