"""What ``/metrics`` shows of every member and of the round: looked up when Prometheus asks, so nothing is outdated."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replayfleet.aggregator.control.verbs import VerbRefused
from replayfleet.aggregator.control.view import FleetView, MemberView
from replayfleet.aggregator.members.broker_files import CERTIFICATE
from replayfleet.aggregator.members.enrolment import BROKER
from replayfleet.aggregator.members.table import expiries
from replayfleet.aggregator.operator.metrics import MEASURED, PREFIX
from replayfleet.federation.service.credentials.certificates import CertificateTimes
from replayfleet.federation.wire.protocol.messages import COUNTER_BITS

MAX_MEMBERS = 1000
"""That have labels of their own; ``members`` counts all."""
_PHASES = ("open", "aggregating", "finished")


class FleetCollector(Collector):
    """Asks the loop for each scrape; if it doesn't answer, the scrape fails, and ``up`` says so.

    Args:
        look: asks the loop; raises ``VerbRefused``.
        reported: client -> what it reported last.
        folder: the data dir, whose disk and certificates are watched.
        connected: whether the broker accepts us.
        problem: what is wrong with the disk; empty if nothing is.
        wall_clock: Unix time.
    """

    def __init__(
        self,
        look: Callable[[], FleetView],
        reported: Mapping[str, Mapping[str, float]],
        folder: Path,
        *,
        connected: Callable[[], bool],
        problem: Callable[[], str],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._look = look
        self._reported = reported
        self._folder = folder
        self._connected = connected
        self._problem = problem
        self._wall_clock = wall_clock

    def collect(self) -> Iterator[Metric]:
        """Return all of it; called on a request's thread."""
        try:
            view = self._look()
        except VerbRefused as error:
            raise OSError(str(error)) from error
        disk = shutil.disk_usage(self._folder)
        yield _gauge("leads", "1 if this aggregator leads its fleet, 0 if it stands by.", view.leads)
        yield _gauge("healthy", "1 while the aggregator does its work.", view.healthy)
        waits = GaugeMetricFamily(
            f"{PREFIX}_waits", "1, and what keeps the aggregator or its round.", labels=["reason"]
        )
        for reason in sorted({wait.reason.value for wait in view.waits}):
            waits.add_metric([reason], 1)
        yield waits
        yield _gauge("broker_connected", "1 while the broker accepts the aggregator.", self._connected())
        yield _gauge("disk_problem", "1 while the disk takes nothing, so that uploads wait.", bool(self._problem()))
        yield _gauge("disk_free_bytes", "On the disk of the data dir.", disk.free)
        yield _gauge("disk_size_bytes", "Of the disk of the data dir.", disk.total)
        yield from _round(view)
        belonged = (member for member in view.members if member.is_member)  # a made-up id becomes no label
        members = tuple(sorted(belonged, key=lambda member: member.revoked))  # whoever replaced it has labels first
        live = [member.live for member in members if not member.revoked]
        yield _gauge("members", "Clients that belong to the fleet.", len(live))
        yield _gauge("members_online", "Of them those that are there.", sum(live))
        yield from self._members(members[:MAX_MEMBERS])
        ends = GaugeMetricFamily(f"{PREFIX}_certificate_end_timestamp_seconds", "When it ends.", labels=["member"])
        for member, at in sorted(expiries(self._folder).items())[:MAX_MEMBERS]:
            ends.add_metric([member], at)
        broker_ends = CertificateTimes(self._folder / BROKER / CERTIFICATE).left_s(0.0, wall_s=0.0)
        if broker_ends is not None:
            ends.add_metric([BROKER], broker_ends)
        yield ends

    def _members(self, members: tuple[MemberView, ...]) -> Iterator[Metric]:
        now = self._wall_clock()
        for name, text, value in (
            ("up", "1 while it is there.", lambda m: float(m.live)),
            ("taking_part", "0 if it is excluded, revoked or only serves.", _takes_part),
            ("awaited", "1 while the open round waits for it.", lambda m: float(m.is_awaited)),
            ("silent_seconds", "Since it was heard of.", lambda m: None if m.seen_at is None else now - m.seen_at),
            ("round", "The round that it knows.", lambda m: m.round if m.round >= 0 else None),
            ("model_version", "That it serves, or confirmed last, within its epoch.", _version),
            ("labels_waiting", "Labelled samples for its next round.", lambda m: _known(m.labels_waiting)),
            ("camera_age_seconds", "Since a picture of its quietest camera.", lambda m: _known(m.picture_age_s)),
        ):  # fmt: skip
            family = GaugeMetricFamily(f"{PREFIX}_member_{name}", text, labels=["client"])
            for member in members:
                if (found := value(member)) is not None:
                    family.add_metric([member.client], found)
            yield family
        waits = GaugeMetricFamily(f"{PREFIX}_member_waits", "1, and why it is waited for.", labels=["client", "reason"])
        for member in members:
            if member.wait is not None:
                waits.add_metric([member.client, member.wait.reason.value], 1)
        yield waits
        for name in MEASURED:
            family = GaugeMetricFamily(f"{PREFIX}_member_{name}", f"{name} of its newest report.", labels=["client"])
            for member in members:
                if name in (told := self._reported.get(member.client, {})):
                    family.add_metric([member.client], told[name])
            yield family


def _round(view: FleetView) -> Iterator[Metric]:
    yield _gauge("round_uploads", "That the current round has.", len(view.uploads))
    yield _gauge("round_expected_uploads", "With which it closes at once.", view.expected)
    yield _gauge("round_remaining_seconds", "To its deadline; 0 unless open.", view.remaining_s)
    yield _gauge("paused", "1 while an operator has paused the fleet.", view.course == "paused")
    phases = GaugeMetricFamily(f"{PREFIX}_round_phase", "1 of the phase that the round is in.", labels=["phase"])
    for phase in _PHASES:
        phases.add_metric([phase], float(view.phase == phase))
    yield phases


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=float(value))


def _known(value: float) -> float | None:
    return None if value < 0 else value


def _takes_part(member: MemberView) -> float:
    return float(member.trains and not member.revoked and member.exclusion is None)


def _version(member: MemberView) -> float:
    known = member.serving_version if member.serving_version >= 0 else member.confirmed_version
    return known % (1 << COUNTER_BITS)
