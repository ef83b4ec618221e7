"""What ``/metrics`` shows of the aggregator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_ROUND_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)


class Metrics:
    """Counters and gauges in a registry of their own, so that two aggregators fit into one test."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.round = Gauge("aggregator_round", "Index of the current round.", registry=self.registry)
        self.rounds = Counter("aggregator_rounds", "Rounds committed by this process.", registry=self.registry)
        self.round_seconds = Histogram(
            "aggregator_round_seconds",
            "From opening a round to committing it.",
            buckets=_ROUND_SECONDS,
            registry=self.registry,
        )
        self.aggregation_seconds = Histogram(
            "aggregator_aggregation_seconds",
            "Time in the method's aggregation.",
            buckets=_ROUND_SECONDS,
            registry=self.registry,
        )
        self.uploads = Counter("aggregator_uploads", "Uploads by result.", ["result"], registry=self.registry)
        self.downloads = Counter("aggregator_downloads", "Downloads by verdict.", ["result"], registry=self.registry)
        self.bytes = Counter("aggregator_transfer_bytes", "Bytes on the wire.", ["direction"], registry=self.registry)
        self.clients = Gauge("aggregator_clients", "Clients by state.", ["state"], registry=self.registry)
        self.heartbeat_age = Gauge(
            "aggregator_heartbeat_age_seconds", "Since a client was heard of.", ["client"], registry=self.registry
        )
        self.errors = Counter("aggregator_errors", "Unexpected errors in the loop.", registry=self.registry)
