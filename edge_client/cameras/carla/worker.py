"""The process that talks to CARLA.

A client of another version may crash, its traffic manager may deadlock, and some of its calls hold Python's lock until
they time out (``get_world`` of 0.9.16 does). None of that may reach the process that serves other cameras.

It drives until its standard input ends or a signal comes, and puts the simulator's settings back before it ends itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import BinaryIO

import msgspec

from replayfleet.edge_client.cameras.carla.drive import CarlaDrive
from replayfleet.edge_client.cameras.carla.messages import Beat, Job, Line, Lost, Message, shot_of, to_line
from replayfleet.edge_client.cameras.carla.settings import CarlaSettings, import_carla
from replayfleet.edge_client.flow import CameraError
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.signals import stopped_by_signals


class _Sender(logging.Handler):
    """Writes messages, from any thread; log records become messages."""

    def __init__(self, output: BinaryIO) -> None:
        super().__init__(logging.INFO)
        self._output = output

    def send(self, message: Message, pixels: bytes = b"") -> None:
        """Write a message and what follows it."""
        with self.lock or threading.RLock():
            self._output.write(to_line(message) + pixels)
            self._output.flush()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record."""
        fields = {key: str(value) for key, value in getattr(record, "fields", {}).items()}
        with contextlib.suppress(OSError):
            self.send(Line(record.levelname, record.getMessage(), fields))


def main() -> None:
    """Drive until the input ends."""
    sender = _Sender(_private_stdout())
    logging.basicConfig(handlers=[sender], level=logging.INFO, force=True)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    stop = threading.Event()
    threading.Thread(target=_stop_at_the_end, args=(sys.stdin.buffer, stop), daemon=True).start()
    with stopped_by_signals(stop), contextlib.suppress(OSError):  # the parent is gone: the drive has ended by then
        try:
            drive = CarlaDrive(
                import_carla(), CarlaSettings(**job.settings), job.name, beat=lambda: sender.send(Beat())
            )
            with contextlib.closing(drive.pictures(stop)) as pictures:  # type: ignore[type-var]
                for picture in pictures:
                    sender.send(shot_of(picture), picture.pixels.tobytes())
        except (CameraError, SettingsError) as error:
            sender.send(Lost(str(error)))
    os._exit(0)  # CARLA's own threads must not keep the process alive


def _stop_at_the_end(requests: BinaryIO, stop: threading.Event) -> None:
    requests.read()
    stop.set()


def _private_stdout() -> BinaryIO:
    """Keep standard output for messages; what CARLA prints goes to standard error."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output
