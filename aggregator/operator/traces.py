"""``aggregator serve --traces``: one OpenTelemetry trace a round, from its opening to the last swap of its models.

Spans are made from the journal's events; a thread of OpenTelemetry's sends them, and one that can't be sent is lost.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.transport.broker_address import is_loopback

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_ATTRIBUTES = ("client", "uploads", "downloads", "version", "blobs", "bytes", "by", "reason")


def check_traces(url: str) -> str:
    """Return the URL of an OpenTelemetry collector if traces can be sent there.

    Raises:
        SettingsError: It is none, others on the way could read along, or the packages aren't installed.
    """
    expected = "expected a collector's URL, for example http://127.0.0.1:4318/v1/traces"
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        usable = parts.scheme in {"http", "https"} and bool(host) and parts.port != 0
    except ValueError as error:
        raise SettingsError(f"--traces {url!r} is no URL ({error}); {expected}") from None
    if parts.username or parts.password:
        raise SettingsError("--traces: a URL with a password in it; set OTEL_EXPORTER_OTLP_HEADERS instead")
    if not usable:
        raise SettingsError(f"--traces {url!r}: {expected}")
    if parts.scheme == "http" and not is_loopback(host):
        raise SettingsError(f"--traces {url}: off this machine https:// is expected")
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise SettingsError("--traces needs OpenTelemetry: pip install 'replayfleet[traces]'")
    return url


def exporter_to(url: str) -> SpanExporter:
    """Return what sends spans to a collector by OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=url, timeout=5)


class Traces:
    """Turns events into spans, in the loop that tells them.

    A round's span ends when all that were sent its models serve them, or when the round after it is over.

    Args:
        fleet: its name.
        exporter: where spans go.
        wall_clock: Unix time.
    """

    def __init__(self, fleet: str, exporter: SpanExporter, wall_clock: Callable[[], float] = time.time) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "aggregator", "replayfleet.fleet": fleet})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("replayfleet")
        self._wall_clock = wall_clock
        self._open: dict[int, _Round] = {}

    def told(self, event: str, fields: Mapping[str, Any]) -> None:
        """Note an event of the journal."""
        now = self._wall_clock()
        match event, fields.get("round"):
            case "round opened", int(index):
                self._begin(index, now)
            case "round closed" | "round extended" | "upload accepted" | "upload rejected", int(index):
                self._of_open_round(event, index, fields, now)
            case "round committed", int(index):
                self._committed(index, fields, now)
            case "download confirmed" | "download refused", int(index):
                self._answered(event, index - 1, fields, now)
            case "client report", int(index):
                self._swapped(index - 1, fields, now)

    def close(self) -> None:
        """End what is open, and send what waits, for five seconds at most. Idempotent."""
        now = self._wall_clock()
        for index in list(self._open):
            self._end(index, now)
        self._provider.force_flush(5000)
        self._provider.shutdown()

    def _begin(self, index: int, now: float) -> None:
        for before in [its for its in self._open if its < index - 1 or its == index]:
            self._end(before, now)
        self._open[index] = _Round(self._tracer.start_span(f"round {index}", start_time=_ns(now)), now)

    def _of_open_round(self, event: str, index: int, fields: Mapping[str, Any], now: float) -> None:
        if (of_round := self._open.get(index)) is None:
            return
        if event == "round closed":
            self._add(of_round, "open", of_round.began, now, fields)
        else:
            name = "upload" if event.startswith("upload") else "extended"
            self._add(of_round, name, of_round.began, now, fields, failed=event != "upload accepted")

    def _committed(self, index: int, fields: Mapping[str, Any], now: float) -> None:
        of_round = self._open.get(index)
        if of_round is None or "recovered" in fields:
            return
        published = now - float(fields["publish_s"])
        self._add(of_round, "aggregate", published - float(fields["aggregate_s"]), published, {})
        self._add(of_round, "publish", published, now, fields)
        of_round.committed, of_round.awaited = now, int(fields["downloads"])
        if not of_round.awaited:
            self._end(index, now)

    def _answered(self, event: str, index: int, fields: Mapping[str, Any], now: float) -> None:
        of_round = self._open.get(index)
        if of_round is not None and of_round.committed is not None:
            self._add(of_round, "download", of_round.committed, now, fields, failed=event == "download refused")
            of_round.answered.add(str(fields.get("client")))
            self._end_if_over(index, of_round, now)

    def _swapped(self, index: int, fields: Mapping[str, Any], now: float) -> None:
        """A client's report follows its swap: it says how long that took."""
        of_round, client = self._open.get(index), str(fields.get("client"))
        took = fields.get("metrics", {}).get("swap_s", -1.0)
        if of_round is not None and of_round.committed is not None and 0 <= took <= now - of_round.committed:
            self._add(of_round, "swap", now - took, now, fields)
            of_round.swapped.add(client)
            self._end_if_over(index, of_round, now)

    def _end_if_over(self, index: int, of_round: _Round, now: float) -> None:
        if len(of_round.answered) >= of_round.awaited and len(of_round.swapped) >= of_round.awaited:
            self._end(index, now)

    def _add(
        self,
        of_round: _Round,
        name: str,
        begin: float,
        end: float,
        fields: Mapping[str, Any],
        *,
        failed: bool = False,
    ) -> None:
        from opentelemetry.trace import StatusCode

        told = {key: fields[key] for key in _ATTRIBUTES if isinstance(fields.get(key), (str, int, float))}
        span = self._tracer.start_span(name, of_round.context, attributes=told, start_time=_ns(begin))
        if failed:
            span.set_status(StatusCode.ERROR, str(fields.get("detail", ""))[:500])
        span.end(_ns(max(begin, end)))

    def _end(self, index: int, now: float) -> None:
        self._open.pop(index).span.end(_ns(now))


class _Round:
    """A round whose span is open."""

    def __init__(self, span: Span, began: float) -> None:
        from opentelemetry.trace import set_span_in_context

        self.span, self.began = span, began
        self.context: Context = set_span_in_context(span)
        self.committed: float | None = None
        self.awaited = 0
        self.answered: set[str] = set()
        self.swapped: set[str] = set()


def _ns(at: float) -> int:
    return int(at * 1e9)
