"""``Client`` with a courier, a trainer and a source that a test scripts; jobs run at once."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from replayfleet.edge_client.client import DATA_AGAIN_S, MAX_FAILURES, Client
from replayfleet.edge_client.flow import PictureSource, Samples, Shown, Source
from replayfleet.edge_client.frames.views import WholePicture
from replayfleet.edge_client.learning.local_training import LocalTraining, TrainerExited
from replayfleet.edge_client.learning.training.job import (
    ChooseJob,
    Chose,
    TrainDone,
    TrainerReady,
    TrainFailed,
    TrainJob,
    read_round_data,
)
from replayfleet.edge_client.serving.model import Workers
from replayfleet.edge_client.serving.proc import Progress
from replayfleet.edge_client.serving.slot import Candidate, ModelSlot
from replayfleet.edge_client.state_store import CHOSEN, Choice, HeldDownload, StateStore, TrainingCommit, spec_digest
from replayfleet.edge_client.sync import downloads
from replayfleet.edge_client.sync.download import Gate
from replayfleet.edge_client.sync.downloads import LONGEST_S
from replayfleet.edge_client.sync.parts import Parts
from replayfleet.edge_client.sync.session_logic import Place, Step
from replayfleet.federation.errors import ArtefactRejected, Reason, SettingsError
from replayfleet.federation.service.disk import Disk
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.service.jobs import Outcome, outcome_of
from replayfleet.federation.wire.protocol.codec import decode
from replayfleet.federation.wire.protocol.messages import (
    Announcement,
    BlobEntry,
    FleetSpec,
    Manifest,
    Offer,
    Probe,
    Release,
    Report,
    RolledBack,
    Serving,
    Verdict,
)
from replayfleet.federation.wire.transport.interfaces import Arrived, Concluded, Event, Failed, Offered, Received
from replayfleet.models.specs import TaskSpec

TASK = {"image_channels": 1, "image_size": 28, "class_names": ["a", "b"], "stem": "cifar", "generator_width": 16}
SPEC = FleetSpec("fleet", "fedavg", {}, TASK, 1)
BEST = FleetSpec("fleet", "fedavg", {"serve": "best"}, TASK, 1)
GOOD, BAD = Probe(0, 1, (0.0, 0.0), 1.0), Probe(0, 1, (9.0, 9.0), 1.0)
OTHER = FleetSpec("fleet", "fedavg", {}, TASK | {"class_names": ["a", "b", "c"]}, 2)


def manifest(version: int) -> Manifest:
    blobs = (BlobEntry("graph/task", "a" * 64, 5), BlobEntry("task", f"{version:064x}", 5))
    serving = Serving("graph/task", "task", Probe(0, 1, (0.0, 0.0), 1.0))
    return Manifest("down", "fleet", "c1", version - 1, version, blobs, b"", serving)


def announcement(round_index: int, state: Any = "open", instance: str = "e1", spec: FleetSpec = SPEC) -> Event:
    return Received("*", Announcement(instance, round_index, state, 0.0, spec))


class Courier:
    """Hands out the events that a test puts in, and notes what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.accepted: list[int] = []
        self.refused: list[str] = []
        self.verdicts: list[tuple[int, bool, str]] = []
        self.sent: list[Manifest] = []
        self.advanced = float("-inf")

    def advanced_at(self, peer: str) -> float:
        return self.advanced

    def handle(self, topic: str, payload: bytes, now: float) -> list[Event]:
        events, self.events = self.events, []
        return events

    def tick(self, now: float) -> list[Event]:
        return []

    def resume(self, now: float) -> None:
        pass

    def follow(self, instance: str) -> None:
        self.followed = instance

    def accept(self, peer: str, offer: Offer, now: float) -> list[Event]:
        self.accepted.append(offer.manifest.version)
        return [Arrived(peer, offer.transfer_id, offer.manifest, 100)]

    def refuse(self, peer: str, offer: Offer, reason: str, detail: str, now: float) -> None:
        self.refused.append(reason)

    def conclude(self, peer: str, manifest: Manifest, transfer_id: str, *, accepted: bool, **why: str) -> None:
        self.verdicts.append((manifest.version, accepted, why.get("reason", "")))

    def send(self, peer: str, manifest: Manifest, presumed_missing: Any, now: float, **_: Any) -> str:
        self.sent.append(manifest)
        return "f" * 32


class Blobs:
    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.believed: dict[str, tuple[int, ...]] = {}

    def has(self, digest: str) -> bool:
        return True

    def verified(self, digests: Iterable[str]) -> dict[str, tuple[int, ...]]:
        return {}

    def believe(self, verified: dict[str, tuple[int, ...]]) -> None:
        self.believed |= verified

    def collect(self, keep: set[str]) -> int:
        self.kept = keep
        return 0


class ScriptedSource:
    def __init__(self) -> None:
        self.used: list[int] = []
        self.samples: Samples | None = Samples(np.zeros((4, 1, 28, 28), np.float32), np.zeros(4, np.int64))

    def watch(self, shown: Shown) -> None:
        pass

    def measures(self) -> dict[str, float]:
        return {}

    def round_samples(self, round_index: int) -> Samples | None:
        return self.samples

    def used_up(self, round_index: int) -> None:
        self.used.append(round_index)

    def test_samples(self, round_index: int) -> Samples | None:
        return self.samples


class Trainer:
    pid = 1

    def __init__(self) -> None:
        self.jobs: list[Any] = []

    def submit(self, job: Any) -> None:
        self.jobs.append(job)

    def progress(self) -> Progress:
        return "works"

    def stop(self) -> None:
        pass


def report_of(payload: bytes) -> Report:
    message = decode(payload)
    assert isinstance(message, Report)
    return message


REPLACED = Release(b"of a key that was replaced", b"", b"")


class Trusting:
    """Takes every download, and no root."""

    problem = ""
    refused = ""

    def check(self, manifest: Manifest) -> None:
        if self.refused:
            raise ArtefactRejected(Reason.UNTRUSTED, self.refused)

    def vouches_for(self, release: Release | None) -> bool:
        return release != REPLACED

    def learn(self, roots: Any) -> None:
        pass


