"""One build of an engine, as whoever serves sees it: a child process that can be stopped at any time."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from typing import IO, Any

from replayfleet.export.engines.cache import Workplace
from replayfleet.export.engines.maker import EngineFailed, Progress
from replayfleet.export.running.provider_options import BatchProfile
from replayfleet.federation.children import Child, ChildLost, child_command

BUILD_COMMAND = child_command("replayfleet.export.engines.process")

BUILD_LIMIT_S = 3600.0
"""After this a build is given up: the longest that was told of took ten minutes, on an Orin
(github.com/roboflow/inference/pull/2703)."""


class EngineBuild:
    """A build that hasn't begun.

    Args:
        maker: ``module:class`` of an ``engines.EngineMaker``, made in the child process.
        limit_s: seconds after which it is given up.
    """

    def __init__(self, maker: str, *, limit_s: float = BUILD_LIMIT_S) -> None:
        self._maker = maker
        self._limit_s = limit_s
        self._child: Child[dict[str, Any]] | None = None
        self._stopped = ""
        self._changing = threading.Lock()

    def run(self, model: bytes, place: Workplace, profile: BatchProfile, progress: Progress) -> None:
        """Build and wait for it, minutes if need be.

        Args:
            model: a self-contained ONNX file.
            place: where the engine goes.
            profile: batch sizes.
            progress: called on this thread.

        Raises:
            EngineFailed: The builder said why not, died, took too long, or was stopped.
        """
        log = place.folder / "log"
        path = place.folder / "model.onnx"
        path.write_bytes(model)
        job = {
            "maker": self._maker,
            "model": str(path),
            "folder": str(place.folder),
            "engine": str(place.engine),
            "timing": str(place.timing),
            "profile": asdict(profile),
        }
        deadline = time.monotonic() + self._limit_s
        with log.open("wb") as errors:
            child = self._start(errors)
        last: dict[str, Any] = {}
        try:
            child.send(job)
            while not {"done", "error"} & last.keys():
                heard = child.receive(max(0.0, deadline - time.monotonic()))
                if heard is None:
                    raise EngineFailed(f"it took longer than {self._limit_s:g} s")
                last = heard[0]
                if "part" in last:
                    progress(int(last["part"]), int(last["of"]))
        except ChildLost:
            pass  # its exit status says more
        finally:
            code = child.close()
        if self._stopped:
            raise EngineFailed(self._stopped)
        if "error" in last:
            raise EngineFailed(str(last["error"]))
        if "done" not in last:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = lines[-1][:200] if lines else "it said nothing"
            raise EngineFailed(f"the building process ended with {code}: {said}")

    def stop(self, why: str = "stopped") -> None:
        """End the build; ``run`` raises. Idempotent, from any thread."""
        with self._changing:
            self._stopped = self._stopped or why
            if self._child is not None:
                self._child.process.kill()

    def _start(self, errors: IO[bytes]) -> Child[dict[str, Any]]:
        with self._changing:
            if self._stopped:
                raise EngineFailed(self._stopped)
            # Answers must be those of the golden vector: TensorRT would use 10 bits of the mantissa where it may.
            self._child = Child(BUILD_COMMAND, dict[str, Any], errors=errors, environment={"NVIDIA_TF32_OVERRIDE": "0"})
            return self._child
