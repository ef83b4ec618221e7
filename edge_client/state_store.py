"""What a client keeps on disk besides blobs: small records, each replaced atomically and checked by digest.

``training``: the latest committed local round: the method's state after it and the upload it made.
``aside``: the last rounds under other agreements: whoever changes a fleet's, by mistake or not, takes no memory away.
``verdict``: what became of that upload; without it the upload is still pending.
``held`` and ``previous``: the download that is served, and the one before it that was confirmed.
``probation``: while the one that is served hasn't been confirmed; ``rolled-back``: the last one that was sent away.
``pace``: how fast this device trains; a measurement, not worth much after a change of threads or task.

Records name blobs by digest, and blobs are durable before a record names them, so a kill at any instant leaves either
the old or the new state.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from replayfleet.devices.budget import Speed
from replayfleet.federation.atomic import clear_place, remove_unfinished, write_atomic
from replayfleet.federation.errors import UNREADABLE, Reason, SettingsError
from replayfleet.federation.paths import read_regular
from replayfleet.federation.service.disk import Disk
from replayfleet.federation.service.fleet.growth import first_classes
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.messages import (
    TASK_GRAPH,
    BlobEntry,
    FleetSpec,
    Manifest,
    Probe,
    Release,
    Serving,
)

log = EventLogger(__name__)

R = TypeVar("R", bound=msgspec.Struct)

NEXT = "going on with what the aggregator sends"

DEATHS_ON_PROBATION = 2
"""Of clients; after so many the model is held to be the cause."""

MAX_ASIDE = 2
"""Memories of former agreements; the oldest stay, so that nobody can push one out by making up new ones."""

MAX_COUNTED = 1000
"""Rounds that an aggregator may go back to, and their samples aren't counted twice."""

_DIGEST_BYTES = 32
_encoder = msgspec.msgpack.Encoder(order="deterministic")


class TrainingCommit(msgspec.Struct, frozen=True):
    """One finished local round.

    Attributes:
        round: which.
        version: of the upload's manifest.
        spec_digest: of the fleet's agreement; under another one neither state nor upload mean anything.
        state: blobs of the method's state.
        state_facts: msgpack.
        upload: blobs of the upload.
        upload_facts: msgpack.
        train_s: seconds that ``local_round`` took.
        num_samples: real samples it learned from.
        num_sub_generators: in the state.
        num_sub_generators_sent: in the upload.
        epsilon: of all sub-generators so far, at ``delta``; None without differential privacy.
        delta: for which ``epsilon`` holds.
        counted: digests of rounds and their samples that the state has counted, the newest ``MAX_COUNTED`` rounds'.
    """

    round: int
    version: int
    spec_digest: str
    state: tuple[BlobEntry, ...]
    state_facts: bytes
    upload: tuple[BlobEntry, ...]
    upload_facts: bytes
    train_s: float
    num_samples: int
    num_sub_generators: int
    num_sub_generators_sent: int = 0
    epsilon: float | None = None
    delta: float | None = None
    counted: tuple[bytes, ...] = ()

    @property
    def privacy(self) -> str:
        """What the client's sub-generators cost, for people; empty without differential privacy."""
        return "" if self.epsilon is None else f"epsilon {self.epsilon:.3g} at delta {self.delta or 0.0:g}"


class Aside(msgspec.Struct, frozen=True):
    """The last rounds under agreements that the fleet has left, oldest first."""

    commits: tuple[TrainingCommit, ...] = ()


class Settled(msgspec.Struct, frozen=True):
    """The upload ``version`` needs no more offers: it has its verdict, or its round is over (``dropped``).

    Attributes:
        version: of the upload's manifest.
        outcome: ``accepted``, ``dropped``, or why it was refused.
        counts_in: the round in which an accepted one counts, until that is over; None then, and of all others.
    """

    version: int
    outcome: str
    counts_in: int | None = None


