"""``GET /healthz``, ``/metrics`` (Prometheus) and what a service adds; on loopback unless the operator says other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

OFF = -1
"""The port number that means: no endpoint."""

Health = Callable[[], Mapping[str, Any]]
"""Called on a request's thread; ``healthy`` (bool) decides between 200 and 503, the rest is shown."""


Answer = tuple[HTTPStatus, Mapping[str, Any]]

Endpoint = Callable[[bytes], Answer]
"""A request's body -> what is answered, as JSON. Called on a request's thread."""

_STARTING: Mapping[str, Any] = {"healthy": False, "phase": "starting"}

MAX_BODY_BYTES = 64 * 1024
"""Larger requests are refused before they are read."""


class HealthServer:
    """The operations endpoint of one process; until ``answer`` is called it says that the service starts.

    Args:
        registry: what ``/metrics`` shows.
        port: 0 picks a free one, ``OFF`` starts nothing.
        host: loopback by default, for the endpoint has no authentication.

    Raises:
        SettingsError: The port is in use or not allowed.
    """

    def __init__(self, registry: CollectorRegistry, *, port: int = 0, host: str = "127.0.0.1") -> None:
        self._server: _Server | None = None
        if port == OFF:
            return
        try:
            self._server = _Server((host, port), registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise SettingsError(f"health port {host}:{port}: {reason}; choose another with --health-port") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)
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
        if self._server is not None:
            self._server.get, self._server.post = get or {}, post or {}
            self._server.health = health

    @property
    def url(self) -> str:
        """``http://host:port``, or empty when off."""
        if self._server is None:
            return ""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def stop(self) -> None:
        """Close the port. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        self.registry = registry
        self.health: Health | None = None
        self.get: Mapping[str, Endpoint] = {}
        self.post: Mapping[str, Endpoint] = {}
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10

    def do_GET(self) -> None:
        """Answer what there is, 404 for the rest."""
        if self.path == "/healthz":
            report = dict(_STARTING if self.server.health is None else self.server.health())
            status = HTTPStatus.OK if report.get("healthy") else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(status, "application/json", json.dumps(report, default=str).encode() + b"\n")
        elif self.path == "/metrics":
            self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self.server.registry))
        elif self.server.health is None:
            self._json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "starting"})
        elif self.path in self.server.get:
            self._run(self.server.get[self.path], b"")
        else:
            known = ["/healthz", "/metrics", *self.server.get]
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", f"try {' or '.join(known)}\n".encode())

    def do_POST(self) -> None:
        """Answer what a service added; a web page of another origin can't reach it."""
        endpoint = self.server.post.get(self.path)
        length = self.headers.get("Content-Length", "")
        if self.server.health is None:
            self._json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "starting"})
        elif endpoint is None:
            self._json(HTTPStatus.NOT_FOUND, {"error": f"nothing is posted to {self.path}"})
        elif self.headers.get_content_type() != "application/json":
            self._json(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, {"error": "expected Content-Type: application/json"})
        elif not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self._json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"expected at most {MAX_BODY_BYTES} bytes"})
        else:
            self._run(endpoint, self.rfile.read(int(length)))

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
        self.wfile.write(body)
