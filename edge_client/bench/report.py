"""What was measured, for people and for programs."""

from __future__ import annotations

from typing import Any

import msgspec

from replayfleet.edge_client.bench.messages import Latency, Measured
from replayfleet.edge_client.bench.running import Bench, Row

_MB = 1e6


def head(subject: str, threads: int) -> str:
    """Return the lines above the rows."""
    return f"{subject}; milliseconds with {threads} thread{'s' if threads > 1 else ''}; resident memory of the process"


def line(row: Row) -> str:
    """Return one row."""
    begin = f"{row.runtime:<12} {row.precision:<8}"
    if not isinstance(row.outcome, Measured):
        return f"{begin} not here: {row.outcome.why}"
    found = row.outcome
    parts = [f"batch {size}: {_in_ms(latency)}" for size, latency in found.latency_s.items()]
    memory = f"{found.resident_bytes / _MB:.0f} MB ({found.model_bytes / _MB:.0f} for the model and its runtime)"
    return f"{begin} {'   '.join(parts)}   {memory}"


def tail(bench: Bench) -> list[str]:
    """Return the lines below the rows."""
    lines = []
    if bench.frames is None:
        lines.append(f"frames       {bench.no_frames}")
    else:
        found = bench.frames
        lines.append(
            f"frames       {found.per_second:.1f} a second from {found.source} to prediction on {found.runs_on}, "
            f"{found.dropped:.1%} dropped; age {_in_ms(found.age_s)}; answering takes {_in_ms(found.answering_s)}, "
            f"so up to {found.could_per_second:.0f} a second"
        )
    lines.append("machine      " + ", ".join(f"{name} {value}" for name, value in bench.machine.items()))
    return lines


def as_facts(bench: Bench) -> dict[str, Any]:
    """Return everything as JSON takes it: seconds and bytes."""
    facts: dict[str, Any] = msgspec.to_builtins(bench)
    for row, found in zip(bench.rows, facts["rows"], strict=True):
        outcome = msgspec.to_builtins(found.pop("outcome"), str_keys=True)
        outcome.pop("type")
        found |= {"usable": isinstance(row.outcome, Measured), **outcome}
    return facts


def _in_ms(latency: Latency) -> str:
    return f"p50 {latency.p50 * 1e3:.2f}, p95 {latency.p95 * 1e3:.2f}, p99 {latency.p99 * 1e3:.2f}"
