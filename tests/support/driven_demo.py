"""A folder as a finished driving demo leaves it, without models: journals, statuses, marker, measured qualities."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from replayfleet.scripts.carla.plan import MARKER, VEHICLES
from replayfleet.scripts.carla.quality import EVERYWHERE, QUALITY_FILE, Quality

TOWNS = {"vehicle-1": ["Town01", "Town02"], "vehicle-2": ["Town02", "Town01"]}
METHODS: dict[str, dict[str, Any]] = {
    "crops": {"method": "pfedgrp", "settings": {"local_epochs": 6}, "stores_data": False},
    "detection": {"method": "fedgp", "settings": {"base": "der", "buffer_size": 200}, "stores_data": True},
}
HELD_OUT = ((0.5, 0.75), (0.25, 0.625))
"""Of each vehicle, after each of the two rounds."""
STREAM = ((0.125, 0.375), (0.0625, 0.4375))


def driven_demo(out: Path, *, synthetic: bool = False, complete: bool = True) -> Path:
    """Write everything that the page reads; returns ``out``."""
    for part in METHODS:
        (out / part / "aggregator").mkdir(parents=True)
        lines = [json.dumps(event) for event in journal(part)]
        (out / part / "aggregator" / "events.jsonl").write_text("\n".join(lines) + "\n")
        for number, vehicle in enumerate(VEHICLES):
            (out / part / vehicle).mkdir()
            status = {
                "pid": 0,
                "frames": 100 + number,
                "dropped": 3,
                "failed": 0,
                "latency_p95_s": 0.02 + 0.01 * number,
            }
            (out / part / vehicle / "status.json").write_text(json.dumps(status))
        (out / part / QUALITY_FILE).write_text(json.dumps(qualities(part)))
    marker = {
        "synthetic": synthetic,
        "roads": "recorded CARLA towns of DATA",
        "recording": "DATA",
        "seed": 4,
        "slower": 1.0,
        "frames_per_town": 8,
        "towns": dict.fromkeys(METHODS, TOWNS),
        "rate_hz": {"crops": 1.1, "detection": 1.25},
        "crops_s": 61.0,
        "detection_s": 59.0,
        "crops_complete": complete,
        "detection_complete": True,
        "seconds": 125.0,
        "broker": "private mosquitto 2.0 on 127.0.0.1:1, without persistence",
        "command": ["python", "-m", "replayfleet.scripts.carla", "--data-root", "a <folder>"],
        "hardware": {"processor": "A fine one", "num_cores": 2},
    }
    (out / MARKER).write_text(json.dumps(marker))
    return out


def journal(part: str) -> list[dict[str, Any]]:
    """Two rounds of two vehicles, each in one town per round."""
    method = METHODS[part]
    task = {"class_names": ["vehicle", "bike"], **({"kind": "detection"} if part == "detection" else {})}
    spec = {"fleet": part, "method": method["method"], "settings": method["settings"], "task": task, "run_seed": 4}
    events: list[dict[str, Any]] = [
        {
            "event": "aggregator started",
            "spec": spec,
            "method": spec["method"],
            "stores_data": method["stores_data"],
            "num_rounds": 2,
            "clients": 2,
        }
    ]
    events += [_report(vehicle, 0, {"bytes_down": 1000.0}) for vehicle in VEHICLES]
    for index in range(2):
        for vehicle in VEHICLES:
            facts = {"seen": {"0": 10 * (index + 1)}} if part == "crops" else {}
            events += [
                {
                    "event": "upload accepted",
                    "round": index,
                    "client": vehicle,
                    "sub_generators": int(part == "crops"),
                    "bytes": 1_000_000,
                    "facts": facts,
                }
            ]
        events += [{"event": "round committed", "round": index, "aggregate_s": 1.0, "round_s": 9.0}]
        for number, vehicle in enumerate(VEHICLES):
            measure = "boxes_found" if part == "detection" else "accuracy"
            metrics = {
                measure: HELD_OUT[number][index],
                "num_test": 4.0,
                "bytes_down": 500_000.0,
                "stream_accuracy": STREAM[number][index],
                "num_stream": 8.0,
                **{f"stream_accuracy/{town}": STREAM[number][index] for town in TOWNS[vehicle][: index + 1]},
                "sub_generators_held": float(part == "crops"),
            }
            events += [_report(vehicle, index + 1, metrics)]
    events += [{"event": "run finished", "rounds": 2}]
    return [{"time": 1000.0 + place, **event} for place, event in enumerate(events)]


def qualities(part: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Of vehicle 1 a little better than of vehicle 2."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for number, vehicle in enumerate(VEHICLES):
        share = 0.6 - 0.1 * number
        one = Quality(12, accuracy=share) if part == "crops" else Quality(12, boxes_found=share / 2, map50=share / 4)
        found[vehicle] = {town: dataclasses.asdict(one) for town in ("Town01", "Town02", EVERYWHERE)}
    return found


def _report(vehicle: str, index: int, metrics: dict[str, float]) -> dict[str, Any]:
    return {"event": "client report", "client": vehicle, "round": index, "version": index + 1, "metrics": metrics}
