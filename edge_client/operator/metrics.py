"""What ``/metrics`` of a client shows."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from replayfleet.devices.limits import Reading
from replayfleet.edge_client.flow import LabelProgress, Shown
from replayfleet.edge_client.frames.answerer import FrameCounts

PREFIX = "replayfleet_client"
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_MEASURED = ("accuracy", "stream_accuracy", "boxes_found")


class Metrics:
    """Prometheus metrics of one client process, in a registry of their own.

    Args:
        device: the board's profile.
        provider: execution provider that answers.
        clock: of pictures, ``time.monotonic``.
    """

    def __init__(self, device: str, provider: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry = CollectorRegistry()
        self._clock = clock
        self._captured: dict[str, float] = {}

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        Info(f"{PREFIX}_device", "Board and execution provider", registry=registry).info(
            {"device": device, "provider": provider}
        )
        self._frames = counter("frames", "Frames by what became of them", "result")
        self.round = gauge("round", "Round announced last")
        self.version = gauge("model_version", "Version that serves frames: 2**32 times the epoch, plus the count")
        self._serving = {
            "probation_version": gauge("probation_version", "Version on probation, -1 for none"),
            "rollbacks": gauge("rollbacks", "Models that were rolled back"),
            "recycles": gauge("serving_recycles", "Serving processes replaced because they grew"),
            "serving_memory_bytes": gauge("serving_memory_bytes", "What the serving process alone occupies"),
        }
        self._latency = Histogram(
            f"{PREFIX}_latency_seconds", "Capture to answer of each frame", buckets=_LATENCY_S, registry=registry
        )
        self._camera_age = gauge("camera_age_seconds", "Since the newest picture that was answered or failed", "camera")
        self._measured = {name: gauge(name, "Of the served model, when it was swapped in") for name in _MEASURED}
        for known in self._measured.values():
            known.set(math.nan)  # nothing is measured before the first report
        self._labels = gauge("labels_waiting", "Labelled samples that wait for the next round")
        self._labels_needed = gauge("labels_needed", "So many begin a round")
        self.connected = gauge("connected", "1 while the broker accepts us")
        self.healthy = gauge("healthy", "1 while the work is done")
        self._waiting = gauge("waiting", "1 for each reason that keeps the client from its work", "reason")
        self.disk_problem = gauge("disk_problem", "1 while the disk takes nothing, so that training waits")
        self.restarts = gauge("trainer_restarts", "Deaths of the training process")
        self._time_share = gauge("training_time_share", "Of its time that training may run")
        self._shortened = counter("shortened_rounds", "Rounds that were trained only in part")
        self._temperature = gauge("temperature_celsius", "Zone nearest to its limit", "zone")
        self._power = gauge("power_watts", "Of the board; NaN without a sensor")
        self.errors = counter("errors", "Unexpected errors, see the log")
        self._bytes = counter("transfer_bytes", "Bytes on the wire", "direction")
        self._seen: dict[str, float] = {}

    def frames(self, counts: FrameCounts) -> None:
        """Take the totals of the serving loop."""
        for result, total in (
            ("answered", counts.num_frames),
            ("dropped", counts.num_dropped),
            ("failed", counts.num_failed),
        ):
            self._frames.labels(result).inc(self._grown(result, total))

    def shown(self, shown: Shown) -> None:
        """Take a picture with its prediction; on the serving thread."""
        camera, captured_at = shown.picture.camera, shown.picture.captured_at
        is_new, self._captured[camera] = camera not in self._captured, captured_at
        if is_new:
            self._camera_age.labels(camera).set_function(functools.partial(self._age_s, camera))
        if shown.prediction is not None:
            self._latency.observe(shown.prediction.age_s)

    def oldest_picture_s(self) -> float:
        """Age of the newest picture of the camera that gave none for longest, seconds; -1 before the first."""
        captured = list(self._captured.values())
        return self._clock() - min(captured) if captured else -1.0

    def learning(self, measured: Mapping[str, float], labels: LabelProgress | None) -> None:
        """Take what the newest report says, and what waits for a round; None where the source doesn't count it."""
        for name in measured.keys() & self._measured.keys():
            self._measured[name].set(measured[name])
        self._labels.set(math.nan if labels is None else labels.num_samples)
        self._labels_needed.set(math.nan if labels is None else labels.min_samples)

    def serving(self, status: Mapping[str, int | None]) -> None:
        """Take what is known of the serving process; see ``guard.serving_status``."""
        for name, gauge in self._serving.items():
            value = status[name]
            gauge.set(-1 if value is None else value)

    def waiting(self, reasons: Collection[str]) -> None:
        """Take all reasons that keep the client from its work."""
        self._waiting.clear()
        for reason in reasons:
            self._waiting.labels(reason).set(1)

    def transferred(self, sent: int, received: int) -> None:
        self._bytes.labels("up").inc(self._grown("up", sent))
        self._bytes.labels("down").inc(self._grown("down", received))

    def training(self, num_shortened: int, time_share: float, reading: Reading) -> None:
        """Take what budget and limits make of training."""
        self._shortened.inc(self._grown("shortened", num_shortened))
        self._time_share.set(time_share)
        self._power.set(math.nan if reading.power_w is None else reading.power_w)
        self._temperature.clear()
        if reading.temperature_c is not None:
            self._temperature.labels(reading.zone).set(reading.temperature_c)

    def _age_s(self, camera: str) -> float:
        return self._clock() - self._captured[camera]

    def _grown(self, name: str, total: float) -> float:
        """By how much a total grew; a serving loop that began anew counts from zero again."""
        before = self._seen.get(name, 0.0)
        self._seen[name] = total
        return total - before if total >= before else total
