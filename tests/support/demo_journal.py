"""A small run as an aggregator's journal tells it: two clients, three rounds, round 2 brings round 0's classes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replayfleet.federation.simulator.records import ClientRecord, RoundRecord
from replayfleet.federation.simulator.result import Result

CLASS_NAMES = ("shirt", "shoe", "bag", "coat & hat")
CLIENTS = ("client-0", "client-1")
CLASSES = ((0, 1), (2, 3), (0, 1))
"""Class ids of each round, the same for both clients."""
ACCURACY = ((0.9, 0.7), (0.8, 0.6), (0.85, 0.75))
BASELINE = (0.8, 0.5, 0.4)
SAMPLES = 20
WEIGHTS = {"client-0": {"client-0": 0.75, "client-1": 0.25}, "client-1": {"client-0": 0.125, "client-1": 0.875}}


def journal(*, sent: tuple[int, ...] = (2, 2, 0), **changed: Any) -> list[dict[str, Any]]:
    """Return the events; ``sent`` says how many sub-generators each client uploads in each round.

    ``changed`` are settings of the method in place of ``spec``'s.
    """
    events: list[dict[str, Any]] = [
        _event("aggregator started", spec=spec(**changed), method="pfedgrp", num_rounds=3, clients=2)
    ]
    events += [_event("round opened", round=0, expected=2)]
    for client in CLIENTS:
        events += [_event("client online", client=client, device="cpu", provider="CPUExecutionProvider", version=-1)]
        events += [report(client, 0, {"bytes_down": 5_000.0})]
    seen: dict[int, int] = {}
    for index, classes in enumerate(CLASSES):
        seen |= {c: seen.get(c, 0) + SAMPLES for c in classes}
        events += [upload(client, index, seen, sent[index]) for client in CLIENTS]
        events += [_event("round closed", round=index)]
        events += [_event("round committed", round=index, weights=WEIGHTS, aggregate_s=1.5, round_s=10.0 + index)]
        events += [
            _event("run finished", rounds=3) if index == 2 else _event("round opened", round=index + 1, expected=2)
        ]
        for number, client in enumerate(CLIENTS):
            metrics = {
                "accuracy": ACCURACY[index][number],
                "num_test": 40.0 * (index + 1),
                "bytes_down": 2_000_000.0,
                "swap_s": 0.04 + 0.01 * number,
                "frames": 100.0 * (index + 1),
                "sub_generators_held": float(len(seen)),
            }
            events += [report(client, index + 1, metrics)]
    return [{"time": 1000.0 + 2 * place, **event} for place, event in enumerate(events)]


def spec(**changed: Any) -> dict[str, Any]:
    """The fleet's spec as the journal has it, with these settings of the method."""
    task = {
        "image_channels": 1,
        "image_size": 28,
        "class_names": list(CLASS_NAMES),
        "stem": "cifar",
        "generator_width": 16,
    }
    settings = {"local_epochs": 2, "gate": True, "learning_rate": 0.01, **changed}
    return {"fleet": "demo", "method": "pfedgrp", "settings": settings, "task": task, "run_seed": 7}


def upload(client: str, index: int, seen: Mapping[int, int], sent: int) -> dict[str, Any]:
    """An accepted upload: 1 MB, and 0.1 MB per sub-generator."""
    facts = {"seen": {str(c): count for c, count in seen.items()}, "num_updates": sent}
    size = 1_000_000 + 100_000 * sent
    return _event("upload accepted", round=index, client=client, sub_generators=sent, bytes=size, facts=facts)


def report(client: str, index: int, metrics: dict[str, float]) -> dict[str, Any]:
    """A client's report on the download for round ``index``."""
    return _event("client report", client=client, round=index, version=index + 1, metrics=metrics)


def baseline_result() -> Result:
    """FedAvg on the same stream."""
    rounds = [
        RoundRecord(
            round=index,
            accuracy=accuracy,
            clients={client: _client_record(index, accuracy) for client in CLIENTS},
            aggregate_s=0.1,
            round_s=1.0,
        )
        for index, accuracy in enumerate(BASELINE)
    ]
    return Result(
        run={
            "method": "fedavg",
            "settings": {"local_epochs": 2},
            "dataset": "fashion-mnist",
            "stream": {"scenario": "circulating", "samples_per_class": SAMPLES},
        },
        stream={"changes": [2], "change_name": "the cycle begins again"},
        rounds=rounds,
        summary={"final_accuracy": BASELINE[-1]},
        hardware={"machine": "x86_64", "system": "Linux", "processor": "A <fast> one", "num_cores": 2},
        versions={"python": "3.11", "torch": "2.15.0"},
        commit="0123456789abcdef",
        wall_s=62.0,
        command=["fleet-sim", "fedavg"],
    )


def _client_record(index: int, accuracy: float) -> ClientRecord:
    return ClientRecord(
        classes=CLASSES[index],
        accuracy=accuracy,
        num_test=40 * (index + 1),
        num_seen=2 * SAMPLES * (index + 1),
        class_accuracy=dict.fromkeys(CLASSES[index], accuracy),
        train_s=1.0,
        bytes_up=1,
        bytes_up_everything=1,
        bytes_down=1,
        bytes_down_everything=1,
        sub_generators_sent=(),
        num_sub_generators_held=0,
    )


def _event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, **fields}
