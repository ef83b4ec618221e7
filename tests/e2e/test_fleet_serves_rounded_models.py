"""A fleet of real processes in which one board asks for INT8 and another doesn't."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayfleet.edge_client.state_store import StateStore
from replayfleet.export.running.facts import own_facts
from replayfleet.export.running.inspection import inspect_graph
from replayfleet.federation.wire.protocol.messages import Manifest
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.broker import find_mosquitto
from tests.support.mosquitto import mosquitto
from tests.support.picture_fleet import Fleet, command, pictures


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with mosquitto(tmp_path, "allow_anonymous true") as port:
        method = ("--method", "pfedgrp", "--settings", "tiny", "--set", "sub_generator=pca-gaussian")
        made = Fleet(tmp_path, f"mqtt://127.0.0.1:{port}", *method, "--set", "local_epochs=6")
        yield made
        for name in [*made.running]:
            made.stop(name)


def held(fleet: Fleet, client: str) -> Manifest:
    found = StateStore(fleet.data_dir(client), read_only=True).held()
    assert found.manifest.serving is not None
    return found.manifest


def precision_of(fleet: Fleet, client: str) -> str:
    """What the graph that a client serves says of itself, whatever its manifest says."""
    manifest = held(fleet, client)
    digests = {entry.name: entry.digest for entry in manifest.blobs}
    summary = inspect_graph(DiskBlobStore(fleet.data_dir(client) / "blobs").read(digests[manifest.serving.graph]))
    return own_facts(summary.metadata).get("format", "float32, parameters beside it" if summary.parameters else "?")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto on this machine")
def test_one_board_serves_int8_and_trains_in_float32_beside_one_that_serves_float32(fleet: Fleet) -> None:
    fleet.serve()
    for name, wish in (("cam-0", "int8"), ("cam-1", "auto")):
        road = pictures(fleet.folder / name / "pictures", "red", "blue")
        fleet.client(name, road, "--precision", wish)
    fleet.until(lambda: fleet.status("cam-0").get("precision") == "int8" and fleet.committed() >= 3)
    assert precision_of(fleet, "cam-0") == "onnx-int8"
    assert precision_of(fleet, "cam-1") == "float32, parameters beside it"
    assert fleet.status("cam-1")["precision"] == "fp32"
    said = json.loads(command("replayfleet.aggregator.cli", "clients", *fleet.place, "--json"))
    assert {row["client"]: row["precision"] for row in said} == {"cam-0": "int8", "cam-1": "fp32"}
    assert "int8" in command("replayfleet.aggregator.cli", "status", *fleet.place)

    fleet.stop("cam-0", signal.SIGKILL)
    before, committed = held(fleet, "cam-0").version, fleet.committed()
    fleet.client("cam-0", fleet.folder / "cam-0" / "pictures", "--precision", "int8")
    fleet.until(lambda: bool(fleet.predictions("cam-0")))  # from its disk, whatever the aggregator says
    fleet.until(lambda: fleet.committed() >= committed + 2 and held(fleet, "cam-0").version > before)
    assert precision_of(fleet, "cam-0") == "onnx-int8"

    fleet.stop("aggregator", signal.SIGKILL)
    fleet.serve()
    committed = fleet.committed()
    fleet.until(lambda: fleet.committed() >= committed + 2)
    uploads = [event for event in fleet.events() if event["event"] == "upload accepted"]
    assert {event["client"] for event in uploads} == {"cam-0", "cam-1"}
    troubles = {"download refused", "model rolled back", "upload rejected", "download failed"}
    assert not [event for event in fleet.events() if event["event"] in troubles]
    assert all("Traceback" not in fleet.log(name) for name in fleet.running)
