from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from replayfleet.aggregator.operator.traces import Traces, check_traces, exporter_to
from replayfleet.federation.errors import SettingsError


class Told:
    """Traces with a clock that the test sets, and what they sent."""

    def __init__(self) -> None:
        self.now = 100.0
        self._exporter = InMemorySpanExporter()
        self.traces = Traces("yard", self._exporter, lambda: self.now)

    def at(self, now: float, event: str, **fields: object) -> None:
        self.now = now
        self.traces.told(event, fields)

    def spans(self) -> list[ReadableSpan]:
        self.traces.close()
        return list(self._exporter.get_finished_spans())


def one_round(told: Told, start: float = 100.0, index: int = 0) -> None:
    told.at(start, "round opened", round=index, expected=2)
    told.at(start + 1, "upload accepted", round=index, client="a", bytes=10)
    told.at(start + 2, "upload accepted", round=index, client="b", bytes=10)
    told.at(start + 2, "round closed", round=index, by="quorum", uploads=2, open_s=2.0)
    told.at(start + 5, "round committed", round=index, downloads=2, aggregate_s=2.0, publish_s=1.0)
    told.at(start + 5, "round opened", round=index + 1, expected=2)
    told.at(start + 6, "download confirmed", round=index + 1, client="a", version=2, bytes=5)
    told.at(start + 7, "download confirmed", round=index + 1, client="b", version=2, bytes=5)
    told.at(start + 8, "client report", round=index + 1, client="a", metrics={"swap_s": 0.5})


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def test_a_round_is_one_trace_from_its_opening_to_the_last_swap() -> None:
    told = Told()
    one_round(told)
    told.at(109, "client report", round=1, client="b", metrics={"swap_s": 0.25})
    before = told.now
    told.at(200, "upload accepted", round=1, client="a", bytes=1)
    spans = told.spans()
    root = next(span for span in spans if span.name == "round 0")
    assert seconds(root) == (100.0, before)
    children = [span for span in spans if span.parent is not None and span.parent.span_id == root.context.span_id]
    assert {span.context.trace_id for span in children} == {root.context.trace_id}
    assert sorted((span.name, *seconds(span)) for span in children) == [
        ("aggregate", 102.0, 104.0),
        ("download", 105.0, 106.0),
        ("download", 105.0, 107.0),
        ("open", 100.0, 102.0),
        ("publish", 104.0, 105.0),
        ("swap", 107.5, 108.0),
        ("swap", 108.75, 109.0),
        ("upload", 100.0, 101.0),
        ("upload", 100.0, 102.0),
    ]
    assert root.resource.attributes["replayfleet.fleet"] == "yard"


def test_a_round_whose_client_stays_silent_ends_when_the_one_after_it_is_over() -> None:
    told = Told()
    for index in range(4):
        one_round(told, 100.0 + 10 * index, index)
    spans = told.spans()
    ends = {span.name: seconds(span)[1] for span in spans if span.name.startswith("round ")}
    assert ends["round 0"] == 115.0
    assert sorted(ends) == [f"round {index}" for index in range(5)]


def test_a_refusal_is_an_error_that_says_why() -> None:
    told = Told()
    told.at(100, "round opened", round=0)
    told.at(101, "upload rejected", round=0, client="a", reason="not-finite", detail="infinite values")
    (span,) = (span for span in told.spans() if span.name == "upload")
    assert not span.status.is_ok
    assert span.status.description == "infinite values"
    assert span.attributes["reason"] == "not-finite"


def test_what_makes_no_sense_makes_no_span() -> None:
    told = Told()
    told.at(100, "download confirmed", round=5, client="a")
    told.at(100, "round committed", round=5, downloads=0, recovered=True)
    told.at(100, "client report", round=1, client="a", metrics={})
    told.at(100, "client online", client="a")
    one_round(told)
    told.at(109, "client report", round=1, client="b", metrics={"swap_s": float("nan")})
    told.at(109, "client report", round=1, client="b", metrics={"swap_s": 1e9})
    assert [span.name for span in told.spans()].count("swap") == 1


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x/v1",
        "127.0.0.1:4318",
        "http://",
        "http://collector.example/v1/traces",
        "http://[",
        "http://127.0.0.1:99999",
        "https://anna:secret@collector.example",
    ],
)
def test_a_url_that_is_none_or_that_others_read(url: str) -> None:
    with pytest.raises(SettingsError, match="--traces"):
        check_traces(url)


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        server.shutdown()


@pytest.mark.parametrize("status", [200, 400])
def test_a_collector_gets_the_spans_and_its_refusal_costs_nothing(status: int) -> None:
    with collector(status) as (url, bodies):
        traces = Traces("yard", exporter_to(check_traces(url)))
        traces.told("round opened", {"round": 0})
        traces.close()
        traces.close()
        assert bodies
    import gzip

    body = gzip.decompress(bodies[0]) if bodies[0][:2] == b"\x1f\x8b" else bodies[0]
    request = ExportTraceServiceRequest.FromString(body)
    assert [span.name for span in request.resource_spans[0].scope_spans[0].spans] == ["round 0"]
