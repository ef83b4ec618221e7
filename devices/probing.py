"""Which board this is, read from what the kernel and NVIDIA's installers leave in files.

Every path is below ``root``, so that a test can write the tree of a board.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from replayfleet.devices.profiles import AUTO, GIB, JETSON, PROFILES, DeviceProfile, profile

_MODULES = {
    "p3767-0000": "jetson-orin-nx",
    "p3767-0001": "jetson-orin-nx",
    "p3767-0003": "jetson-orin-nano",
    "p3767-0004": "jetson-orin-nano",
    "p3767-0005": "jetson-orin-nano",
    "p3701": "jetson-agx-orin",
    "p3834": "jetson-thor",
    "p2888": "jetson-xavier",
    "p3668": "jetson-xavier",
}
"""NVIDIA's part numbers of modules, as in ``compatible`` of their device trees (linux/arch/arm64/boot/dts/nvidia)."""

_NAMES = {
    "Orin Nano": "jetson-orin-nano",
    "Orin NX": "jetson-orin-nx",
    "AGX Orin": "jetson-agx-orin",
    "IGX Orin": "jetson-agx-orin",
    "Thor": "jetson-thor",
    "Xavier": "jetson-xavier",
}
_CHIPS = {"nvidia,tegra194": "jetson-xavier", "nvidia,tegra264": "jetson-thor"}
_ORIN = "nvidia,tegra234"

_JETPACKS = (
    ((39, 2, 0), "7.2"),
    ((38, 4, 0), "7.1"),
    ((38, 2, 0), "7.0"),
    ((36, 4, 3), "6.2"),
    ((36, 4, 0), "6.1"),
    ((36, 3, 0), "6.0"),
    ((35, 2, 0), "5.1"),
    ((32, 4, 0), "4"),
)
"""First L4T release of a JetPack, newest first (developer.nvidia.com/embedded/jetpack-archive)."""


@dataclass(frozen=True, slots=True)
class Board:
    """What was found.

    Attributes:
        model: as the board calls itself; empty on a PC.
        compatible: of the device tree, most specific first.
        machine: ``x86_64``, ``aarch64``, ...
        l4t: release of Jetson Linux, (major, minor, patch); None off JetPack, or in a container without its file.
        cuda: version of the CUDA toolkit; empty if there is none.
        driver: version of NVIDIA's driver on a PC; empty if there is none.
        gpus: names of NVIDIA's GPUs on a PC.
        num_cores: that are on, and that the container or service may use.
        memory_bytes: that this machine, container or service has; on a Jetson shared with the GPU. 0 if unknown.
    """

    model: str = ""
    compatible: tuple[str, ...] = ()
    machine: str = ""
    l4t: tuple[int, int, int] | None = None
    cuda: str = ""
    driver: str = ""
    gpus: tuple[str, ...] = ()
    num_cores: int = 1
    memory_bytes: int = 0

    @property
    def is_jetson(self) -> bool:
        """Whether the chip is one of NVIDIA's Tegras; containers hide the device tree, but may have JetPack's file."""
        return self.l4t is not None or any(name.startswith("nvidia,tegra") for name in self.compatible)

    @property
    def jetpack(self) -> str:
        """The JetPack that the L4T release belongs to; empty if unknown."""
        if self.l4t is None:
            return ""
        return next((name for first, name in _JETPACKS if first[0] == self.l4t[0] and self.l4t >= first), "")

    def describe(self) -> str:
        """One line for people."""
        words = [self.model or f"{self.machine} machine"]
        if self.l4t is not None:
            words.append(f"L4T {'.'.join(map(str, self.l4t))}" + (f" (JetPack {self.jetpack})" if self.jetpack else ""))
        words += [f"GPU {name}" for name in self.gpus]
        words += [f"driver {self.driver}"] if self.driver else []
        words += [f"CUDA toolkit {self.cuda}"] if self.cuda else []
        words += [f"{self.num_cores} core{'s' if self.num_cores > 1 else ''}", f"{self.memory_bytes / GIB:.1f} GiB"]
        return ", ".join(words)


