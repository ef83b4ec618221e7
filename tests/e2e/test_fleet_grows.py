"""A running fleet of real processes that began with a simulation's model learns classes more, as an operator would."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayfleet.federation.children import child_command
from replayfleet.federation.wire.transport.broker import find_mosquitto
from tests.support.mosquitto import mosquitto
from tests.support.picture_fleet import Fleet, command, pictures


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with mosquitto(tmp_path, "allow_anonymous true") as port:
        method = ("--method", "fedavg", "--settings", "tiny", "--set", "local_epochs=4")
        made = Fleet(tmp_path, f"mqtt://127.0.0.1:{port}", *method)
        yield made
        for name in [*made.running]:
            made.stop(name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto on this machine")
def test_a_first_model_is_given_and_classes_are_added_while_the_fleet_runs(fleet: Fleet) -> None:
    folder = fleet.folder
    first = pictures(folder / "data" / "first", "red", "blue", count=100)
    simulated = (
        "--dataset",
        "folder",
        "--data-root",
        first,
        "--image-size",
        32,
        "--model",
        "lenet",
        "--settings",
        "tiny",
    )
    sizes = ("--clients", 2, "--rounds", 2, "--set", "local_epochs=4")
    command("replayfleet.federation.simulator.cli", "fedavg", *simulated, *sizes, "--out", folder / "run")
    exported = folder / "first.onnx"
    code = "import sys; from replayfleet.cli import model_export; sys.argv[0] = 'model-export'; model_export()"
    words = ["task", "--from", folder / "run", "--client", "0", "--split", "--out", exported]
    line = [child_command("x")[0], "-c", code, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    fleet.serve("--initial", exported.with_suffix(".safetensors"))
    roads = {name: pictures(folder / name / "pictures", "red", "blue") for name in ("cam-0", "cam-1")}
    for name, road in roads.items():
        fleet.client(name, road)
    # The model that was given answers before the fleet has learned anything.
    fleet.until(lambda: all(fleet.predictions(name) for name in roads))
    fleet.until(lambda: fleet.committed() >= 1)

    said = command("replayfleet.aggregator.cli", "add-class", "green", *fleet.place, "--dry-run")
    assert "3 classes" in said
    before = {name: process.pid for name, process in fleet.running.items()}
    for road in roads.values():
        pictures(road, "green")
    said = command("replayfleet.aggregator.cli", "add-class", "green", *fleet.place, "--yes")
    assert "done; the aggregator goes on with them" in said
    assert all(fleet.predictions(name) for name in roads)  # they serve on meanwhile
    fleet.until(lambda: all("the fleet learns more classes" in fleet.log(name) for name in roads))
    fleet.until(lambda: all(any(one["class"] == "green" for one in fleet.predictions(name)) for name in roads))

    fleet.stop("aggregator")  # and the other way: of one that is stopped
    said = command("replayfleet.aggregator.cli", "add-class", "white", *fleet.place, "--yes")
    assert "4 classes" in said
    fleet.serve()
    fleet.until(lambda: all(fleet.log(name).count("the fleet learns more classes") == 2 for name in roads))
    assert {name: fleet.running[name].pid for name in roads} == {name: before[name] for name in roads}
    deeds = [event["verb"] for event in fleet.events() if event["event"] == "operator"]
    assert deeds == ["add-class", "add-class"]
    assert all("Traceback" not in fleet.log(name) for name in fleet.running)
