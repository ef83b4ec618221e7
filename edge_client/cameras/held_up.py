"""A camera whose recording waits while whoever learns from it can't keep up; a live one never waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from replayfleet.edge_client.flow import Camera, Picture

_LOOK_S = 0.05


def held_up(
    cameras: Sequence[Camera], has_room: Callable[[], bool], all_ended: Callable[[], None]
) -> tuple[Camera, ...]:
    """Return cameras that wait for room after each picture of a recording, and tell when the last one has ended."""
    playing = {camera.name for camera in cameras}

    def ended(name: str) -> None:
        playing.discard(name)
        if not playing:
            all_ended()

    return tuple(_HeldUp(camera, has_room, ended) for camera in cameras)


class _HeldUp:
    def __init__(self, camera: Camera, has_room: Callable[[], bool], ended: Callable[[str], None]) -> None:
        self._camera = camera
        self._has_room = has_room
        self._ended = ended
        self.name = camera.name
        self.live = camera.live
        self.class_names = camera.class_names

    @property
    def trouble(self) -> str:
        return str(getattr(self._camera, "trouble", ""))

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        for picture in self._camera.pictures(stop):
            yield picture
            while not (self.live or self._has_room() or stop.is_set()):
                stop.wait(_LOOK_S)
        if not (self.live or stop.is_set()):
            self._ended(self.name)

    def describe(self) -> str:
        return self._camera.describe()
