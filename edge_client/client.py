"""One client's run: connects downloads, training and uploads; called by one loop, owns no thread, socket or clock."""

from __future__ import annotations

import math
import shlex
from collections import deque
from collections.abc import Mapping

from replayfleet.devices.budget import upload_reserve_s
from replayfleet.edge_client.flow import Samples, Source
from replayfleet.edge_client.learning.collector import newest
from replayfleet.edge_client.learning.local_training import TrainerEvent
from replayfleet.edge_client.learning.training.job import (
    ChooseJob,
    RoundFile,
    TrainDone,
    TrainFailed,
    TrainJob,
)
from replayfleet.edge_client.state_store import HeldDownload, SentAway, TrainingCommit
from replayfleet.edge_client.sync.choices import ChoiceDesk
from replayfleet.edge_client.sync.download import is_same, serves_best
from replayfleet.edge_client.sync.downloads import Agreement, DownloadDesk, agreement
from replayfleet.edge_client.sync.following import Following
from replayfleet.edge_client.sync.parts import Parts
from replayfleet.edge_client.sync.reports import ReportDesk
from replayfleet.edge_client.sync.session_logic import NOWHERE, Place, Situation, Step, next_step, open_place
from replayfleet.edge_client.sync.uploads import UploadDesk
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.fleet.growth import extends
from replayfleet.federation.service.jobs import Outcome
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.messages import Announcement, epoch_of
from replayfleet.federation.wire.transport.interfaces import Arrived, Concluded, Event, Failed, Offered, Received
from replayfleet.models.specs import DetectionSpec

log = EventLogger(__name__)

DATA_AGAIN_S = 5.0
"""How long to wait before asking a source again that had no samples for the open round."""
MAX_FAILURES = 2
"""How often training may fail on one version."""
MAX_FAILED = 8
"""How many failures are remembered, the newest."""


