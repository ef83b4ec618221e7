"""Simulations whose clients train as one network, stop early, and choose a torch device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.image_sets import small_dataset

from replayfleet.devices import probing
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.placement import placed, placed_data, torch_device
from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskModels
from replayfleet.federation.service.artefact_codec import encode_artefacts
from replayfleet.federation.service.fleet.presets import settings_for
from replayfleet.federation.simulator.checkpoints import Checkpoints
from replayfleet.federation.simulator.job import identity_of, simulation_of, wanted_stream
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.simulation import Simulation
from replayfleet.federation.simulator.tables.plan import workers_each
from replayfleet.federation.streams.stream import Stream, StreamSettings


def simulation(method: str, *, in_step: bool, num_rounds: int = 1) -> Simulation:
    dataset = small_dataset()
    size = StreamSettings(scenario="circulating", num_clients=3, num_rounds=num_rounds, samples_per_class=3)
    kind = METHODS[method]
    built = kind(task=dataset.task, **{**settings_for(method, "tiny"), "local_epochs": 1, "learning_rate": 1e-3})
    return Simulation(
        method=built,
        dataset=dataset,
        stream=Stream(size, dataset.train.labels, dataset.test.labels, dataset.task.num_classes),
        run_seed=0,
        sampler=None,
        num_threads=1,
        in_step=in_step,
    )


def uploads_of(simulated: Simulation) -> dict[str, Any]:
    outcomes: list[Any] = []
    simulated.run(on_round=outcomes.append)
    return dict(outcomes[-1].uploads)


@pytest.mark.parametrize("method", ["fedavg", "centralized", "pfedgrp"])
def test_clients_in_step_upload_what_they_upload_one_by_one(method: str) -> None:
    alone = uploads_of(simulation(method, in_step=False))
    in_step = uploads_of(simulation(method, in_step=True))
    assert list(in_step) == list(alone)
    for name, upload in alone.items():
        packed, again = upload.pack(), in_step[name].pack()
        assert again.facts == packed.facts
        assert again.parameter_sets.keys() == packed.parameter_sets.keys()
        for key, tensor in packed.parameter_sets["task"].items():
            torch.testing.assert_close(again.parameter_sets["task"][key], tensor, rtol=1e-3, atol=1e-4)


def test_a_run_that_is_told_to_stop_ends_with_its_round_and_goes_on_from_there(tmp_path: Path) -> None:
    simulated = simulation("fedavg", in_step=False, num_rounds=3)
    whole = [record.accuracy for record in simulated.run()]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({}, resume=False)
    assert len(simulated.run(checkpoints=checkpoints, should_stop=lambda: True)) == 1
    assert [record.accuracy for record in simulated.run(checkpoints=checkpoints)] == whole


def test_a_run_whose_parameters_are_absurd_goes_on_too(tmp_path: Path) -> None:
    simulated = simulation("centralized", in_step=False, num_rounds=2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({}, resume=False)
    outcomes: list[Any] = []
    simulated.run(checkpoints=checkpoints, on_round=outcomes.append, should_stop=lambda: True)
    (last,) = checkpoints.load()
    artefacts = outcomes[0].aggregator_state.pack()
    next(iter(next(iter(artefacts.parameter_sets.values())).values())).fill_(float("nan"))
    checkpoints.save(msgspec.structs.replace(last, aggregator=encode_artefacts(artefacts, checkpoints)))
    assert len(simulated.run(checkpoints=checkpoints)) == 2


def test_a_method_that_cant_train_in_step_trains_one_by_one_and_refuses_to_be_asked() -> None:
    def identity(**asked: Any) -> dict[str, Any]:
        options = RunSpec(
            method="mfcl", scenario="circulating", dataset="fashion-mnist", preset="tiny", out=Path("out"), **asked
        )
        data = small_dataset(train_per_class=60, test_per_class=40)
        return identity_of(options, simulation_of(options, wanted_stream(options), data))

    assert identity(in_step=False) == identity()
    with pytest.raises(SettingsError, match="mfcl with resnet20 can't train in step on fashion-mnist; without"):
        identity(in_step=True)
    assert identity(torch_device="cuda:1") == identity(torch_device="cuda")  # needs no GPU: nothing is run
    assert identity(torch_device="cpu:0") == identity(), "PyTorch has two names for it"
    assert workers_each(2, "cpu:0") == workers_each(2, "cpu")


def test_as_many_clients_train_at_a_time_as_there_are_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_num_cores", lambda root: 7)
    known = {"method": "fedavg", "scenario": "circulating", "dataset": "fashion-mnist", "preset": "tiny"}
    spec = RunSpec(**known, out=Path("out"), threads=2)
    data = small_dataset(train_per_class=60, test_per_class=40)
    assert simulation_of(spec, wanted_stream(spec), data).num_workers == 3


def test_a_torch_device_that_is_not_there_is_named() -> None:
    assert torch_device("cpu").type == "cpu"
    with pytest.raises(SettingsError, match="torch device 'nonsense' can't be used"):
        torch_device("nonsense")


def test_values_move_whole_and_stay_themselves_on_the_cpu() -> None:
    method = METHODS["pfedgrp"](task=small_dataset().task)
    download = method.initial_download(torch.Generator().manual_seed(0))
    assert placed(download, torch.device("cpu")) is download
    moved = placed(download, torch.device("meta"))
    assert type(moved) is type(download)
    assert {tensor.device.type for tensor in moved.average.values()} == {"meta"}
    shared: dict[int, Any] = {}
    first, second = (placed(download, torch.device("meta"), shared) for _ in range(2))
    assert first is not second
    assert first.average is second.average
    data = RoundData(torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64))
    assert placed_data(data, torch.device("cpu")) is data
    assert placed_data(data, torch.device("meta")).images.device.type == "meta"


def test_a_set_that_records_share_is_looked_at_once() -> None:
    class Seen(dict[str, torch.Tensor]):
        looks = 0

        def values(self) -> Any:
            self.looks += 1
            return super().values()

    sets = Seen(w=torch.zeros(2))
    state, seen = TaskModels({"a": sets, "b": sets}, sets), dict[int, Any]()
    assert placed(state, torch.device("cpu"), seen) is state
    download = TaskDownload(sets)
    assert placed(download, torch.device("cpu"), seen) is download
    assert sets.looks == 1
