"""One piece of fuzzing: some thousands of inputs for one target, in a process of its own that may not grow or hang.

``python -m tests.fuzz.piece TARGET SEED NUMBER INPUTS FOLDER`` prints what became of them as JSON. A piece depends on
its arguments alone. What the target answers guides it: an input with an answer that was never heard (which error, with
which words) joins the corpus from which later ones are made. Our errors say precisely what is wrong, so that is nearly
coverage.
"""

from __future__ import annotations

import logging
import mmap
import re
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from random import Random

import msgspec

from replayfleet.federation.errors import ArtefactRejected, UploadRejected
from tests.fuzz.mutation import Unfit, mutated
from tests.fuzz.target import Target

MAX_INPUT_BYTES = 1 << 20
MAX_CPU_S = 2.0
"""Of one input. The kernel ends the process at it, whatever it is in the middle of."""

MAX_GROWTH_BYTES = 256 << 20
"""Of the process's address space, over all of a piece. What asks for more gets a MemoryError, which is a finding."""

MAX_CORPUS = 4000
MAX_KEPT_BYTES = 32 << 10
MAX_FINDINGS = 20
_HEAD_BYTES = 8
_VARIES = re.compile(r"\d+|'[^']*'|\"[^\"]*\"|\[.*\]|[^\x20-\x7e]")


class Finding(msgspec.Struct):
    """An input that brought out what it should not have."""

    what: str
    trace: str
    data: bytes


class Outcome(msgspec.Struct):
    """What became of a piece's inputs.

    Attributes:
        refused: kind of error (with its reason) -> inputs.
        answers: distinct things that the target said.
        cpu_s: of the decoder alone.
        most_cpu_s: of the slowest input.
        growth_bytes: of the process's memory since the seeds were through.
    """

    inputs: int = 0
    accepted: int = 0
    refused: dict[str, int] = {}
    answers: int = 0
    cpu_s: float = 0.0
    most_cpu_s: float = 0.0
    growth_bytes: int = 0
    findings: list[Finding] = []


class _Piece:
    """Feeds inputs and counts what becomes of them."""

    def __init__(self, target: Target, note: mmap.mmap | None) -> None:
        self.outcome = Outcome()
        self.taken: list[bytes] = []
        self._target, self._note = target, note
        self._places: set[str] = set()

    def feed(self, data: bytes) -> str:
        """Return what the target says to an input, without the numbers and names in it; empty for one that is none."""
        if self._note is not None:
            self._note[: _HEAD_BYTES + len(data)] = len(data).to_bytes(_HEAD_BYTES, "little") + data
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)
        outcome, began = self.outcome, time.process_time()
        try:
            answer = f"accepted {self._target.feed(data) or ''}"
            outcome.accepted += 1
            self.taken.append(data)
        except Unfit:
            return ""
        except self._target.refusals as error:
            kind = type(error).__name__
            if isinstance(error, (ArtefactRejected, UploadRejected)):
                kind += f" {error.reason.value}"
            answer = f"{kind} {error}"
            outcome.refused[kind] = outcome.refused.get(kind, 0) + 1
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            answer = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            if answer not in self._places and len(self._places) < MAX_FINDINGS:
                outcome.findings.append(Finding(answer, traceback.format_exc(), data))
            self._places.add(answer)
        took = time.process_time() - began
        outcome.inputs += 1
        outcome.cpu_s += took
        outcome.most_cpu_s = max(outcome.most_cpu_s, took)
        return _VARIES.sub("#", answer[:2000])


def run_piece(target: Target, seed: str, num_inputs: int, note: mmap.mmap | None = None) -> Outcome:
    """Feed the target's seeds, which must be accepted, and then ``num_inputs`` inputs.

    Args:
        target: what is fuzzed.
        seed: of all randomness.
        num_inputs: those that the target can make no input of aren't counted.
        note: where the input at hand stands, for whoever finds this process ended; with it each input has its limit.
    """
    rng, piece, corpus = Random(seed), _Piece(target, note), list(target.seeds())
    answers = {piece.feed(data) for data in corpus}
    if piece.outcome.accepted < len(corpus):
        piece.outcome.findings.append(Finding(f"a seed is refused: {sorted(answers)}", "", b""))
    taken = list(corpus)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    piece.outcome = Outcome(findings=piece.outcome.findings)
    while piece.outcome.inputs < num_inputs:
        # Around what was accepted lies what is nearly so; around what was found last is least known.
        near = rng.choice((taken, taken, corpus, corpus[-64:]))
        data = mutated(rng.choice(near), rng, corpus, target.form)[:MAX_INPUT_BYTES]
        piece.taken.clear()
        answer = piece.feed(data)
        if answer and len(data) <= MAX_KEPT_BYTES:
            if answer not in answers and len(corpus) < MAX_CORPUS:
                corpus.append(data)
            if piece.taken and len(taken) < MAX_CORPUS and rng.random() < 0.02:
                taken.append(data)
        answers.add(answer)
    outcome = piece.outcome
    outcome.answers = len(answers)
    outcome.growth_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return outcome


def main(name: str, seed: str, number: str, inputs: str, folder: str) -> None:
    """Run one piece within its limits; the input at hand lies in ``FOLDER/note``, should the process end."""
    from tests.fuzz.targets import TARGETS

    logging.disable(logging.CRITICAL)
    target = TARGETS[name]
    for data in target.seeds():
        target.feed(data)  # whatever is imported late, is before limits count
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_GROWTH_BYTES, resource.RLIM_INFINITY))
    with (Path(folder) / "note").open("w+b") as file:
        file.truncate(_HEAD_BYTES + MAX_INPUT_BYTES)
        outcome = run_piece(target, f"{seed}/{name}/{number}", int(inputs), mmap.mmap(file.fileno(), 0))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


def noted(folder: Path) -> bytes:
    """Return the input that a process which ended had at hand."""
    data = (folder / "note").read_bytes()
    return data[_HEAD_BYTES:][: int.from_bytes(data[:_HEAD_BYTES], "little")]


if __name__ == "__main__":
    main(*sys.argv[1:])
