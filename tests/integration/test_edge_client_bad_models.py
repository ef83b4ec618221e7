"""Whole clients that are sent a model that nobody should serve, or that leaks; it misbehaves in a real process.

Times hold on a machine with an idle core; on a busy one only what happens is asserted, not how soon.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import client_world
from support.client_world import World, events
from support.quiet import Quiet

from replayfleet.edge_client import service
from replayfleet.edge_client.flow import Prediction, Shown
from replayfleet.edge_client.serving.model import WorkerRules, Workers
from replayfleet.edge_client.serving.slot import Candidate
from replayfleet.edge_client.state_store import StateStore
from replayfleet.edge_client.sync import downloads
from replayfleet.edge_client.sync.downloads import Agreement, DownloadDesk
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.wire.protocol.messages import Manifest
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.interfaces import Arrived

DOUBLE = (sys.executable, str(Path(__file__).parents[1] / "support/doubled_serving_worker.py"))


class Fleet:
    """One client whose second version is the bad one, and all that it answered."""

    def __init__(self, folder: Path, num_rounds: int = 1, deadline_s: float = 60.0) -> None:
        self.world = World(folder, num_clients=1, num_rounds=num_rounds, deadline_s=deadline_s)
        self.seen: list[Prediction] = []

    def spoil_the_second(self, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Version 2 misbehaves, however soon it comes: before it is tried, not when some pictures were answered."""

        def spoiled(manifest: Manifest, *args: Any) -> Candidate:
            if manifest.version == 2:
                monkeypatch.setenv("MISBEHAVES", how)
                if how == "is truncated":
                    truncate(self.world.folder, manifest)
            return make(manifest, *args)

        make: Callable[..., Candidate] = downloads.candidate
        monkeypatch.setattr(downloads, "candidate", spoiled)

    def serve_the_first(self) -> None:
        self.client = self.world.start_client("cam-0", watchers=[self._take])
        self.world.until(lambda: len(self.seen) > 5)

    def until_told(self, event: str) -> dict[str, Any]:
        self.world.until(lambda: events(self.world, event) != [])
        return events(self.world, event)[-1]

    def answered(self, more: int) -> set[int]:
        """Versions that answer the next frames."""
        before = len(self.seen)
        self.world.until(lambda: len(self.seen) >= before + more)
        return {prediction.model_version for prediction in self.seen[before:]}

    def held_version(self) -> int:
        held = StateStore(self.world.folder / "cam-0").held()
        return held.manifest.version

    def _take(self, shown: Shown) -> None:
        if shown.prediction is not None:
            self.seen.append(shown.prediction)


@pytest.fixture
def fleet_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fleet]]:
    def doubled(blobs: Path, **options: Any) -> Workers:
        return Workers(blobs, **options, rules=WorkerRules(DOUBLE))

    def make(**rules: Any) -> Fleet:
        made.append(Fleet(tmp_path, **rules))
        return made[-1]

    monkeypatch.setattr(service, "Workers", doubled)
    monkeypatch.setenv("MISBEHAVES", "tells dark from bright")  # untrained, the first would be sure of nothing
    made: list[Fleet] = []
    yield make
    for each in made:
        each.world.close()


@pytest.fixture
def fleet(fleet_of: Callable[..., Fleet]) -> Fleet:
    return fleet_of()


def truncate(folder: Path, manifest: Manifest) -> None:
    path = DiskBlobStore(folder / "cam-0/blobs").path(manifest.blobs[-1].digest)
    short = path.with_suffix(".short")
    short.write_bytes(path.read_bytes()[:-100])
    short.replace(path)  # a process that mapped it keeps it whole


