"""The board itself, Python, the three packages that come from a vendor on some boards, and what it computes with."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from replayfleet.devices.installing import what_to_install
from replayfleet.devices.probing import Board
from replayfleet.devices.profiles import CPU, GIB, TENSORRT, DeviceProfile, required_provider
from replayfleet.edge_client.doctor.findings import Finding, failure, ok, skipped, warning

MEMORY_SHARE = 0.8
"""Of a module's memory; the rest is the firmware's, the GPU's carve-outs and the kernel's."""

_FACTS = ("model", "machine", "jetpack", "cuda", "driver", "num_cores", "memory_bytes")
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
        origin = self.installer or ("the system's package manager" if "/dist-packages" in self.folder else "unknown")
        return f"{self.name} {self.version} in {self.folder}, installed by {origin}"


def look_at_board(board: Board, profile: DeviceProfile, note: str) -> list[Finding]:
    """Return what was found, and which profile it means."""
    found = f"{board.describe()}: --device {profile.name}, which serves {profile.precision} models quickest"
    facts = {
        **{key: getattr(board, key) for key in _FACTS},
        "l4t": ".".join(map(str, board.l4t or ())),
        "gpus": list(board.gpus),
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
    system = "apt install python3-opencv" if board.is_jetson else "pip install opencv-python-headless"
    rows = (
        ("onnxruntime", "onnxruntime", failure, "nothing can be served", f"install it: {vendor}"),
        ("opencv", "cv2", warning, "no cameras, films or folder:// sources", system),
        ("torch", "torch", warning, "this device serves, but can't train", f"install it: {vendor}"),
    )
    findings = []
    for name, module, missing, loss, advice in rows:
        package = installed(module)
        if package is None:
            findings.append(missing(f"package.{name}", f"not installed: {loss}", advice))
        else:
            findings.append(_found(f"package.{name}", package))
    return findings


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
    names = []
    for name in _PACKAGES.get(module, (module,)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if str(importlib.metadata.distribution(name).locate_file("")) == folder:
                names.append(name)
    return names


def _found(check: str, package: Package) -> Finding:
    facts = dataclasses.asdict(package) | {"rivals": list(package.rivals)}
    if not package.rivals:
        return ok(check, package.describe(), **facts)
    both = (package.name, *package.rivals)
    found = f"{package.describe()}; more than one package brings the same files: {', '.join(both)}"
    return warning(check, found, f"pip uninstall {' '.join(both)}, then install one of them again", **facts)


def look_at_provider(
    name: str, provider: str, profile: DeviceProfile, board: Board, require: str = ""
) -> list[Finding]:
    """Return whether a provider computes, and how much this profile minds if it doesn't.

    Args:
        name: of the provider, as ``--require-provider`` takes it.
        provider: ONNX Runtime's name.
        profile: what the client is started with.
        board: what it runs on.
        require: the provider that must be there; empty: the profile's first.
    """
    from replayfleet.devices.providers import try_provider

    check = f"provider.{name}"
    wanted = required_provider(require) if require else profile.execution_providers[0]
    try:
        trial = try_provider(provider)
    except ImportError as error:
        if provider in {CPU, wanted}:
            return [failure(check, f"{error}: it can't be tried", "install onnxruntime first")]
        return [skipped(check, f"{error}: it can't be tried")]
    facts = {"listed": trial.listed, "works": trial.works, "missing": list(trial.missing), "wanted": provider == wanted}
    if trial.works:
        role = "" if provider in {wanted, CPU} else f"; --device {profile.name} serves with {wanted} first"
        return [ok(check, f"proved by an inference{role}", **facts)]
    advice = what_to_install(provider, trial.missing, board)
    if provider in {CPU, wanted}:
        return [failure(check, trial.problem, advice, **facts)]
    if trial.listed or (provider == TENSORRT and profile.tensorrt):
        return [warning(check, trial.problem, advice, **facts)]
    return [skipped(check, f"{trial.problem}; --device {profile.name} doesn't need it", **facts)]
