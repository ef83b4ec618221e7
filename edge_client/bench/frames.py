"""From source to prediction, as a client does it: cameras on threads, the model in a process of its own."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replayfleet.edge_client.bench.messages import Latency, Variant, latency_of
from replayfleet.edge_client.flow import Camera, Picture, Shown, View
from replayfleet.edge_client.frames.answerer import Answerer
from replayfleet.edge_client.frames.inference import InferenceLoop
from replayfleet.edge_client.serving.model import Workers
from replayfleet.edge_client.serving.slot import Candidate, Model, ModelSlot
from replayfleet.edge_client.sources import source_opener
from replayfleet.export.files import read_file
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.protocol.tensors import encode_arrays
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.specs import AnyTaskSpec

FIRST_PICTURE_S = 30.0
"""How long a source may take until its first picture is answered."""


@dataclass(frozen=True, slots=True)
class FrameRate:
    """What became of a source's pictures.

    Attributes:
        source: whose.
        runs_on: the execution provider that answered.
        per_second: answered pictures.
        could_per_second: as many as there were time for, if pictures came without a pause.
        dropped: share of the pictures that a live camera took and nobody looked at, 0 to 1.
        age_s: from capture to prediction.
        answering_s: looking at a picture and answering it, without waiting for one.
    """

    source: str
    runs_on: str
    per_second: float
    could_per_second: float
    dropped: float
    age_s: Latency
    answering_s: Latency


class _Timed(Answerer):
    """Notes how long it takes."""

    def __init__(self, slot: ModelSlot, view: View) -> None:
        super().__init__(slot, view)
        self.seconds: list[float] = []

    def answer(self, picture: Picture) -> Shown | None:
        began = time.perf_counter()
        shown = super().answer(picture)
        self.seconds.append(time.perf_counter() - began)
        return shown


def measure_frames(
    variant: Variant, task: AnyTaskSpec, source: str, *, provider: str, num_threads: int, seconds: float
) -> FrameRate:
    """Serve a source's pictures for a while.

    Args:
        variant: an ONNX model.
        task: what it was made for.
        source: one URI, as ``edge-client start`` takes it.
        provider: execution provider that works here.
        num_threads: of one inference.
        seconds: that are measured, from the first answered picture on.

    Raises:
        SettingsError: The source can't be used, or nothing of it was answered within ``FIRST_PICTURE_S``.
        ArtefactRejected: The model doesn't load.
    """
    with tempfile.TemporaryDirectory() as folder:
        opened = source_opener([source], Path(folder))(task)
        blobs = DiskBlobStore(Path(folder) / "blobs")
        graph = blobs.put(read_file(Path(variant.model)))
        tensors = read_file(Path(variant.parameters)) if variant.parameters else encode_arrays({})
        parameters = blobs.put(tensors)
        workers = Workers(Path(folder) / "blobs", num_threads=num_threads, providers=(provider,))
        slot = ModelSlot()

        def load() -> Model:
            return workers.model(graph, parameters, task.image_shape)

        slot.install(Candidate(0, 0, task.image_shape, load, lambda model: None))
        try:
            answerer = _Timed(slot, opened.pictures.view)
            ages, took_s, dropped = _serve(answerer, opened.pictures.cameras, seconds)
        finally:
            slot.clear()
        return FrameRate(
            source=source,
            runs_on=provider,
            per_second=len(ages) / took_s,
            could_per_second=len(answerer.seconds) / sum(answerer.seconds),
            dropped=dropped,
            age_s=latency_of(ages),
            answering_s=latency_of(answerer.seconds),
        )


def _serve(answerer: _Timed, cameras: Sequence[Camera], seconds: float) -> tuple[list[float], float, float]:
    """Return the ages of the predictions that were made, the seconds that it took, and the share that was dropped."""
    first, over = threading.Event(), threading.Event()
    ages: list[float] = []
    began, before = 0.0, answerer.counts

    def watch(shown: Shown) -> None:
        nonlocal began, before
        if shown.prediction is None or over.is_set():
            return
        if not first.is_set():  # it waited for the process; what follows is counted
            began, before = time.monotonic(), answerer.counts
            answerer.seconds.clear()
            first.set()
            return
        ages.append(shown.prediction.answered_at - shown.picture.captured_at)

    loop = InferenceLoop(cameras, answerer, watch)
    loop.start()
    try:
        if not first.wait(FIRST_PICTURE_S):
            raise SettingsError(f"no picture was answered within {FIRST_PICTURE_S:g} s: {loop.error or 'none came'}")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not loop.ended:
            time.sleep(min(0.05, seconds))
        took_s, after = time.monotonic() - began, answerer.counts
        over.set()
    finally:
        loop.stop()
    if not ages:
        raise SettingsError(f"only one picture was answered within {seconds:g} s; give it more --seconds")
    captured = after.num_captured - before.num_captured
    return ages, took_s, (after.num_dropped - before.num_dropped) / max(1, captured)
