"""Fuzzes every decoder: ``make fuzz``. Counts, seed and findings go to a JSON file, where a later call goes on.

    python -m tests.fuzz [TARGETS] [--inputs N] [--seed N] [--out FILE]
    python -m tests.fuzz TARGET --replay FILE

Pieces run one after the other in processes of their own (``tests/fuzz/piece.py``). Ends with exit code 1 if anything
but a documented error came out, if an input took too long or too much memory, or if a process ended by itself; the
inputs lie in ``runs/fuzz`` then.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click
import msgspec

from tests.fuzz.piece import Finding, Outcome, noted
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "runs" / "fuzz"
PIECE_INPUTS = 250_000
VERSIONS = ("msgspec", "numpy", "safetensors", "zstandard", "torch")


class Tally(msgspec.Struct):
    """What became of a target's inputs so far; fields as in ``Outcome``."""

    pieces: int = 0
    inputs: int = 0
    accepted: int = 0
    refused: dict[str, int] = {}
    inputs_per_cpu_s: int = 0
    cpu_s: float = 0.0
    most_cpu_s: float = 0.0
    growth_mb: int = 0
    findings: list[str] = []


class Report(msgspec.Struct):
    """What a run has done so far, and where."""

    seed: int
    python: str
    machine: str
    versions: dict[str, str]
    targets: dict[str, Tally] = {}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(TARGETS)))
@click.option("--inputs", default=1_000_000, help="For each target, in all.", show_default=True)
@click.option("--seed", default=0, help="Another one makes other inputs.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=FOUND / "report.json", help="Is continued, if it is there."
)
@click.option("--replay", type=click.Path(exists=True, path_type=Path), help="Feeds this input to one target.")
def main(names: tuple[str, ...], inputs: int, seed: int, out: Path, replay: Path | None) -> None:
    """Fuzz all targets, or those that are named."""
    if replay is not None:
        sys.path.append(str(ROOT / "tests"))
        for name in names:
            click.echo(f"{name}: accepted {TARGETS[name].feed(replay.read_bytes()) or ''}")
        return
    report = msgspec.json.decode(out.read_bytes(), type=Report) if out.exists() else _new_report(seed)
    if report.seed != seed:
        raise click.UsageError(f"{out} is of seed {report.seed}; name another file, or remove it")
    for name in names or TARGETS:
        tally = report.targets.setdefault(name, Tally())
        while tally.inputs < inputs:
            _add(tally, name, _piece(name, seed, tally.pieces, min(PIECE_INPUTS, inputs - tally.inputs)))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        refused = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.refused.items()))
        click.echo(
            f"{name:16} {tally.inputs} inputs, {tally.accepted} accepted; refused: {refused or 'none'}; "
            f"{tally.inputs_per_cpu_s}/s, at most {tally.most_cpu_s:.3f} s, {tally.growth_mb} MB more; "
            f"{len(tally.findings)} findings"
        )
    findings = [f"{name}: {what}" for name in names or TARGETS for what in report.targets[name].findings]
    if findings:
        raise click.ClickException("\n".join([f"{len(findings)} findings; inputs in {FOUND}", *findings]))


def _piece(name: str, seed: int, number: int, inputs: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "tests.fuzz.piece", name, str(seed), str(number), str(inputs), folder]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=False)
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=Outcome)
        data = noted(Path(folder)) if (Path(folder) / "note").exists() else b""
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        return Outcome(inputs, findings=[Finding(f"the process ended: {how}", done.stderr.decode()[-4000:], data)])


def _add(tally: Tally, name: str, outcome: Outcome) -> None:
    tally.pieces += 1
    tally.inputs += outcome.inputs
    tally.accepted += outcome.accepted
    tally.refused = dict(Counter(tally.refused) + Counter(outcome.refused))
    tally.cpu_s = round(tally.cpu_s + outcome.cpu_s, 3)
    tally.inputs_per_cpu_s = round(tally.inputs / max(tally.cpu_s, 1e-9))
    tally.most_cpu_s = round(max(tally.most_cpu_s, outcome.most_cpu_s), 3)
    tally.growth_mb = max(tally.growth_mb, outcome.growth_bytes >> 20)
    for finding in outcome.findings:
        FOUND.mkdir(parents=True, exist_ok=True)
        file = FOUND / f"{name}-{hashlib.sha256(finding.data).hexdigest()[:12]}"
        file.write_bytes(finding.data)
        file.with_suffix(".txt").write_text(f"{finding.what}\n{finding.trace}")
        tally.findings = sorted({*tally.findings, f"{finding.what} ({file.name})"})


def _new_report(seed: int) -> Report:
    processor = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    return Report(seed, platform.python_version(), f"{processor}, one core", versions)


if __name__ == "__main__":
    main()
