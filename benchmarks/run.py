"""All benchmarks one after the other, each in a process of its own: ``make bench``.

python -m benchmarks.run [latency aggregation transfer ...] [--quick] [--out runs/bench]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

BENCHMARKS: dict[str, tuple[list[str], list[str]]] = {
    "latency": ([], ["--repeats", "5"]),
    "precisions": ([], ["--train", "64", "--test", "100", "--repeats", "2"]),
    "local_round": ([], ["--settings", "tiny", "--repeats", "1"]),
    "aggregation": ([], ["--repeats", "1"]),
    "streaming": ([], ["--updates", "10"]),
    "traffic": ([], ["--settings", "tiny", "--rounds", "6"]),
    "simulated_round": ([], ["--clients", "2", "--rounds", "3", "--repeats", "1"]),
    "simulated_clients": ([], ["--epochs", "1", "--repeats", "1"]),
    "live_camera": ([], ["--seconds", "3"]),
    "synthetic_street": ([], ["--pictures", "10"]),
    "served_stream": ([], ["--seconds", "3"]),
    "serving_while_training": ([], ["--seconds", "3"]),
    "hot_swaps": ([], ["--swaps", "3"]),
    "probation": ([], ["--per-class", "20"]),
    "live_camera_recovery": ([], ["--repeats", "1"]),
    "flood": ([], ["--seconds", "3"]),
    "deployed_round": ([], ["--clients", "2", "--rounds", "3"]),
    "trust": ([], ["--rounds", "1"]),
    "restart": ([], ["--repeats", "1"]),
    "recovery": ([], []),
    "transfer": (["--large", "--frozen"], ["--repeats", "1"]),
}
"""Module -> (options of a real run, options of a smoke run)."""


def main() -> None:
    """Run what was asked for; exit 1 if any of it failed, after the others ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; none means all")
    parser.add_argument("--quick", action="store_true", help="a smoke run; its numbers mean nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the raw results")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}")
    warn_if_busy()
    failed = [
        name
        for name in options.names or BENCHMARKS
        if not run(name, BENCHMARKS[name][options.quick], options.out / f"{name}.json")
    ]
    print(f"\nraw results: {options.out}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def warn_if_busy() -> None:
    """Say so if other work disturbs the numbers."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.5 * cores:
        print(f"this machine is busy (load {load:.1f} on {cores} cores): trust ratios only, and those with care")


def run(name: str, arguments: list[str], out: Path) -> bool:
    """Run one benchmark; whether it succeeded."""
    print(f"\n== {name}", flush=True)
    began = time.monotonic()
    file = next(Path(__file__).parent.rglob(f"{name}.py"))
    module = ".".join(file.relative_to(Path(__file__).parents[1]).with_suffix("").parts)
    command = [sys.executable, "-m", module, *arguments, "--out", str(out)]
    done = subprocess.run(command, env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ}, check=False)
    print(f"   took {time.monotonic() - began:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()