class Harness:
    def __init__(self, folder: Path) -> None:
        self.courier, self.trainer, self.source, self.blobs = Courier(), Trainer(), ScriptedSource(), Blobs()
        self.reports: list[Report] = []
        self.trust = Trusting()
        self.rollbacks: list[RolledBack] = []
        self.outcomes: list[Outcome] = []
        self.tasks: list[TaskSpec] = []
        self.disk = Disk(folder, "training waits", 0.0)
        self.slot, self.records = ModelSlot(), StateStore(folder, disk=self.disk)
        self.training = LocalTraining(lambda _idle: self.trainer)
        parts: Any = Parts(
            client_id="c1",
            data_dir=folder,
            gate=Gate("fleet", "c1"),
            records=self.records,
            trust=cast("Any", self.trust),
            boot_id="b1",
            blobs=self.blobs,  # type: ignore[arg-type]
            disk=self.disk,
            courier=self.courier,
            publish=self.take,
            slot=self.slot,
            workers=Workers(folder, num_threads=1, providers=("CPUExecutionProvider",)),
            training=self.training,
            jobs=self,
            open_source=self.open,
            clock=lambda: 0.0,
        )
        self.client = Client(parts)
        self.client.start()
        self.training.start()
        self.client.on_trainer(TrainerReady(), 0.0)

    def take(self, topic: str, payload: bytes, retain: bool) -> None:
        message = decode(payload)
        if isinstance(message, RolledBack):
            self.rollbacks.append(message)
        else:
            self.reports.append(report_of(payload))

    def submit(self, work: Callable[[], Any], then: Any, failed: Any) -> None:
        self.outcomes.append(outcome_of(work, then, failed))

    def open(self, task: TaskSpec) -> Source:
        self.tasks.append(task)
        return Source(PictureSource((), WholePicture(task_of(SPEC)), "scripted"), self.source)

    def hear(self, *events: Event, now: float = 0.0) -> Step:
        self.courier.events = list(events)
        self.client.on_message("topic", b"", now)
        while self.outcomes:
            self.client.on_outcome(self.outcomes.pop(0), now)
        return self.client.step

    def hear_alone(self, *events: Event, now: float = 0.0) -> list[Outcome]:
        """Hear, and return what the jobs that are waiting will have come to."""
        self.courier.events = list(events)
        self.client.on_message("topic", b"", now)
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def trained(self, round_index: int, version: int, spec: FleetSpec = SPEC, **more: Any) -> Step:
        blob = (BlobEntry("task", "c" * 64, 5),)
        self.records.commit_training(
            TrainingCommit(round_index, version, spec_digest(spec), (), b"", blob, b"", 2.0, 4, 0, **more), spec
        )
        self.client.on_trainer(TrainDone(round_index, "", {"c" * 64: (version,)}), 0.0)
        return self.client.step


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    def fake_candidate(manifest: Manifest, *_: Any, **__: Any) -> Candidate:
        def load() -> Any:
            if manifest.version == 666 or (manifest.serving and manifest.serving.probe == BAD):
                raise ArtefactRejected(Reason.PROBE_MISMATCH, "wrong answers")
            return lambda images: np.tile(np.array([1, 0], np.float32), (len(images), 1))

        return Candidate(manifest.version, manifest.round, (1, 28, 28), load, lambda _: None)

    monkeypatch.setattr(downloads, "candidate", fake_candidate)
    return Harness(tmp_path)


def offered(version: int, boot: str = "b1") -> Event:
    return Offered("c1", Offer("aggregator", f"{version:032x}", manifest(version), (), 1024, b"", boot))


def of_round(round_index: int, version: int, **more: Any) -> Event:
    anew = msgspec.structs.replace(manifest(version), round=round_index, **more)
    return Offered("c1", Offer("aggregator", f"{version:032x}", anew, (), 1024, b"", "b1"))


def no_process(*_: Any, **__: Any) -> Candidate:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def verdict(version: int, *, accepted: bool = True, reason: str = "") -> Event:
    up = Manifest("up", "fleet", "c1", 0, version, ())
    return Concluded("c1", up, Verdict("aggregator", "f" * 32, 0, version, accepted, reason), 777)


def test_an_offer_that_overtakes_the_announcement_waits_for_it(made: Harness) -> None:
    assert made.hear(offered(1)) is Step.WAIT_AGGREGATOR
    assert made.courier.accepted == []
    assert made.hear(announcement(0)) is Step.TRAINING
    assert made.courier.accepted == [1]
    assert made.courier.verdicts == [(1, True, "")]


def test_a_round_runs_from_download_to_verdict_and_report(made: Harness) -> None:
    assert made.hear(announcement(0), offered(1)) is Step.TRAINING
    assert [(job.manifest.round, job.version) for job in made.trainer.jobs] == [(0, 2)]
    made.trained(0, 2)
    assert made.blobs.believed == {"c" * 64: (2,)}
    assert [sent.version for sent in made.courier.sent] == [2]
    assert made.hear(verdict(2)) is Step.WAIT_ROUND
    assert made.hear(announcement(1), offered(2)) is Step.TRAINING
    report = made.reports[-1]
    assert (report.round, report.version) == (1, 2)
    assert report.metrics["accuracy"] == 1.0
    assert report.metrics["num_test"] == 4
    assert report.metrics["bytes_up"] == 777
    assert report.metrics["bytes_down"] == 100
    assert report.metrics["train_s"] == 2.0


def test_what_the_sub_generators_cost_is_reported_and_shown_also_after_a_restart(made: Harness, tmp_path: Path) -> None:
    made.hear(announcement(0), offered(1))
    assert made.client.privacy == ""
    made.trained(0, 2, epsilon=4.25, delta=1e-5)
    made.hear(verdict(2))
    made.hear(announcement(1), offered(2))
    assert (made.reports[-1].metrics["dp_epsilon"], made.reports[-1].metrics["dp_delta"]) == (4.25, 1e-5)
    assert made.client.privacy == "epsilon 4.25 at delta 1e-05"
    again = Harness(tmp_path)
    assert again.client.privacy == made.client.privacy
    made.trained(1, 3)
    assert made.client.privacy == ""


