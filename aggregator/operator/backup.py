"""``aggregator backup`` and ``aggregator restore``: a consistent copy of a data dir, also while its aggregator runs."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replayfleet.aggregator.store import DATABASE, AggregatorStore
from replayfleet.aggregator.trust.release import are_newer, can_sign
from replayfleet.federation.atomic import sync_folder
from replayfleet.federation.errors import UNREADABLE, SettingsError
from replayfleet.federation.service.credentials.keys import KEYS
from replayfleet.federation.service.data_dir import MARKER, aggregators, claim_data_dir, read_owner
from replayfleet.federation.service.disk import is_damage
from replayfleet.federation.wire.protocol.limits import MAX_EPOCH
from replayfleet.federation.wire.protocol.tensors import digest as digest_of

BLOBS = "blobs"
TRIES = 5
"""A running aggregator may collect a blob between our look at its database and the copy; then we look again."""
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
_NOT_COPIED = frozenset({DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", BLOBS, "lock", "thumbnails"})


@dataclass(frozen=True, slots=True)
class Copied:
    """What was copied.

    ``revoked_since``: members of a restored store who were revoked in the one that it replaces. ``keeps_keys``: its
    keys are those of what it replaces, where they were rotated since the backup; clients take no earlier one's word.
    """

    folder: Path
    fleet: str
    round: int
    epoch: int
    num_blobs: int
    revoked_since: tuple[str, ...] = ()
    keeps_keys: bool = False


def back_up(data_dir: Path, target: Path) -> Copied:
    """Copy a data dir, keys included, to a new folder that only the user can read.

    Args:
        data_dir: of an aggregator, running or not.
        target: doesn't exist yet, or is empty.

    Raises:
        SettingsError: There is no run, it is of another format, its keys are gone, or ``target`` can't be used. Nothing
            is left there.
    """
    if not (data_dir / DATABASE).is_file():
        raise SettingsError(f"data dir {data_dir}: no aggregator has run here; expected {DATABASE}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target} is not empty; a backup goes into a new folder")
    read_owner(data_dir, aggregators(None))
    _check_apart(target, data_dir)
    with _in_place_of(target) as fresh:
        copied = _copied_in_tries(data_dir, fresh, target, TRIES)
        if not can_sign(fresh / KEYS):
            raise SettingsError(
                f"{data_dir / KEYS} lacks its root or its signing key, so no device would follow this backup: "
                "put the folder back from an earlier backup, then make this one"
            )
        return copied


def restore(backup: Path, data_dir: Path, *, replace: bool = False, as_spare: bool = False) -> Copied:
    """Make a data dir from a backup, in an epoch of its own: clients that went on since then come back to its round.

    Args:
        backup: made by ``back_up``; it isn't changed.
        data_dir: doesn't exist, is empty, or is replaced.
        replace: move what is in ``data_dir`` aside, beside it; nothing is deleted.
        as_spare: in the epoch of the backup, so that it stands by while the one that was backed up leads.

    Raises:
        SettingsError: No backup, one of another format, a damaged one, or a data dir that isn't empty or is in use.
            Nothing was changed.
    """
    fleet = _check(backup)
    _check_apart(data_dir, backup)
    occupied = data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir()))
    if occupied and not replace:
        raise SettingsError(f"data dir {data_dir} is not empty; --replace moves what is there aside")
    with _in_place_of(data_dir, aside=occupied) as fresh:
        copied = _copied(backup, fresh, data_dir)
        if occupied:
            claim_data_dir(data_dir, fleet=fleet, role="aggregator").close()  # raises while somebody uses it
        keeps_keys = (backup / KEYS).is_dir() and are_newer(data_dir / KEYS, backup / KEYS)
        if keeps_keys:
            shutil.rmtree(fresh / KEYS)
            shutil.copytree(data_dir / KEYS, fresh / KEYS)
        with contextlib.closing(AggregatorStore(fresh)) as store:
            revoked, epoch = _known(data_dir)
            store.move(above=None if as_spare else max(store.epoch(), epoch))
            since = revoked & store.roll.enrolled
            return dataclasses.replace(
                copied, epoch=store.epoch(), revoked_since=tuple(sorted(since)), keeps_keys=keeps_keys
            )


def _check_apart(target: Path, source: Path) -> None:
    """Refuse a copy within what is copied: the next one would hold it too, and so on."""
    if target.resolve().is_relative_to(source.resolve()):
        raise SettingsError(f"{target} lies in {source} itself; choose a folder beside it, best on another disk")


def _known(folder: Path) -> tuple[frozenset[str], int]:
    """Who is revoked there, and its epoch, as far as they can be read: what is replaced may be damaged, or of old."""
    revoked, epoch = frozenset[str](), 0
    if (folder / DATABASE).is_file():
        with contextlib.suppress(sqlite3.Error, SettingsError), contextlib.closing(_opened(folder)) as store:
            with contextlib.suppress(*UNREADABLE, TypeError):
                epoch = min(store.epoch(), MAX_EPOCH - 1)
            store.roll.refresh()
            revoked = store.roll.revoked
    return revoked, epoch


def _check(backup: Path) -> str:
    """Return the fleet's name of a backup that is whole."""
    if not (backup / DATABASE).is_file() or not (backup / MARKER).is_file():
        raise SettingsError(f"{backup} is no backup of an aggregator; expected {DATABASE} and {MARKER} in it")
    read_owner(backup, aggregators(None))
    with contextlib.closing(_opened(backup)) as store:
        spec = store.spec()
        for digest in sorted(store.referenced()):
            if not _is_whole(backup / BLOBS / digest[:2] / digest, digest):
                raise SettingsError(f"{backup}: blob {digest[:12]} is missing or damaged; take another backup")
    if spec is None:
        raise SettingsError(f"{backup}: its run has not begun yet")
    return spec.fleet