class Client:
    """Feeds every event to whom it concerns, and does what ``next_step`` says.

    Args:
        parts: collaborators.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._reports = ReportDesk(parts)
        self._downloads = DownloadDesk(parts, self._reports)
        self._uploads = UploadDesk(parts)
        self._choices = ChoiceDesk(parts, self._downloads)
        self._following = Following(parts.gate.fleet)
        self._deadline_at: float | None = None
        self._agreed: Agreement | None = None
        self._waiting: dict[str, Offered] = {}
        self._trained = NOWHERE
        self._reading_round: int | None = None
        self._reading_since = 0.0
        self._num_failed = 0
        self._round_file: RoundFile | None = None
        self._trained_from: HeldDownload | None = None
        self._failed_on = deque[HeldDownload](maxlen=MAX_FAILED)
        self._data_again_at: float | None = None
        self.source: Source | None = None
        self.step = Step.WAIT_AGGREGATOR
        self.privacy = ""

    @property
    def round(self) -> int:
        """The round that the aggregator announced last; -1 before."""
        word = self._following.word
        return -1 if word is None else word.round

    @property
    def notice(self) -> str:
        """What keeps this client from its work, or what was said of its upload or its model; empty if all is well."""
        held = self._downloads.held
        return self._following.notice or self._parts.trust.problem or ("" if held is None else held.manifest.notice)

    @property
    def ignored(self) -> str:
        """Why the aggregator's newest word isn't followed; empty if it is, or none came."""
        return self._following.ignored

    @property
    def is_excluded(self) -> bool:
        """Whether an operator excluded this client."""
        word = self._following.word
        return word is not None and word.excludes(self._parts.client_id)

    @property
    def is_shut_out(self) -> bool:
        """Whether the aggregator takes nothing that this client signs."""
        word = self._following.word
        return word is not None and word.shuts_out(self._parts.client_id)

    @property
    def is_paused(self) -> bool:
        """Whether an operator paused the fleet."""
        word = self._following.word
        return word is not None and word.paused and not word.rests_s and word.state != "finished"

    @property
    def rests_s(self) -> float:
        """Seconds until the round is due, when last heard of; 0 if it is."""
        word = self._following.word
        return word.rests_s if word is not None and word.state == "open" else 0.0

    @property
    def sent_away(self) -> SentAway | None:
        """The download that was rolled back, unless a newer one is held."""
        return self._downloads.sent_away

    @property
    def download_problem(self) -> str:
        """Why the announced round's download isn't served; empty if it is, or none came."""
        now = self._situation()
        held, word = now.held, now.announcement
        served = held is not None and word is not None and held >= open_place(now, word)
        return "" if served else self._downloads.problem

    @property
    def upload_problem(self) -> str:
        """Why the aggregator doesn't take the upload for now; empty if it does, or there is none."""
        return self._uploads.problem

    @property
    def serving_version(self) -> int:
        """Of the model that answers frames now; -1 for none."""
        served = self._parts.slot.active
        return -1 if served is None else served.version

    @property
    def precision(self) -> str:
        """What the model on disk computes in; empty while there is none."""
        held = self._downloads.held
        return "" if held is None or held.served.serving is None else held.served.serving.precision

    @property
    def choice(self) -> str:
        """What was chosen to be served, and why, in words; empty where what was downloaded is."""
        held = self._downloads.held
        return "" if held is None or held.choice is None else held.choice.text

    @property
    def measured(self) -> Mapping[str, float]:
        """What the newest report says of the served model; empty before the first. Safe to call from another thread."""
        newest = self._reports.newest
        return {} if newest is None else newest.metrics

    @property
    def measured_round(self) -> int:
        """Of the download whose model the newest report is of; -1 before the first."""
        return -1 if self._reports.newest is None else self._reports.newest.round

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of the fleet's task; empty until it is known."""
        return () if self._agreed is None else self._agreed.task.class_names

    @property
    def max_boxes(self) -> int | None:
        """Boxes in a picture's label, where the fleet learns boxes."""
        task = None if self._agreed is None else self._agreed.task
        return task.max_boxes if isinstance(task, DetectionSpec) else None

    @property
    def method(self) -> str:
        """That the fleet agreed on; empty until it is known."""
        return "" if self._agreed is None else self._agreed.spec.method

    @property
    def finished(self) -> bool:
        """Whether the run is over, its final model is served, and the aggregator was told."""
        held, newest = self._downloads.held, self._reports.newest
        reported = held is not None and newest is not None and newest.version >= held.manifest.version
        return self.step is Step.FINISHED and reported

    def start(self) -> None:
        """Serve the last good model.

        Raises:
            SettingsError: The source doesn't fit the fleet's task.
        """
        self._downloads.serve_from_disk()
        held = self._downloads.held
        if held is not None:
            self._agree(agreement(held.spec))

    def on_message(self, topic: str, payload: bytes, now: float) -> None:
        self._handle(self._parts.courier.handle(topic, payload, now), now)
        self._advance(now)

    def on_trainer(self, event: TrainerEvent, now: float) -> None:
        """Take a word of the training process."""
        job = self._parts.training.job
        ended = self._parts.training.handle(event, now)
        if ended is not None and isinstance(job, ChooseJob):
            self._choices.chosen(job, ended)
        elif isinstance(ended, (TrainDone, TrainFailed)):
            self._training_ended(ended)
        self._advance(now)

    def on_outcome(self, outcome: Outcome, now: float) -> None:
        outcome(now)
        self._advance(now)

    def on_connected(self, now: float) -> None:
        """The broker accepted us (again): repeat what it may have lost."""
        self._following.reconnected()
        self._parts.courier.resume(now)
        self._advance(now)

    def tick(self, now: float) -> None:
        """Let time pass; call at least every 0.2 s."""
        self._parts.disk.tick(now)
        self._parts.training.tick(now)
        self._handle(self._parts.courier.tick(now), now)
        self._downloads.follow_slot()
        self._downloads.tell_held()
        self._downloads.serve_again(now)
        if self._data_again_at is not None and now >= self._data_again_at and self._reading_round is None:
            if next_step(self._situation()) is Step.WAIT_DATA:
                self._read_round(self.round, now)  # it waits for them on, so that it can say since when
            else:
                self._data_again_at = None
        if self._parts.training.round is None and self._reading_round is None:
            self._downloads.collect_if_due()
        self._advance(now)

    def stop(self) -> None:
        """Leave what the next start has to know."""
        self._downloads.stop()
        self._forget_samples()
        self._choices.forget()

    def _handle(self, events: list[Event], now: float) -> None:
        pending = list(events)
        while pending:
            pending.extend(self._on_event(pending.pop(0), now))

    def _on_event(self, event: Event, now: float) -> list[Event]:
        match event:
            case Received(_, Announcement() as announcement):
                return self._announced(announcement, now)
            case Offered() if self._agreed is None:
                self._waiting[event.peer] = event  # the announcement takes another connection, and will come
            case Offered():
                self._warm_up_for(event, now)
                return self._downloads.offered(event, now)
            case Arrived() if self._agreed is not None:
                self._downloads.arrived(event, self._agreed)
            case Concluded():
                if self._uploads.concluded(event, now):
                    place = Place(event.manifest.epoch, event.manifest.round)
                    self._reports.contribute(place, {"bytes_up": float(event.bytes_on_wire)})
            case Failed():
                if not self._uploads.failed(event, now):
                    self._downloads.failed(event)
            case _:
                log.debug("message ignored", kind=type(event).__name__)
        return []

    def _warm_up_for(self, event: Offered, now: float) -> None:
        """Let the training process import torch while the models of the round that it will train are on their way."""
        word, manifest = self._following.word, event.offer.manifest
        fresh = self._trained < Place(manifest.epoch, manifest.round)
        opens = word is not None and word.state == "open" and not word.paused
        if word is not None and opens and fresh and manifest.round == word.round and self._parts.compute.trains:
            self._parts.training.start(now)

    def _announced(self, announcement: Announcement, now: float) -> list[Event]:
        """Take the aggregator's word, if it is one to follow; returns the offers that waited for it."""
        before, parts = self._following.word, self._parts
        if not self._following.follows(announcement, now):
            return []
        try:
            self._agree(agreed := agreement(announcement.spec))
        except SettingsError as error:
            self._following.ignore(f"{error}; update or correct this client, or the aggregator")
            return []
        self._following.take(announcement, now)
        parts.courier.follow(announcement.instance)
        parts.trust.learn(announcement.roots)
        self._deadline_at = now + announcement.deadline_s if announcement.deadline_s > 0 else None
        self._uploads.heard(announcement, now, agreed.digest)
        if announcement.state == "open" and parts.training.round == announcement.round:
            parts.training.follow(self._training_deadline(now))
        if before is None or (before.round, before.state) != (announcement.round, announcement.state):
            log.info("announced", round=announcement.round, state=announcement.state)
        if before is not None and before.instance != announcement.instance:
            self._reports.repeat()
        if before is None or before.instance != announcement.instance:
            self._downloads.repeat_rollback()
        waiting, self._waiting = list(self._waiting.values()), {}
        return list(waiting)

    def _agree(self, agreed: Agreement) -> None:
        """Adopt the fleet's agreement; what belongs to another one is left behind.

        One that only has more classes leaves nothing behind: the model serves until the grown one is there.

        Raises:
            SettingsError: The source doesn't fit the fleet's task, or a model of another task is served, which no
                announcement takes away.
        """
        before = self._agreed
        if before is not None and before.digest == agreed.digest:
            return
        source = self.source
        more_classes = before is not None and extends(agreed.spec, before.spec)
        if before is None or before.task != agreed.task:
            if self._downloads.held is not None and before is not None and not more_classes:
                if extends(before.spec, agreed.spec):
                    lost = " ".join(map(shlex.quote, before.task.class_names[len(agreed.task.class_names) :]))
                    raise SettingsError(
                        f"this aggregator began from a copy without classes that the fleet learned since: `aggregator "
                        f"add-class {lost}` there, and all go on"
                    )
                raise SettingsError("the fleet learns another task than the one served; it takes a new --data-dir")
            source = self._parts.open_source(agreed.task)
        if more_classes:
            log.info("the fleet learns more classes", classes=", ".join(agreed.task.class_names))
        elif before is not None:
            log.warning("the fleet agreed anew", method=agreed.spec.method, run_seed=agreed.spec.run_seed)
        self._agreed = agreed
        commit = self._parts.records.training()
        ours = commit is not None and commit.spec_digest == agreed.digest
        self._trained = _place_of(commit) if commit is not None and ours else NOWHERE
        remembered = self._parts.records.remembered(agreed.spec)
        self.privacy = "" if remembered is None else remembered.privacy
        self._failed_on.clear()
        self._reports.forget_contributions()
        if source is not None and (more_classes or source is not self.source):
            self.source = source
            self._reports.measure_on(source.samples, agreed.task)
            if commit is not None:  # it may have died before it told its source
                self._use_up(commit.round)

    def _situation(self) -> Situation:
        agreed, base = self._agreed, self._base()
        in_work, sent_away = self._parts.training.round, self._downloads.sent_away
        reading = self._reading_round if self._data_again_at is None else None
        return Situation(
            announcement=self._following.word,
            held=_place_under(agreed, self._downloads.held),
            coming=_place_under(agreed, self._downloads.coming),
            trained=self._trained,
            training_round=in_work if in_work is not None else reading,
            pending=None if agreed is None else self._uploads.pending(agreed.digest),
            client_id=self._parts.client_id,
            trains=self._parts.compute.trains,
            has_disk=not self._parts.disk.problem,
            has_data=self._data_again_at is None,
            abandoned=(_place_under(agreed, base) if self._fails_on(base) else None) or NOWHERE,
            sent_away=NOWHERE if sent_away is None else Place(epoch_of(sent_away.version), sent_away.round),
            waited=self.step is Step.WAIT_DOWNLOAD,
        )

    def _advance(self, now: float) -> None:
        """Do the next thing, until there is nothing to do but wait."""
        for _ in Step:
            self.step = next_step(self._situation())
            if self.step is Step.LET_GO:
                self._uploads.let_go()
            elif self.step is Step.TRAIN:
                self._read_round(self.round, now)
            else:
                break
        self._downloads.install()
        if self._reading_round is None:
            self._choices.advance(self._agreed, now)
        held, word = self._downloads.held, self._following.word
        if self.step is Step.OFFER and word is not None:
            self._uploads.offer(word.instance, None if held is None else held.manifest, now)

    def _base(self) -> HeldDownload | None:
        """What the open round is trained from: what is about to be served, if it is that round's, or else what is."""
        coming, agreed = self._downloads.coming, self._agreed
        if coming is None or agreed is None or (coming.manifest.round, coming.spec) != (self.round, agreed.spec):
            return self._downloads.held
        return coming

    def _fails_on(self, base: HeldDownload | None) -> bool:
        """Whether training failed on this download, or too often on its version: what comes again may repair it."""
        failed = [one for one in self._failed_on if base is not None and is_same(one.manifest, base.manifest)]
        return len(failed) >= MAX_FAILURES or any(one is base for one in failed)

    def reading_s(self, now: float) -> float:
        """How long the round's samples have been asked for; 0 while they aren't."""
        return 0.0 if self._reading_round is None else now - self._reading_since

    def upload_silent_s(self, now: float) -> float:
        """How long nothing new of the offered upload has reached the aggregator; 0 while it takes or needs none."""
        word = self._following.word
        if self.step is not Step.WAIT_VERDICT or word is None or word.state != "open":
            return 0.0
        since = self._parts.courier.advanced_at(self._parts.client_id)
        return now - since if math.isfinite(since) else 0.0

    def _read_round(self, round_index: int, now: float) -> None:
        """Get the round's samples from the source, as a job, then train from what is its base now."""
        source, parts, base = self.source, self._parts, self._base()
        assert source is not None
        self._reading_round, self._reading_since = round_index, now

        def begin() -> Samples | None:
            """What waited for a model that hangs as it loads may come too late, and then uses up nothing."""
            return source.samples.round_samples(round_index) if self.round == round_index else None

        def read(samples: Samples | None, now: float) -> None:
            self._reading_round = self._data_again_at = None
            if samples is not None and len(samples):
                if not self._train(samples, base, now):
                    log.warning("samples not used", round=round_index, samples=len(samples), reason="asked for no more")
            elif self.round == round_index:
                self._data_again_at = now + DATA_AGAIN_S

        def failed(error: Exception, now: float) -> None:
            log.error("round data can't be read", round=round_index, reason=error, again_in_s=DATA_AGAIN_S)
            self._reading_round = None
            self._data_again_at = now + DATA_AGAIN_S

        parts.jobs.submit(begin, read, failed)

    def _train(self, samples: Samples, base: HeldDownload | None, now: float) -> bool:
        """Begin to train, unless what was to be trained is no longer asked for; returns whether it did."""
        agreed, parts = self._agreed, self._parts
        if base is None or agreed is None or (base.manifest.round, base.spec) != (self.round, agreed.spec):
            return False
        bounded, num_dropped = newest(samples)
        self._trained_from = base
        self._forget_samples()
        if serves_best(agreed.spec):
            bounded = self._choices.hold_out(bounded, agreed.spec.run_seed, self.round)
        self._round_file = RoundFile(bounded)
        commit, version = parts.records.training(), base.manifest.version + 1
        if commit is not None and epoch_of(commit.version) <= base.manifest.epoch:
            version = max(version, commit.version + 1)  # an upload is of the epoch that it was trained in
        log.info("training", round=self.round, samples=len(bounded), dropped=num_dropped)
        parts.training.begin(
            TrainJob(
                data_dir=str(parts.data_dir),
                client_id=parts.client_id,
                spec=agreed.spec,
                manifest=base.manifest,
                version=version,
                sampler=parts.compute.sampler,
                num_threads=parts.compute.training_threads,
                round_data=self._round_file.path,
                allowance=parts.compute.allowance,
                torch_device=parts.compute.training_device,
                choice=base.choice,
                verified=parts.blobs.verified(entry.digest for entry in base.manifest.blobs),
            ),
            now,
            self._training_deadline(now),
        )
        return True

    def _training_deadline(self, now: float) -> float | None:
        """When training must be done, so that its upload arrives before the round's deadline."""
        if self._deadline_at is None:
            return None
        return self._deadline_at - upload_reserve_s(max(0.0, self._deadline_at - now), self._uploads.last_upload_s)

    def _training_ended(self, ended: TrainDone | TrainFailed) -> None:
        parts = self._parts
        self._forget_samples()
        commit = parts.records.training()
        if isinstance(ended, TrainFailed) or commit is None or commit.round != ended.round:
            error = ended.error if isinstance(ended, TrainFailed) else "its record is damaged"
            number = ended.disk_errno if isinstance(ended, TrainFailed) else None
            if number is not None and parts.disk.takes(OSError(number, error)):
                log.warning("training failed", round=ended.round, reason=error, next="again when the disk takes it")
                self._downloads.collect_soon()  # what it left makes room
                return
            log.error("training failed", round=ended.round, reason=error, next="waiting for the next round")
            self._num_failed += 1
            agreed, num_failed = self._agreed, self._num_failed
            ours = "" if agreed is None else agreed.digest
            trained = commit is not None and (commit.round, commit.spec_digest) == (ended.round, ours)
            # They may be why: after the 2nd, 4th, 8th failure in a row, or a lasting one would use up everything.
            if trained or (num_failed > 1 and not num_failed & (num_failed - 1)):
                self._use_up(ended.round)
            if self._trained_from is not None:
                self._failed_on.append(self._trained_from)
            return
        if ended.note:
            log.warning("training", round=ended.round, note=ended.note)
        self._num_failed = 0
        parts.blobs.believe(ended.verified)
        self._use_up(commit.round)
        log.info("trained", round=commit.round, train_s=round(commit.train_s, 3), blobs=len(commit.upload))
        if self._agreed is not None and commit.spec_digest == self._agreed.digest:
            self._trained, self.privacy = _place_of(commit), commit.privacy
            measures = {
                "train_s": commit.train_s,
                "sub_generators_sent": float(commit.num_sub_generators_sent),
                "sub_generators_held": float(commit.num_sub_generators),
                **({} if commit.epsilon is None else {"dp_epsilon": commit.epsilon, "dp_delta": commit.delta or 0.0}),
            }
            self._reports.contribute(self._trained, measures)
        self._uploads.reload()

    def _use_up(self, round_index: int) -> None:
        """Tell the source that no later round is to get this one's samples."""
        if (source := self.source) is not None:
            self._parts.disk.do(lambda _: source.samples.used_up(round_index))

    def _forget_samples(self) -> None:
        file, self._round_file = self._round_file, None
        if file is not None:
            file.close()


def _place_under(agreed: Agreement | None, download: HeldDownload | None) -> Place | None:
    """Return the place of a download of this agreement."""
    if agreed is None or download is None or download.spec != agreed.spec:
        return None
    return Place(download.manifest.epoch, download.manifest.round)


def _place_of(commit: TrainingCommit) -> Place:
    return Place(epoch_of(commit.version), commit.round)
