"""Raw results of many runs in one small file: what ``reproduce`` leaves behind, without checkpoints.

Of a finished run that is its ``result.json``, of one that was only begun the records of its rounds, ``rounds.json``.
"""

from __future__ import annotations

import io
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.paths import RESULT
from replayfleet.federation.simulator.checkpoints import Checkpoints, holds_run
from replayfleet.federation.simulator.records import RoundRecord
from replayfleet.federation.simulator.result import Part

ROUNDS = "rounds.json"


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """A run, finished or not.

    Attributes:
        run: what defines it.
        rounds: one record per round that it made.
        summary: of a finished one.
        label: the name that was typed, where it is known.
        parts: the processes that ran rounds, if they were several, or it isn't finished.
        hardware, versions, commit, command: of a finished run's last process.
    """

    run: dict[str, Any]
    rounds: list[RoundRecord]
    summary: dict[str, float] = {}
    label: str = ""
    parts: list[Part] = []
    hardware: dict[str, Any] = {}
    versions: dict[str, str] = {}
    commit: str = ""
    command: list[str] = []

    @property
    def finished(self) -> bool:
        """Whether it made all its rounds."""
        return len(self.rounds) == int(self.run["stream"]["num_rounds"])

    @property
    def curve(self) -> list[float]:
        """Acc^t of its rounds."""
        return [record.accuracy for record in self.rounds]

    def spoken_command(self) -> str:
        """Return what was typed, without what only says how long."""
        words = list(self.command or self.parts[-1].command)
        for option in ("--minutes", "--workers"):
            if option in words:
                del words[words.index(option) : words.index(option) + 2]
        return shlex.join(word for word in words if word not in {"--resume", "--overwrite"})


def pack(out: Path, file: Path) -> int:
    """Write the raw results of all runs below ``out``, one block's folder beside another; returns how many.

    Names, bytes and times of the archive depend on the results alone.
    """
    found = sorted(path for path in out.glob("*/runs/*/*/*/seed-*") if path.is_dir())
    contents = {folder: content for folder in found if (content := _content(folder)) is not None}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz", preset=9) as tar:
        for folder, (name, data) in contents.items():
            entry = tarfile.TarInfo((folder / name).relative_to(out).as_posix())
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, archive.getvalue())
    return len(contents)


def unpacked(file: Path) -> dict[str, Raw]:
    """Return the runs of a packed file by their folders, ``<block>/runs/<name>/<scenario>/<dataset>/seed-<K>``."""
    return dict(_unpacked(file))


def _unpacked(file: Path) -> Iterator[tuple[str, Raw]]:
    with tarfile.open(file, mode="r:xz") as tar:
        for entry in tar:
            stream = tar.extractfile(entry)
            assert stream is not None
            yield entry.name.rpartition("/")[0], msgspec.json.decode(stream.read(), type=Raw)


def _content(folder: Path) -> tuple[str, bytes] | None:
    """Return a run's file, or None of one without a complete round."""
    if (folder / RESULT).exists():
        return RESULT, (folder / RESULT).read_bytes()
    state = folder / "state"
    if not holds_run(state):
        return None
    records = [snapshot.record for snapshot in Checkpoints(state).load()]
    if not records:
        return None
    begun = Raw(
        run=msgspec.json.decode((state / "run.json").read_bytes()),
        rounds=records,
        parts=msgspec.json.decode((state / "parts.json").read_bytes(), type=list[Part]),
    )
    return ROUNDS, msgspec.json.format(msgspec.json.encode(begun), indent=1) + b"\n"
