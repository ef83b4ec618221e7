"""``result.json``: what a run was, on what, and what came out; and reading it again for comparison."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.federation.errors import UNREADABLE, SettingsError
from replayfleet.federation.extensions import DATASETS_GROUP
from replayfleet.federation.paths import RESULT
from replayfleet.federation.simulator.charts import Curve
from replayfleet.federation.simulator.measures import metrics
from replayfleet.federation.simulator.records import RoundRecord, summarise

SCHEMA = 1

_LATER_STREAM_KEYS = {"overlap": 0, "num_absent": 0}
"""What results of version 0.1.0 lack."""

_PACKAGES = ("replayfleet", "torch", "numpy", "onnxruntime")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one process was that ran rounds of a run.

    Attributes:
        first_round: the first that it ran.
        hardware: machine, processor, cores; GPU, if it computed on one.
        versions: of Python and the packages that compute.
        commit: of its checkout.
        command: what was typed, `without_machine`.
    """

    first_round: int
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str
    command: list[str]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run.

    Attributes:
        run: what defines it: method, settings, scenario, data set, clients, rounds, seeds, sampler, threads.
        stream: ``changes`` (rounds) and ``change_name``, for charts; where clients drive, ``routes``: client -> towns.
        rounds: one record per round.
        summary: ``summarise``, and ``average_regret`` and ``late_regret`` where a run of Centralized was compared.
        hardware: machine, processor, cores; GPU, if it computed on one. Of a resumed run this and the next two are
            those of its last part.
        versions: of Python and the packages that compute.
        commit: of the checkout that ran, empty outside one.
        wall_s: of the last process, and of the rounds before it.
        command: what was typed last, `without_machine`.
        parts: the processes that ran rounds, in their order; empty if it was one.
        label: the variant's or method's name that was typed; empty in results of version 0.1.0.
    """

    run: dict[str, Any]
    stream: dict[str, Any]
    rounds: list[RoundRecord]
    summary: dict[str, float]
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str
    wall_s: float
    command: list[str]
    label: str = ""
    parts: list[Part] = []
    schema: int = SCHEMA

    def encode(self) -> bytes:
        """Return readable JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def curve(self) -> Curve:
        """Return the accuracies for a chart, of the honest clients."""
        names = sorted(name for name, client in self.rounds[-1].clients.items() if not client.hostile)
        clients = {name: [record.clients[name].accuracy for record in self.rounds] for name in names}
        return Curve(self.label or str(self.run["method"]), [record.accuracy for record in self.rounds], clients)


def summary_beside(records: Sequence[RoundRecord], others: Sequence[Result]) -> dict[str, float]:
    """Return ``summarise``, with AR (Eq. 6), of the last rounds too, if Centralized is among the compared runs."""
    summary = summarise(records)
    for other in others:
        if other.run["method"] == "centralized":
            acc, upper = ([record.accuracy for record in rounds] for rounds in (records, other.rounds))
            summary["average_regret"] = metrics.average_regret(acc, upper)
            late = -metrics.LATE_ROUNDS
            summary["late_regret"] = metrics.average_regret(acc[late:], upper[late:])
    return summary


def read_result(path: Path, run: Mapping[str, Any]) -> Result:
    """Return another run's result, to be compared with ``run``.

    Args:
        path: its file, or the folder that it is in.
        run: what this run is.

    Raises:
        SettingsError: It can't be read, isn't whole, or is of another stream, whose accuracies would not compare.
    """
    if path.is_dir():
        path = path / RESULT
    try:
        other = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise SettingsError(f"--compare {path}: can't be read ({error.strerror})") from error
    except UNREADABLE as error:
        raise SettingsError(f"--compare {path}: no result.json of this program ({error})") from error
    for key in ("dataset", "stream"):
        theirs, ours = other.run.get(key), run[key]
        if isinstance(theirs, dict):  # what differs is said, not all that a stream is made of
            theirs = {**_LATER_STREAM_KEYS, **theirs}
            differing = [name for name in {**ours, **theirs} if name not in ours or theirs.get(name) != ours[name]]
            theirs, ours = ({name: stream.get(name) for name in differing} for stream in (theirs, ours))
        if theirs != ours:
            raise SettingsError(f"--compare {path}: its {key} was {theirs!r}, this run's is {ours!r}")
    if other.run.get("samples", run.get("samples")) != run.get("samples"):
        raise SettingsError(
            f"--compare {path}: its data set {run['dataset']} held other samples, or an earlier version ran it; run "
            "it again"
        )
    theirs, ours = (
        {key: code for key, code in packages.items() if key.startswith(f"{DATASETS_GROUP} ")}
        for packages in (other.run.get("packages", {}), run.get("packages", {}))
    )
    if theirs != ours:
        raise SettingsError(f"--compare {path}: the package of its data set had other code; run it again")
    if damage := _damage(other):
        raise SettingsError(f"--compare {path}: {damage}; run it again, or leave it out")
    return other


def _damage(other: Result) -> str:
    """Say what a result lacks that every one of this version has; empty if it is whole."""
    num_rounds, clients = other.run["stream"].get("num_rounds"), {frozenset(record.clients) for record in other.rounds}
    if other.schema != SCHEMA:
        return f"it has schema {other.schema}, expected {SCHEMA}"
    if not isinstance(other.run.get("method"), str):
        return "it doesn't say of which method it is"
    if not other.rounds or num_rounds not in {None, len(other.rounds)}:
        return f"it has {len(other.rounds)} rounds, expected {num_rounds}"
    if len(clients) != 1:
        return "its rounds are of different clients"
    if any(record.accuracy < 0 or record.accuracy > 1 for record in other.rounds):
        return "it has accuracies that are not between 0 and 1"
    return ""


def hardware(torch_device: str = "cpu") -> dict[str, Any]:
    """Return what this machine is, with its GPU if ``torch_device`` is one of CUDA's."""
    found = {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "num_cores": os.cpu_count(),
    }
    return found | _gpu(torch_device) if torch_device.startswith("cuda") else found


def _gpu(torch_device: str) -> dict[str, Any]:
    import torch

    return {"gpu": torch.cuda.get_device_name(torch_device), "cuda": torch.version.cuda}


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:  # noqa: SIM105 - a loop over suppress() would read no better
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # noqa: PERF203
            pass
    return found


def commit() -> str:
    """Return the commit of the checkout that this file is in, ``+`` behind it if files differ; empty outside one."""
    if not _git("ls-files", Path(__file__).name):  # of a virtual environment in a repository that is somebody else's
        return ""
    return _git("describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*")


def _git(*words: str) -> str:
    """Return what git says where this file is; empty if nothing."""
    try:
        said = subprocess.run(  # noqa: S603
            ["git", "-C", str(Path(__file__).parent), *words],  # noqa: S607
            capture_output=True,
            check=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.processor()
