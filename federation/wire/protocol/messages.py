"""Every message of the wire format, version 1.

How a round runs (A aggregator, C client):

1. A keeps an ``Announcement`` retained on ``<fleet>/round``: the open round, the method, the task.
2. C keeps a ``Presence`` retained on its ``state`` topic. When C comes online, and at every new round, A offers C its
   download: an ``Offer`` whose manifest says ``round = r``: what C trains round r from.
3. C trains round r when it holds the manifest of round r and r is open, then offers its upload, also ``round = r``.
   It counts in round r, or in one of the ``Announcement.late_rounds`` after it, whichever is open as it comes.
4. Either way a transfer is: ``Offer``, and from the aggregator at once a first window of blocks on the data topic
   (``up`` or ``down``; a client sends one at once that is a single block); the receiver answers on ``control`` with
   ``Progress`` (what it has, how far the sender may go), with ``Want`` for blobs of the manifest that neither the
   bundle nor its store holds, and at the end with one ``Verdict``.
5. ``Verdict(accepted=True)`` means verified and on disk; nothing weaker counts as delivered. All steps are
   idempotent: an ``Offer`` whose content is already there gets its ``Verdict`` again. A client whose accepted download
   fails while it serves goes back to the one before, and says so with ``RolledBack``.
6. Blobs that all clients share travel once, in an ``Offer`` on ``<fleet>/down``; whoever misses blocks asks
   with ``Want``.
7. C keeps an upload until it sees that the round it counts in was committed. An ``Announcement`` says which uploads A
   holds: who misses its own there offers it again, whatever verdict it got before. Verdicts count from the A it was
   offered to.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, TypeAlias

import msgspec

PROTOCOL_VERSION = 1
MARK_BYTES = 8

Role: TypeAlias = Literal["client", "aggregator"]

COUNTER_BITS = 32
"""Of a download's version: its lower bits count, its upper bits are the epoch of the aggregator's store."""

KEPT_DOWNLOADS = 2
"""Earlier downloads of each client whose blobs the aggregator keeps beside those of the newest one."""

TASK_GRAPH = "graph/task"
"""In a download: the graph of its task models, float32, parameters left open."""

ROUNDED_GRAPHS = f"{TASK_GRAPH}-"
"""What names of graphs of rounded models begin with; the precision follows."""

ROUNDED_FROM = "graph/rounded-from/"
"""Before the name of a set of parameters: the empty set that a graph rounded from them is served with."""

_encoder = msgspec.msgpack.Encoder()


class BlobEntry(msgspec.Struct, frozen=True):
    """One content-addressed blob of a manifest.

    Attributes:
        name: its role, for example ``task``, ``sub-generator/3``, ``graph/task``.
        digest: sha256 of the decoded bytes, 64 hex digits; the blob's id in every store.
        size_bytes: length of the decoded bytes.
        shared: all clients get the same, so it travels on the shared topic.
    """

    name: str
    digest: str
    size_bytes: int
    shared: bool = False


class Probe(msgspec.Struct, frozen=True):
    """The golden vector: a model that doesn't reproduce it is never served.

    Attributes:
        seed: input is ``numpy.random.default_rng(seed).uniform(-1, 1, (batch_size, C, H, W))`` as float32.
        batch_size: B.
        logits: (B x K) expected float32 values, row by row; of a detector 256 of each picture's raw outputs.
        tolerance: largest absolute difference accepted.
    """

    seed: int
    batch_size: int
    logits: tuple[float, ...]
    tolerance: float


class Serving(msgspec.Struct, frozen=True):
    """How to serve the download's task model: blob names within the same manifest, and the probe."""

    graph: str
    parameters: str
    probe: Probe

    @property
    def precision(self) -> str:
        """What the graph computes in, which its name says: ``graph/task-fp16``; ``fp32`` if it says nothing."""
        return self.graph.partition(ROUNDED_GRAPHS)[2] or "fp32"

    @property
    def model(self) -> str:
        """Name of the float32 parameters that are served, or that a rounded graph was made of.

        A rounded graph is self-contained, and its ``parameters`` are an empty set named after those it was made of,
        which are among the manifest's blobs all the same: they are what a client trains from.
        """
        return self.parameters.removeprefix(ROUNDED_FROM)


class Release(msgspec.Struct, frozen=True):
    """The Update Framework's metadata of one client's download, as files.

    Its target is named by the client's id; it is the encoded ``Manifest.plain``.
    """

    timestamp: bytes
    snapshot: bytes
    targets: bytes


