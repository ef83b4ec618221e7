"""A client whose engine is built while it serves: real aggregator, serving process and building process.

What is built is an engine of paper, in place of TensorRT's, which needs a GPU; it answers on the processor.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import msgspec

from replayfleet.edge_client.bench.messages import Measured, Trial
from replayfleet.edge_client.bench.subject import from_data_dir
from replayfleet.edge_client.bench.worker import measured
from replayfleet.edge_client.serving.engine_desk import EngineDesk, open_desk
from replayfleet.edge_client.serving.model import WorkerModel
from replayfleet.edge_client.serving.slot import ModelSlot
from replayfleet.edge_client.sync.parts import Compute
from tests.support.client_world import TASK, World
from tests.support.paper_engines import PaperMaker


def paper_desk(data_dir: Path, slot: ModelSlot) -> EngineDesk | None:
    return open_desk(data_dir, slot, maker=PaperMaker(), maker_path="tests.support.paper_engines:WaitingMaker")


def test_the_model_serves_while_its_engine_is_built_and_then_by_its_engine(tmp_path: Path):
    with contextlib.closing(World(tmp_path, num_clients=1, num_rounds=1)) as world:
        client = world.start_client("cam-0", rounds=0, compute=Compute(open_engines=paper_desk))
        data_dir = tmp_path / "cam-0"
        world.until(lambda: str(client.status().get("engine")).startswith("building engine 3/11, "))
        before = client.status()
        served = client._slot.active
        assert served is not None
        world.until(lambda: client.counts.num_frames > int(before["frames"]) + 5)  # it serves all the while
        assert client._slot.active is served
        (data_dir / "go").touch()
        world.until(lambda: client.status()["engine"] == "engine serves")
        faster = client._slot.active
        assert faster.version == served.version
        assert isinstance(faster.model, WorkerModel)
        assert faster.model is not served.model
        frames = client.counts.num_frames
        world.until(lambda: client.counts.num_frames > frames + 5)
        assert client.counts.num_failed == 0
        world.until(lambda: json.loads((data_dir / "status.json").read_text())["engine"] == "engine serves")
        assert len([path for path in (data_dir / "engines").iterdir() if not path.name.startswith("timing")]) == 1
        the_served_model_is_measured(data_dir, tmp_path)  # what is served doesn't come about quickly


def the_served_model_is_measured(data_dir: Path, folder: Path) -> None:
    """While the client runs."""
    subject = from_data_dir(data_dir, folder)
    assert subject.task == TASK
    for variant in subject.variants:
        runtime = {"eager": "eager", "torchscript": "TorchScript"}.get(variant.form, "CPU")
        task = msgspec.to_builtins(TASK)
        trial = Trial(runtime, variant, task, (1,), 1, 0.01)
        assert isinstance(measured(trial), Measured)
    assert {variant.precision for variant in subject.variants} == {"fp32", "fp16", "int8"}


def test_a_client_whose_device_has_no_engines_says_nothing_of_them(tmp_path: Path):
    assert open_desk(tmp_path, ModelSlot()) is None
    assert not (tmp_path / "engines").exists()
