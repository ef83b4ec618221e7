"""A real mosquitto with a configuration of the test's own, on a free port of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from replayfleet.federation.wire.transport.broker import _reserved, find_mosquitto
from replayfleet.federation.wire.transport.interfaces import OnMessage, Session, Will
from replayfleet.federation.wire.transport.mqtt import MqttSession
from tests.support.ports import answers


@contextlib.contextmanager
def mosquitto(folder: Path, *lines: str) -> Iterator[int]:
    """Run it and yield its port; ends when the block does.

    Args:
        folder: for its files.
        lines: of its configuration, without ``listener``.
    """
    config, user = folder / "mosquitto.conf", ["user root"] if os.geteuid() == 0 else []
    with _reserved(None) as held, (folder / "mosquitto.log").open("wb") as noise:
        port = int(held.getsockname()[1])
        config.write_text("\n".join([f"listener {port} 127.0.0.1", *lines, *user, "log_type error", ""]))
        process = subprocess.Popen([str(find_mosquitto()), "-c", config], stdout=noise, stderr=noise)
        try:
            deadline = time.monotonic() + 60
            while not answers(port):
                assert process.poll() is None, (folder / "mosquitto.log").read_text()
                assert time.monotonic() < deadline, "mosquitto does not start"
                time.sleep(0.005)
            held.close()
            yield port
        finally:
            process.terminate()
            process.wait()


class Mqtt:
    """Makes sessions with a broker, as a service asks for them."""

    def __init__(self, url: str) -> None:
        self.url = url

    def session(self, client_id: str, *, on_message: OnMessage, will: Will | None) -> Session:
        return MqttSession(self.url, client_id, on_message=on_message, will=will)


def password_file(folder: Path, **users: str) -> Path:
    """Write mosquitto's password file for these users."""
    path = folder / "passwords"
    path.write_text("".join(f"{user.replace('_', '-')}:{password}\n" for user, password in users.items()))
    tool = shutil.which("mosquitto_passwd") or "/usr/bin/mosquitto_passwd"
    subprocess.run([tool, "-U", path], check=True)
    return path
