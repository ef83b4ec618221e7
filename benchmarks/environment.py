"""Writes a benchmark's result together with what produced it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "paho-mqtt", "zstandard", "safetensors")


def environment() -> dict[str, Any]:
    """Return hardware, versions, load, commit and command."""
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": _output(["git", "rev-parse", "--short", "HEAD"]),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "mosquitto": _output(["/usr/sbin/mosquitto", "-h"]).split("\n", 1)[0],
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write ``{"environment": ..., "result": ...}`` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), "result": result}, indent=1) + "\n")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except OSError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
