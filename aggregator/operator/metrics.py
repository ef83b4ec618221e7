"""What ``/metrics`` shows of the aggregator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_ROUND_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)


class Metrics:
    """Counters and gauges in a registry of their own, so that two aggregators fit into one test."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"aggregator_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"aggregator_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"aggregator_{name}_seconds", text, buckets=_ROUND_SECONDS, registry=registry)

        self.round = gauge("round", "Index of the current round.")
        self.rounds = counter("rounds", "Rounds committed by this process.")
        self.round_seconds = seconds("round", "From opening a round to committing it.")
        self.aggregation_seconds = seconds("aggregation", "Time in the method's aggregation.")
        self.uploads = counter("uploads", "Uploads by result.", "result")
        self.downloads = counter("downloads", "Downloads by verdict.", "result")
        self.bytes = counter("transfer_bytes", "Bytes on the wire.", "direction")
        self.clients = gauge("clients", "Clients by state.", "state")
        self.heartbeat_age = gauge("heartbeat_age_seconds", "Since a client was heard of.", "client")
        self.quarantined = counter("uploads_quarantined", "Accepted uploads that a round was aggregated without.")
        self.disk_problem = gauge("disk_problem", "1 while the disk takes nothing, so that uploads wait.")
        self.errors = counter("errors", "Unexpected errors in the loop.")
