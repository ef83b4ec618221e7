"""``GET /healthz`` and ``GET /metrics`` (Prometheus), on loopback unless the operator says otherwise."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from federation.errors import SettingsError

OFF = -1
"""The port number that means: no endpoint."""

Health = Callable[[], Mapping[str, Any]]
"""Called on a request's thread; ``healthy`` (bool) decides between 200 and 503, the rest is shown."""


class HealthServer:
    """The operations endpoint of one process.

    Args:
        health: what ``/healthz`` says.
        registry: what ``/metrics`` shows.
        port: 0 picks a free one, ``OFF`` starts nothing.
        host: loopback by default, for the endpoint has no authentication.

    Raises:
        SettingsError: The port is in use or not allowed.
    """

    def __init__(self, health: Health, registry: CollectorRegistry, *, port: int = 0, host: str = "127.0.0.1") -> None:
        self._server: _Server | None = None
        if port == OFF:
            return
        try:
            self._server = _Server((host, port), health, registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise SettingsError(f"health port {host}:{port}: {reason}; choose another with --health-port") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)
        self._thread.start()

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

    def __init__(self, address: tuple[str, int], health: Health, registry: CollectorRegistry) -> None:
        self.health = health
        self.registry = registry
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10

    def do_GET(self) -> None:
        """Answer the two paths, 404 for the rest."""
        if self.path == "/healthz":
            report = dict(self.server.health())
            status = HTTPStatus.OK if report.get("healthy") else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(status, "application/json", json.dumps(report, default=str).encode() + b"\n")
        elif self.path == "/metrics":
            self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self.server.registry))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"try /healthz or /metrics\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no events."""

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
