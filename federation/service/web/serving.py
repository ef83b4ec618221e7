"""Runs pages: their socket, uvicorn, and waiting for a port that somebody else still has."""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
import threading
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.logs import EventLogger

TRY_AGAIN_S = 10.0
MAX_CONNECTIONS = 600
"""Open ones; more are answered with 503 at once."""
SURPLUS = 16
"""So many are told; beyond them nobody is."""
FIRST_REQUEST_S = 10.0
"""A connection that has asked for nothing (more) by then, in whole, gives its place back."""


class _Listening(socket.socket):
    """Lets in as many as have a place: more would use up the descriptors that this process needs for its work.

    Counted here, because uvicorn hears of nobody who is yet to agree on TLS.

    Args:
        listening: whose place this takes.
        most: connections that may be open.
    """

    def __init__(self, listening: socket.socket, most: int) -> None:
        super().__init__(fileno=listening.detach())
        self._most = most
        self._let_in: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next one who is let in; ConnectionAbortedError, of which asyncio makes nothing, in their place."""
        connection, address = super().accept()
        self._let_in = [earlier for earlier in self._let_in if earlier.fileno() >= 0]
        if len(self._let_in) >= self._most:
            connection.close()
            raise ConnectionAbortedError
        self._let_in.append(connection)
        return connection, address


class _Punctual(H11Protocol):
    """HTTP for those who have something to ask: uvicorn's own lets a connection be silent for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(FIRST_REQUEST_S, self._expect_a_request)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.loop.call_later(FIRST_REQUEST_S, self._expect_a_request, self.cycle)

    def shutdown(self) -> None:
        """End what is told on and on, as if its browser had gone; uvicorn would wait, and cancel it noisily."""
        super().shutdown()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()

    def _expect_a_request(self, earlier: object = None) -> None:
        request: object = self.cycle  # None before the first one, whatever uvicorn's types say
        if request is earlier:
            self.transport.abort()


class WebServer:
    """Answers browsers on the thread that calls ``run``.

    Args:
        app: what answers.
        host: where; TLS is the caller's rule.
        port: 0 picks a free one.
        name: of what is served, for the log and for errors.
        tls: certificate and key, PEM; both or none.
        max_connections: open ones.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        name: str,
        tls: tuple[Path | None, Path | None] = (None, None),
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._host, self._port, self._name = host, port, name
        self._scheme = "http" if tls[0] is None else "https"
        self._log = EventLogger(name)
        self._over = threading.Event()
        self._most = max_connections + SURPLUS
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_Punctual,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=max_connections,
                backlog=self._most,
                timeout_graceful_shutdown=1,
                ssl_certfile=tls[0],
                ssl_keyfile=tls[1],
            )
        )
        self.url = ""
        """Where the pages are; empty until they are there."""

    def run(self) -> None:
        """Answer until a signal comes, on the main thread, or ``stop`` is called; a taken port is waited for.

        Raises:
            SettingsError: The address can't be ours.
        """
        listening = self._bound()
        if listening is None:
            return
        with listening:
            host, port = listening.getsockname()[:2]
            self.url = f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}/"
            self._log.info(self._name, url=self.url)
            asyncio.run(self._serve(_Listening(listening, self._most)))

    def stop(self) -> None:
        """Close the pages. Idempotent; any thread."""
        self._over.set()
        self._server.should_exit = True

    async def _serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._scheme == "https":  # whoever never agrees on TLS has asked for nothing either
            punctual = functools.partial(loop.create_server, ssl_handshake_timeout=FIRST_REQUEST_S)
            loop.create_server = punctual  # type: ignore[method-assign]  # uvicorn has no option for it
        with listening:
            await self._server.serve(sockets=[listening])

    def _bound(self) -> socket.socket | None:
        """Return a listening socket; a port that is taken is waited for, since whoever has it may end."""
        listening = self._try()
        if listening is None:
            self._log.warning(
                f"{self._name} waits", address=f"{self._host}:{self._port}", reason="another program has the port"
            )
        while listening is None and not self._over.wait(TRY_AGAIN_S):
            listening = self._try()
        return listening

    def _try(self) -> socket.socket | None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            return socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise SettingsError(
                f"{self._name} {self._host}:{self._port}: {error.strerror or error}; choose another address"
            ) from error
