"""Engines of paper: what stands in for TensorRT, which needs a GPU.

They are built by a real child process, into real files, part by part; a served model answers with ONNX Runtime on the
processor once they are there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from replayfleet.export.engines.cache import Workplace
from replayfleet.export.engines.maker import EngineFailed, Progress
from replayfleet.export.running.provider_options import BatchProfile, Provider

NUM_PARTS = 11


class PaperMaker:
    """Builds at once."""

    def platform(self) -> Mapping[str, str]:
        return {"device": "paper", "scissors": "1.0"}

    def build(self, model: bytes, place: Workplace, profile: BatchProfile, progress: Progress) -> None:
        os.write(1, b"what a library prints is no progress\n")
        for part in range(1, NUM_PARTS + 1):
            progress(part, NUM_PARTS)
            (place.engine / f"{part}.engine").write_bytes(model[:100])
        (place.engine / "niceness").write_text(str(os.nice(0)))
        (place.timing / "times").write_bytes(b"1")

    def providers(
        self, graph: bytes, input_shape: tuple[int, ...], engine: Path, profile: BatchProfile
    ) -> tuple[Provider, ...]:
        if not (engine / f"{NUM_PARTS}.engine").is_file():
            raise EngineFailed("the engine isn't there")
        return ("CPUExecutionProvider",)


class FailingMaker(PaperMaker):
    """Can't do it, and says why."""

    def build(self, model: bytes, place: Workplace, profile: BatchProfile, progress: Progress) -> None:
        progress(1, NUM_PARTS)
        raise RuntimeError("no paper left\nin the tray")


class DyingMaker(PaperMaker):
    """Is killed, as by the kernel when memory runs out."""

    def build(self, model: bytes, place: Workplace, profile: BatchProfile, progress: Progress) -> None:
        os.write(2, b"cutting\n")
        os.kill(os.getpid(), signal.SIGKILL)


class WaitingMaker(PaperMaker):
    """Writes one part, and its process's number beside the cache, then waits for a file named ``go`` there."""

    def build(self, model: bytes, place: Workplace, profile: BatchProfile, progress: Progress) -> None:
        (place.engine / "1.engine").write_bytes(b"half")
        progress(3, NUM_PARTS)
        around = place.folder.parent.parent
        (around / "builder.tmp").write_text(str(os.getpid()))
        (around / "builder.tmp").rename(around / "builder")
        while not (around / "go").exists():
            time.sleep(0.02)
        super().build(model, place, profile, progress)
