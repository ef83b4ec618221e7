"""Breaks the code in known ways, one at a time, and sees that tests fail: ``tests/mutants.toml`` lists how.

    python -m tests.mutants [WORDS] [--jobs N] [--part I/N]

The tree is copied to a folder of its own for each job. A mutant survives if the tests named beside it pass. Ends with
exit code 1 if one survives, or if its old text isn't in the file exactly once: then the code has moved on, and the list
has to follow. ``trust:`` are those that take out what a fleet's trust rests on, a mechanism each (``GUARDS``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec
import tomli

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
TIMEOUT_S = 600.0
GUARDS = (
    "signature",
    "expiry",
    "version",
    "epoch",
    "digest",
    "byte quota",
    "id binding",
    "quarantine",
    "reconciliation",
    "retry",
    "transaction",
)
"""What keeps a fleet going and its models its own: without any of these a test fails."""


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way of breaking the code.

    Attributes:
        what: what is wrong then, in words.
        file: path from the repository's root.
        old: text that occurs in it exactly once.
        new: what takes its place.
        tests: pytest's paths, of which at least one test must fail.
        guard: of ``GUARDS``, what is taken out; empty: none of them.
    """

    what: str
    file: str
    old: str
    new: str
    tests: list[str]
    guard: str = ""

    @property
    def words(self) -> str:
        return f"{self.file} {self.what}" + (f" trust: {self.guard}" if self.guard else "")


def listed() -> list[Mutant]:
    return msgspec.convert(tomli.loads(LIST.read_text())["mutant"], list[Mutant])


@click.command()
@click.argument("words", default="")
@click.option("--jobs", type=click.IntRange(1), default=1, help="Mutants at a time.")
@click.option("--part", metavar="I/N", default="1/1", help="The I-th of N parts; parts have few test files in common.")
def main(words: str, jobs: int, part: str) -> None:
    """Try all mutants, or those with WORDS in their file or description."""
    try:
        index, parts = map(int, part.split("/"))
    except ValueError:
        raise click.BadParameter(f"{part!r}: expected I/N, for example 2/8", param_hint="--part") from None
    ordered = sorted((mutant for mutant in listed() if words in mutant.words), key=lambda mutant: mutant.tests)
    chosen = ordered[(index - 1) * len(ordered) // parts : index * len(ordered) // parts] if 0 < index <= parts else []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees = [_copied(Path(folder) / str(job)) for job in range(jobs)]
        _demand_that_all_pass(trees[0], chosen)
        # Each job has a tree and every jobs-th mutant.
        tried = pool.map(lambda job: [_tried(trees[job], mutant) for mutant in chosen[job::jobs]], range(jobs))
        outcomes = [outcome for each in tried for outcome in each]
    survivors = outcomes.count("survived")
    odd = len(outcomes) - survivors - outcomes.count("killed")
    click.echo(f"mutants: {len(outcomes)}, not to be tried: {odd}, survivors: {survivors}")
    sys.exit(bool(survivors or odd or not outcomes))


def _copied(target: Path) -> Path:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def _demand_that_all_pass(tree: Path, mutants: Sequence[Mutant]) -> None:
    """A test that fails anyway kills nothing."""
    done = _pytest(tree, sorted({test for mutant in mutants for test in mutant.tests}))
    if done.returncode:
        sys.exit(f"tests fail without any mutant:\n{done.stdout[-3000:]}")


def _tried(tree: Path, mutant: Mutant) -> str:
    outcome = "".join(_outcome(tree, mutant))
    click.echo(f"{outcome:9} {mutant.file}: {mutant.what}" + (f" ({mutant.guard})" if mutant.guard else ""))
    return outcome


def _outcome(tree: Path, mutant: Mutant) -> Iterator[str]:
    path = tree / mutant.file
    code = path.read_text() if path.is_file() else ""
    if code.count(mutant.old) != 1:
        yield f"old text is there {code.count(mutant.old)} times, expected once:"
        return
    path.write_text(code.replace(mutant.old, mutant.new))
    try:
        # pytest ends with 1 if a test failed; anything else but 0 (no such test, no import) is a fault of the list.
        code_of_pytest = _pytest(tree, ["-x", *mutant.tests]).returncode
        yield {0: "survived", 1: "killed"}.get(code_of_pytest, f"pytest ended with {code_of_pytest}:")
    except subprocess.TimeoutExpired:
        yield "killed"  # it hangs, which somebody would notice
    finally:
        path.write_text(code)


def _pytest(tree: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *arguments]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


if __name__ == "__main__":
    main()
