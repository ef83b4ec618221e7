"""What an export tells its operator, line by line: size, parity, gate, latency, files, and what to run next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from replayfleet.export.running.artefact import USUAL_ANSWER

if TYPE_CHECKING:
    from replayfleet.export.job import Exported, Request


def lines(request: Request, done: Exported) -> Iterator[str]:
    """Yield the report of one export."""
    architecture, name = request.architecture, request.format.name
    shape = "x".join(str(side) for side in architecture.spec.image_shape)
    yield f"model    {architecture.kind}, {shape}, {done.num_parameters:,} parameters"
    size = sum(size for _, size, _ in done.files)
    ratio = "" if done.float32_bytes is None else f", {size / done.float32_bytes:.3f} of onnx in float32"
    yield f"size     {size:,} bytes{ratio}"
    yield _parity(done)
    if done.verdict is not None:
        verdict = done.verdict
        yield (
            f"gate     {100 * verdict.reference:.2f} to {100 * verdict.candidate:.2f} in {verdict.measure}: "
            f"{verdict.loss_points:.2f} points lost, at most {verdict.limit_points:g} are accepted"
        )
    times = ", ".join(f"{way} {seconds * 1e3:.2f} ms" for way, seconds in done.latency_s.items())
    yield f"latency  {times} at batch 1 with {request.num_threads} threads"
    for path, number, digest in done.files:
        yield f"wrote    {path}  {number:,} bytes  sha256 {digest}"
    check = ["model-export", "check", str(request.path)]
    if name == "torchscript":
        check += ["--sha256", done.files[0][2]]
    elif request.split:
        check += ["--parameters", str(done.files[0][0])]
    yield f"next     {shlex.join(check)}"


def _parity(done: Exported) -> str:
    parity = done.parity
    batches = ", ".join(str(size) for size in parity.batches[:-1]) + f" and {parity.batches[-1]}"
    text = f"parity   {parity.worst:.1e} from the eager model, at most, over batches {batches}"
    if not parity.spread:  # absolute, or a model that always answers the same
        of_large = f", or {parity.tolerance / USUAL_ANSWER:g} of its largest answer"  # as ``scale`` has it
        return f"{text}; {parity.tolerance:g} is accepted{of_large if parity.worst > parity.tolerance else ''}"
    return (
        f"{text} of such samples: {parity.worst / parity.spread:.2g} of its answers' standard deviation, "
        f"{parity.tolerance / parity.spread:g} is accepted"
    )
