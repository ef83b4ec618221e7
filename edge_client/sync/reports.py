"""Reports on the models that are served: how well each does here, and what its round cost."""

from __future__ import annotations

from collections.abc import Mapping

from replayfleet.edge_client.flow import SampleSource
from replayfleet.edge_client.learning.quality import quality
from replayfleet.edge_client.serving.slot import ServedModel
from replayfleet.edge_client.sync.parts import Parts
from replayfleet.edge_client.sync.session_logic import Place
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.messages import Report, epoch_of
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.models.specs import AnyTaskSpec

log = EventLogger(__name__)


class ReportDesk:
    """Measures what is served, and tells the aggregator."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._source: SampleSource | None = None
        self._task: AnyTaskSpec | None = None
        self._contributed: dict[Place, dict[str, float]] = {}
        self._measured_version = -1
        self.newest: Report | None = None
        """The last report that was sent."""

    def contribute(self, place: Place, metrics: Mapping[str, float]) -> None:
        """Add metrics of a trained round to the report on the first model after it."""
        self._contributed.setdefault(place, {}).update(metrics)
        for earlier in sorted(self._contributed)[:-2]:  # one waits for its model, and the next trains beside the swap
            del self._contributed[earlier]

    def forget_contributions(self) -> None:
        """The fleet agreed anew: rounds count from the start."""
        self._contributed = {}

    def measure_on(self, source: SampleSource, task: AnyTaskSpec) -> None:
        """Measure on ``source`` from now on, beginning with what is served already."""
        self._source, self._task = source, task
        self.measure_unless_reported()

    def measure_unless_reported(self) -> None:
        """After a start from disk the aggregator still waits for a report on what is served."""
        served = self._parts.slot.active
        if served is not None and self._source is not None and self._measured_version != served.version:
            self.measure(served, {})

    def measure(self, served: ServedModel, metrics: Mapping[str, float]) -> None:
        """Measure the served model on all classes met so far; the model of round r knows the rounds before it.

        Args:
            served: what to measure.
            metrics: what else its report says.
        """
        source, task, self._measured_version = self._source, self._task, served.version
        here = Place(epoch_of(served.version), served.round)
        earlier = sorted(place for place in self._contributed if place < here)
        known = {name: value for place in earlier for name, value in self._contributed.pop(place).items()}

        def work() -> tuple[dict[str, float], int]:
            samples = None if source is None or served.round < 1 else source.test_samples(served.round - 1)
            if samples is None or not len(samples) or task is None:
                return {}, 0
            return quality(served.model, samples, task), len(samples)

        def measured(result: tuple[dict[str, float], int], now: float) -> None:
            found, num_test = result
            streamed = {} if source is None else dict(source.measures())
            cost = {**known, **metrics, **self._parts.frame_measures()}
            said = {**cost, **streamed, **found, "num_test": float(num_test)}
            self.newest = Report(self._parts.client_id, served.round, served.version, said)
            told = {name: round(value, 4) for name, value in (*found.items(), *streamed.items()) if "/" not in name}
            shown: dict[str, object] = {**told} if told else {"accuracy": "unknown"}
            log.info("report", round=served.round, version=served.version, **shown)
            self.repeat()

        def failed(error: Exception, now: float) -> None:
            log.warning("accuracy not measured", version=served.version, reason=error)
            measured(({}, 0), now)

        self._parts.jobs.submit(work, measured, failed)

    def repeat(self) -> None:
        """Send the last report again: the aggregator restarted, and keeps none."""
        if self.newest is not None:
            parts = self._parts
            parts.publish(topic_of(parts.gate.fleet, "control", parts.client_id), encode(self.newest), False)
