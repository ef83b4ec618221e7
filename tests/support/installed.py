"""Replayfleet as somebody else installs it: sdist, wheel, and a fresh environment beside this one's libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"


@dataclass(frozen=True)
class Environment:
    """A virtual environment that finds this one's libraries, but nothing that is installed in editable form."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.folder)}))

    def install(self, wheel: Path) -> None:
        # What it finds among the libraries is not what it was asked for, whatever its version.
        options = ["--quiet", "--no-index", "--no-deps", "--ignore-installed", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", *options, wheel]
        subprocess.run(command, check=True, timeout=120, env=self.variables({}))

    def run(
        self,
        name: str,
        *arguments: str,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run one of its programs as a person does who stands in ``cwd``."""
        return subprocess.run(
            [self.folder / "bin" / name, *arguments],
            cwd=cwd,
            env=self.variables(environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @staticmethod
    def variables(more: Mapping[str, str]) -> dict[str, str]:
        """Ours without what makes Python find the checkout or trust the current folder less than by itself."""
        hidden = {"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        return {key: value for key, value in os.environ.items() if key not in hidden} | dict(more)


def fresh_environment(folder: Path) -> Environment:
    venv.create(folder, with_pip=False, symlinks=True)
    environment = Environment(folder)
    # A line in a .pth is a folder to search; .pth files in that folder, as of an editable install, are not read.
    (environment.site_packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return environment


def copied_sources(folder: Path) -> Path:
    """Copy what is packaged, links as links: a build leaves its traces beside its input."""
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    linked = [path.name for path in (ROOT / "replayfleet").iterdir() if path.is_symlink()]
    for name in ("replayfleet", *linked):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Of unpacking: Python 3.11 before 3.11.4, Debian 12's for example, has no filters."""


def built_sdist(sources: Path, out: Path) -> Path:
    return out / _built("sdist", sources, out)


def built_wheel(sources: Path, out: Path) -> Path:
    """Build from a folder, or from an sdist as ``python -m build`` does."""
    if sources.is_file():
        with tarfile.open(sources) as archive:
            archive.extractall(out / "unpacked", **SAFELY)
        (sources,) = (out / "unpacked").iterdir()
    return out / _built("wheel", sources, out)


def _built(what: str, sources: Path, out: Path) -> str:
    command: Sequence[str] = [sys.executable, "-c", _BUILD.format(what), str(out)]
    done = subprocess.run(command, cwd=sources, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout.splitlines()[-1]