class Manifest(msgspec.Struct, frozen=True):
    """A complete list of what an upload or download consists of.

    Attributes:
        direction: ``up`` or ``down``.
        fleet: fleet name.
        client_id: whose it is.
        round: the round whose training it comes from (up) or is for (down).
        version: rises with every manifest of one sender for one client; an older one never replaces a newer one. Its
            upper bits are the epoch, so whatever a restored aggregator sends is newer than what it forgot.
        blobs: all blobs, also those that the receiver already holds.
        facts: msgpack-encoded ``Artefacts.facts``.
        serving: downloads only.
        notice: downloads only; what the aggregator has to say of the client's last upload or of the model, for people.
        release: downloads to one client only; who answers for it, and until when.
    """

    direction: Literal["up", "down"]
    fleet: str
    client_id: str
    round: int
    version: int
    blobs: tuple[BlobEntry, ...]
    facts: bytes = b""
    serving: Serving | None = None
    notice: str = ""
    release: Release | None = None

    @property
    def epoch(self) -> int:
        """Of the store that made the download; an upload has that of the download it was trained from."""
        return epoch_of(self.version)

    @property
    def plain(self) -> Manifest:
        """What a release signs."""
        return self if self.release is None else msgspec.structs.replace(self, release=None)

    @property
    def mark(self) -> bytes:
        """Eight bytes that tell this upload from others; the version, which only tells attempts apart, is left out."""
        plain = msgspec.structs.replace(self, version=0)
        return hashlib.sha256(_encoder.encode(plain)).digest()[:MARK_BYTES]


def client_mark(client_id: str) -> bytes:
    """Return eight bytes that tell a client from others."""
    return hashlib.sha256(client_id.encode()).digest()[:MARK_BYTES]


def _has_mark(marks: bytes, mark: bytes) -> bool:
    return any(marks[place : place + MARK_BYTES] == mark for place in range(0, len(marks), MARK_BYTES))


def epoch_of(version: int) -> int:
    """Return the epoch of the store that gave a version."""
    return version >> COUNTER_BITS


def spoken(version: int) -> str:
    """Return a version as people read it: ``7``, or ``2/7`` where the store's epoch was raised."""
    epoch, counter = divmod(version, 1 << COUNTER_BITS)
    return f"{epoch}/{counter}" if epoch else str(counter)


Encoding: TypeAlias = Literal["raw", "zstd", "shuffle4-zstd", "packed"]

ENCODINGS: tuple[Encoding, ...] = ("raw", "zstd", "shuffle4-zstd", "packed")
"""What this build decodes. It says so to its peer, who uses no others."""


class BundlePart(msgspec.Struct, frozen=True):
    """One blob inside a bundle: ``encoded_bytes`` bytes, decoded by ``encoding``, yield the blob ``digest``.

    ``base`` is the digest of the blob from which a packed one differs; empty if it stands alone. Who lacks the base
    asks with ``Want``, and gets the blob in a form that needs none.
    """

    digest: str
    encoded_bytes: int
    encoding: Encoding
    base: str = ""


class Offer(msgspec.Struct, frozen=True, tag="offer", tag_field="kind"):
    """A manifest, and a bundle of those of its blobs that the sender believes the receiver lacks.

    Attributes:
        sender: who offers.
        transfer_id: 32 hex digits, derived from the content, so the same bundle resumes after any crash.
        parts: the bundle's blobs, concatenated in this order; may be empty.
        block_bytes: size of all blocks but the last.
        block_digests: sha256 of every block, 32 bytes each, concatenated.
        answers: of a download: the ``Presence.boot_id`` of the client that it is made for. What was recorded before the
            client began is of no use to anybody.
        stored: the bundle also lies in the fleet's blob store, under the transfer's id; blocks come to who asks.
    """

    sender: Role
    transfer_id: str
    manifest: Manifest
    parts: tuple[BundlePart, ...]
    block_bytes: int
    block_digests: bytes
    answers: str = ""
    stored: bool = False


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="kind"):
    """What the receiver has of a bundle, and how far the sender may go.

    Attributes:
        next_missing: index of the first block that is missing; the number of blocks when all are there.
        missing: ranges ``(first, last)``, inclusive, of missing blocks below the highest one received.
        credit: the sender may have this many blocks beyond ``next_missing`` in flight.
    """

    sender: Role
    transfer_id: str
    next_missing: int
    missing: tuple[tuple[int, int], ...]
    credit: int


class Want(msgspec.Struct, frozen=True, tag="want", tag_field="kind"):
    """Blobs of an offered manifest that the receiver lacks and that the bundle doesn't carry."""

    sender: Role
    transfer_id: str
    digests: tuple[str, ...]


class Verdict(msgspec.Struct, frozen=True, tag="verdict", tag_field="kind"):
    """The end of a transfer: accepted (verified and on disk), or refused and why.

    ``instance`` is that of the aggregator that says so, empty in a client's; a client counts only the word of the one
    that it follows. ``counts_in`` is the round in which an accepted upload counts; -1 where that isn't said.
    """

    sender: Role
    transfer_id: str
    round: int
    version: int
    accepted: bool
    reason: str = ""
    detail: str = ""
    instance: str = ""
    counts_in: int = -1


