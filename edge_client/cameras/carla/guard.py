"""Gives a simulator back its settings when the process that borrowed them is gone.

A synchronous server waits for its ticking client for ever, also after ``kill -9``. So the client starts this small
process, tells it over a pipe what to put back, and lets it go once it has done so itself. When the pipe breaks without
that, the guard puts back what it was told. It imports CARLA only then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec

from replayfleet.federation.children import child_command
from replayfleet.federation.errors import UNREADABLE

FIELDS = ("synchronous_mode", "fixed_delta_seconds", "no_rendering_mode")
"""Of ``carla.WorldSettings``: what a camera changes."""

PATIENCE_S = 60.0
"""So long a guard tries to reach a simulator that doesn't answer."""

_ANSWER_S = 10.0
_PROBE_S = 2.0
_PAUSE_S = 2.0
_COMMAND = child_command("replayfleet.edge_client.cameras.carla.guard")


class Duty(msgspec.Struct, frozen=True):
    """What to put back.

    Attributes:
        host: of the simulator.
        port: of the simulator.
        episode: ``carla.World.id``; another episode is somebody else's, and stays untouched.
        settings: values of ``FIELDS``; None for a client that changed none.
        actor_ids: to destroy, in this order.
    """

    host: str
    port: int
    episode: int
    settings: dict[str, Any] | None
    actor_ids: tuple[int, ...]


class Guard:
    """The client's end of a guard process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches a whole session
        )

    def promise(self, duty: Duty) -> None:
        """Tell what to put back from now on, instead of anything told before."""
        self._write(duty)

    def release(self) -> None:
        """Everything was put back; the guard ends."""
        self._write(None)
        self._close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def abandon(self) -> None:
        """Leave the rest to the guard; it ends when it is done, or after a minute without an answer."""
        self._close()
        threading.Thread(target=self._process.wait, name="carla guard", daemon=True).start()

    def _write(self, message: Duty | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def _close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def saved(settings: Any) -> dict[str, Any]:
    """Return what of ``carla.WorldSettings`` a camera changes."""
    return {field: getattr(settings, field) for field in FIELDS}


def put_back(world: Any, values: dict[str, Any]) -> None:
    """Give a world back the settings it had, and leave alone whatever else was changed meanwhile."""
    settings = world.get_settings()
    for field in FIELDS:
        setattr(settings, field, values[field])
    world.apply_settings(settings)


def somebody_ticks(world: Any, wait_s: float) -> bool:
    """Say whether a synchronous world moves on within ``wait_s``."""
    try:
        world.wait_for_tick(wait_s)
    except RuntimeError:
        return False
    return True


def restore(carla: Any, duty: Duty) -> str:
    """Put back what ``duty`` says, and return what was done.

    Raises:
        RuntimeError: The simulator doesn't answer.
    """
    client = carla.Client(duty.host, duty.port)
    client.set_timeout(_ANSWER_S)
    world = client.get_world()
    if world.id != duty.episode:
        return "nothing to put back, the world is another one"
    done = "settings left alone"
    if duty.settings is not None:
        if world.get_settings().synchronous_mode and somebody_ticks(world, _PROBE_S):
            done = "settings left alone, another client ticks"
        else:
            put_back(world, duty.settings)
            done = "settings put back"
    client.apply_batch([carla.command.DestroyActor(actor_id) for actor_id in duty.actor_ids])
    return f"{done}, {len(duty.actor_ids)} actors destroyed"


def main() -> None:
    """Read duties from standard input; when it breaks, do the last one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    duty: Duty | None = None
    for line in sys.stdin:
        with contextlib.suppress(*UNREADABLE):  # torn by a kill in the middle of writing
            duty = msgspec.json.decode(line, type=Duty | None)
            if duty is None:
                break
    if duty is not None:
        _restore_patiently(duty)
    sys.stdout.flush()
    os._exit(0)  # CARLA's own threads must not keep the guard alive


def _restore_patiently(duty: Duty) -> None:
    import carla  # type: ignore[import-not-found, unused-ignore]

    from replayfleet.federation.service.logs import EventLogger, configure_logging

    configure_logging()
    log = EventLogger("carla guard")
    where = f"{duty.host}:{duty.port}"
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            log.warning("carla client went without restoring", server=where, done=restore(carla, duty))
        except RuntimeError as error:
            if time.monotonic() < until:
                time.sleep(_PAUSE_S)
                continue
            log.error("carla settings not restored", server=where, reason=error)
        return