class Choice(msgspec.Struct, frozen=True):
    """Which model a device serves, in a fleet that lets it choose, and why: a ``steps.serving.Served`` on disk.

    Attributes:
        name: of the candidate.
        scores: candidate -> share of the device's evidence that it answers rightly.
        gain: score of the best less that of the one served before.
        error: standard error of that gain.
        lost: the device's own model is clearly better than the one that it downloaded to serve.
        parameters: of what is served; None if that is what the download's manifest names.
        probe: its golden vector; None likewise.
    """

    name: str
    scores: dict[str, float]
    gain: float
    error: float
    lost: bool
    parameters: BlobEntry | None = None
    probe: Probe | None = None

    @property
    def text(self) -> str:
        """The choice, for people."""
        others = ", ".join(f"{name} {100 * share:.1f}" for name, share in self.scores.items() if name != self.name)
        return f"{self.name}, right on {100 * self.scores[self.name]:.1f} % of the evidence ({others})"


CHOSEN = "chosen"
"""In a manifest that is served: the parameters that were chosen in place of the downloaded ones. They are served with
the float32 graph, which every download holds, a rounded one beside it or not."""


class HeldDownload(msgspec.Struct, frozen=True):
    """A download that passed its probe, under the agreement it was made for, and what was chosen of it, if anything."""

    manifest: Manifest
    spec: FleetSpec
    choice: Choice | None = None

    @property
    def served(self) -> Manifest:
        """The manifest, naming what is served: the same, unless something else was chosen."""
        return with_choice(self.manifest, self.choice)


def with_choice(manifest: Manifest, choice: Choice | None) -> Manifest:
    """Return a manifest that names, as what is served, what was chosen."""
    if choice is None or choice.parameters is None or choice.probe is None or manifest.serving is None:
        return manifest
    entry = BlobEntry(CHOSEN, choice.parameters.digest, choice.parameters.size_bytes)
    serving = Serving(TASK_GRAPH, CHOSEN, choice.probe)
    return msgspec.structs.replace(manifest, blobs=(*manifest.blobs, entry), serving=serving)


class Pace(msgspec.Struct, frozen=True):
    """How a device trained under one agreement and number of threads.

    Attributes:
        spec_digest: of the agreement.
        num_threads: that it trained with.
        speed: mean of its rounds, the latest counting most.
        max_batch_size: what memory sufficed for; None if it always did.
    """

    spec_digest: str
    num_threads: int
    speed: Speed = msgspec.field(default_factory=Speed)
    max_batch_size: int | None = None


class Trial(msgspec.Struct, frozen=True):
    """The held download is on probation.

    Attributes:
        version: of its manifest.
        runs: a client serves it; still so at the next start if that client died.
        num_deaths: clients that died while they served it.
        before: version of what was held on probation when this was begun, and still is after a kill in between.
    """

    version: int
    runs: bool = True
    num_deaths: int = 0
    before: int | None = None


class SentAway(msgspec.Struct, frozen=True):
    """A download that served, failed and isn't taken again.

    Attributes:
        version: of its manifest; older ones aren't taken either, but for the one that was returned to.
        round: of its manifest.
        reason: value of a ``Reason``.
        detail: one line.
        release: of its manifest: whose word it was.
    """

    version: int
    round: int
    reason: str
    detail: str
    release: Release | None = None


def spec_digest(spec: FleetSpec) -> str:
    """Name an agreement: two are the same if fleet, method, settings, task and seed are."""
    return hashlib.sha256(_encoder.encode(spec)).hexdigest()


def goes_on_under(spec: FleetSpec, digest: str) -> bool:
    """Whether what was remembered under the agreement ``digest`` is good under ``spec``, which may have more classes.

    A class's id stays, and what a client remembers is by class.
    """
    if digest == spec_digest(spec):
        return True
    names = spec.task.get("class_names", ())
    return any(digest == spec_digest(first_classes(spec, number)) for number in range(len(names) - 1, 1, -1))


_records = (TrainingCommit, Aside, Settled, HeldDownload, Pace, Trial, SentAway)
_decoders: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in _records
}
"""Made at import, for threads: ``children.decoder_of``."""


