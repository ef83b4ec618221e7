"""Runs the console: its socket, uvicorn, and waiting for a port that somebody else still has."""

from __future__ import annotations

import errno
import socket
import time

import uvicorn

from replayfleet.aggregator.console.access import Access
from replayfleet.aggregator.console.app import Console
from replayfleet.aggregator.console.charts import warm
from replayfleet.aggregator.console.guard import Rules
from replayfleet.aggregator.console.settings import ConsoleSettings
from replayfleet.aggregator.console.watch import Watch
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.logs import EventLogger

TRY_AGAIN_S = 10.0
MAX_CONNECTIONS = 600
"""Open ones; more are answered with 503 at once."""

_log = EventLogger("console")


def run(settings: ConsoleSettings) -> None:
    """Answer browsers until a signal comes.

    Raises:
        SettingsError: The data dir can't be read, or the address can't be ours.
    """
    watch = Watch(settings.data_dir)
    watch.number()
    access = Access(settings.tokens, reading_needs_token=not settings.is_private)
    secure = settings.tls_cert is not None
    console = Console(watch, Rules(settings.hosts, access), secure=secure)
    config = uvicorn.Config(
        console.app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    server = uvicorn.Server(config)
    warm()
    with _bound(*settings.address) as listening:
        host, port = listening.getsockname()[:2]
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        _log.info("console", url=f"{'https' if secure else 'http'}://{place}/")
        server.run(sockets=[listening])


def _bound(host: str, port: int) -> socket.socket:
    """Return a listening socket; a port that is taken is waited for, since whoever has it may end."""
    listening = _try(host, port)
    if listening is None:
        _log.warning("console waits", address=f"{host}:{port}", reason="another program has the port")
    while listening is None:
        time.sleep(TRY_AGAIN_S)
        listening = _try(host, port)
    return listening


def _try(host: str, port: int) -> socket.socket | None:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise SettingsError(f"console {host}:{port}: {error.strerror or error}; choose another address") from error