def _is_whole(path: Path, digest: str) -> bool:
    try:
        return digest_of(path.read_bytes()) == digest
    except FileNotFoundError:
        return False


def _copied_in_tries(source: Path, fresh: Path, target: Path, tries_left: int) -> Copied:
    try:
        return _copied(source, fresh, target)
    except FileNotFoundError as error:
        if tries_left <= 1:
            raise SettingsError(f"data dir {source}: {error.filename} is missing") from error
        return _copied_in_tries(source, fresh, target, tries_left - 1)


def _copied(source: Path, fresh: Path, target: Path) -> Copied:
    with contextlib.closing(_connected(source)) as old, contextlib.closing(sqlite3.connect(fresh / DATABASE)) as new:
        old.backup(new)
        new.execute("PRAGMA journal_mode=DELETE")  # one file, which a read-only disk can serve too
    with contextlib.closing(_opened(fresh)) as store:
        spec = store.spec()
        if spec is None:
            raise SettingsError(f"data dir {source}: its run has not begun yet")
        needed = store.referenced()
        copied = Copied(target, spec.fleet, store.round().index, store.epoch(), len(needed))
    for digest in needed:
        place = Path(BLOBS) / digest[:2] / digest
        (fresh / place).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy2(source / place, fresh / place)
    for entry in source.iterdir():
        if entry.name in _NOT_COPIED or entry.name.startswith(".") or entry.is_socket():
            continue
        if entry.is_dir():  # links too: what a data dir needs may lie elsewhere
            shutil.copytree(entry, fresh / entry.name, dirs_exist_ok=True)
        else:
            shutil.copy2(entry, fresh / entry.name)
    return copied


def _opened(folder: Path) -> AggregatorStore:
    return AggregatorStore(folder, read_only=True)


def _connected(folder: Path) -> sqlite3.Connection:
    path = folder / DATABASE
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


@contextlib.contextmanager
def _in_place_of(target: Path, *, aside: bool = False) -> Iterator[Path]:
    """Yield a private folder that becomes ``target`` when all went well, and vanishes otherwise."""
    target = target.absolute()  # ``.`` has no name
    fresh = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    _remove_unfinished(target.parent)
    try:
        lock = _made(fresh)
    except OSError as error:
        raise SettingsError(f"{target}: can't be written ({error.strerror or error})") from error
    try:
        yield fresh
        for folder, _, names in os.walk(fresh):
            for name in names:
                with (Path(folder) / name).open("rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        if aside:
            number = next(n for n in range(1, 1 << 20) if not _aside(target, n).exists())
            target.rename(_aside(target, number))
        fresh.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise SettingsError(f"{target}: can't be written ({error})") from error
    except sqlite3.Error as error:
        if is_damage(error):
            raise SettingsError(f"the database to copy is damaged ({error}); nothing was written") from error
        raise SettingsError(f"{target}: can't be written ({error})") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        os.close(lock)


def _made(fresh: Path) -> int:
    """Make a private folder and return its lock; until it has that, another command may take it for a leftover."""
    while True:
        fresh.mkdir(mode=0o700, parents=True)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(fresh, os.O_RDONLY)
            with contextlib.suppress(OSError):  # where folders can't be locked, nobody removes what others left
                fcntl.flock(lock, fcntl.LOCK_EX)
            if fresh.exists():
                return lock
            os.close(lock)


def _remove_unfinished(folder: Path) -> None:
    """Remove what commands that were killed left beside their target: whole copies, with keys. Who runs has a lock."""
    for path in [path for path in folder.glob(".*.tmp") if _UNFINISHED.fullmatch(path.name)]:
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _aside(target: Path, number: int) -> Path:
    return target.with_name(f"{target.name}.before-restore-{number}")
