"""One build of an engine, as whoever serves sees it: a child process that can be stopped at any time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from replayfleet.export.engines.cache import Workplace
from replayfleet.export.engines.maker import EngineFailed, Progress
from replayfleet.export.running.provider_options import BatchProfile
from replayfleet.federation.children import child_command, child_environment

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
        self._process: subprocess.Popen[bytes] | None = None
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
        with log.open("wb") as errors:
            process = self._start(errors)
        timer = threading.Timer(self._limit_s, lambda: self.stop(f"it took longer than {self._limit_s:g} s"))
        timer.daemon = True
        timer.start()
        try:
            last = _conversation(process, json.dumps(job).encode() + b"\n", progress)
        finally:
            timer.cancel()
            process.kill()
            code = process.wait()
        if self._stopped:
            raise EngineFailed(self._stopped)
        if "error" in last:
            raise EngineFailed(str(last["error"]))
        if "done" not in last:
            raise EngineFailed(f"the building process ended with {code}: {_last_line(log.read_bytes())}")

    def stop(self, why: str = "stopped") -> None:
        """End the build; ``run`` raises. Idempotent, from any thread."""
        with self._changing:
            self._stopped = self._stopped or why
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()

    def _start(self, errors: Any) -> subprocess.Popen[bytes]:
        # Answers must be those of the golden vector: TensorRT would use 10 bits of the mantissa where it may.
        environment = {"NVIDIA_TF32_OVERRIDE": "0", **child_environment()}
        with self._changing:
            if self._stopped:
                raise EngineFailed(self._stopped)
            self._process = subprocess.Popen(  # noqa: S603
                BUILD_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
            return self._process


def _conversation(process: subprocess.Popen[bytes], job: bytes, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Hand the job over and listen to the end; returns the last word."""
    assert process.stdin is not None
    assert process.stdout is not None
    last: dict[str, Any] = {}
    with process.stdout as lines, contextlib.closing(process.stdin) as job_input:
        with contextlib.suppress(BrokenPipeError):
            job_input.write(job)
            job_input.flush()
        for line in lines:
            last = json.loads(line)
            if "part" in last:
                progress(int(last["part"]), int(last["of"]))
            else:
                break
    return last


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it said nothing"
