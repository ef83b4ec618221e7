"""A disk that takes nothing is a state and no end: why, since when, what waits, and that it goes on by itself.

Serving needs no disk. What must be durable before it is told (an accepted upload, a held download) waits here and is
tried again; what can be repeated is refused as busy. Only damage ends a service.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.backoff import Backoff
from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service.data_dir import LOCK, MARKER
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

LEAST_ROOM_BYTES = 8 << 20
"""With less free space nothing new is begun: a round writes some megabytes, and others need the disk too."""

ENOUGH_ROOM_BYTES = 256 << 20
"""Nothing waits for more free space than this."""

LOOK_EVERY_S = 5.0
FIRST_TRY_S, LONGEST_WAIT_S = 0.5, 3.0
_PROBE, _PROBE_BYTES = "disk-check", 64 << 10

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DISK = _FULL | {
    *(errno.EROFS, errno.EIO, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EFBIG),
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOENT),
}
_SQLITE = {
    13: errno.ENOSPC,
    10: errno.EIO,
    8: errno.EROFS,
    14: errno.EIO,
    3: errno.EACCES,
    5: errno.EBUSY,
    6: errno.EBUSY,
}
"""Result codes of SQLite that pass: FULL, IOERR, READONLY, CANTOPEN, PERM, BUSY, LOCKED."""

_SQLITE_DAMAGE, _DAMAGE_WORDS = frozenset({11, 26}), ("malformed", "not a database")

_SQLITE_WORDS = {"is full": errno.ENOSPC, "disk I/O": errno.EIO, "readonly": errno.EROFS}
_SQLITE_WORDS |= {"unable to open": errno.EIO, "locked": errno.EBUSY}


@dataclass(frozen=True, slots=True)
class Room:
    """What there is of a data dir's disk.

    Attributes:
        gone: the data dir isn't there.
        replaced: something else is in its place, or its lock was removed.
    """

    free_bytes: int
    total_bytes: int
    gone: bool = False
    replaced: bool = False


def disk_errno(error: BaseException) -> int | None:
    """Return the number of an error of the disk, also of one behind another; None if it is something else.

    A database that is damaged is no such error: that doesn't pass.
    """
    for found in _with_causes(error):
        if isinstance(found, OSError):
            # A short write, or a file that ends early, has no number.
            number = errno.EIO if found.errno is None and type(found) is OSError else found.errno
            if number in _DISK:
                return number
        elif type(found).__module__ == "sqlite3":  # not imported: a client has no database
            code = getattr(found, "sqlite_errorcode", None)  # Python 3.11
            if code is not None:
                return _SQLITE.get(code & 0xFF)
            return next((number for words, number in _SQLITE_WORDS.items() if words in str(found)), None)
    return None


def is_damage(error: BaseException) -> bool:
    """Whether a database is damaged, which no waiting mends."""
    if type(error).__module__ != "sqlite3":
        return False
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF in _SQLITE_DAMAGE if code is not None else any(word in str(error) for word in _DAMAGE_WORDS)


def in_words(number: int, room: Room, folder: Path) -> str:
    """Return what is wrong with a disk, for log, health and status."""
    if room.replaced:
        return (
            f"data dir {folder} was replaced, or its {LOCK} removed, while this runs; put the old one back, or restart"
        )
    if room.gone:
        return f"data dir {folder} is gone; put it back, or start anew"
    if number in _FULL:
        plenty = room.free_bytes >= min(room.total_bytes // 2, ENOUGH_ROOM_BYTES) > 0
        limit = ", so a quota or all inodes (`df -i`) are used up" if plenty else ""
        return f"disk full: {room.free_bytes >> 20} MB free of {room.total_bytes >> 20} MB{limit}"
    if number == errno.EROFS:
        return f"disk of {folder} is read-only"
    return f"disk of {folder} fails ({errno.errorcode.get(number, number)})"


class Disk:
    """What a service knows of the disk below its data dir; called by its loop.

    Args:
        folder: the claimed data dir.
        waits: what waits while the disk takes nothing; stands in every message.
        now: the loop's clock, in seconds.
        room: looks at the disk; may raise OSError.
        lock: of the claimed data dir (``DataDir.lock``); None: nobody asks whether it was replaced.

    Attributes:
        problem: why nothing is written, in words; empty if all is well.
    """

    def __init__(
        self,
        folder: Path,
        waits: str,
        now: float,
        room: Callable[[], Room] | None = None,
        lock: os.stat_result | None = None,
    ) -> None:
        self._folder = folder
        self._waits = waits
        # Without its marker it is another folder of that name: the place where a disk was mounted, for example.
        marker = folder / MARKER
        self._room = room or partial(room_of, folder, marker if marker.exists() else folder, lock)
        self._backoff = Backoff(FIRST_TRY_S, LONGEST_WAIT_S)
        self._later: deque[Callable[[float], None]] = deque()
        self._now = self._since = self._try_at = now
        self._look_at = float("-inf")
        self._needed = LEAST_ROOM_BYTES
        self.problem = ""

    @property
    def settled(self) -> bool:
        """Whether everything that was to be written is."""
        return not self._later

    def takes(self, error: BaseException) -> bool:
        """Note an error if it is the disk's; returns whether it is. Another is the caller's.

        Raises:
            ReplayfleetError: The database is damaged.
        """
        if is_damage(error):
            raise ReplayfleetError(f"the database in {self._folder} is damaged ({error}); restore a backup") from error
        number = disk_errno(error)
        if number is None:
            return False
        room = self._look()
        if number == errno.ENOENT and not room.gone:
            return False
        if number == errno.ENOSPC:
            # It wasn't enough: wait for twice as much, so that a round isn't trained again and again for nothing. But
            # where there is plenty it was a quota or another limit, which free space doesn't show.
            self._needed = max(LEAST_ROOM_BYTES, min(2 * room.free_bytes, room.total_bytes // 2, ENOUGH_ROOM_BYTES))
        self._note(in_words(number, room, self._folder), error)
        return True

    def do(self, work: Callable[[float], None]) -> None:
        """Call ``work`` now, or when the disk takes it; in the order in which they came.

        Args:
            work: gets ``now``; begins with what must be durable, so that it can be begun again. What it raises beside
                errors of the disk is raised.
        """
        self._later.append(work)
        if len(self._later) == 1:
            self.is_there()
            self._work_off()

    def tick(self, now: float) -> bool:
        """Try again if it is time; returns whether the disk takes everything again, once each time."""
        self._now = now
        if not self.problem:
            if now >= self._look_at:
                self._look_at = now + LOOK_EVERY_S
                self._backoff.reset()
                self.is_there()
            return False
        if now < self._try_at:
            return False
        self._try_at = now + self._backoff.next_s()
        try:
            self._probe()
        except OSError as error:
            self.takes(error)
            return False
        problem, self.problem = self.problem, ""
        try:
            self._work_off()
        except Exception:  # of other things than the disk: the rest waits for the next try
            self.problem = problem
            raise
        if self.problem:
            return False
        self._look_at = now + LOOK_EVERY_S  # one that takes what is tried, and fails of more, is tried ever less often
        log.info("disk takes everything again", after_s=round(now - self._since, 1), was=problem)
        return True

    def _work_off(self) -> None:
        while self._later and not self.problem:
            try:
                self._later[0](self._now)
            except Exception as error:  # the disk's are kept for later, others are the caller's
                if self.takes(error):
                    return
                self._later.popleft()
                raise
            self._later.popleft()

    def is_there(self) -> bool:
        """Look before anything fails: a disk that is nearly full, and a data dir that somebody took away or replaced.

        Returns:
            Whether the folder is still our data dir.
        """
        room = self._look()
        if room.gone:
            self._note(in_words(errno.ENOENT, room, self._folder), "")
        elif room.total_bytes > 0 and room.free_bytes < min(LEAST_ROOM_BYTES, room.total_bytes // 2):
            self._note(in_words(errno.ENOSPC, room, self._folder), "")
        return not room.gone

    def _note(self, words: str, error: object) -> None:
        words = f"{words}; {self._waits}"
        if not self.problem:
            self._since = self._now
            self._try_at = self._now + self._backoff.next_s()
            log.warning("disk takes nothing", reason=words, error=error)
        self.problem = words

    def _look(self) -> Room:
        try:
            return self._room()
        except OSError:
            return Room(0, 0)

    def _probe(self) -> None:
        """Write something.

        Raises:
            OSError: The disk takes nothing, there isn't enough room, or the data dir isn't there.
        """
        room = self._room()
        if room.gone:
            raise FileNotFoundError(errno.ENOENT, "the data dir is gone")
        if room.free_bytes < self._needed:
            raise OSError(errno.EDQUOT, f"{room.free_bytes} bytes are free, {self._needed} are needed")
        self._needed = LEAST_ROOM_BYTES
        path = self._folder / _PROBE
        write_atomic(path, bytes(_PROBE_BYTES), private=True)
        path.unlink()


def room_of(folder: Path, sign: Path, lock: os.stat_result | None = None) -> Room:
    """Look at the disk of a folder, which is gone without its ``sign``, and was replaced if its lock isn't ``lock``.

    Raises:
        OSError: The disk doesn't answer.
    """
    if not sign.exists():
        return Room(0, 0, gone=True)
    try:
        replaced = lock is not None and not os.path.samestat(lock, (folder / LOCK).stat())
    except FileNotFoundError:
        replaced = True
    if replaced:
        return Room(0, 0, gone=True, replaced=True)
    usage = shutil.disk_usage(folder)
    return Room(usage.free, usage.total)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    for _ in range(8):
        if found is None:
            return
        yield found
        found = found.__cause__
