"""``edge-client start --thumbnails``: each camera's newest picture, small, for the console of the aggregator."""

from __future__ import annotations

import threading
from collections.abc import Callable

from replayfleet.edge_client.flow import Shown
from replayfleet.edge_client.operator.studio.studio import answered_corners, jpeg
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.thumbnails import MAX_PICTURE_BYTES, MAX_WIDTH, Thumbnail, encode_thumbnail

EVERY_S = 5.0
"""Between two pictures of a camera."""

log = EventLogger(__name__)


class Thumbnails:
    """Sends what is new, on a thread of its own.

    Args:
        say: takes a message for the client's topic; may be called on any thread. What can't be sent now needn't be.
        every_s: between two pictures of a camera.
    """

    def __init__(self, say: Callable[[bytes], None], every_s: float = EVERY_S) -> None:
        self._say = say
        self._every_s = every_s
        self._newest: dict[str, Shown] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thumbnails", daemon=True)
        self._thread.start()

    def watch(self, shown: Shown) -> None:
        """Keep a camera's newest picture; called on the serving thread."""
        self._newest[shown.picture.camera] = shown

    def close(self) -> None:
        """Send no more. Idempotent."""
        self._stopping.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            for camera in sorted(self._newest.copy()):
                shown = self._newest.pop(camera)
                try:
                    picture = jpeg(shown.picture.pixels, answered_corners(shown), MAX_PICTURE_BYTES, MAX_WIDTH)
                    if picture:
                        self._say(encode_thumbnail(Thumbnail(camera, shown.picture.frame_id, picture)))
                except Exception:  # root of a thread
                    log.exception("thumbnail not sent", camera=camera)
