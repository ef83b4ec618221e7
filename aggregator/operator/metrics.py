"""What ``/metrics`` shows of the aggregator: counted from the journal's events before it leaves any out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from replayfleet.federation.errors import Reason

PREFIX = "replayfleet"
_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REASONS = frozenset(reason.value for reason in Reason)
MEASURED = (
    "accuracy",
    "stream_accuracy",
    "boxes_found",
    "num_unlabelled",
    "num_samples_dropped",
    "frames",
    "dp_epsilon",
)
"""Of what clients report: what stands in ``/metrics`` for each of them."""
MAX_REPORTED = 1000
"""Clients whose newest report is kept for that."""


class Metrics:
    """Counters and histograms in a registry of their own, so that two aggregators fit into one test.

    Attributes:
        reported: client -> newest values of ``MEASURED``.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.reported: dict[str, dict[str, float]] = {}
        counter = functools.partial(Counter, namespace=PREFIX, registry=registry)
        histogram = functools.partial(Histogram, namespace=PREFIX, registry=registry)
        Info("build", "Of this aggregator.", namespace=PREFIX, registry=registry).info(
            {"version": version("replayfleet"), "role": "aggregator"}
        )
        self.round = Gauge("round", "Index of the current round.", namespace=PREFIX, registry=registry)
        self.rounds = counter("rounds", "Rounds committed by this process.")
        self.closed = counter("rounds_closed", "Rounds closed: quorum, deadline, or by an operator.", ["by"])
        self.extended = counter("rounds_extended", "Deadlines that came with too few uploads.")
        self.round_seconds = histogram("round_seconds", "From opening a round to committing it.", buckets=_SECONDS)
        self.phase_seconds = histogram("round_phase_seconds", "Open, aggregate, publish.", ["phase"], buckets=_SECONDS)
        self.uploads = counter("uploads", "Uploads by result.", ["result"])
        self.rejected = counter("uploads_rejected", "Rejected uploads by reason.", ["reason"])
        self.quarantined = counter(
            "uploads_quarantined",
            "Accepted uploads that a round left out; not those lost here.",
        )
        self.downloads = counter("downloads", "Downloads by result.", ["result"])
        self.refused = counter("downloads_refused", "Refused downloads by reason.", ["reason"])
        self.rollbacks = counter("rollbacks", "Models that clients took back, by reason.", ["reason"])
        self.bytes = counter("transfer_bytes", "Bytes on the wire of what arrived whole.", ["direction"])
        self.answer_seconds = histogram(
            "client_latency_p95_seconds",
            "Capture to answer of 95 % of a client's pictures, by report.",
            buckets=_LATENCY_S,
        )
        self.swap_seconds = histogram("client_swap_seconds", "Loading and swapping a model.", buckets=_SECONDS)
        self.train_seconds = histogram("client_train_seconds", "Local training.", buckets=_SECONDS)
        self.errors = counter("errors", "Unexpected errors in the loop.")

        # A counter that begins at one has not increased, as far as Prometheus sees: all begin at zero.
        for family, labels in (
            (self.closed, ("quorum", "deadline", "operator")),
            (self.phase_seconds, ("open", "aggregate", "publish")),
            (self.uploads, ("accepted", "rejected")),
            (self.downloads, ("accepted", "refused")),
            (self.bytes, ("up", "down")),
        ):
            for label in labels:
                family.labels(label)
        for reason in (*_REASONS, "other"):
            for counted in (self.rejected, self.refused, self.rollbacks):
                counted.labels(reason)

    def told(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count an event of the journal."""
        if event == "client report":
            self._reported(fields["client"], fields["metrics"])
        elif event.startswith(("round", "run")):
            self._of_round(event, fields)
        else:
            self._of_transfer(event, fields)

    def _of_round(self, event: str, fields: Mapping[str, Any]) -> None:
        match event:
            case "round opened":
                self.round.set(fields["round"])
            case "run finished":
                self.round.set(fields["rounds"])
            case "round extended":
                self.extended.inc()
            case "round closed":
                self.closed.labels(fields["by"]).inc()
                self.phase_seconds.labels("open").observe(fields["open_s"])
            case "round committed" if "recovered" not in fields:
                self.rounds.inc()
                self.round_seconds.observe(fields["round_s"])
                self.phase_seconds.labels("aggregate").observe(fields["aggregate_s"])
                self.phase_seconds.labels("publish").observe(fields["publish_s"])

    def _of_transfer(self, event: str, fields: Mapping[str, Any]) -> None:
        match event:
            case "upload accepted":
                self.uploads.labels("accepted").inc()
            case "upload rejected":
                self.uploads.labels("rejected").inc()
                self.rejected.labels(_bounded(fields["reason"])).inc()
            case "upload quarantined":
                self.quarantined.inc()
            case "download confirmed":
                self.downloads.labels("accepted").inc()
            case "download refused":
                self.downloads.labels("refused").inc()
                self.refused.labels(_bounded(fields["reason"])).inc()
            case "model rolled back":
                self.rollbacks.labels(_bounded(fields["reason"])).inc()
        if "bytes" in fields:
            self.bytes.labels("up" if event.startswith("upload") else "down").inc(fields["bytes"])

    def _reported(self, client: str, values: Mapping[str, float]) -> None:
        if client in self.reported or len(self.reported) < MAX_REPORTED:
            self.reported[client] = {name: values[name] for name in MEASURED if name in values}
        for name, kept in (
            ("latency_p95_s", self.answer_seconds),
            ("swap_s", self.swap_seconds),
            ("train_s", self.train_seconds),
        ):
            if 0 <= values.get(name, -1) <= _LONGEST_S:
                kept.observe(values[name])


_LONGEST_S = 86400.0
"""What a device claims to have taken longer for would spoil the sums of all."""


def _bounded(reason: str) -> str:
    """Return a reason if it is one of ours: whatever strangers say becomes no label."""
    return reason if reason in _REASONS else "other"
