"""``carla://host:2000?town=Town03&rate=10``: a vehicle that drives through a CARLA simulator, with its boxes.

The simulator runs in synchronous mode with a fixed step, and exactly one client ticks it. Pictures lag behind ticks by
a couple of frames, so each is matched to the frame that its tick returned, and gets the boxes of that moment.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_client.cameras.base import CameraError, Picture
from edge_client.cameras.carla_boxes import Lens, Limits, annotate
from edge_client.cameras.carla_calls import CallThread
from edge_client.cameras.carla_frames import Missing
from edge_client.cameras.carla_session import CarlaSession, Moment
from edge_client.cameras.carla_settings import CLASS_NAMES, CarlaSettings, import_carla
from federation.service.logs import EventLogger

__all__ = ["CarlaCamera", "CarlaSettings"]

log = EventLogger(__name__)
T = TypeVar("T")

_LAG_FRAMES = 8
"""So many frames may pass before the simulation waits for a picture; documented are a couple."""

_OPENING_S = 180.0
"""Loading a town takes minutes on a slow disk."""

_FAR_M = 1000.0


class CarlaCamera:
    """Implements ``Camera`` with a vehicle in a simulator.

    Args:
        settings: where, and what.
        name: of the camera within its client.
        clock: ``time.monotonic``.

    Raises:
        SettingsError: CARLA's Python package isn't installed.
    """

    live = True
    class_names = CLASS_NAMES

    def __init__(self, settings: CarlaSettings, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._settings = settings
        self._clock = clock
        self._carla = import_carla()
        self._next_id = 0

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield annotated pictures until ``stop`` is set, at most as fast as the clock on the wall.

        However it ends, world and traffic manager get their settings back and the vehicle disappears; if this process
        is killed, a guard process sees to it.

        Raises:
            CameraError: No simulator, one of another version, one that stands still, one that others tick.
        """
        session = CarlaSession(self._carla, self._settings, self._clock)
        calls = CallThread(f"carla {self._settings.place}")
        try:
            self._call(calls, session, session.open, _OPENING_S)
            log.info("carla session opened", camera=self.name, server=self._settings.place, town=session.town)
            yield from self._drive(session, calls, stop)
        finally:
            self._end(session, calls)

    def describe(self) -> str:
        """One line for logs."""
        own = self._settings
        role = "ticks" if own.tick else "waits for ticks"
        return (
            f"carla {own.place} {own.town or 'as loaded'}, {own.vehicle}, {own.width}x{own.height}, "
            f"{own.rate:g} pictures/s, {role}"
        )

    def _drive(self, session: CarlaSession, calls: CallThread, stop: threading.Event) -> Iterator[Picture]:
        awaited: collections.deque[Moment] = collections.deque()
        first_id = self._next_id
        first_frame: int | None = None
        every = self._settings.frames_per_picture(session.fixed_step_s)
        due = self._clock()
        while not stop.is_set():
            moment = self._call(calls, session, session.step, 2 * self._settings.timeout_s + 1)
            if moment.solids is not None:
                awaited.append(moment)
            # Another client's ticks set the pace of one that waits for them.
            due = max(due + session.fixed_step_s, self._clock()) if self._settings.tick else self._clock()
            for taken, data in self._ready(session, awaited, moment.frame, due, stop):
                first_frame = taken.frame if first_frame is None else first_frame
                frame_id = first_id + (taken.frame - first_frame) // every
                self._next_id = frame_id + 1
                yield self._picture(frame_id, taken, data, session.town)

    def _ready(
        self, session: CarlaSession, awaited: collections.deque[Moment], newest: int, due: float, stop: threading.Event
    ) -> Iterator[tuple[Moment, tuple[Any, ...]]]:
        """Yield what arrives until ``due``; wait longer for what lags too far behind the ``newest`` frame."""
        while awaited and not stop.is_set():
            oldest = awaited[0]
            too_far = newest - oldest.frame >= _LAG_FRAMES
            until = max(due, self._clock() + self._settings.timeout_s) if too_far else due
            data = session.frames.take(oldest.frame, until, stop)
            if data is Missing.LATE:
                if not too_far or stop.is_set():
                    break
                session.failed = True
                raise CameraError(
                    f"carla {self._settings.place}: {session.frames.waiting_for(oldest.frame)} delivered nothing for "
                    f"frame {oldest.frame} within {self._settings.timeout_s:g} s"
                )
            awaited.popleft()
            if data is Missing.LOST:
                log.warning("carla picture lost", camera=self.name, frame=oldest.frame)
            else:
                yield oldest, data
        stop.wait(max(0.0, due - self._clock()))

    def _picture(self, frame_id: int, moment: Moment, data: tuple[Any, ...], town: str) -> Picture:
        image = data[0]
        lens = Lens(image.width, image.height, self._settings.fov)
        limits = Limits(self._settings.min_visible, self._settings.min_size_px, self._settings.max_distance_m)
        depth_m = metres(data[1]) if len(data) > 1 else None
        assert moment.solids is not None
        boxes = annotate(moment.solids, image.transform.get_inverse_matrix(), lens, depth_m, limits)
        return Picture(self.name, frame_id, rgb(image), moment.at, boxes, town)

    def _call(self, calls: CallThread, session: CarlaSession, work: Callable[[], T], limit_s: float) -> T:
        """Run ``work`` and turn what CARLA raises into ``CameraError``; ``limit_s`` bounds even a deadlock."""
        try:
            return calls.call(work, limit_s)
        except (RuntimeError, IndexError) as error:  # time-outs, destroyed actors; unknown blueprints
            session.failed = True
            raise CameraError(f"carla {self._settings.place}: {error}") from error

    def _end(self, session: CarlaSession, calls: CallThread) -> None:
        if not calls.stuck:
            try:
                calls.call(session.close, 3 * self._settings.timeout_s + 10)
            except CameraError as error:
                log.warning("carla session doesn't close", camera=self.name, reason=error)
        if calls.stuck:
            session.give_up()
        calls.end()


def rgb(image: Any) -> NDArray[np.uint8]:
    """Return a ``carla.Image`` (BGRA) as (H, W, 3) uint8, RGB."""
    pixels: NDArray[np.uint8] = np.ascontiguousarray(_bgra(image)[:, :, 2::-1])
    return pixels


def metres(image: Any) -> NDArray[np.float32]:
    """Return a depth camera's ``carla.Image`` as (H, W) float32 metres along the camera's axis.

    ``1000 (R + 256 G + 65536 B) / (256^3 - 1)``, Docs/ref_sensors.md.
    """
    blue, green, red = np.moveaxis(_bgra(image)[:, :, :3].astype(np.float32), -1, 0)
    depth: NDArray[np.float32] = (red + 256 * green + 65536 * blue) * np.float32(_FAR_M / (256**3 - 1))
    return depth


def _bgra(image: Any) -> NDArray[np.uint8]:
    return np.frombuffer(image.raw_data, dtype=np.uint8).reshape(image.height, image.width, 4)
