"""A drive through a CARLA world as a sequence of annotated pictures, in the process that talks to the simulator.

The simulator runs in synchronous mode with a fixed step, and exactly one client ticks it. Pictures lag behind ticks by
a couple of frames, so each is matched to the frame that its tick returned, and gets the boxes of that moment.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.cameras.carla.boxes import Lens, Limits, annotate
from replayfleet.edge_client.cameras.carla.frames import Missing
from replayfleet.edge_client.cameras.carla.session import CarlaSession, Moment
from replayfleet.edge_client.cameras.carla.settings import CarlaSettings, import_carla
from replayfleet.edge_client.flow import CameraError, Picture
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

_LAG_FRAMES = 8
"""So many frames may pass before the simulation waits for a picture; documented are a couple."""

_FAR_M = 1000.0


def carla_drive(
    settings: CarlaSettings, name: str, take_stderr: Callable[[], Any], alive: Callable[[], None]
) -> CarlaDrive:
    """Return what takes a vehicle's pictures; what CARLA and its guard write to standard error is for people."""
    return CarlaDrive(import_carla(), settings, name, beat=alive)


class CarlaDrive:
    """One stay in a world.

    Args:
        carla: the package.
        settings: where, and what.
        name: of the camera within its client.
        beat: called after every frame, pictured or not.
    """

    def __init__(
        self,
        carla: Any,
        settings: CarlaSettings,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._clock = clock
        self._beat = beat
        self._session = CarlaSession(carla, settings, clock)

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield pictures until ``stop`` is set, at most as fast as the clock on the wall; once per object.

        However it ends, world and traffic manager get their settings back and the vehicle disappears.

        Raises:
            CameraError: No simulator, one of another version, one that stands still, one that others tick.
        """
        try:
            with self._errors_told():
                self._session.open()
                log.info("carla session opened", server=self._settings.place, town=self._session.town)
            yield from self._drive(stop)
        finally:
            self._session.close()

    def _drive(self, stop: threading.Event) -> Iterator[Picture]:
        step_s = self._session.fixed_step_s
        awaited: collections.deque[Moment] = collections.deque()
        first_frame: int | None = None
        due = self._clock()
        while not stop.is_set():
            with self._errors_told():
                moment = self._session.step()
            self._beat()
            if moment.solids is not None:
                awaited.append(moment)
            # Another client's ticks set the pace of one that waits for them.
            due = max(due + step_s, self._clock()) if self._settings.tick else self._clock()
            for taken, data in self._ready(awaited, moment.frame, due, stop):
                first_frame = taken.frame if first_frame is None else first_frame
                frame_id = (taken.frame - first_frame) // self._settings.frames_per_picture(step_s)
                yield self._picture(frame_id, taken, data)

    def _ready(
        self, awaited: collections.deque[Moment], newest: int, due: float, stop: threading.Event
    ) -> Iterator[tuple[Moment, tuple[Any, ...]]]:
        """Yield what arrives until ``due``; wait longer for what lags too far behind the ``newest`` frame."""
        frames = self._session.frames
        while awaited and not stop.is_set():
            oldest = awaited[0]
            too_far = newest - oldest.frame >= _LAG_FRAMES
            until = max(due, self._clock() + self._settings.timeout_s) if too_far else due
            data = frames.take(oldest.frame, until, stop)
            if data is Missing.LATE:
                if not too_far or stop.is_set():
                    break
                raise CameraError(
                    f"carla {self._settings.place}: {frames.waiting_for(oldest.frame)} delivered nothing for "
                    f"frame {oldest.frame} within {self._settings.timeout_s:g} s"
                )
            awaited.popleft()
            if data is Missing.LOST:
                log.warning("carla picture lost", camera=self._name, frame=oldest.frame)
            else:
                yield oldest, data
        stop.wait(max(0.0, due - self._clock()))

    def _picture(self, frame_id: int, moment: Moment, data: tuple[Any, ...]) -> Picture:
        image = data[0]
        lens = Lens(image.width, image.height, self._settings.fov)
        limits = Limits(self._settings.min_visible, self._settings.min_size_px, self._settings.max_distance_m)
        depth_m = metres(data[1]) if len(data) > 1 else None
        assert moment.solids is not None
        boxes = annotate(moment.solids, image.transform.get_inverse_matrix(), lens, depth_m, limits)
        return Picture(self._name, frame_id, rgb(image), moment.at, boxes, self._session.town)

    @contextlib.contextmanager
    def _errors_told(self) -> Iterator[None]:
        """Turn what CARLA raises into ``CameraError``: time-outs and destroyed actors, unknown blueprints."""
        try:
            yield
        except (RuntimeError, IndexError) as error:
            self._session.failed = True
            raise CameraError(f"carla {self._settings.place}: {error}") from error


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
