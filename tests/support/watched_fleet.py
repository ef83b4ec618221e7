"""The data dir of an aggregator with many clients and some rounds behind it, made in a moment: what a console reads."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from replayfleet.aggregator.store import AggregatorStore, StoredArtefacts
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec, Manifest
from tests.support.demo_journal import spec as demo_spec

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=alert(1)> \u202e\x1b[31m"
BEGAN = 1_800_000_000.0


def names(num_clients: int) -> list[str]:
    return [f"cam-{number:03}" for number in range(num_clients)]


def watched_fleet(
    folder: Path, *, num_clients: int = 4, num_rounds: int = 3, rejects: str = "cam-002", spec: FleetSpec | None = None
) -> Path:
    """Write a fleet whose newest round waits for its last client and whose ``rejects`` refuses its models.

    What that client says is hostile to terminals and pages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store, clients = AggregatorStore(folder), names(num_clients)
    store.found(spec or FleetSpec(**{**demo_spec(), "fleet": "street"}), BEGAN)
    entry = BlobEntry("task", "ab" * 32, 10)
    for index in range(num_rounds + 1):
        if index < num_rounds:
            store.close_round(index, BEGAN)
            drafts = {c: Manifest("down", "street", c, index + 1, 0, (entry,)) for c in clients}
            store.commit_round(index, StoredArtefacts((), "cd" * 32), drafts, BEGAN)
    for client in clients:
        if client != rejects and (held := store.download(client)) is not None:
            store.confirm(held)
    for client in clients[:-1]:
        if client != rejects:
            store.accept_upload(Manifest("up", "street", client, num_rounds, 1, (entry,)), 3_400_000, num_rounds)
    store.close()
    lines = [json.dumps(event) for event in events(clients, num_rounds, rejects)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def events(clients: list[str], num_rounds: int, rejects: str) -> list[dict[str, Any]]:
    chance, found = random.Random(5), []
    at = BEGAN

    def add(event: str, **fields: Any) -> None:
        nonlocal at
        at += 0.5
        found.append({"time": round(at, 3), "event": event, **fields})

    add("aggregator started", fleet="street", method="pfedgrp", clients=len(clients), round=0)
    for client in clients:
        add("client online", client=client, device="jetson-orin-nano", provider="TensorrtExecutionProvider")
    for index in range(num_rounds + 1):
        add("round opened", round=index, expected=len(clients), deadline_s=600.0)
        for place, client in enumerate(clients):
            if index and client == rejects:
                add(
                    "download refused", round=index, client=client, version=index, reason="probe-mismatch",
                    detail=f"the model answers differently {HOSTILE}",
                )  # fmt: skip
            elif index:
                add("download confirmed", round=index, client=client, version=index, bytes=2_400_000)
                accuracy = 0.85 - 0.5 / (1 + index) + 0.05 * chance.random()
                metrics = {
                    "accuracy": accuracy, "num_test": 40.0 * index, "swap_s": 0.04, "latency_p95_s": 0.021,
                    "stream_accuracy": accuracy - 0.1, "stream_accuracy/Town01": accuracy - 0.05,
                    "stream_accuracy/Town05": accuracy - 0.2, "bytes_up": 3.4e6,
                }  # fmt: skip
                add("client report", client=client, round=index, version=index, accuracy=accuracy, metrics=metrics)
            if (index < num_rounds or place < len(clients) - 1) and client != rejects:
                add(
                    "upload accepted",
                    round=index,
                    client=client,
                    version=1,
                    bytes=3_400_000,
                    sub_generators=2,
                    facts={"seen": {"0": 20, "3": 20}, "num_samples": 40, "num_updates": 2, "num_filled": place},
                )
        if index < num_rounds:
            add("round closed", round=index, by="deadline" if index % 3 == 1 else "quorum",
                uploads=len(clients) - 1, expected=len(clients), open_s=42.0)  # fmt: skip
            near = {c: _weights(clients, place) for place, c in enumerate(clients)}
            add("round committed", round=index, weights=near, aggregate_s=1.5, publish_s=0.2, round_s=44.0)
    return found


def _weights(clients: list[str], place: int) -> dict[str, float]:
    """Return whose models one client's is mixed from: neighbours, who see the same street."""
    near = {other: math.exp(-abs(place - at) / 2) for at, other in enumerate(clients)}
    return {other: share / sum(near.values()) for other, share in near.items()}
