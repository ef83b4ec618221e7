"""What the kernel and NVIDIA's installers leave in files, board by board, written below a folder.

Device trees as in linux/arch/arm64/boot/dts/nvidia and in owners' reports, release files as in NVIDIA's.
"""

from __future__ import annotations

from pathlib import Path

ORIN_NANO = (
    "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
    ("nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234"),
)
ORIN_NX = (
    "NVIDIA Jetson Orin NX Engineering Reference Developer Kit",
    ("nvidia,p3768-0000+p3767-0000", "nvidia,p3767-0000", "nvidia,tegra234"),
)
AGX_ORIN = (
    "NVIDIA Jetson AGX Orin Developer Kit",
    ("nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234"),
)
THOR = (
    "NVIDIA Jetson AGX Thor Developer Kit",
    ("nvidia,p4071-0000+p3834-0008", "nvidia,p3834-0008", "nvidia,tegra264"),
)
XAVIER_NX = (
    "NVIDIA Jetson Xavier NX Developer Kit",
    ("nvidia,p3509-0000+p3668-0000", "nvidia,p3668-0000", "nvidia,tegra194"),
)
AGX_XAVIER = ("Jetson-AGX", ("nvidia,galen", "nvidia,jetson-xavier", "nvidia,p2822-0000+p2888-0001", "nvidia,tegra194"))
RASPBERRY_PI = ("Raspberry Pi 4 Model B Rev 1.4", ("raspberrypi,4-model-b", "brcm,bcm2711"))

R36 = "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8\n"


def board_tree(
    root: Path,
    board: tuple[str, tuple[str, ...]] | None = None,
    *,
    release: str = "",
    cores: str = "0-5",
    memory_kib: int = 7_650_336,
) -> Path:
    """Write a board's files below ``root`` and return it."""
    files: dict[str, str] = {
        "sys/devices/system/cpu/online": f"{cores}\n",
        "proc/meminfo": f"MemTotal:        {memory_kib} kB\nMemFree:  1 kB\n",
    }
    if board is not None:
        files["proc/device-tree/model"] = f"{board[0]}\0"
        files["proc/device-tree/compatible"] = "".join(f"{name}\0" for name in board[1])
    if release:
        files["etc/nv_tegra_release"] = release
    write_tree(root, files)
    return root


def gpu_tree(root: Path) -> Path:
    """Write a PC's files with a GPU, NVIDIA's driver and a CUDA toolkit."""
    board_tree(root, cores="0-15", memory_kib=128 << 20)
    write_tree(
        root,
        {
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA GeForce RTX 4090\nIRQ: 130\n",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  R\n",
            "usr/local/cuda/version.json": '{"cuda": {"name": "CUDA SDK", "version": "13.0.20250819"}}',
        },
    )
    return root


def write_tree(root: Path, files: dict[str, str]) -> None:
    """Write files below ``root``, with the folders that they need."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
