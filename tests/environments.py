"""Runs tests where others will: other processors' arithmetic, other releases of PyTorch, Pythons, a board's packages.

    python -m tests.environments portable [--turn N] [--only WORDS] [PYTEST'S ARGUMENTS]
    python -m tests.environments board [PYTEST'S ARGUMENTS]
    python -m tests.environments pythons [PYTEST'S ARGUMENTS]

``portable`` runs the tests marked ``learning``. What a processor rounds differently, a training amplifies: a test that
holds by luck holds on one machine. ``board`` runs what needs no PyTorch with a board's releases, and without PyTorch.
``pythons`` runs the unit tests with every Python of the range that this machine has.

Environments that need other packages are made on demand below ``.environments/`` and kept until pyproject.toml changes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import tomli

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".environments"
RUNNERS = ("hypothesis>=6.100,<7", "pytest>=8.3,<10", "pytest-timeout>=2.3,<3", "pytest-xdist>=3.6,<4")
LEARNING_NEEDS = (
    "-e",
    ".[broker,console,export,sim,ddpm,detection]",
    "onnxruntime>=1.20,<2",
    "cryptography>=42",
    *RUNNERS,
)
PYTHONS = re.findall(r'Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())

BOARD = {"numpy": "1.26", "opencv-python-headless": "4.9"}
"""Releases on a board with JetPack 6. Its ONNX Runtime and its amqtt are the oldest that pyproject.toml allows."""

BOARD_TESTS = (
    "tests/unit/devices",
    "tests/unit/edge_client",
    "tests/unit/federation/service",
    "tests/unit/federation/wire",
    "tests/integration",
    "tests/property",
)

# Instructions of three generations of processors: what PyTorch's own kernels may use, what oneDNN's may, and the flag
# in /proc/cpuinfo without which the first would end in an illegal instruction.
GENERATIONS = (("default", "SSE41", ""), ("avx2", "AVX2", "avx2"), ("avx512", "AVX512_CORE", "avx512f"))


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of running the learning tests.

    Attributes:
        name: for people.
        variables: added to the environment.
        flag: of the processor that it needs; empty for none.
        torch: ``"oldest"`` or ``"newest"`` of the range in pyproject.toml; empty for the one that is installed.
    """

    name: str
    variables: dict[str, str]
    flag: str = ""
    torch: str = ""


SETTINGS = [
    Setting(
        f"{aten}, {threads} thread{'s' * (threads > 1)}",
        {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "TEST_THREADS": str(threads)},
        flag,
    )
    for threads in (1, 2)
    for aten, onednn, flag in GENERATIONS
]
RELEASES = [Setting(f"{which} torch", {}, torch=which) for which in ("oldest", "newest")]


class NotToBeHad(Exception):
    """The package index has no such release."""


@click.group()
def main() -> None:
    """Run tests in other environments; see the module's docstring."""


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--turn", type=int, help="Run one setting of those that need no other packages: this number's, modulo.")
@click.option("--only", default="", help="Run the settings whose names hold this, as 'avx2' or 'oldest'.")
@click.argument("arguments", nargs=-1)
def portable(turn: int | None, only: str, arguments: tuple[str, ...]) -> None:
    """Learning tests under every setting; ends with exit code 1 if one failed."""
    chosen = [*SETTINGS, *RELEASES] if turn is None else [SETTINGS[turn % len(SETTINGS)]]
    outcomes = {one.name: _tried(one, arguments) for one in chosen if only in one.name}
    click.echo("\n".join(f"{name:22} {outcome}" for name, outcome in outcomes.items()))
    sys.exit(any(outcome.startswith("failed") for outcome in outcomes.values()) or not outcomes)


def _tried(setting: Setting, arguments: Sequence[str]) -> str:
    click.echo(f"== {setting.name}")
    if setting.flag and setting.flag not in Path("/proc/cpuinfo").read_text():
        return f"skipped: this processor has no {setting.flag}"
    try:
        python = _python_with_torch(setting.torch) if setting.torch else Path(sys.executable)
    except NotToBeHad as error:
        return f"skipped: {error}"
    tests = [*arguments] or ["tests/unit/federation"]
    code = _pytest(python, ["-m", "learning", *tests], setting.variables)
    return "passed" if code == 0 else f"failed: pytest ended with {code}"


