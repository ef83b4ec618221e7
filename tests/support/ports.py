"""Ports of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return one on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Whether somebody listens on it."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
