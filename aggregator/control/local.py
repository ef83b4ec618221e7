"""The verbs over a socket in the data dir, for its owner and root: one line of JSON each way (``control.caller``).

Sizes and times are bounded, and whatever bytes come end nothing but their connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import struct
import threading
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.aggregator.control.caller import NO_REQUEST, REQUEST_S, SOCKET, Answer, Request, short_place
from replayfleet.aggregator.control.door import Control
from replayfleet.aggregator.control.verbs import MAX_VERB_BYTES, VerbRefused
from replayfleet.aggregator.records.deeds import who_is
from replayfleet.federation.errors import UNREADABLE, ReplayfleetError, SettingsError
from replayfleet.federation.service.logs import EventLogger

MAX_REQUEST_BYTES = MAX_VERB_BYTES + 1024
MAX_CONNECTIONS = 16
_CREDENTIALS = struct.Struct("iII")

_log = EventLogger("aggregator")
_request = msgspec.json.Decoder(Request)  # made at import, for threads: children.decoder_of


class LocalSocket:
    """Listens while the aggregator runs.

    Args:
        folder: the claimed data dir; the socket of a process that was killed is taken away.
        control: does what is asked.

    Raises:
        SettingsError: The folder takes no socket.
    """

    def __init__(self, folder: Path, control: Control) -> None:
        with short_place(folder) as place:
            try:
                (folder / SOCKET).unlink(missing_ok=True)
                self._server = _Server(str(place / SOCKET), control)
                self._bound = (folder / SOCKET).lstat()
            except OSError as error:
                raise SettingsError(f"{folder / SOCKET}: no socket can be made ({error.strerror or error})") from error
        self._path = folder / SOCKET
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="control", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close it and take it away, unless another process has put its own there. Idempotent."""
        self._server.shutdown()
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self._path.lstat(), self._bound):
                self._path.unlink()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, path: str, control: Control) -> None:
        self.control = control
        self.free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(path, _Handler)

    def server_activate(self) -> None:
        """Listen, once nobody else can connect."""
        Path(str(self.server_address)).chmod(0o600)
        super().server_activate()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether to answer: our own user or root, and not too many at once."""
        return _peer(request)[1] in {os.geteuid(), 0} and self.free.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own."""
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread is to be had
            self.free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one, then there is room for another."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One who goes away in the middle is no event."""
        _log.debug("control connection ended")


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    timeout = REQUEST_S

    def handle(self) -> None:
        """Answer one request."""
        try:
            answer = self._answer(self.rfile.readline(MAX_REQUEST_BYTES + 1))
        except ReplayfleetError as error:
            answer = Answer(refused=str(error))
        self.wfile.write(msgspec.json.encode(answer) + b"\n")

    def _answer(self, line: bytes) -> Answer:
        if len(line) > MAX_REQUEST_BYTES:
            raise VerbRefused(f"a request of more than {MAX_REQUEST_BYTES} bytes")
        try:
            request = _request.decode(line)
        except UNREADABLE as error:
            raise VerbRefused(f"{NO_REQUEST}: {error}") from error
        control = self.server.control
        if request.ask == "look":
            return Answer(view=control.look())
        if request.classes:
            who = request.who or who_is(*_peer(self.request)[:2])
            return Answer(plan=control.add_classes(request.classes, who, only_plan=request.ask == "plan"))
        if request.verb is None:
            raise VerbRefused("a verb is missing")
        if request.ask == "plan":
            return Answer(plan=control.plan(request.verb))
        return Answer(plan=control.do(request.verb, request.who or who_is(*_peer(self.request)[:2]), request.agreed))


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group at the other end, as the kernel knows them."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(said)
    return pid, uid, gid
