"""``carla://host:2000?town=Town03&rate=10``: a vehicle that drives through a CARLA simulator, with its boxes."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

import msgspec

from replayfleet.edge_client.cameras.carla.messages import (
    MAX_LINE_BYTES,
    MAX_SIDE,
    Beat,
    Job,
    Line,
    Lost,
    Message,
    Shot,
    from_line,
    picture_of,
    to_line,
)
from replayfleet.edge_client.cameras.carla.settings import CLASS_NAMES, CarlaSettings, check_package
from replayfleet.edge_client.flow import CameraError, Picture
from replayfleet.federation.children import child_command, child_environment
from replayfleet.federation.service.logs import EventLogger

__all__ = ["CarlaCamera", "CarlaSettings"]

log = EventLogger(__name__)

WORKER_COMMAND = child_command("replayfleet.edge_client.cameras.carla.worker")

_LOOK_AT_STOP_S = 0.1
_GRACE_S = 5.0
"""Beyond CARLA's own time-outs, which end most waits."""

_START_S = 20.0
_LOAD_TOWN_S = 120.0


class CarlaCamera:
    """Implements ``Camera`` with a vehicle in a simulator, driven by a process of its own.

    The world never waits for a slow reader: what isn't read when the next picture comes is dropped, and frame ids jump.

    Args:
        settings: where, and what.
        name: of the camera within its client.
        command: runs the process.
        clock: ``time.monotonic``.

    Raises:
        SettingsError: CARLA's Python package isn't installed.
    """

    live = True
    class_names = CLASS_NAMES

    def __init__(
        self,
        settings: CarlaSettings,
        name: str,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_package()
        self.name = name
        self._settings = settings
        self._command = tuple(command)
        self._clock = clock
        self._next_id = 0

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield annotated pictures until ``stop`` is set, at most as fast as the clock on the wall.

        However it ends, world and traffic manager get their settings back and the vehicle disappears: the process sees
        to it, also when this one is killed; if it is killed itself, a guard process does.

        Raises:
            CameraError: No simulator, one of another version, one that stands still, one that others tick; or the
                process hung or crashed.
        """
        first_id = self._next_id
        with contextlib.closing(_Link(self._settings, self.name, self._command)) as link:
            deadline = self._clock() + _START_S + self._opening_s
            while not stop.is_set():
                heard = link.newest.take(_LOOK_AT_STOP_S)
                if heard is None:
                    if self._clock() >= deadline:
                        link.kill()
                        raise CameraError(f"carla {self._settings.place}: its process hung, and was killed")
                    continue
                if isinstance(heard, Lost):
                    raise CameraError(heard.reason)
                deadline = self._clock() + 2 * self._settings.timeout_s + _GRACE_S
                if not isinstance(heard, Beat):
                    picture = picture_of(*heard, self.name, first_id)
                    self._next_id = picture.frame_id + 1
                    yield picture

    def describe(self) -> str:
        """One line for logs."""
        own = self._settings
        role = "ticks" if own.tick else "waits for ticks"
        return (
            f"carla {own.place} {own.town or 'as loaded'}, {own.vehicle}, {own.width}x{own.height}, "
            f"{own.rate:g} pictures/s, {role}"
        )

    @property
    def _opening_s(self) -> float:
        return 4 * self._settings.timeout_s + _GRACE_S + (_LOAD_TOWN_S if self._settings.town else 0.0)


class _Newest:
    """Holds the newest picture, whether the process lives, and its last words."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shot: tuple[Shot, bytes] | None = None
        self._alive = False
        self._lost: Lost | None = None

    def put(self, message: Message, pixels: bytes = b"") -> None:
        """Keep what the process said."""
        with self._changed:
            if isinstance(message, Shot):
                self._shot = (message, pixels)
            elif isinstance(message, Lost):
                self._lost = self._lost or message
            else:
                self._alive = True
            self._changed.notify_all()

    def take(self, timeout_s: float) -> tuple[Shot, bytes] | Beat | Lost | None:
        """Return the newest picture; without one a beat, or the last words; None if nothing is heard."""
        with self._changed:
            self._changed.wait_for(lambda: self._shot or self._alive or self._lost, timeout_s)
            shot, alive = self._shot, self._alive
            self._shot, self._alive = None, False
            if shot is not None:
                return shot
            return self._lost or (Beat() if alive else None)


class _Link:
    """The process that drives."""

    def __init__(self, settings: CarlaSettings, name: str, command: Sequence[str]) -> None:
        self._name = name
        self._goodbye_s = 3 * settings.timeout_s + _GRACE_S
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"OMP_NUM_THREADS": "1", **child_environment()},
            )
        except OSError as error:
            raise CameraError(f"carla {settings.place}: its process can't be started ({error})") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.newest = _Newest()
        with contextlib.suppress(BrokenPipeError):  # reading says what became of it
            self._input.write(to_line(Job(name, dataclasses.asdict(settings))))
            self._input.flush()
        self._thread = threading.Thread(target=self._listen, name=f"carla {name}", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End the process at once; its guard puts things back."""
        self._process.kill()

    def close(self) -> None:
        """Ask the process to put everything back and to end; kill it if it doesn't. Idempotent."""
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(timeout=self._goodbye_s)
        except subprocess.TimeoutExpired:
            log.warning("carla process doesn't end, killed", camera=self._name)
            self._process.kill()
            self._process.wait()
        self._thread.join()
        self._output.close()

    def _listen(self) -> None:
        try:
            while line := self._output.readline(MAX_LINE_BYTES):
                message = from_line(line)
                if isinstance(message, Line):
                    self._log(message)
                else:
                    self.newest.put(message, _pixels(self._output, message) if isinstance(message, Shot) else b"")
        except EOFError:
            pass  # it crashed while it wrote; its exit status says so
        except (msgspec.MsgspecError, ValueError) as error:
            self._process.kill()
            self.newest.put(Lost(f"carla: its process sent something unreadable ({error})"))
        code = self._process.wait()
        self.newest.put(Lost(f"carla: its process ended with exit status {code}"))

    def _log(self, line: Line) -> None:
        write = log.warning if line.level == "WARNING" else log.info
        write(line.event, **{**line.fields, "camera": self._name})


def _pixels(output: IO[bytes], shot: Shot) -> bytes:
    if not (0 < shot.width <= MAX_SIDE and 0 < shot.height <= MAX_SIDE):
        raise ValueError(f"a picture of {shot.width}x{shot.height}")
    size = shot.width * shot.height * 3
    pixels = output.read(size)
    if len(pixels) != size:
        raise EOFError("half a picture")
    return pixels
