"""A simulation's state on disk after every round, so that it can be stopped at any moment and resumed.

``run.json`` says which run it is, ``round-NNNN.json`` what a round left behind, and ``blobs/<digest>.safetensors`` hold
its tensors. Blobs are written before the round that names them, and removed only after a later round is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.federation.atomic import remove_unfinished, write_atomic
from replayfleet.federation.errors import UNREADABLE, SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.service.artefact_codec import EncodedArtefacts, decode_parameters
from replayfleet.federation.service.fleet.later import LATER_SETTINGS
from replayfleet.federation.simulator.records import RoundRecord
from replayfleet.federation.simulator.result import Part
from replayfleet.federation.wire.protocol.tensors import digest

_RUN = "run.json"
"""Written first: a folder without it holds no run."""

_PARTS = "parts.json"
"""Which processes made the run: one, or one more for every time that it was resumed."""


class Snapshot(msgspec.Struct, frozen=True):
    """Everything that the next round needs, beside the blobs.

    Attributes:
        record: what the round measured.
        aggregator: its state.
        clients: client id -> its state.
        held: of the ledger.
    """

    record: RoundRecord
    aggregator: EncodedArtefacts
    clients: dict[str, EncodedArtefacts]
    held: dict[str, dict[str, str]]


class Checkpoints:
    """The folder of one run. It is a blob store for ``encode_artefacts`` and ``decode_artefacts``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blobs = folder / "blobs"
        self._initial: str | None = None

    def begin(self, run: dict[str, Any], *, resume: bool) -> None:
        """Claim the folder for ``run`` (JSON values): empty it, or with ``resume`` check that it holds the same run.

        What a killed process left half written is removed.

        Raises:
            SettingsError: There is nothing to resume, or it is another run; names what differs. Nothing is changed.
        """
        if resume:
            self.check_same(run)
        self._initial = run.get("initial")
        remove_unfinished(self._folder)
        remove_unfinished(self._blobs)
        if resume:
            return
        for path in [*self._folder.glob("round-*.json"), *self._blobs.glob("*.safetensors")]:
            path.unlink()
        (self._folder / _PARTS).unlink(missing_ok=True)
        self._blobs.mkdir(parents=True, exist_ok=True)
        write_atomic(self._folder / _RUN, msgspec.json.format(msgspec.json.encode(run)))

    def noted_parts(self, part: Part, *, num_rounds: int) -> list[Part]:
        """Return the parts of the run in their order, ``part`` the last; it is written down.

        A part that completed no round gives way to the next, and one that has no round left to run counts for nothing.

        Raises:
            SettingsError: What was written down before is damaged.
        """
        path = self._folder / _PARTS
        try:
            earlier = msgspec.json.decode(path.read_bytes(), type=list[Part]) if path.exists() else []
        except (OSError, *UNREADABLE) as error:
            raise SettingsError(f"{path} can't be read ({error}); start the run anew") from error
        if part.first_round >= num_rounds:
            return earlier or [part]
        parts = [*(one for one in earlier if one.first_round < part.first_round), part]
        write_atomic(path, msgspec.json.format(msgspec.json.encode(parts)))
        return parts

    def num_rounds(self) -> int:
        """Return how many rounds are complete."""
        return sum(1 for _ in self._folder.glob("round-*.json"))

    def put(self, data: bytes) -> str:
        """Store a blob durably; returns its digest."""
        name = digest(data)
        path = self._path(name)
        if not path.exists():
            write_atomic(path, data)
        return name

    def read(self, name: str) -> bytes:
        """Return a blob.

        Raises:
            SettingsError: It is missing or damaged.
        """
        try:
            data = self._path(name).read_bytes()
        except OSError as error:
            raise SettingsError(f"{self._path(name)} can't be read ({error.strerror}); start the run anew") from error
        if digest(data) != name:
            raise SettingsError(f"{self._path(name)} is damaged: its digest is another; start the run anew")
        return data

    def save(self, snapshot: Snapshot) -> None:
        """Complete a round, then remove the blobs that only earlier rounds named."""
        write_atomic(self.round_path(snapshot.record.round), msgspec.json.encode(snapshot))
        keep = {entry.digest for state in (snapshot.aggregator, *snapshot.clients.values()) for entry in state.blobs}
        for path in self._blobs.glob("*.safetensors"):
            if path.stem not in keep and path.stem != self._initial:
                path.unlink()

    def first_model(self) -> Parameters | None:
        """Return the task model that the run began with; None: random ones.

        Raises:
            SettingsError: It is missing or damaged.
        """
        initial = msgspec.json.decode((self._folder / _RUN).read_bytes()).get("initial")
        return None if initial is None else decode_parameters("initial", self.read(initial))

    def load(self) -> list[Snapshot]:
        """Return all completed rounds in order; only the last one's blobs still exist.

        Raises:
            SettingsError: A file is damaged, a round is missing, or a file holds another round than its name says.
        """
        snapshots = []
        for number in range(self.num_rounds()):
            path = self.round_path(number)
            if not path.exists():
                raise SettingsError(f"{path} is missing; start the run anew")
            snapshot = _read_snapshot(path)
            if snapshot.record.round != number:
                raise SettingsError(f"{path} holds round {snapshot.record.round}; start the run anew")
            snapshots.append(snapshot)
        return snapshots

    def round_path(self, number: int) -> Path:
        """Return where a round's snapshot is, once it is complete."""
        return self._folder / f"round-{number:04d}.json"

    def _path(self, name: str) -> Path:
        return self._blobs / f"{name}.safetensors"

    def check_same(self, run: dict[str, Any]) -> None:
        """Raise SettingsError unless the folder holds the same run; names what differs."""
        path = self._folder / _RUN
        try:
            earlier = as_noted_now(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
        except FileNotFoundError:
            raise SettingsError(f"{self._folder} holds no run to resume; leave --resume out") from None
        except (OSError, *UNREADABLE) as error:
            raise SettingsError(f"{path} can't be read ({error}); start the run anew") from error
        earlier.setdefault("samples", run.get("samples"))  # earlier versions didn't note it
        differs = difference(earlier, msgspec.json.decode(msgspec.json.encode(run)))
        before, now = earlier.get("packages"), run.get("packages", {})
        before = before if isinstance(before, dict) else {}
        changed = [code["package"] for name, code in now.items() if before.get(name, code) != code]
        if changed and differs.startswith("packages."):
            raise SettingsError(
                f"{self._folder} holds a run of other code: package {', '.join(changed)} has changed since; its rounds "
                "would not fit together. Take the code of then, or begin anew with --overwrite or another --out"
            )
        if differs.startswith("samples "):
            raise SettingsError(
                f"{self._folder} holds a run on other samples: what data set {run['dataset']} holds has changed since, "
                "or an earlier version began it; take the files, or the version, of then, or begin anew with "
                "--overwrite or another --out"
            )
        if differs:
            how = "the same options"
            if differs.startswith("settings."):
                how = _options_of(earlier["settings"], run["settings"])
            raise SettingsError(
                f"{self._folder} holds another run: {differs}; resume with {how}, or choose another --out"
            )


def as_noted_now(run: dict[str, Any]) -> dict[str, Any]:
    """Return what defines a run (JSON values) without later settings that change nothing; earlier versions named some.

    A package's method keeps all of its settings, whatever they are called.
    """
    settings = run.get("settings")
    if not isinstance(settings, dict) or run.get("method") not in METHODS:
        return run
    return {**run, "settings": {key: one for key, one in settings.items() if LATER_SETTINGS.get(key, ...) != one}}


def _options_of(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return with what a run that has other settings is resumed; one that it lacks was as before there was one."""
    was, now = {**LATER_SETTINGS, **was}, {**LATER_SETTINGS, **now}
    if now.keys() != was.keys():
        return "the version that began it"
    return " ".join(f"--set {name}={was[name]}" for name in sorted(now) if was[name] != now[name])


def difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first setting in which two runs (JSON values) differ, with both values; empty if none does."""
    for key in sorted(now.keys() | was.keys()):
        old, new = was.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            inner = difference(old, new)
            if inner:
                return f"{key}.{inner}"
        elif old != new:
            return f"{key} was {old!r}, is now {new!r}"
    return ""


def holds_run(folder: Path) -> bool:
    """Whether a run was begun in this folder; a process that died before it had begun leaves a lock only."""
    return (folder / _RUN).exists()


def holds_rounds(folder: Path) -> bool:
    """Whether there is work in this folder: a run whose first round failed may be begun anew."""
    return any(folder.glob("round-*.json"))


def _read_snapshot(path: Path) -> Snapshot:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Snapshot)
    except (OSError, *UNREADABLE) as error:
        raise SettingsError(f"{path} can't be read ({error}); start the run anew") from error
