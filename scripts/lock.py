"""The lock files that ``make setup`` installs: every package with its version and the digests of its files.

``make lock`` makes them from pyproject.toml, keeping the versions that they have; ``ARGS=--upgrade`` takes the newest.
``make check`` says, without a network, when they are older than pyproject.toml's dependencies. They hold for Python
3.10 to 3.14 on x86_64 Linux; other platforms, and who asks for it, install from the ranges (``scripts/setup.sh``).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("cpu", "cuda")
_LINE = "# Dependencies in pyproject.toml: sha256 "


def lock_file(extra: str, root: Path = ROOT) -> Path:
    """Return where the lock of ``.[EXTRA,dev]`` is."""
    return root / "scripts" / "locks" / f"{extra}.txt"


def dependencies_digest(root: Path = ROOT) -> str:
    """Name all that a lock depends on: the ranges of every extra, and the Pythons."""
    # Python 3.10 has no reader; pip, which is there before anything that we ask for, brings one.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
    project: dict[str, Any] = toml.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {key: project[key] for key in ("requires-python", "dependencies", "optional-dependencies")}
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()


def faults(root: Path = ROOT) -> list[str]:
    """Return what is wrong with the lock files, a line each."""
    found = []
    for extra in EXTRAS:
        path = lock_file(extra, root)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if f"{_LINE}{dependencies_digest(root)}\n" not in text:
            found.append(f"{path.relative_to(root)} is older than the dependencies in pyproject.toml; run `make lock`")
    return found


def make(options: list[str]) -> None:
    """Resolve both extras with uv, whose universal resolution has one answer for all Pythons."""
    for extra in EXTRAS:
        path = lock_file(extra)
        compiled = [
            str(Path(sys.prefix) / "bin" / "uv"),
            "pip",
            "compile",
            "pyproject.toml",
            "--extra",
            extra,
            "--extra",
            "dev",
            "--quiet",
        ]
        how = ["--universal", "--python-version", "3.10", "--generate-hashes"]
        # No host of an index: whoever installs has an index of their own, and the digests say that it is the same file.
        form = ["--no-emit-index-url", "--no-annotate", "--no-header", "--output-file", str(path)]
        subprocess.run([*compiled, *how, *form, *options], cwd=ROOT, check=True)
        what = f"# By `make lock` for `.[{extra},dev]`: Python 3.10 to 3.14, x86_64 Linux; scripts/lock.py says more.\n"
        locked = path.read_text(encoding="utf-8")
        path.write_text(f"{what}{_LINE}{dependencies_digest()}\n{locked}", encoding="utf-8")


def main() -> None:
    """``lock.py make [OPTIONS OF UV]`` or ``lock.py check``, which exits 1 and says why if a lock is old."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "make"))
    given, of_uv = parser.parse_known_args()
    if given.what == "make":
        make(of_uv)
    elif problems := faults():
        sys.exit("\n".join(f"lock: {problem}" for problem in problems))


if __name__ == "__main__":
    main()
