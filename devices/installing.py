"""What to install so that an execution provider works, board by board.

Measured or read off devices by others, see the notes to each; none of these boards was at hand.
"""

from __future__ import annotations

from replayfleet.devices.probing import Board
from replayfleet.devices.profiles import CPU, TENSORRT

DRIVER = "libcuda.so.1"
"""Comes with NVIDIA's driver and with nothing else."""

_JETPACK_6 = "pip install onnxruntime-gpu --index-url https://pypi.jetson-ai-lab.io/jp6/cu126"
"""github.com/dusty-nv/jetson-containers/issues/1283; for Python 3.10."""


def what_to_install(provider: str, missing: tuple[str, ...], board: Board) -> str:
    """Return one sentence without a full stop.

    Args:
        provider: the one that doesn't work.
        missing: shared libraries that it lacks, as far as known.
        board: where.
    """
    if provider == CPU:
        return "this onnxruntime is broken: install it again"
    if board.is_jetson:
        return _on_jetson(missing, board)
    if DRIVER in missing:
        return (
            f"{DRIVER} belongs to NVIDIA's driver: install that (in a container, run it with --gpus all), "
            "or use --device cpu where there is no such GPU"
        )
    if provider == TENSORRT:
        return "pip install 'replayfleet[cuda]' 'tensorrt-cu13<11', and add its folder tensorrt_libs to LD_LIBRARY_PATH"
    return "pip install 'replayfleet[cuda]', which brings CUDA and cuDNN, without the package onnxruntime beside it"


def _on_jetson(missing: tuple[str, ...], board: Board) -> str:
    """PyPI's ``onnxruntime-gpu`` for aarch64 installs, but has kernels for none of these GPUs and lacks TensorRT."""
    if DRIVER in missing:
        return "NVIDIA's driver isn't there: in a container, run it with --runtime nvidia; else flash JetPack again"
    if missing:
        return "apt install nvidia-jetpack brings CUDA, cuDNN and TensorRT"
    release = board.l4t[0] if board.l4t else 0
    if release == 36:
        return f"on JetPack 6, with its Python 3.10: pip uninstall onnxruntime onnxruntime-gpu, then {_JETPACK_6}"
    if release in {38, 39}:
        return (
            "on JetPack 7 build onnxruntime from source with --use_cuda --use_tensorrt: no index has one for its GPUs"
        )
    if release == 35:
        return "on JetPack 5 take one of NVIDIA's wheels from elinux.org/Jetson_Zoo, for your Python (3.10 or newer)"
    return "on a Jetson install the vendor's onnxruntime, not PyPI's, which has no kernels for its GPU"
