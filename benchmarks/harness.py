"""What all benchmarks share: options, turns, facts of processes and of the machine, results as JSON.

A benchmark is a module with ``measure(options)``, which prints what it finds and returns it; ``run`` does the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from replayfleet.federation.simulator.result import commit, hardware, versions

if TYPE_CHECKING:
    from replayfleet.federation.streams.datasets import Dataset
    from replayfleet.federation.streams.stream import Stream

PACKAGES = ("torch", "onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "paho-mqtt", "zstandard", "safetensors")
_HELP = {
    "data_root": "folder of data sets; else $REPLAYFLEET_DATA",
    "rate": "pictures per second",
    "repeats": "interleaved runs per number",
    "seconds": "of each phase",
    "settings": "preset of the method and the stream",
    "threads": "of torch",
}


def run(
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    description: str | None,
    *positional: str,
    failed: Callable[[dict[str, Any]], Sequence[str]] = lambda _result: (),
    **options: Any,
) -> None:
    """Read the command line, measure, and write what ``--out`` asks for.

    Args:
        measure: gets the options and returns the result.
        description: of the module.
        positional: further arguments that must be given, as paths.
        failed: what a result misses; anything ends the program with exit code 1, after it was written.
        options: name -> default, or ``(default, help)``; False is a flag, a list takes several, None is a path.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in positional:
        parser.add_argument(name, type=Path)
    for name, value in options.items():
        default, text = value if isinstance(value, tuple) else (value, _HELP.get(name, ""))
        how: dict[str, Any] = {"type": Path if default is None else type(default)}
        if default is False:
            how = {"action": "store_true"}
        elif isinstance(default, list):
            how = {"nargs": "+", "type": type(default[0])}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=text, **how)
    parser.add_argument("--out", type=Path, help="write JSON here")
    given = parser.parse_args()
    if "threads" in options:
        from replayfleet.federation.service.torch_setup import prepare_torch

        prepare_torch(given.threads)
    result = measure(given)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"environment": environment(), "result": result}, indent=1) + "\n")
    if missed := failed(result):
        sys.exit(f"missed: {'; '.join(missed)}")


def in_turns(
    ways: Mapping[str, Callable[[], object]], repeats: int, *, warm_ups: int = 0, after: Callable[[], object] = int
) -> dict[str, list[float]]:
    """Return the seconds of each way, which take turns so that all meet the same noise; ``after`` counts too."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warm_ups + repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            after()
            if turn >= warm_ups:
                taken[name].append(time.perf_counter() - began)
    return taken


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the median over turns of the first against the second."""
    return statistics.median(one / other for one, other in zip(first, second, strict=True))


def circulating(dataset: Dataset, **settings: Any) -> Stream:
    """Return a stream of this scenario over a data set."""
    from replayfleet.federation.streams.stream import Stream, StreamSettings

    wanted = StreamSettings(scenario="circulating", **settings)
    return Stream(wanted, dataset.train.labels, dataset.test.labels, dataset.task.num_classes)


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def resident_mb(pid: int) -> float:
    """Memory of a process, without what is swapped out."""
    return psutil.Process(pid).memory_info().rss / 1e6


def peak_bytes(pid: int | str = "self") -> int:
    """Return a process's largest memory so far; unlike getrusage's it doesn't include that of its parent."""
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:", 1)[1].split()[0])


def environment() -> dict[str, Any]:
    """Return hardware, versions, load, commit and command."""
    try:
        mosquitto = subprocess.run(["/usr/sbin/mosquitto", "-h"], capture_output=True, text=True, check=False).stdout
    except OSError:
        mosquitto = ""
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": commit()[:7],
        "cpu": hardware()["processor"],
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "mosquitto": mosquitto.split("\n", 1)[0],
        "packages": versions(PACKAGES),
    }
