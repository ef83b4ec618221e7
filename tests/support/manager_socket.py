"""What systemd's side of sd_notify hears: a real unix datagram socket."""

from __future__ import annotations

import contextlib
import socket
import time


class ManagerSocket:
    """Bound for the time of a ``with`` block.

    Args:
        address: a path, or ``@name`` for an abstract one, as in ``$NOTIFY_SOCKET``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def __enter__(self) -> ManagerSocket:
        self._socket.bind(f"\0{self.address[1:]}" if self.address[0] == "@" else self.address)
        self._socket.setblocking(False)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def read(self) -> list[str]:
        """Everything that was said since the last call."""
        said = []
        with contextlib.suppress(BlockingIOError):
            while True:
                said.append(self._socket.recv(4096).decode())
        return said

    def hears(self, line: str, within_s: float) -> bool:
        """Whether a line is said from now on, within so many seconds."""
        self.read()
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if any(line in message.splitlines() for message in self.read()):
                return True
            time.sleep(0.02)
        return False
