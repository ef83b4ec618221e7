"""``GET /healthz``, ``/metrics`` (Prometheus) and what a service adds; on loopback unless the operator says other."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.web.hosts import means_this_machine

log = EventLogger(__name__)

OFF = -1
"""The port number that means: no endpoint."""

Health = Callable[[], Mapping[str, Any]]
"""Called on a request's thread; ``healthy`` (bool) decides between 200 and 503, the rest is shown."""


Answer = tuple[HTTPStatus, Mapping[str, Any]]

Endpoint = Callable[[bytes], Answer]
"""A request's body -> what is answered, as JSON. Called on a request's thread."""

AGAIN_S = 10.0
"""So often a port that another program has is tried."""

_STARTING: Mapping[str, Any] = {"healthy": False, "phase": "starting"}

MAX_BODY_BYTES = 64 * 1024
"""Larger requests are refused before they are read."""

MAX_CONNECTIONS = 64
"""Each has a thread and a file of this process, whoever opened it; more are closed at once."""
CONNECTION_S = 30.0
"""After which it is closed, however much of a request came."""


class HealthServer:
    """The operations endpoint of one process; until ``answer`` is called it says that the service starts.

    A port that another program has is said in the log and tried again: no service ends because of it.

    Args:
        registry: what ``/metrics`` shows.
        port: 0 picks a free one, ``OFF`` starts nothing.
        host: loopback by default, for without a token the endpoint has no authentication, and answers no other name.
        token: that has to be shown; empty: none.

    Raises:
        SettingsError: The address can't be used.
    """

    def __init__(self, registry: CollectorRegistry, *, port: int = 0, host: str = "127.0.0.1", token: str = "") -> None:
        self._service = _Service(registry, token)
        self._server: _Server | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if port == OFF:
            return
        self._address = (host, port)
        self._server = self._bound()
        if self._server is None:
            reason = "another program has the port"
            log.warning("health and metrics wait", address=f"{host}:{port}", reason=reason, again_s=AGAIN_S)
        self._thread = threading.Thread(target=self._serve, name="health", daemon=True)
        self._thread.start()

    def answer(
        self,
        health: Health,
        *,
        get: Mapping[str, Endpoint] | None = None,
        post: Mapping[str, Endpoint] | None = None,
    ) -> None:
        """Answer from now on.

        Args:
            health: what ``/healthz`` says.
            get: path -> answer; the body is empty.
            post: path -> answer.
        """
        service = self._service
        service.get, service.post, service.health = get or {}, post or {}, health

    @property
    def url(self) -> str:
        """``http://host:port``; empty when off, or while another program has the port."""
        if self._server is None:
            return ""
        host, port = self._server.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else str(host)}:{port}"

    def stop(self) -> None:
        """Close the port. Idempotent."""
        self._over.set()
        if self._server is not None:
            self._server.shutdown()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._server is not None:
            self._server.server_close()
            self._server = None

    def _serve(self) -> None:
        while self._server is None:
            if self._over.wait(AGAIN_S):
                return
            self._server = self._bound()
        self._server.serve_forever(0.1)

    def _bound(self) -> _Server | None:
        host, port = self._address
        try:
            return _Server(self._address, self._service)
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                return None
            reason = getattr(error, "strerror", None) or str(error)
            raise SettingsError(f"{host}:{port} for health and metrics: {reason}; choose another address") from error


class _Service:
    def __init__(self, registry: CollectorRegistry, token: str) -> None:
        self.registry = registry
        self.token = token
        self.health: Health | None = None
        self.get: Mapping[str, Endpoint] = {}
        self.post: Mapping[str, Endpoint] = {}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MAX_CONNECTIONS  # of five, the kernel resets some of sixteen that come at once

    def __init__(self, address: tuple[str, int], service: _Service) -> None:
        self.service = service
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, if there is a place."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread is to be had
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Give the place back when all is said."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One who goes away before the answer is no event; anything else stands in the log, in its form."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            log.error("request failed", client=client_address, reason=traceback.format_exc())


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10

    def setup(self) -> None:
        """Begin, and be over in time."""
        super().setup()
        self._over = threading.Timer(CONNECTION_S, self._close)
        self._over.daemon = True
        self._over.start()

    def finish(self) -> None:
        """All is said."""
        self._over.cancel()
        super().finish()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Answer what there is, 404 for the rest."""
        if not self._may():
            return
        path, _, _ = self.path.partition("?")  # nothing is asked for beside it
        if path == "/healthz":
            report = dict(_STARTING if self.server.service.health is None else self.server.service.health())
            status = HTTPStatus.OK if report.get("healthy") else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(status, "application/json", json.dumps(report, default=str).encode() + b"\n")
        elif path == "/metrics":
            self._metrics()
        elif self.server.service.health is None:
            self._json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "starting"})
        elif path in self.server.service.get:
            self._run(self.server.service.get[path], b"")
        else:
            posted = (f"POST {path}" for path in self.server.service.post)
            known = ["/healthz", "/metrics", *self.server.service.get, *posted]
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", f"try {' or '.join(known)}\n".encode())

    def do_HEAD(self) -> None:
        """Answer as ``do_GET``, without what ``_answer`` then leaves out."""
        self.do_GET()

    def do_POST(self) -> None:
        """Answer what a service added; no web page reaches it: the type, and the name that it goes by, keep it out."""
        if not self._may():
            return
        endpoint = self.server.service.post.get(self.path)
        length = self.headers.get("Content-Length", "")
        if self.server.service.health is None:
            self._json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "starting"})
        elif endpoint is None:
            self._json(HTTPStatus.NOT_FOUND, {"error": f"nothing is posted to {self.path}"})
        elif self.headers.get_content_type() != "application/json":
            self._json(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, {"error": "expected Content-Type: application/json"})
        elif not length.isdecimal():
            self._json(
                HTTPStatus.LENGTH_REQUIRED, {"error": "expected Content-Length: what comes in pieces isn't read"}
            )
        elif len(length) > 9 or int(length) > MAX_BODY_BYTES:
            self._json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"expected at most {MAX_BODY_BYTES} bytes"})
        else:
            self._run(endpoint, self.rfile.read(int(length)))

    def _may(self) -> bool:
        """Whether the token was shown, or without one this machine was asked for; a refusal is answered here."""
        token, shown = self.server.service.token, self.headers.get("Authorization", "")
        if not token and not means_this_machine(self.headers.get("Host", "")):
            self._json(
                HTTPStatus.MISDIRECTED_REQUEST, {"error": "expected a Host that is localhost or an address of it"}
            )
            return False
        if not token or hmac.compare_digest(f"Bearer {token}".encode(), shown.encode(errors="replace")):
            return True
        self._json(HTTPStatus.UNAUTHORIZED, {"error": "expected Authorization: Bearer TOKEN"})
        return False

    def _metrics(self) -> None:
        try:
            text = generate_latest(self.server.service.registry)
        except OSError as error:  # what a collector says that has nothing to tell now
            self._json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)})
            return
        self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, text)

    def _run(self, endpoint: Endpoint, body: bytes) -> None:
        try:
            status, answer = endpoint(body)
        except Exception:  # root of a request's thread
            log.exception("request failed", path=self.path)
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "see the log"}
        self._json(status, answer)

    def _json(self, status: HTTPStatus, answer: Mapping[str, Any]) -> None:
        self._answer(status, "application/json", json.dumps(answer, default=str).encode() + b"\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no events."""

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