def probe(root: Path = Path("/"), machine: str | None = None) -> Board:
    """Look at the board; what can't be read counts as absent.

    Args:
        root: where ``proc``, ``sys``, ``etc``, ``usr`` and ``dev`` lie.
        machine: the processor's architecture; None asks the system.
    """
    gpus = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    driver = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", _text(root / "proc/driver/nvidia/version"))
    return Board(
        model=_text(root / "proc/device-tree/model").strip("\0 \n"),
        compatible=tuple(name for name in _text(root / "proc/device-tree/compatible").split("\0") if name.strip()),
        machine=platform.machine() if machine is None else machine,
        l4t=_l4t(_text(root / "etc/nv_tegra_release")),
        cuda=_cuda(root),
        driver=driver[1] if driver else "",
        gpus=tuple(match[1].strip() for gpu in gpus if (match := re.search(r"Model:\s*(.+)", _text(gpu)))),
        num_cores=_num_cores(root),
        memory_bytes=_memory_bytes(root),
    )


def fitting(board: Board) -> DeviceProfile:
    """Return the profile of ``--device auto``."""
    if board.is_jetson:
        return PROFILES[_jetson(board)]
    if board.gpus:
        return PROFILES["cuda"]
    return PROFILES["arm-cpu" if board.machine in {"aarch64", "armv7l", "arm64"} else "cpu"]


def chosen(name: str, board: Board) -> tuple[DeviceProfile, str]:
    """Return the profile that ``--device`` means on this board, and what is odd about it (empty: nothing).

    Args:
        name: a key of ``PROFILES``, or ``auto``; ``jetson`` is whichever Jetson this is.
        board: from ``probe``.

    Raises:
        SettingsError: No such name.
    """
    fits = fitting(board)
    if name == AUTO:
        return fits, ""
    if name == JETSON and board.is_jetson:
        return fits, ""
    asked = profile(name)
    if asked.vendor_runtime and not board.is_jetson:
        return asked, f"--device {name} expects a Jetson, but this is {_named(board)}; going on with what works"
    if asked.vendor_runtime and fits.name not in {name, JETSON}:
        return asked, f"--device {name} is given, but this is {_named(board)}, which --device {fits.name} is made for"
    return asked, ""


def _named(board: Board) -> str:
    return repr(board.model) if board.model else f"an {board.machine} machine without a device tree"


def _jetson(board: Board) -> str:
    text = " ".join(board.compatible)
    for part, name in _MODULES.items():
        if part in text:
            return name
    for words, name in _NAMES.items():
        if words in board.model:
            return name
    for chip, name in _CHIPS.items():
        if chip in board.compatible:
            return name
    if _ORIN in board.compatible and board.memory_bytes:  # a carrier board that doesn't say; sold with 8, 16 or 32 GB
        if board.memory_bytes > 20 * GIB:
            return "jetson-agx-orin"
        return "jetson-orin-nx" if board.memory_bytes > 10 * GIB else "jetson-orin-nano"
    return JETSON


def _l4t(text: str) -> tuple[int, int, int] | None:
    """Read ``# R36 (release), REVISION: 4.3, GCID: ...``."""
    match = re.search(r"# R(\d+) \(release\), REVISION: (\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def _cuda(root: Path) -> str:
    folder = root / "usr/local/cuda"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(_text(folder / "version.json"))["cuda"]["version"])
    match = re.search(r"CUDA Version (\d[\d.]*)", _text(folder / "version.txt"))
    return match[1] if match else ""


def _num_cores(root: Path) -> int:
    """Count the cores that are on and may be used; a Jetson's power mode switches some off, a cpuset forbids others."""
    allowed = re.search(r"^Cpus_allowed_list:(.*)$", _text(root / "proc/self/status"), re.MULTILINE)
    on, ours = _cores(_text(root / "sys/devices/system/cpu/online")), _cores(allowed[1] if allowed else "")
    cores = len(on & ours or on or ours) or os.cpu_count() or 1
    for limit in _limits(root, "cpu.max"):
        quota, _, period = limit.partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def _cores(text: str) -> set[int]:
    """Read ``0-3,6``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def _memory_bytes(root: Path) -> int:
    match = re.search(r"MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"))
    total = int(match[1]) << 10 if match else 0
    return min([total, *(int(limit) for limit in _limits(root, "memory.max") if limit.isdigit())]) if total else 0


def _limits(root: Path, name: str) -> list[str]:
    """Return a file's text of our control group and of all above it (cgroups(7), version 2): each bounds us.

    A container sees its own as the outermost; a systemd unit's (``MemoryMax=``, ``CPUQuota=``) lies below.
    """
    own = re.search(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE)
    group = PurePosixPath(own[1] if own else "")
    return [_text(root / "sys/fs/cgroup" / place / name).strip() for place in (group, *group.parents)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