def _python_with_torch(which: str) -> Path:
    wanted = _requirement("torch", "train")
    if which == "oldest":
        return _made("torch-oldest", [*LEARNING_NEEDS, _oldest(wanted)])
    # pip's report lists what it would install: nothing, if the release at hand is the newest that it can get.
    report = _pip(Path(sys.executable), ["--dry-run", "--upgrade", "--no-deps", "--quiet", "--report", "-", wanted])
    if not json.loads(report)["install"]:
        return Path(sys.executable)
    return _made("torch-newest", [*LEARNING_NEEDS, "--upgrade", wanted])


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1)
def pythons(arguments: tuple[str, ...]) -> None:
    """Unit tests with each of ``PYTHONS`` that is here; ends with exit code 1 if one failed."""
    names = [f"python{release}" for release in PYTHONS]
    codes = {name: _with_python(name, arguments) for name in names if _is_here(name)}
    for name in names:
        click.echo(f"{name:22} {codes.get(name, 'skipped: not on this machine, or without ensurepip')}")
    sys.exit("passed" not in codes.values() or any(code.startswith("failed") for code in codes.values()))


def _is_here(name: str) -> bool:
    """Whether a Python runs and makes environments: pyenv has names of others too, and Debian splits ensurepip off."""
    if not shutil.which(name):
        return False
    return subprocess.run([name, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0


def _with_python(name: str, arguments: Sequence[str]) -> str:
    click.echo(f"== {name}")
    try:
        python = _made(name, ["--upgrade", "pip", "-e", ".[cpu,dev]"], name)
    except NotToBeHad as error:
        return f"skipped: {error}"
    code = _pytest(python, ["-m", "not slow", *([*arguments] or ["tests/unit"])], {})
    return "passed" if code == 0 else f"failed: pytest ended with {code}"


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1)
def board(arguments: tuple[str, ...]) -> None:
    """Everything that needs no PyTorch, with a board's releases."""
    oldest = [_oldest(_requirement("onnxruntime", "cpu")), _oldest(_requirement("amqtt", "broker"))]
    pins = [f"{name}=={release}.*" for name, release in BOARD.items()]
    try:
        python = _made("board", ["-e", ".[broker]", *pins, *oldest, "cryptography>=42", *RUNNERS])
    except NotToBeHad as error:
        click.echo(f"test-board: skipped: {error}")
        return
    sys.exit(_pytest(python, ["-m", "not slow", *([*arguments] or BOARD_TESTS)], {}))


def _made(name: str, install: Sequence[str], maker: str = sys.executable) -> Path:
    """Return the interpreter of an environment with these packages, made anew when pyproject.toml changed."""
    python, stamp = ENVIRONMENTS / name / "bin/python", ENVIRONMENTS / name / "installed"
    content = "\n".join(install) + (ROOT / "pyproject.toml").read_text()
    if not stamp.is_file() or stamp.read_text() != content:
        click.echo(f"making {python.parents[1]}; this takes minutes")
        subprocess.run([maker, "-m", "venv", "--clear", python.parents[1]], check=True)
        _pip(python, ["--quiet", *install])
        stamp.write_text(content)
    return python


def _pip(python: Path, arguments: Sequence[str]) -> str:
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    missing = re.search(r"No matching distribution found for (\S+)", done.stderr)
    if missing:
        raise NotToBeHad(f"the package index has no {missing[1]}")
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def _pytest(python: Path, arguments: Sequence[str], variables: dict[str, str]) -> int:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    threads = variables.get("TEST_THREADS", "1")
    environment = {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": threads}
    environment |= variables
    command = [python, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _requirement(package: str, extra: str) -> str:
    """Return an extra's requirement of a package, as ``torch>=2.9,<3``."""
    extras = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return str(next(one for one in extras[extra] if re.match(rf"{package}\b", one)))


def _oldest(requirement: str) -> str:
    """Return ``torch==2.9.*`` for ``torch>=2.9,<3``."""
    package, release = requirement.partition(",")[0].split(">=")
    return f"{package}=={release}.*"


if __name__ == "__main__":
    main()
