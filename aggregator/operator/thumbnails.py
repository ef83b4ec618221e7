"""Newest pictures of cameras whose devices allow it, kept for the console: one small file each, never backed up.

The folder is emptied when the aggregator starts, and a picture that isn't renewed is forgotten by whoever reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.quotas import Limiter
from replayfleet.federation.wire.protocol.codec import is_block
from replayfleet.federation.wire.protocol.thumbnails import MAX_BYTES, decode_thumbnail
from replayfleet.federation.wire.protocol.topics import parse_topic
from replayfleet.federation.wire.transport.interfaces import Seals

FOLDER = "thumbnails"
CHANNEL = "thumbnail"
KEPT_S = 120.0
MAX_CAMERAS = 8
"""Of one client."""
PER_S, AT_ONCE = 4.0, 16.0

log = EventLogger(__name__)


@dataclass(frozen=True, slots=True)
class Picture:
    """A camera's newest picture.

    Attributes:
        camera: whose.
        name: of its file, for an address.
        at: Unix time when it came.
        jpeg: what it shows.
    """

    camera: str
    name: str
    at: float
    jpeg: bytes


class ThumbnailDesk:
    """Takes pictures from members.

    Args:
        data_dir: the aggregator's.
        seals: knows who said what.
        is_member: whether a client belongs to the fleet.
    """

    def __init__(self, data_dir: Path, seals: Seals, is_member: Callable[[str], bool]) -> None:
        self._folder = data_dir / FOLDER
        self._seals = seals
        self._is_member = is_member
        self._limiter = Limiter(PER_S, AT_ONCE)
        shutil.rmtree(self._folder, ignore_errors=True)

    def take(self, topic: str, payload: bytes, now: float) -> None:
        """Keep a picture that came, instead of the camera's former one.

        Raises:
            OSError: The disk doesn't take it.
        """
        try:
            address = parse_topic(topic)
            frame = None if is_block(payload) else self._seals.open(address, topic, payload, now)
            if frame is None or not self._is_member(address.peer) or not self._limiter.admit(address.peer, now):
                return
            found = decode_thumbnail(frame)
        except MalformedMessage as error:
            log.debug("thumbnail not taken", topic=topic, reason=error)
            return
        folder = self._folder / address.peer
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / hashlib.sha256(found.camera.encode()).hexdigest()[:16]
        if not path.exists() and _num_kept(folder) >= MAX_CAMERAS:
            return
        fresh = path.with_suffix(".new")
        fresh.write_bytes(frame)  # unlike all else, it may be lost
        fresh.replace(path)


def _num_kept(folder: Path) -> int:
    """Delete the pictures of cameras that are gone, and return how many are left."""
    for path in list(folder.iterdir()):
        if abs(time.time() - path.stat().st_mtime) > KEPT_S:
            path.unlink()
    return len(list(folder.iterdir()))


def pictures_of(data_dir: Path, client: str, now: float | None = None) -> list[Picture]:
    """Return a client's pictures that are new enough, by camera; nothing for whoever sends none.

    Args:
        data_dir: the aggregator's.
        client: a member's name.
        now: Unix time; the present one by default.
    """
    found = []
    with contextlib.suppress(OSError):
        for path in (data_dir / FOLDER / client).iterdir():
            with contextlib.suppress(OSError, MalformedMessage), path.open("rb") as file:  # gone, or replaced just now
                at = path.stat().st_mtime
                if abs((time.time() if now is None else now) - at) <= KEPT_S and not path.suffix:
                    one = decode_thumbnail(file.read(MAX_BYTES + 1))
                    found.append(Picture(one.camera, path.name, at, one.picture))
    return sorted(found, key=lambda one: one.camera)
