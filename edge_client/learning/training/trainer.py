"""The training process: jobs on standard input, as lines of JSON.

It is the only part of a client that imports torch. It ends when its input does, so it never outlives the client.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from replayfleet.devices.memory import give_memory_back
from replayfleet.edge_client.learning.training.guard import bound_memory, within_memory, yield_to_serving
from replayfleet.edge_client.learning.training.job import (
    BLOBS,
    IDLE,
    JSON_LOGS,
    AnyJob,
    ChooseJob,
    FromTrainer,
    TrainDone,
    TrainerReady,
    TrainFailed,
    TrainJob,
    parameter_sets_of,
)
from replayfleet.edge_client.learning.training.stored import load_state, remembered, sampler_for, samples_of
from replayfleet.edge_client.state_store import MAX_COUNTED, StateStore, TrainingCommit, spec_digest
from replayfleet.federation.children import Parent
from replayfleet.federation.errors import ReplayfleetError, is_out_of_memory, told
from replayfleet.federation.imports import without_collections
from replayfleet.federation.service.artefact_codec import EncodedOnce, encode_artefacts, open_artefacts
from replayfleet.federation.service.disk import disk_errno
from replayfleet.federation.service.fleet.spec import method_of
from replayfleet.federation.service.logs import EventLogger, configure_logging
from replayfleet.federation.service.torch_setup import leave_the_compiler_out, prepare_torch
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec, Manifest
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore

log = EventLogger(__name__)

KEEPS_S = 2.0
"""For so long after a job its memory waits for another one, which would ask for it page by page."""

T = TypeVar("T")


def run_job(job: TrainJob, say: Callable[[FromTrainer], None] = lambda _: None) -> TrainDone:
    """Train one round and make it durable: blobs first, then the one record that names them.

    Args:
        job: what to train, and in what time.
        say: told what becomes of the round, and that it is durable.

    Raises:
        ArtefactRejected: The download doesn't decode.
        OutOfMemory: Memory doesn't suffice, even for small batches.
        SettingsError: This build doesn't know the fleet's method, settings or task.
        ValueError: The download isn't one of this method, or the method refuses the data.
        OSError: The disk is full, or the round data are gone.
    """
    deadline_at = None if job.left_s is None else time.monotonic() + job.left_s
    import torch

    from replayfleet.edge_client.learning.training.choosing import told
    from replayfleet.edge_client.learning.training.pacing import PacedRound
    from replayfleet.federation.methods.kit import promises, travel
    from replayfleet.federation.methods.kit.packing import sub_generators_among
    from replayfleet.federation.methods.kit.placement import CPU, placed, placed_data, proved_device
    from replayfleet.federation.methods.kit.privacy import account_among
    from replayfleet.federation.methods.kit.seeding import (
        NUM_ENTROPY_BYTES,
        entropy_generator,
        noise_by,
        seeded_generator,
    )
    from replayfleet.federation.methods.steps.screening import answers_of

    method = _method_of(msgspec.msgpack.encode(job.spec))
    prepare_torch(job.num_threads)
    device, _ = proved_device(job.torch_device)
    paced = PacedRound(job, deadline_at, _clock_of(device), say)
    data_dir, manifest = Path(job.data_dir), job.manifest
    blobs, records = DiskBlobStore(data_dir / BLOBS, job.verified), StateStore(data_dir)
    data, download = samples_of(job.round_data), method.Download.unpack(_opened(manifest, blobs))
    held, owed, note = load_state(method, records, blobs, job.spec)
    # a state that was damaged, and begins anew, counted nothing
    held, counted = _counted_once(held, data, manifest.round, None if note else remembered(records, job.spec))
    known, began = records.pace(spec_digest(job.spec), job.num_threads), time.monotonic()

    def local_round(sized: Any, device: torch.device) -> tuple[Any, Any]:
        rng = seeded_generator(job.spec.run_seed, manifest.round, job.client_id)
        more = paced.begin(sized, known.speed)
        # whatever the aggregator could draw itself hides nothing from it
        with (
            noise_by(lambda: entropy_generator(os.urandom(NUM_ENTROPY_BYTES))),
            promises.faults_named(sized, "local_round"),
        ):
            result = sized.local_round(
                placed(held, device),
                placed_data(data, device),
                placed(download, device),
                rng,
                sampler=sampler_for(job, blobs, sized, device.type),
                **more,
            )
        made = promises.local_result(method, result)
        back: dict[int, Any] = {}
        return placed(made[0], CPU, back), placed(made[1], CPU, back)

    (state, upload), max_batch_size = within_memory(
        lambda sized: _else_on_the_cpu(functools.partial(local_round, sized), device),
        method,
        known.max_batch_size,
        job.allowance.memory_bytes,
        _bound_on(device),
    )
    train_s = time.monotonic() - began
    made = travel.sent(method, answers_of(method.task), state, upload, download, owed)
    packed, offered = travel.with_remainder(made.state.pack(), made.remainder), told(made.upload, job.choice).pack()
    # Once for both: what is kept is sent too, and some of it is as it came.
    kept, sent = map(functools.partial(encode_artefacts, store=EncodedOnce(blobs)), (packed, offered))
    _keep_differences(made.rounded, sent.blobs, manifest, download, blobs)
    account = account_among(type(upload), offered.facts)
    records.commit_training(
        TrainingCommit(
            round=manifest.round,
            version=job.version,
            spec_digest=spec_digest(job.spec),
            state=kept.blobs,
            state_facts=kept.facts,
            upload=sent.blobs,
            upload_facts=sent.facts,
            train_s=train_s,
            num_samples=len(data.labels),
            num_sub_generators=len(sub_generators_among(type(state), packed.parameter_sets)),
            num_sub_generators_sent=len(sub_generators_among(type(upload), [blob.name for blob in sent.blobs])),
            epsilon=None if account is None else account.epsilon,
            delta=None if account is None else account.delta,
            counted=counted,
        ),
        job.spec,
    )
    speed = known.speed.mixed_with(paced.finish())
    say(
        done := TrainDone(
            manifest.round,
            "; ".join(filter(None, (note, paced.note))),
            blobs.verified(entry.digest for entry in sent.blobs),
        )
    )
    with contextlib.suppress(OSError):  # the round is on disk, and that is what counts: nobody waits for this
        records.keep_pace(msgspec.structs.replace(known, speed=speed, max_batch_size=max_batch_size))
    return done


@functools.lru_cache(maxsize=1)
def _method_of(spec: bytes) -> Any:
    """Return the method of a spec, made once for all of its rounds, with what is remembered of it by its identity."""
    return method_of(msgspec.msgpack.decode(spec, type=FleetSpec))


def _counted_once(
    state: Any, data: Any, round_index: int, former: TrainingCommit | None
) -> tuple[Any, tuple[bytes, ...]]:
    """Return a state that hasn't counted these samples yet, and the digests of all that it has counted after them.

    It has where an aggregator went back to this round, and its samples are the same again; then a buffer that has met
    them isn't offered them either. What a private sub-generator of them cost stays: it was drawn, and may be known.
    """
    from replayfleet.federation.methods.kit.packing import uncounted
    from replayfleet.federation.methods.steps.kept_samples import Reservoir, StoredRounds

    digest = hashlib.sha256(b"%d" % round_index)
    for part in (data.images, data.labels):
        digest.update(part.contiguous().numpy())
    mark, counted = digest.digest()[:16], () if former is None else former.counted
    others = tuple(one for one in counted if one != mark)
    if mark in counted:
        state = uncounted(state, data.counts)
        if isinstance(state, (Reservoir, StoredRounds)):
            state = state.met_last(data.images)
    return state, (*others, mark)[-MAX_COUNTED:]


def _opened(manifest: Manifest, blobs: DiskBlobStore) -> Any:
    """Return what was downloaded; raises ReplayfleetError if a file of it is gone."""
    try:
        return open_artefacts(parameter_sets_of(manifest), manifest.facts, blobs)
    except KeyError as error:
        raise ReplayfleetError(
            f"a file of the downloaded model is gone ({str(error)[1:13]}); the next start fetches it again"
        ) from error


def _else_on_the_cpu(work: Callable[[Any], T], device: Any) -> T:
    """Return what ``work`` makes on a torch device, or on the CPU if that is a GPU which fails."""
    try:
        return work(device)
    except RuntimeError as error:
        if device.type == "cpu" or is_out_of_memory(error):
            raise
        log.warning("GPU failed", device=device, reason=error, next="the round is trained on the CPU")
    from replayfleet.federation.methods.kit.placement import CPU

    return work(CPU)


def _clock_of(device: Any) -> Callable[[], float]:
    """Return a clock that waits for what was asked of a GPU: steps are measured, not their announcement."""
    if device.type != "cuda":
        return time.monotonic
    import torch

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.monotonic()

    return clock


def _bound_on(device: Any) -> Callable[[int], None]:
    """Return what bounds training's memory: the process's, or on a GPU what it may have there."""
    if device.type != "cuda":
        return bound_memory
    import torch

    def bound(max_bytes: int) -> None:
        _, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, max_bytes / total), device)

    return bound


def _keep_differences(
    rounded: Mapping[str, Any], sent: Sequence[BlobEntry], manifest: Manifest, download: Any, blobs: DiskBlobStore
) -> None:
    """Put what differs by whole steps from a model of the download into the spool, as it travels."""
    names = {id(parameters): name for name, parameters in download.pack().parameter_sets.items()}
    held = {entry.name: entry.digest for entry in manifest.blobs}
    for entry in sent:
        one = rounded.get(entry.name)
        if one is not None and one.base is not None:
            blobs.pack(entry.digest, held[names[id(one.base)]], one.steps)


def main() -> None:
    """Serve jobs until standard input ends."""
    configure_logging(as_json=JSON_LOGS in sys.argv[1:])
    parent = Parent()  # killed with the client also while stopped, when the end of its input would go unread
    refused = yield_to_serving(idle=IDLE in sys.argv[1:])
    if refused:
        log.warning("training can't be told to yield as it should", refused=refused)
    try:
        warm_up()
    except ModuleNotFoundError as error:
        log.error("this device can't train", reason=error, next="it serves what others learn")
        sys.exit(1)
    with contextlib.suppress(BrokenPipeError):  # the client is gone
        parent.say(TrainerReady())
        for number, job in enumerate(_jobs(parent)):
            answer(job, parent.say)
            if not number:
                give_memory_back()
                gc.freeze()  # torch and our modules stay: later collections needn't look at them, which takes 150 ms


def warm_up() -> None:
    """Import torch, the slow part, before the first job: a round's pace would see steps that take for ever."""
    with without_collections():
        prepare_torch(1)
        leave_the_compiler_out()


