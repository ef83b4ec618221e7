"""Engines on disk: built on this device, for this device, never sent anywhere.

A folder per engine, named by a digest of everything that it depends on: the artefact's bytes, the device's name, the
versions of the libraries, the batch sizes. ONNX Runtime's own key knows the graph only, so that the next round's
parameters would be answered by the last round's engine (github.com/microsoft/onnxruntime/issues/32254); an engine of
another device or library version fails or, worse, answers (github.com/NVIDIA/TensorRT/issues/2900).

    <folder>/<key>/engine.json        what it is of, and the size and sha256 of every file
                  /engine/...         what the builder wrote
            /timing-<platform>/...    the timing cache that all builds on one platform share
            /.building-<random>/...   a build in progress: worthless once its builder is gone
            /.deleting-<random>/...

An entry appears by one rename after all of it is on disk, and disappears by one rename before it is deleted, so a
``kill -9`` leaves whole entries and rubbish, which ``clean`` removes. One process at a time may own a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from replayfleet.export.running.provider_options import BatchProfile
from replayfleet.federation.atomic import sync_folder, write_atomic

DEFAULT_MAX_BYTES = 1 << 30
"""Of all entries together: a hundred engines of our networks."""

_RECORD = "engine.json"
_BUILDING, _DELETING, _TIMING = ".building-", ".deleting-", "timing-"


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where one engine is built.

    Attributes:
        folder: of this build alone.
        engine: the builder's files go here.
        timing: a copy of the shared timing cache, to read and to write.
    """

    folder: Path
    engine: Path
    timing: Path


class EngineCache:
    """The engines of one device.

    Args:
        folder: made if it doesn't exist.
        platform: device name and library versions; engines of any other are deleted by ``clean``.
        max_bytes: of all entries; the least lately used ones go first, the one just stored stays.
    """

    def __init__(self, folder: Path, platform: Mapping[str, str], *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._folder = folder
        self._platform = dict(sorted(platform.items()))
        self._max_bytes = max_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def clean(self) -> list[str]:
        """Delete what can't be used: rubbish of builds that were killed, damaged entries, those of another platform.

        Returns:
            One line for every entry that went, and why; rubbish isn't worth one.
        """
        gone = []
        for path in sorted(self._folder.iterdir()):
            if path.name.startswith((_BUILDING, _DELETING)):
                _remove(path)
            elif path.name.startswith(_TIMING):
                if path.name != self._timing.name:
                    self._delete(path)
            elif path.is_dir():
                why = self._unusable(path)
                if why:
                    gone.append(f"{path.name}: {why}")
                    self._delete(path)
        return gone

    def find(self, artefact: str, profile: BatchProfile) -> Path | None:
        """Return the folder of an artefact's engine, every byte checked, or None; a damaged entry is deleted.

        Args:
            artefact: sha256 of the graph with its parameters.
            profile: batch sizes.
        """
        entry = self._folder / self._key(artefact, profile)
        if not entry.is_dir():
            return None
        if self._unusable(entry):
            self._delete(entry)
            return None
        with contextlib.suppress(OSError):  # of a read-only disk
            os.utime(entry / _RECORD)  # used now
        return entry / "engine"

    @contextmanager
    def workplace(self) -> Iterator[Workplace]:
        """Lend folders to a build; gone afterwards, unless what was built there was stored."""
        folder = self._folder / f"{_BUILDING}{secrets.token_hex(8)}"
        place = Workplace(folder, folder / "engine", folder / "timing")
        try:
            place.engine.mkdir(parents=True)
            place.timing.mkdir()
            for path in self._timing.glob("*"):
                shutil.copyfile(path, place.timing / path.name)
            yield place
        finally:
            _remove(folder)

    def store(self, place: Workplace, artefact: str, profile: BatchProfile) -> Path:
        """Keep the engine that was built at ``place``; returns its folder. Keeps the timing cache too.

        Raises:
            ValueError: The builder left no file.
            OSError: The disk is full; nothing was kept.
        """
        files = {str(path.relative_to(place.engine)): _facts(path) for path in _files(place.engine)}
        if not files:
            raise ValueError("the builder left no engine")
        entry = self._folder / self._key(artefact, profile)
        new = place.folder / "entry"
        new.mkdir()
        place.engine.rename(new / "engine")
        record = {"artefact": artefact, "profile": asdict(profile), "platform": self._platform, "files": files}
        write_atomic(new / _RECORD, json.dumps(record, indent=1, sort_keys=True).encode())
        _sync(new)
        if entry.exists():
            self._delete(entry)
        new.rename(entry)
        sync_folder(self._folder)
        self._keep_timing(place)
        self._make_room(entry)
        return entry / "engine"

    @property
    def size_bytes(self) -> int:
        """Of all entries."""
        return sum(_size(entry) for entry in self._entries())

    @property
    def _timing(self) -> Path:
        return self._folder / f"{_TIMING}{_digest(self._platform)}"

    def _key(self, artefact: str, profile: BatchProfile) -> str:
        return _digest({"artefact": artefact, "profile": asdict(profile), "platform": self._platform})

    def _entries(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.is_dir() and not path.name.startswith((".", _TIMING))]

    def _unusable(self, entry: Path) -> str:
        """Return why an entry can't be used, or an empty string."""
        try:
            record = json.loads((entry / _RECORD).read_bytes())
            platform, files = dict(record["platform"]), dict(record["files"])
            key = self._key(record["artefact"], BatchProfile(**record["profile"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            return f"its record can't be read ({type(error).__name__})"
        changed = sorted(name for name in platform.keys() | self._platform if not _same(platform, self._platform, name))
        if changed:
            name = changed[0]
            return f"{name} was {platform.get(name, 'absent')}, is {self._platform.get(name, 'absent')}"
        if key != entry.name:
            return "its record belongs to another engine"
        found = {str(path.relative_to(entry / "engine")): path for path in _files(entry / "engine")}
        if found.keys() != files.keys():
            return "a file is missing, or there is one too many"
        damaged = next((name for name, path in found.items() if _facts(path) != files[name]), "")
        return f"{damaged} is damaged" if damaged else ""

    def _keep_timing(self, place: Workplace) -> None:
        """Take the build's timing cache over, each file whole; without it builds take longer, nothing else."""
        with contextlib.suppress(OSError):
            self._timing.mkdir(parents=True, exist_ok=True)
            for path in _files(place.timing):
                write_atomic(self._timing / path.name, path.read_bytes())

    def _make_room(self, newest: Path) -> None:
        others = sorted((entry for entry in self._entries() if entry != newest), key=_used_at)
        total = self.size_bytes
        while total > self._max_bytes and others:
            total -= _size(others[0])
            self._delete(others.pop(0))

    def _delete(self, path: Path) -> None:
        aside = self._folder / f"{_DELETING}{secrets.token_hex(8)}"
        path.rename(aside)
        _remove(aside)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _same(one: Mapping[str, str], other: Mapping[str, str], name: str) -> bool:
    return name in one and name in other and one[name] == other[name]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _facts(path: Path) -> list[object]:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return [path.stat().st_size, digest.hexdigest()]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _used_at(entry: Path) -> float:
    try:
        return (entry / _RECORD).stat().st_mtime
    except OSError:
        return 0.0


def _sync(folder: Path) -> None:
    """Make a new folder durable with all that it holds."""
    for path in [*_files(folder), *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync_folder(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