class StateStore:
    """The records below one data dir; the training process writes ``training`` and ``pace``, the client the others.

    Args:
        data_dir: a client's.
        read_only: for who looks in beside a running client: nothing is made or removed, damaged records neither.
        disk: keeps what the disk doesn't take, and writes it later, in order; until then records are read as if it
            were written. None: that is an error.
    """

    def __init__(self, data_dir: Path, *, read_only: bool = False, disk: Disk | None = None) -> None:
        self._folder = data_dir / "state"
        self._read_only = read_only
        self._disk = disk
        self._waiting: dict[str, bytes | None] = {}
        if not read_only:
            self._folder.mkdir(parents=True, exist_ok=True)
        if disk is not None:  # the client, before its training process
            with contextlib.suppress(OSError):  # of a read-only disk
                remove_unfinished(self._folder)
                for path in self._folder.iterdir():
                    if clear_place(path):
                        log.error("record unreadable", file=path, reason="it was no file", next=NEXT)

    def commit_training(self, commit: TrainingCommit, spec: FleetSpec) -> None:
        """Make a finished round durable; its blobs must be already.

        Args:
            commit: the round.
            spec: what it was trained under; a former round that means nothing under it is set aside.
        """
        before, aside = self.training(), self._aside()
        former = {one.spec_digest: one for one in (*aside, before) if one is not None}
        others = tuple(one for digest, one in former.items() if not goes_on_under(spec, digest))[:MAX_ASIDE]
        if others != aside:
            self._write("aside", Aside(others))  # first: a kill in between leaves what was remembered twice
        self._write("training", commit)

    def remembered(self, spec: FleetSpec) -> TrainingCommit | None:
        """The latest finished round whose state is good under ``spec``, of a former time if need be."""
        known = [one for one in (self.training(), *self._aside()) if one is not None]
        return next((one for one in known if goes_on_under(spec, one.spec_digest)), None)

    def _aside(self) -> tuple[TrainingCommit, ...]:
        found = self._read("aside", Aside)
        return () if found is None else found.commits

    def training(self) -> TrainingCommit | None:
        """The latest finished round; None if there is none or its record is damaged."""
        return self._read("training", TrainingCommit)

    def keep_pace(self, pace: Pace) -> None:
        self._write("pace", pace)

    def pace(self, spec_digest: str, num_threads: int) -> Pace:
        """How fast training was under this agreement with so many threads; empty where nothing was measured."""
        found = self._read("pace", Pace)
        if found is None or (found.spec_digest, found.num_threads) != (spec_digest, num_threads):
            return Pace(spec_digest, num_threads)
        return found

    def settle(self, version: int, outcome: str, *, counts_in: int | None = None) -> None:
        """Note what became of the upload ``version``; with ``counts_in`` it stays pending until that round is over."""
        self._write("verdict", Settled(version, outcome, counts_in))

    def pending(self) -> tuple[TrainingCommit | None, int | None]:
        """The finished round whose upload has no verdict yet or counts in a round that isn't over, and in which."""
        commit, settled = self.training(), self._read("verdict", Settled)
        if commit is None or settled is None or settled.version != commit.version:
            return commit, None
        return (None if settled.counts_in is None else commit), settled.counts_in

    def hold(self, held: HeldDownload, *, on_probation: bool = False) -> None:
        """Make a download that passed its probe the one to serve, keeping the one before, or before it if unconfirmed.

        Args:
            held: the download.
            on_probation: it is to be confirmed; until then a client that dies twice returns to the previous one.
        """
        before, trial = self.held(), self._trial()
        new = before is None or before.manifest.version != held.manifest.version
        if before is not None and new and trial is None:
            self._write("previous", before)
        if on_probation and new:
            before_it = None if trial is None else trial.version
            self._write("probation", Trial(held.manifest.version, before=before_it))
        self._write("held", held)
        if not on_probation:
            self._remove("probation")

    def confirm(self, version: int) -> None:
        trial = self._trial()
        if trial is not None and trial.version == version:
            self._remove("probation")

    def send_away(self, sent_away: SentAway) -> HeldDownload | None:
        """Return to the previous download for good; returns it, or None if there is none, and nothing changes then."""
        held, previous = self.held(), self.previous()
        if held is None or previous is None or held.manifest.version != sent_away.version:
            return None
        self._write("rolled-back", sent_away)  # decides; a death from here on is made good by ``begin``
        self._write("held", previous)
        self._remove("previous")
        self._remove("probation")
        return previous

    def sent_away(self) -> SentAway | None:
        """The download that was sent away last."""
        return self._read("rolled-back", SentAway)

    def begin(self) -> SentAway | None:
        """A client starts: count a death of the one before; returns what is sent away because of it.

        A death counts if the held download was on probation and nobody said goodbye: the model may have brought the
        client down, or the board.
        """
        trial, gone = self._trial(), self.sent_away()
        held = self.held()
        if held is not None and gone is not None and gone.version == held.manifest.version:
            self.send_away(gone)
            return gone
        if trial is None:
            return None
        num_deaths = trial.num_deaths + trial.runs
        if num_deaths >= DEATHS_ON_PROBATION and held is not None:
            detail, manifest = f"the client died {num_deaths} times while it served it", held.manifest
            crashed = SentAway(trial.version, manifest.round, Reason.CRASHED.value, detail, manifest.release)
            if self.send_away(crashed) is not None:
                return crashed
        self._write("probation", Trial(trial.version, num_deaths=num_deaths))
        return None

    def goodbye(self) -> None:
        trial = self._trial()
        if trial is not None:
            self._write("probation", Trial(trial.version, runs=False, num_deaths=trial.num_deaths))

    @property
    def on_probation(self) -> bool:
        """Whether the held download still has to be confirmed."""
        return self._trial() is not None

    def _trial(self) -> Trial | None:
        """The record, if it is about the held download and there is one to return to."""
        trial, held = self._read("probation", Trial), self.held()
        if trial is None or held is None or self.previous() is None:
            return None
        version = held.manifest.version
        return msgspec.structs.replace(trial, version=version) if version in {trial.version, trial.before} else None

    def held(self) -> HeldDownload | None:
        return self._read("held", HeldDownload)

    def previous(self) -> HeldDownload | None:
        return self._read("previous", HeldDownload)

    def blobs_in_use(self) -> set[str]:
        """Digests of all blobs that a record names; everything else may be collected while no job or transfer runs."""
        commit = self.training()
        entries = [*commit.state, *commit.upload] if commit is not None else []
        entries += [entry for one in self._aside() for entry in one.state]
        for download in (self.held(), self.previous()):
            entries += download.served.blobs if download is not None else ()
        return {entry.digest for entry in entries}

    def _write(self, name: str, record: msgspec.Struct) -> None:
        data = _encoder.encode(record)
        self._keep(name, hashlib.sha256(data).digest() + data)

    def _remove(self, name: str) -> None:
        self._keep(name, None)

    def _keep(self, name: str, content: bytes | None) -> None:
        if self._disk is None:
            self._put(name, content)
            return
        self._waiting[name] = content
        self._disk.do(lambda _: self._put(name, content))

    def _put(self, name: str, content: bytes | None) -> None:
        if content is None:
            (self._folder / name).unlink(missing_ok=True)
        else:
            write_atomic(self._folder / name, content, private=True)
        if self._waiting.get(name) is content:
            self._waiting.pop(name, None)

    def _read(self, name: str, kind: type[R]) -> R | None:
        path = self._folder / name
        try:
            content = self._waiting[name] if name in self._waiting else read_regular(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.error("record unreadable", file=path, reason=error, next=NEXT)
            return None
        if content is None:
            return None
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        try:
            if hashlib.sha256(data).digest() != digest:
                raise ValueError("digest doesn't match")
            found: R = _decoders[kind].decode(data)
            return found
        except UNREADABLE as error:
            if self._read_only:
                raise SettingsError(f"{path} is damaged ({error})") from error
            log.error("record damaged", file=path, reason=error, next=NEXT)
            self._remove(name)
            return None