def answer(job: AnyJob, say: Callable[[FromTrainer], None]) -> None:
    """Do a job, and say how it ended.

    Args:
        job: what to do.
        say: told what becomes of it, and how it ended.
    """
    try:
        if isinstance(job, ChooseJob):
            from replayfleet.edge_client.learning.training.choosing import run_choice

            say(run_choice(job))
        else:
            run_job(job, say)
    except (ReplayfleetError, ValueError, OSError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        say(TrainFailed(job.manifest.round, text, disk_errno(error)))
    except (Exception, SystemExit) as error:  # root of the process
        log.exception("training failed", round=job.manifest.round)
        say(TrainFailed(job.manifest.round, told(error)[:500]))


def _jobs(parent: Parent) -> Iterator[AnyJob]:
    """Yield jobs; a thread of its own listens, so that the client's goodbye ends a job in progress too.

    What one took of memory is there for the next, where that comes soon.
    """
    import queue
    import threading

    jobs: queue.SimpleQueue[AnyJob] = queue.SimpleQueue()

    def listen() -> None:
        while (job := parent.hear(cast("type[AnyJob]", AnyJob))) is not None:
            jobs.put(job)
        os._exit(0)  # whatever is half done is on no record

    threading.Thread(target=listen, name="jobs", daemon=True).start()
    while True:
        try:
            yield jobs.get(timeout=KEEPS_S)
        except queue.Empty:  # noqa: PERF203 -- once in a while
            give_memory_back()
            yield jobs.get()