def test_a_download_that_fails_its_probe_is_refused_and_the_old_one_stays(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.hear(offered(666))
    assert made.courier.verdicts[-1] == (666, False, "probe-mismatch")
    held = made.records.held()
    assert held.manifest.version == made.client.serving_version == 1


def test_a_round_is_trained_beside_the_swap_of_the_model_it_begins_with(made: Harness) -> None:
    read, install = made.hear_alone(announcement(0), offered(1))
    made.client.on_outcome(read, 0.0)
    assert [job.manifest.version for job in made.trainer.jobs] == [1]
    assert made.courier.verdicts == [], "its swap is not done"
    assert made.trained(0, 2) is Step.WAIT_DOWNLOAD, "the aggregator hears of the swap first"
    assert made.courier.sent == []
    made.client.on_outcome(install, 0.0)
    assert (made.client.serving_version, made.courier.verdicts) == (1, [(1, True, "")])
    assert [sent.version for sent in made.courier.sent] == [2]
    assert made.hear(verdict(2)) is Step.WAIT_ROUND
    assert "train_s" not in made.reports[-1].metrics, "that is the next report's"
    assert made.hear(announcement(1), offered(2)) is Step.TRAINING
    assert made.reports[-1].metrics["train_s"] == 2.0


def test_a_held_round_is_trained_though_the_next_ones_download_overtakes_its_announcement(made: Harness) -> None:
    samples, made.source.samples = made.source.samples, None
    assert made.hear(announcement(0), offered(1)) is Step.WAIT_DATA
    made.source.samples = samples
    made.client.tick(DATA_AGAIN_S)
    (read,) = made.hear_alone()
    made.hear_alone(offered(2))
    made.client.on_outcome(read, 0.0)
    assert [job.manifest.version for job in made.trainer.jobs] == [1]


def test_samples_that_are_read_while_a_swap_fails_are_trained_on(
    made: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "candidate", no_process)
    samples, made.source.samples = made.source.samples, None
    nothing_read, not_installed = made.hear_alone(announcement(0), offered(1))
    made.client.on_outcome(nothing_read, 0.0)
    made.source.samples = samples
    made.client.tick(DATA_AGAIN_S)
    made.client.on_outcome(not_installed, DATA_AGAIN_S)
    for outcome in made.outcomes:
        made.client.on_outcome(outcome, DATA_AGAIN_S)
    assert [job.manifest.version for job in made.trainer.jobs] == [1]


def test_a_round_that_passes_while_its_model_hangs_as_it_loads_uses_up_no_samples(
    made: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, behind = made.source.samples, list[Any]()

    def asked(round_index: int) -> Samples | None:
        rounds.append(round_index)
        return samples

    rounds = list[int]()
    monkeypatch.setattr(made.source, "round_samples", asked)
    with monkeypatch.context() as jobs:
        jobs.setattr(made, "submit", lambda *job: behind.append(job))
        made.hear(announcement(0), offered(1))
        made.hear(announcement(1))
    for job in behind:
        made.submit(*job)
    assert made.hear() is Step.WAIT_DOWNLOAD
    assert rounds == []
    assert made.hear(offered(2)) is Step.TRAINING
    assert rounds == [1]


def test_samples_whose_round_passes_as_they_are_read_are_told(made: Harness, caplog: pytest.LogCaptureFixture) -> None:
    read, *_ = made.hear_alone(announcement(0), offered(1))
    made.hear_alone(announcement(1))
    made.client.on_outcome(read, 0.0)
    assert not made.trainer.jobs
    assert "samples not used" in caplog.text


def test_a_swap_that_is_refused_for_now_brings_no_training_without_end_nor_another_rounds_measures(
    made: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.hear(announcement(0), offered(1))
    made.trained(0, 2)
    made.hear(verdict(2))
    with monkeypatch.context() as while_full:
        while_full.setattr(downloads, "candidate", no_process)
        made.hear(announcement(1), offered(2))
        for tries in range(1, MAX_FAILURES + 1):
            made.client.on_trainer(TrainFailed(1, "no"), 0.0)
            assert made.courier.verdicts[-1] == (2, False, "busy")
            made.hear(offered(2), now=tries * downloads.STARVED_S)
        assert made.client.step is Step.WAIT_DOWNLOAD
    assert made.hear(offered(2), now=(MAX_FAILURES + 1) * downloads.STARVED_S) is Step.WAIT_ROUND
    assert [job.manifest.round for job in made.trainer.jobs] == [0] + [1] * MAX_FAILURES
    assert (made.reports[-1].round, made.reports[-1].metrics["train_s"]) == (1, 2.0)


def test_a_download_that_finds_no_memory_is_tried_less_and_less_often_and_the_next_one_at_once(
    made: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.hear(announcement(0), offered(1))
    with monkeypatch.context() as while_starved:
        tries = Mock(side_effect=OSError(errno.ENOMEM, "none is left for 3 MB"))
        while_starved.setattr(downloads, "candidate", tries)
        made.hear(announcement(1))
        for now in range(0, 601, 3):
            made.hear(offered(2), now=float(now))
        assert 10 <= tries.call_count <= 20, "of 201 offers"
        assert made.courier.refused == ["busy"] * (201 - tries.call_count)
        before = tries.call_count
        made.hear(offered(3), now=600.0)
        assert tries.call_count == before + 1
    made.hear(offered(3), now=600.0 + downloads.STARVED_S)
    assert made.client.serving_version == 3


def test_what_comes_a_second_time_while_it_is_installed_is_put_off_and_let_go(made: Harness) -> None:
    again = Offered("c1", Offer("aggregator", "8" * 32, manifest(1), (), 1024, b"", "b1"))
    outcomes = made.hear_alone(announcement(0), offered(1), offered(1), again)
    assert made.courier.verdicts == [(1, False, "busy")]
    for outcome in outcomes:
        made.client.on_outcome(outcome, 0.0)
    assert made.courier.verdicts[-1] == (1, True, "")
    assert made.client._parts.receiving == {}


def test_what_was_trained_under_a_former_agreement_is_trained_anew(made: Harness) -> None:
    anew = msgspec.structs.replace(SPEC, run_seed=2)
    made.hear(announcement(0), offered(1))
    made.hear(announcement(0, spec=anew))
    made.trained(0, 2, epsilon=4.0)
    made.hear(of_round(0, 3))
    assert made.trainer.jobs[-1].spec == anew
    made.trained(0, 4, anew)
    made.hear(announcement(1, spec=anew), of_round(1, 5))
    assert made.reports[-1].metrics["train_s"] == 2.0
    assert "dp_epsilon" not in made.reports[-1].metrics


def test_what_was_trained_is_let_go_though_no_download_of_its_epoch_is_ever_served(made: Harness) -> None:
    def outpaced(round_index: int, version: int) -> Event:
        return of_round(round_index, (1 << 32) + version, serving=Serving("graph/task", "task", BAD))

    made.hear(announcement(3), of_round(3, 1))
    made.client.on_trainer(TrainFailed(3, "no"), 0.0)
    made.hear(outpaced(3, 1))
    made.trained(3, (1 << 32) + 2)
    made.hear(announcement(4), outpaced(4, 3))
    assert made.records.pending() == (None, None)
    assert made.trainer.jobs[-1].manifest.round == 4


def test_measures_of_rounds_whose_models_are_never_served_take_a_bounded_place(made: Harness) -> None:
    desk = made.client._reports
    made.hear(announcement(9))
    for round_index in range(9):
        desk.contribute(Place(0, round_index), {"train_s": float(round_index), f"of_{round_index}": 1.0})
    made.hear(offered(10))
    metrics = made.reports[-1].metrics
    assert metrics["train_s"] == 8.0
    assert {name for name in metrics if name.startswith("of_")} == {"of_7", "of_8"}
    assert len(desk._contributed) == 0


def test_a_client_that_died_between_training_and_the_swap_goes_on_with_both(made: Harness, tmp_path: Path) -> None:
    read, _ = made.hear_alone(announcement(0), offered(1))
    made.client.on_outcome(read, 0.0)
    made.trained(0, 2)
    again = Harness(tmp_path)
    assert again.hear(announcement(0)) is Step.OFFER
    assert [sent.version for sent in again.courier.sent] == [2]
    again.hear(offered(1))
    assert (again.client.serving_version, again.trainer.jobs) == (1, [])
    assert again.hear(verdict(2), announcement(1), offered(2)) is Step.TRAINING


def test_what_was_learned_from_a_download_that_cannot_be_served_counts(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.trained(0, 2)
    made.hear(verdict(2))
    assert made.hear(announcement(665), offered(666)) is Step.TRAINING
    assert (made.client.serving_version, made.courier.verdicts[-1]) == (1, (666, False, "probe-mismatch"))
    made.trained(665, 667)
    assert made.courier.sent[-1].version == 667
    made.hear(verdict(667))
    assert made.hear(announcement(667), offered(668)) is Step.TRAINING
    assert made.client.serving_version == 668


def test_the_source_hears_which_rounds_samples_are_used_up_also_after_a_crash(made: Harness, tmp_path: Path) -> None:
    made.hear(announcement(0), offered(1))
    assert made.source.used == []
    made.trained(0, 2)
    assert made.source.used == [0]
    made.hear(announcement(1), offered(2))
    made.client.on_trainer(TrainFailed(1, "No space left on device", errno.ENOSPC), 0.0)
    assert made.source.used == [0], "it will be tried again"
    again = Harness(tmp_path)
    again.hear(announcement(1))
    assert again.source.used == [0], "as its record says"


def test_samples_on_which_training_fails_twice_are_used_up(made: Harness) -> None:
    for round_index in range(5):
        made.hear(announcement(round_index), offered(round_index + 1))
        made.client.on_trainer(TrainFailed(round_index, "no memory"), 0.0)
    assert made.source.used == [1, 3], "the second and the fourth time: what lasts isn't their doing"
    made.hear(announcement(5), offered(6))
    made.trained(5, 7)
    made.hear(verdict(7))
    made.hear(announcement(6), offered(8))
    made.client.on_trainer(TrainFailed(6, "a damaged blob"), 0.0)
    assert made.source.used == [1, 3, 5]


def test_a_round_whose_process_died_when_it_was_trained_is_used_up(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.records.commit_training(
        TrainingCommit(0, 2, spec_digest(SPEC), (), b"", (BlobEntry("task", "c" * 64, 5),), b"", 2.0, 4, 0), SPEC
    )
    made.client.on_trainer(TrainFailed(0, "the training process died 5 times"), 0.0)
    assert made.source.used == [0]


def test_why_a_download_isnt_served_is_told_while_the_rounds_model_isnt_there(made: Harness) -> None:
    made.hear(announcement(0), offered(666))
    assert "wrong answers" in made.client.download_problem
    made.hear(offered(1), announcement(0))
    made.hear(announcement(1), of_round(1, 666))
    assert "wrong answers" in made.client.download_problem
    made.hear(of_round(1, 667))
    assert made.client.download_problem == ""
    made.hear(of_round(0, 3))  # older than what is held: an aggregator that was frozen says it again
    assert made.courier.refused[-1] == "stale-version"
    assert made.client.download_problem == ""


def test_a_round_whose_training_failed_is_trained_from_another_download_of_it(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.client.on_trainer(TrainFailed(0, "no"), 0.0)
    assert made.hear(of_round(0, 5)) is Step.TRAINING
    assert [job.manifest.version for job in made.trainer.jobs] == [1, 5]


def test_a_download_that_nobody_answers_for_is_refused(made: Harness) -> None:
    made.trust.refused = "nobody signed for it"
    made.hear(announcement(0), offered(1))
    assert (made.courier.accepted, made.courier.refused) == ([], ["untrusted"])


def test_a_transfer_that_fails_is_told_as_the_one_that_it_is(made: Harness, caplog: pytest.LogCaptureFixture) -> None:
    made.hear(announcement(0), offered(1))
    made.trained(0, 2)
    assert len(made.courier.sent) == 1
    made.hear(Failed("c1", "0" * 32, TimeoutError("nothing heard")), now=1.0)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == ["download failed"]
    caplog.clear()
    made.hear(Failed("c1", "f" * 32, ValueError("the broker takes less now")), now=1.0)
    assert "upload not taken" in caplog.text
    assert "download failed" not in caplog.text
    assert len(made.courier.sent) == 1
    made.hear(now=60.0)
    assert len(made.courier.sent) == 2


def test_an_upload_of_which_nothing_arrives_is_known_while_it_waits_for_its_verdict(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.courier.advanced = 5.0
    assert made.client.upload_silent_s(200.0) == 0.0, "it is being trained"
    made.trained(0, 2)
    assert made.hear(now=10.0) is Step.WAIT_VERDICT
    assert made.client.upload_silent_s(200.0) == 195.0
    made.hear(announcement(0, "aggregating"))
    assert made.client.upload_silent_s(200.0) == 0.0, "the aggregator takes none now"
    made.hear(announcement(0))
    made.courier.advanced = float("-inf")
    assert made.client.upload_silent_s(200.0) == 0.0, "the aggregator has answered"


def test_an_offer_that_was_made_for_an_earlier_process_is_passed_over(made: Harness) -> None:
    made.hear(announcement(0), offered(1, "b0"))
    assert (made.courier.accepted, made.courier.refused) == ([], [])
    made.hear(offered(1))
    assert made.courier.accepted == [1]


def test_an_old_download_is_refused_before_it_is_received(made: Harness) -> None:
    made.hear(announcement(4), offered(5))
    made.hear(offered(3))
    assert made.courier.accepted == [5]
    assert made.courier.refused == ["stale-version"]


def test_the_held_download_is_confirmed_again_without_a_swap(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.hear(offered(1))
    assert made.courier.accepted == [1]
    assert made.courier.verdicts == [(1, True, ""), (1, True, "")]
    assert made.slot.num_swaps == 1


def test_a_held_download_of_which_the_disk_lost_something_is_received_again(
    made: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.hear(announcement(0), offered(1))
    monkeypatch.setattr(made.blobs, "has", lambda digest: digest != "a" * 64)
    made.hear(offered(1))
    assert made.courier.accepted == [1, 1]


def test_a_new_epoch_brings_the_upload_and_the_report_again(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.trained(0, 2)
    num_reports = len(made.reports)
    made.hear(announcement(0, instance="e2"))
    assert [sent.version for sent in made.courier.sent] == [2, 2]
    assert len(made.reports) == num_reports + 1
    made.hear(announcement(0, instance="e2"))
    assert len(made.courier.sent) == 2


def test_a_round_that_cannot_be_trained_is_left_and_the_next_is_tried(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.client.on_trainer(TrainFailed(0, "no"), 0.0)
    assert made.client.step is Step.WAIT_ROUND
    assert not list(made.records._folder.parent.glob("round-data*"))
    assert made.hear(announcement(1), offered(2)) is Step.TRAINING


def test_a_round_that_the_disk_did_not_take_is_trained_again_when_it_does(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.client.on_trainer(TrainFailed(0, "No space left on device", errno.ENOSPC), 0.0)
    assert made.client.step is Step.WAIT_DISK
    assert "disk full" in made.disk.problem
    made.hear(offered(2))
    assert made.courier.refused == ["busy"]
    made.client.tick(4.0)
    made.hear()
    assert made.client.step is Step.TRAINING
    assert [job.manifest.round for job in made.trainer.jobs] == [0, 0]


def test_whom_rounds_pass_by_waits_for_models_while_they_are_aggregated_too(made: Harness) -> None:
    for round_index in range(2):
        for state in ("open", "aggregating"):
            assert made.hear(announcement(round_index, state)) is Step.WAIT_DOWNLOAD


def test_a_round_that_lacks_a_file_which_no_disk_took_away_is_left(made: Harness) -> None:
    """As where a package's method reads one that isn't there: the round was trained again and again, without end."""
    made.hear(announcement(0), offered(1))
    made.client.on_trainer(TrainFailed(0, "No such file or directory", errno.ENOENT), 0.0)
    made.hear()
    assert made.client.step is Step.WAIT_ROUND
    assert len(made.trainer.jobs) == 1


def test_a_download_is_served_at_once_and_confirmed_when_its_record_is_on_disk(
    made: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as while_full:
        while_full.setattr(
            "replayfleet.edge_client.state_store.write_atomic",
            Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")),
        )
        assert made.hear(announcement(0), offered(1)) is Step.TRAINING, "nobody knew of the disk when it began"
        made.client.tick(5.0)
        assert (made.client.serving_version, made.courier.verdicts) == (1, [])
        assert StateStore(made.records._folder.parent).held() is None
    made.client.tick(10.0)
    assert made.courier.verdicts == [(1, True, "")]
    assert StateStore(made.records._folder.parent).held() == made.records.held() != None  # noqa: E711


def test_training_is_told_to_end_before_the_rounds_deadline_early_enough_for_the_upload(made: Harness) -> None:
    def announced(round_index: int, deadline_s: float) -> Event:
        return Received("*", Announcement("e1", round_index, "open", deadline_s, SPEC))

    made.hear(announced(0, 100.0), offered(1), now=50.0)
    assert made.trainer.jobs[-1].left_s == pytest.approx(90.0)
    made.trained(0, 2)
    made.hear(verdict(2), now=3.0)  # 3 s after its offer
    made.hear(announced(1, 100.0), offered(2), now=200.0)
    assert made.trainer.jobs[-1].left_s == pytest.approx(100.0 - 0.5 - 2 * 3.0)
    made.trained(1, 3)
    made.hear(announced(2, 0.0), offered(3), now=300.0)
    assert made.trainer.jobs[-1].left_s is None


def test_a_process_that_died_gets_the_deadline_that_the_round_has_by_then(made: Harness) -> None:
    def announced(deadline_s: float) -> Event:
        return Received("*", Announcement("e1", 0, "open", deadline_s, SPEC))

    made.hear(announced(100.0), offered(1), now=50.0)
    made.hear(announced(300.0), now=140.0)
    made.client.on_trainer(TrainerExited(1, -9), 141.0)
    made.client.tick(145.0)
    made.client.on_trainer(TrainerReady(), 150.0)
    assert [job.left_s for job in made.trainer.jobs] == pytest.approx([90.0, 260.0])


def test_the_training_process_starts_while_a_rounds_models_are_on_their_way_and_not_before(made: Harness) -> None:
    made.training.stop()
    made.hear(announcement(1))
    assert made.training.pid is None
    made.courier.accept = lambda *_: []  # type: ignore[method-assign]
    made.hear(offered(1))  # of a round that is over
    assert made.training.pid is None
    made.hear(offered(2))
    assert made.training.pid is not None


def test_a_source_without_samples_is_asked_again_later(made: Harness) -> None:
    samples, made.source.samples = made.source.samples, None
    assert made.hear(announcement(0), offered(1)) is Step.WAIT_DATA
    made.source.samples = samples
    assert made.hear(now=4.9) is Step.WAIT_DATA
    made.client.tick(5.0)
    assert made.hear(now=5.0) is Step.TRAINING


def test_a_source_without_samples_lacks_them_also_while_it_is_asked_again(made: Harness) -> None:
    made.source.samples = None
    made.hear(announcement(0), offered(1))
    for asked_at in (5.0, 10.0):
        made.client.tick(asked_at)
        assert made.outcomes, "it is asked"
        assert made.client.step is Step.WAIT_DATA, "else this wait would begin anew each time, and never be told"
        assert made.hear(now=asked_at) is Step.WAIT_DATA


def test_an_announcement_of_another_task_takes_no_model_away_and_ends_nothing(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.trained(0, 2)
    made.hear(verdict(2))
    assert made.hear(announcement(7, "finished", spec=OTHER)) is Step.WAIT_ROUND
    assert made.hear(announcement(0, spec=OTHER)) is Step.WAIT_ROUND
    assert [task.num_classes for task in made.tasks] == [2]
    assert made.client.serving_version == 1
    assert "another task" in made.client.notice
    assert made.hear(announcement(1), offered(2)) is Step.TRAINING
    assert made.client.notice == ""


def test_another_agreement_on_the_same_task_leaves_progress_behind(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.trained(0, 2)
    made.hear(verdict(2))
    anew = msgspec.structs.replace(SPEC, run_seed=2)
    assert made.hear(announcement(0, spec=anew)) is Step.WAIT_DOWNLOAD
    assert made.client.serving_version == 1
    assert made.hear(announcement(1, spec=anew), offered(2)) is Step.TRAINING


def test_a_client_without_a_model_takes_up_another_task(made: Harness) -> None:
    made.hear(announcement(0))
    assert made.hear(announcement(0, spec=OTHER)) is Step.WAIT_DOWNLOAD
    assert [task.num_classes for task in made.tasks] == [2, 3]


def test_an_announcement_that_is_not_understood_is_ignored(made: Harness) -> None:
    strange = msgspec.structs.replace(SPEC, task={"image_channels": 7})
    foreign = msgspec.structs.replace(SPEC, fleet="others")
    assert made.hear(announcement(0, spec=strange), announcement(0, spec=foreign)) is Step.WAIT_AGGREGATOR
    assert made.tasks == []


def test_a_source_that_does_not_fit_an_announced_task_waits_and_says_so(made: Harness) -> None:
    object.__setattr__(made.client._parts, "open_source", Mock(side_effect=SettingsError("choose another source")))
    assert made.hear(announcement(0)) is Step.WAIT_AGGREGATOR
    assert "choose another source" in made.client.notice
    object.__setattr__(made.client._parts, "open_source", made.open)
    assert made.hear(announcement(0)) is Step.WAIT_DOWNLOAD
    assert made.client.notice == ""


def test_a_client_goes_back_to_a_restored_aggregators_round_and_says_so(made: Harness) -> None:
    made.hear(announcement(4), offered(5))
    made.trained(4, 6)
    assert [sent.round for sent in made.courier.sent] == [4]
    back = Received("*", Announcement("e2", 1, "open", 0.0, SPEC, epoch=1))
    assert made.hear(back) is Step.WAIT_DOWNLOAD
    assert "restored to round 1" in made.client.notice
    again = msgspec.structs.replace(manifest(2), version=(1 << 32) + 2)
    assert made.hear(Offered("c1", Offer("aggregator", "2" * 32, again, (), 1024, b"", "b1"))) is Step.TRAINING
    job = made.trainer.jobs[-1]
    assert (job.manifest.round, job.version) == (1, (1 << 32) + 3)


def test_a_rolled_back_download_is_left_on_disk_and_told_and_its_round_is_not_trained(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.trained(0, 2)
    made.hear(verdict(2))
    made.hear(offered(2))
    assert made.records.on_probation
    made.slot.roll_back(2, Reason.DRIFTED, "one class")
    made.client.tick(1.0)
    held = made.records.held()
    assert held.manifest.version == 1
    (told,) = made.rollbacks
    assert (told.client_id, told.version, told.serving_version, told.reason) == ("c1", 2, 1, "drifted")
    made.client.tick(2.0)
    assert made.hear(announcement(1)) is Step.WAIT_ROUND
    made.hear(offered(2))
    assert made.courier.refused == ["rolled-back"]
    assert len(made.rollbacks) == 1
    made.hear(announcement(1, instance="e2"))
    assert len(made.rollbacks) == 2, "a new aggregator may not know"
    assert made.hear(announcement(2, instance="e2"), offered(3)) is Step.TRAINING
    made.hear(announcement(2, instance="e3"))
    assert len(made.rollbacks) == 2, "a newer one is held: nobody needs to know any more"


def test_a_roll_back_is_for_good_though_the_download_before_was_signed_with_a_key_that_is_replaced(
    made: Harness, tmp_path: Path
) -> None:
    made.hear(announcement(0), of_round(0, 1, release=REPLACED))
    made.hear(announcement(1), offered(2))
    made.slot.roll_back(2, Reason.DRIFTED, "one class")
    made.client.tick(1.0)
    again = Harness(tmp_path)
    again.hear(announcement(1), offered(2))
    assert (again.courier.refused, again.client.serving_version) == (["rolled-back"], 1)
    again.hear(announcement(2), offered(3))
    assert again.client.serving_version == 3


def test_what_a_replaced_key_signed_and_was_rolled_back_keeps_no_download_away(made: Harness, tmp_path: Path) -> None:
    made.hear(announcement(0), offered(1))
    made.hear(of_round(0, 1000, release=REPLACED))
    made.slot.roll_back(1000, Reason.DRIFTED, "one class")
    made.client.tick(1.0)
    again = Harness(tmp_path)
    for version in (2, 3):
        again.hear(announcement(version - 1), offered(version))
        assert again.client.serving_version == version


def test_a_model_that_is_rolled_back_before_its_swap_was_noted_is_not_held(made: Harness, tmp_path: Path) -> None:
    made.hear(announcement(0), offered(1))
    made.courier.events = [announcement(1), offered(2)]
    made.client.on_message("topic", b"", 0.0)  # it serves; what the job made is still in the queue
    made.slot.roll_back(2, Reason.CRASHED, "at its first frame")
    made.client.tick(0.1)
    made.hear()
    assert [told.version for told in made.rollbacks] == [2]
    again = Harness(tmp_path)
    again.hear()
    assert again.client.serving_version == 1


def test_a_download_that_passed_its_probation_is_the_one_to_return_to(made: Harness) -> None:
    for version in (1, 2):
        made.hear(announcement(version - 1), offered(version))
        made.slot.confirm(version)
        made.client.tick(0.0)
    assert not made.records.on_probation
    made.hear(announcement(2), offered(3))
    previous = made.records.previous()
    assert previous.manifest.version == 2
    assert made.rollbacks == []


def test_a_client_that_died_twice_on_probation_serves_the_model_before_and_says_so(
    made: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made.hear(announcement(0), offered(1))
    made.hear(announcement(1), offered(2))
    second = Harness(tmp_path)
    second.hear()
    assert second.client.serving_version == 2
    assert second.slot.previous is not None, "there is a way back, should it fail again"
    assert "model rolled back" not in caplog.messages
    third = Harness(tmp_path)
    third.hear()
    assert third.client.serving_version == 1
    assert caplog.messages.count("model rolled back") == 1
    third.hear(announcement(1), offered(2))
    assert [told.version for told in third.rollbacks] == [2]
    assert third.courier.refused == ["rolled-back"]
    third.client.stop()


def killed(*_: Any, **__: Any) -> Candidate:
    raise ArtefactRejected(Reason.CRASHED, "its process was ended by SIGKILL")


@pytest.mark.parametrize(("newest", "refused"), [(1, no_process), (1, killed), (2, no_process)])
def test_a_stored_model_for_which_the_machine_has_nothing_left_is_tried_again_though_nobody_can_be_reached(
    newest: int, refused: Callable[..., Candidate], made: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(1, newest + 1):
        made.hear(announcement(version - 1), offered(version))
    with monkeypatch.context() as patched:
        patched.setattr(downloads, "candidate", refused)
        again = Harness(tmp_path)
        again.hear()
    assert again.client.serving_version == -1
    again.client.tick(LONGEST_S)
    again.hear(now=LONGEST_S)
    assert again.client.serving_version == newest
    assert (again.slot.previous is None) == (newest == 1), "one on probation has a way back"
    assert again.rollbacks == []


def test_a_stored_model_on_probation_that_finds_no_process_isnt_confirmed_by_the_one_that_serves_in_its_place(
    made: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.hear(announcement(0), offered(1))
    made.hear(announcement(1), offered(2))
    usual = downloads.candidate
    monkeypatch.setattr(
        downloads, "candidate", lambda one, *more: no_process() if one.version == 2 else usual(one, *more)
    )
    again = Harness(tmp_path)
    again.hear()
    assert again.client.serving_version == 1
    again.client.tick(0.0)
    again.client.stop()
    assert StateStore(tmp_path).on_probation


def test_the_run_is_finished_when_its_last_download_is_served_and_reported(made: Harness) -> None:
    made.hear(announcement(0), offered(1))
    made.trained(0, 2)
    made.hear(verdict(2))
    made.hear(announcement(1, "finished"))
    assert not made.client.finished
    assert made.hear(offered(2)) is Step.FINISHED
    assert made.client.finished


def test_a_restarted_client_serves_reports_and_keeps_what_it_needs(made: Harness, tmp_path: Path) -> None:
    made.hear(announcement(0), offered(1))
    made.trained(0, 2)
    again = Harness(tmp_path)
    assert again.hear() is Step.WAIT_AGGREGATOR
    assert again.client.serving_version == 1
    assert [report.version for report in again.reports] == [1]
    assert again.hear(announcement(0)) is not Step.TRAIN
    assert [sent.version for sent in again.courier.sent] == [2], "the upload that has no verdict"
    again.client.tick(0.0)
    assert {"a" * 64, "c" * 64, f"{1:064x}"} <= again.blobs.kept
    assert again.records.held() == HeldDownload(manifest(1), SPEC)


def test_blobs_of_what_is_on_its_way_or_came_for_all_are_kept_until_it_comes_to_nothing(
    made: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.hear(announcement(0), offered(1))
    made.trained(0, 2)
    made.hear(verdict(2))
    shared = Manifest("down", "fleet", "*", 1, 1, (BlobEntry("task", "d" * 64, 5, shared=True),))
    made.hear(Arrived("*", "e" * 32, shared, 100))
    monkeypatch.setattr(made.courier, "accept", lambda *_: [])
    made.hear(offered(2))
    made.client.tick(0.0)
    assert {"d" * 64, f"{2:064x}"} <= made.blobs.kept
    made.hear(Failed("c1", f"{2:032x}", TimeoutError("nothing heard")))
    made.client._downloads.collect_soon()
    made.client.tick(0.0)
    assert f"{2:064x}" not in made.blobs.kept


def choice(name: str = "own", probe: Probe = GOOD) -> Choice:
    scores = {"task": 0.5, "own": 0.75, "served": 0.5}
    return Choice(name, scores, 0.25, 0.0625, True, BlobEntry("task", "c" * 64, 5), probe)


def until_it_chooses(made: Harness) -> ChooseJob:
    """Train round 0 and receive the download that ends it."""
    made.source.samples = Samples(np.zeros((20, 1, 28, 28), np.float32), np.arange(20, dtype=np.int64) % 2)
    made.hear(announcement(0, spec=BEST), offered(1))
    assert len(read_round_data(made.trainer.jobs[0].round_data)) == 18
    made.trained(0, 2, BEST)
    made.hear(verdict(2))
    made.hear(announcement(1, spec=BEST), offered(2))
    job = made.trainer.jobs[-1]
    assert isinstance(job, ChooseJob)
    return job


def test_what_proves_best_is_served_told_and_kept(made: Harness) -> None:
    job = until_it_chooses(made)
    assert len(read_round_data(job.held_out)) == 2
    assert job.served is None, "what round 0 began with was nobody's choice"
    assert made.client.serving_version == 1, "until it is chosen"
    made.client.on_trainer(Chose(1, 2, choice()), 0.0)
    made.hear()
    held = made.records.held()
    assert (held.manifest, held.served.serving and held.served.serving.parameters) == (manifest(2), CHOSEN)
    assert made.courier.verdicts[-1] == (2, True, "")
    assert "c" * 64 in made.records.blobs_in_use()
    assert made.client.choice.startswith("own, right on 75.0 %")
    metrics = made.reports[-1].metrics
    assert (metrics["evidence/own"], metrics["served/own"], metrics["served_gain"]) == (0.75, 1.0, 0.25)
    assert [type(job) for job in made.trainer.jobs[-2:]] == [ChooseJob, TrainJob]
    assert made.trainer.jobs[-1].choice == choice()
    made.trained(1, 3, BEST)
    made.hear(verdict(3))
    made.hear(announcement(2, spec=BEST), offered(3))
    again: Any = made.trainer.jobs[-1]
    assert again.served == BlobEntry(CHOSEN, "c" * 64, 5)


def test_a_swap_that_ends_while_a_newer_download_waits_for_a_choice_holds_up_no_upload(made: Harness) -> None:
    read, install = made.hear_alone(announcement(0, spec=BEST), offered(1))
    made.client.on_outcome(read, 0.0)
    made.hear(offered(2))
    made.client.on_outcome(install, 0.0)
    made.trained(0, 2, BEST)
    assert [sent.version for sent in made.courier.sent] == [2]


def test_a_choice_waits_while_a_round_is_read(made: Harness) -> None:
    until_it_chooses(made)
    made.client.on_trainer(Chose(1, 2, None), 0.0)
    made.client.on_outcome(made.outcomes.pop(0), 0.0)
    (_, read) = made.hear_alone(offered(3))
    made.client.on_outcome(read, 0.0)
    assert [type(job) for job in made.trainer.jobs[-2:]] == [ChooseJob, TrainJob]


def test_a_source_without_samples_is_not_asked_again_while_the_training_process_chooses(made: Harness) -> None:
    samples, made.source.samples = made.source.samples, None
    made.hear(announcement(0, spec=BEST), offered(1))
    assert made.hear(offered(2)) is Step.WAIT_DATA
    assert isinstance(made.trainer.jobs[-1], ChooseJob)
    made.source.samples = samples
    made.client.tick(DATA_AGAIN_S)
    assert made.hear(now=DATA_AGAIN_S) is Step.TRAINING
    assert isinstance(made.trainer.jobs[-1], ChooseJob)


def test_a_client_that_died_before_the_swap_serves_what_it_served_and_chooses_by_replay(
    made: Harness, tmp_path: Path
) -> None:
    until_it_chooses(made)
    again = Harness(tmp_path)
    assert again.client.serving_version == 1
    again.hear(announcement(1, spec=BEST), offered(2))
    job: Any = again.trainer.jobs[-1]
    assert (job.manifest.version, job.held_out) == (2, "")
    again.client.on_trainer(Chose(1, 2, None), 0.0)
    again.hear()
    assert again.records.held() == HeldDownload(manifest(2), BEST)


def test_without_a_choice_what_was_downloaded_is_served(made: Harness) -> None:
    until_it_chooses(made)
    made.client.on_trainer(TrainFailed(1, "no memory"), 0.0)
    made.hear()
    assert made.records.held() == HeldDownload(manifest(2), BEST)
    assert made.training.problem == "", "no round failed"


def test_a_chosen_model_that_answers_otherwise_than_its_golden_vector_gives_way_to_the_downloaded_one(
    made: Harness,
) -> None:
    until_it_chooses(made)
    made.client.on_trainer(Chose(1, 2, choice(probe=BAD)), 0.0)
    made.hear()
    made.hear()
    assert made.records.held() == HeldDownload(manifest(2), BEST)
    assert made.courier.verdicts[-1] == (2, True, "")


def test_a_newer_download_overtakes_one_that_waits_for_a_choice(made: Harness) -> None:
    until_it_chooses(made)
    made.hear(offered(3))
    assert made.courier.verdicts[-1] == (2, False, "stale-version")
    made.client.on_trainer(Chose(1, 2, choice()), 0.0)
    job: Any = made.trainer.jobs[-1]
    assert (job.manifest.version, made.client.serving_version) == (3, 1)
    made.client.on_trainer(Chose(2, 3, None), 0.0)
    made.hear()
    assert made.records.held() == HeldDownload(manifest(3), BEST)