@pytest.mark.parametrize(
    ("how", "reason"),
    [("answers otherwise", "probe-mismatch"), ("dies on load", "crashed"), ("is truncated", "wrong-digest")],
)
def test_a_model_that_fails_its_checks_is_never_served_and_the_aggregator_learns_why(
    how: str, reason: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.spoil_the_second(how, monkeypatch)
    fleet.serve_the_first()
    told = fleet.until_told("download refused")
    assert (told["version"], told["reason"]) == (2, reason)
    assert fleet.answered(20) == {1}
    assert {prediction.model_version for prediction in fleet.seen} == {1}
    assert (fleet.client.counts.num_failed, fleet.held_version()) == (0, 1)


@pytest.mark.parametrize(("how", "reason"), [("drifts", "drifted"), ("dies", "crashed"), ("slow", "too-slow")])
def test_a_model_that_turns_bad_is_rolled_back_within_a_second_and_costs_no_frame(
    how: str, reason: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_world, "RATE_HZ", 40.0)  # a drift is seen in 25 answers
    fleet.spoil_the_second(how, monkeypatch)
    fleet.serve_the_first()
    quiet = Quiet()
    told = fleet.until_told("model rolled back")
    bound_s = quiet.within(1.0)
    assert (told["version"], told["serving"], told["reason"]) == (2, 1, reason)
    fleet.answered(1)  # it may have had that one in work
    assert fleet.answered(20) == {1}
    bad = [prediction.answered_at for prediction in fleet.seen if prediction.model_version == 2]
    assert max(bad, default=0.0) - min(bad, default=0.0) < bound_s
    assert (fleet.client.counts.num_failed, fleet.held_version()) == (0, 1)
    fleet.world.until(lambda: [wait["reason"] for wait in fleet.client.status()["waits"]] == ["rolled-back"])
    assert f"({reason}: " in fleet.client.status()["waits"][0]["text"]
    assert not fleet.client.status()["healthy"]


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_the_clients_disk_lost_of_a_model_is_sent_again_at_once(
    is_gone: bool, fleet_of: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost_once(desk: DownloadDesk, event: Arrived, agreed: Agreement) -> None:
        if event.manifest.version == 2 and not lost:
            lost.append(DiskBlobStore(fleet.world.folder / "cam-0/blobs").path(event.manifest.blobs[-1].digest))
            if is_gone:
                lost[0].unlink()
            else:
                truncate(fleet.world.folder, event.manifest)
        arrived(desk, event, agreed)

    lost: list[Path] = []
    arrived = DownloadDesk.arrived
    monkeypatch.setattr(DownloadDesk, "arrived", lost_once)
    fleet = fleet_of(num_rounds=2, deadline_s=86400.0)
    fleet.serve_the_first()
    fleet.world.until(lambda: fleet.client.client.finished)
    (refused,) = events(fleet.world, "download refused")
    assert (refused["version"], refused["reason"]) == (2, "wrong-digest")
    confirmed = [(entry["round"], entry["version"]) for entry in events(fleet.world, "download confirmed")]
    assert confirmed[:2] == [(0, 1), (1, 2)]


def test_a_download_that_was_refused_comes_again_when_its_round_waits_for_it(
    fleet_of: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    def truncated(desk: DownloadDesk, event: Arrived, agreed: Agreement) -> None:
        if event.manifest.version == 2:
            truncate(fleet.world.folder, event.manifest)
        arrived(desk, event, agreed)

    def refused(manifest: Manifest, *args: Any) -> Candidate:
        if manifest.version == 2:  # also when the next one has brought the same blob again
            raise ArtefactRejected(Reason.WRONG_DIGEST, "too short")
        return make(manifest, *args)

    arrived = DownloadDesk.arrived
    make: Callable[..., Candidate] = downloads.candidate
    monkeypatch.setattr(DownloadDesk, "arrived", truncated)
    monkeypatch.setattr(downloads, "candidate", refused)
    fleet = fleet_of(num_rounds=2, deadline_s=5.0)
    fleet.serve_the_first()
    assert fleet.until_told("download refused")["version"] == 2
    store, rounds = fleet.world.aggregator._parts.store, fleet.world.aggregator.coordinator.rounds
    fleet.world.until(lambda: store.download("cam-0").version == 3)
    rounds.extend(86400.0, time.monotonic())  # the deadline comes no second time, however slow this is
    fleet.world.until(lambda: fleet.client.client.finished)
    assert [entry["round"] for entry in events(fleet.world, "upload accepted")] == [0, 1]
    confirmed = [(entry["round"], entry["version"]) for entry in events(fleet.world, "download confirmed")]
    assert confirmed[:2] == [(0, 1), (1, 3)]
    assert 2 not in {prediction.model_version for prediction in fleet.seen}


def test_a_process_that_grows_is_recycled_and_costs_no_frame(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISBEHAVES", "leaks")
    fleet.serve_the_first()
    pid = fleet.client.status()["serving_pid"]
    fleet.world.until(lambda: fleet.client.status()["recycles"] >= 1)
    assert fleet.client.status()["serving_pid"] != pid
    fleet.answered(5)
    assert (fleet.client.counts.num_failed, fleet.client.status()["rollbacks"]) == (0, 0)