class Presence(msgspec.Struct, frozen=True, tag="presence", tag_field="kind"):
    """A client's retained state; ``offline`` is its last will.

    ``boot_id`` with a rising ``sequence`` keeps a late will of an earlier boot from marking a live client dead. One
    that doesn't train only serves: no round waits for it. ``reason`` and ``why`` say what keeps the client from its
    work; both are empty if nothing does. ``decodes`` names the encodings of blobs that it takes, and ``precision`` what
    it wants its served model to compute in, ``fp16`` or ``int8``; empty for float32. ``labels_waiting`` counts labelled
    samples for the next round, and ``picture_age_s`` is the age of the newest picture of the camera that gave none for
    longest; both are -1 if unknown. ``labels_answered`` counts the labelled things that the open round's model was
    asked about since it serves, and ``labels_right`` those that it answered rightly.
    """

    client_id: str
    status: Literal["online", "sleeping", "stopped", "offline"]
    boot_id: str
    sequence: int
    device: str = ""
    provider: str = ""
    phase: str = ""
    round: int = -1
    serving_version: int = -1
    trains: bool = True
    reason: str = ""
    why: str = ""
    decodes: tuple[str, ...] = ()
    precision: str = ""
    labels_waiting: int = -1
    picture_age_s: float = -1.0
    labels_answered: int = 0
    labels_right: int = 0


class Report(msgspec.Struct, frozen=True, tag="report", tag_field="kind"):
    """What a client measured, once per round, after it swapped the model of that round's download in.

    ``metrics`` keys are listed in ``docs/architecture.md``: ``accuracy``, ``num_test``, ``swap_s``, ``train_s``,
    ``bytes_up``, ``bytes_down``, ``frames``, ``latency_p95_s``, ``sub_generators_sent``, ``sub_generators_held``; of
    cameras ``stream_accuracy``, ``num_stream``, ``stream_accuracy/<place>``; of detectors ``boxes_found``.
    """

    client_id: str
    round: int
    version: int
    metrics: dict[str, float]


class RolledBack(msgspec.Struct, frozen=True, tag="rolled-back", tag_field="kind"):
    """A client took a download back that it had confirmed: it served, and failed. Repeated to a new aggregator.

    Attributes:
        client_id: who says so.
        round: of the download.
        version: of the download; the client won't take it again.
        serving_version: what it serves instead.
        reason: value of a ``Reason``.
        detail: one line.
    """

    client_id: str
    round: int
    version: int
    serving_version: int
    reason: str
    detail: str = ""


class FleetSpec(msgspec.Struct, frozen=True):
    """What all members of a fleet agree on; the aggregator owns it.

    Attributes:
        method: a key of ``METHODS``.
        settings: the method's fields other than ``task``.
        task: the fields of ``TaskSpec``, or those of ``DetectionSpec`` with ``kind`` = ``detection``.
        run_seed: every random generator derives from it.
    """

    fleet: str
    method: str
    settings: dict[str, Any]
    task: dict[str, Any]
    run_seed: int


class Announcement(msgspec.Struct, frozen=True, tag="announcement", tag_field="kind"):
    """The aggregator's retained word to all.

    Attributes:
        instance: of one aggregator's process; another one means that it restarted.
        state: ``open`` takes uploads for ``round``; ``aggregating`` takes none; ``finished`` is the end of the run;
            ``offline`` is the aggregator's last will; ``standby`` is a second aggregator's question who leads, never
            retained.
        deadline_s: seconds from now to the round's deadline, 0 unless open.
        epoch: of the aggregator's store: raised when the store is restored or takes over, so that all know.
        holds: ``Manifest.mark`` of every upload that counts for the round, sorted; clients look for theirs.
        roots: the newest root metadata of The Update Framework, oldest first: whose signatures count.
        excluded: ``client_mark`` of every client that takes no part, sorted; clients look for theirs.
        shut_out: likewise, of every client that was heard of lately and isn't enrolled, or was revoked.
        paused: nobody begins to train until the operator lets the fleet go on, or the round is due; uploads of the open
            round still count.
        rests_s: seconds from now until the round is due, infinite where no clock says when; 0 if it is due.
        decodes: names of the encodings of blobs that the aggregator takes.
        late_rounds: an upload counts in one of so many rounds after that which it was trained for; 0: in that alone.
    """

    instance: str
    round: int
    state: Literal["open", "aggregating", "finished", "offline", "standby"]
    deadline_s: float
    spec: FleetSpec
    epoch: int = 0
    holds: bytes = b""
    roots: tuple[bytes, ...] = ()
    excluded: bytes = b""
    shut_out: bytes = b""
    paused: bool = False
    rests_s: float = 0.0
    decodes: tuple[str, ...] = ()
    late_rounds: int = 0

    def counts(self, mark: bytes) -> bool:
        """Whether the upload with this mark counts for the round."""
        return _has_mark(self.holds, mark)

    def excludes(self, client_id: str) -> bool:
        """Whether this client takes no part."""
        return _has_mark(self.excluded, client_mark(client_id))

    def shuts_out(self, client_id: str) -> bool:
        """Whether nothing that this client signs counts."""
        return _has_mark(self.shut_out, client_mark(client_id))

    def leaves_out(self, client_id: str) -> bool:
        """Whether nothing that this client trains would count."""
        return self.excludes(client_id) or self.shuts_out(client_id)


Message: TypeAlias = Offer | Progress | Want | Verdict | Presence | Report | RolledBack | Announcement


class Block(msgspec.Struct, frozen=True):
    """One block of a bundle; travels in its own binary frame, not as msgpack."""

    transfer_id: str
    index: int
    payload: bytes | memoryview
