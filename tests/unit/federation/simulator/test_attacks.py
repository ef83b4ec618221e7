"""Hostile clients: what they send, and that the honest ones' data and records are their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.image_sets import small_dataset, write_fashion_mnist

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import pfedgrp_records as grp
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.fedcil import FedCIL
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.simulator.attacks import ATTACKS, Attack
from replayfleet.federation.simulator.job import prepare
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.simulation import RoundOutcome, Simulation
from replayfleet.federation.streams.stream import Stream, StreamSettings
from tests.support.toy import TOY


def simulation(attack: Attack | None = None, num_clients: int = 4, num_rounds: int = 1, **fields: Any) -> Simulation:
    dataset = small_dataset()
    wanted = StreamSettings(
        scenario="circulating", num_clients=num_clients, num_rounds=num_rounds, samples_per_class=3, seed=1
    )
    stream = Stream(wanted, dataset.train.labels, dataset.test.labels, dataset.task.num_classes)
    method = FedAvg(task=dataset.task, local_epochs=1, batch_size=4)
    return Simulation(method=method, dataset=dataset, stream=stream, run_seed=0, sampler=None, attack=attack, **fields)


def last_round(simulated: Simulation) -> RoundOutcome:
    outcomes: list[RoundOutcome] = []
    simulated.run(on_round=outcomes.append)
    return outcomes[-1]


def sent(kind: str, start: Mapping[str, float], learned: Mapping[str, float]) -> dict[str, float]:
    upload, download = ({name: torch.tensor([value]) for name, value in values.items()} for values in (learned, start))
    found = Attack(kind).upload(TaskUpload(upload, 7), TaskDownload(download), FedAvg(task=TOY), torch.Generator())
    assert found.num_samples == 7
    return {name: tensor.item() for name, tensor in found.task_parameters.items()}


@pytest.mark.parametrize(("kind", "expected"), [("sign-flip", 0.5), ("tenfold", 6.0), ("label-flip", 1.5)])
def test_an_update_is_scaled_about_the_model_that_it_was_trained_from(kind: str, expected: float):
    assert sent(kind, {"w": 1.0}, {"w": 1.5}) == {"w": expected}


@pytest.mark.parametrize(("start_from", "expected"), [("average", 6.0), ("personalised", -3.0)])
def test_that_is_whichever_model_the_method_begins_from(start_from: str, expected: float):
    average, personalised, learned = ({"w": torch.tensor([value])} for value in (1.0, 2.0, 1.5))
    method = PFedGRP(task=TOY, start_from=start_from)
    upload, download = grp.Upload(learned, {}, {0: 7}, 7), grp.Download(personalised, average)
    found = Attack("tenfold").upload(upload, download, method, torch.Generator())
    assert found.task_parameters["w"].item() == expected


def test_variances_stay_what_variances_can_be():
    assert sent("tenfold", {"norm.running_var": 1.0}, {"norm.running_var": 0.5}) == {"norm.running_var": 0.0}


def test_flipped_labels_are_counted_from_the_other_end_and_honest_data_stay_as_they_are():
    data = RoundData(torch.zeros(4, 1, 28, 28), torch.tensor([0, 1, 2, 3]))
    assert Attack("label-flip").data(data, TOY).labels.tolist() == [3, 2, 1, 0]
    assert data.labels.tolist() == [0, 1, 2, 3]
    assert Attack("tenfold").data(data, TOY) is data


def test_random_parameters_have_the_layout_of_the_model_and_are_new_in_every_round():
    outcomes: list[RoundOutcome] = []
    simulation(Attack("random"), num_rounds=2).run(on_round=outcomes.append)
    first, second = (outcome.uploads["client-3"].task_parameters for outcome in outcomes)
    assert {n: t.shape for n, t in first.items()} == {
        n: t.shape for n, t in outcomes[0].uploads["client-0"].task_parameters.items()
    }
    assert not torch.equal(first["conv.weight"], second["conv.weight"])


@pytest.mark.parametrize("kind", ATTACKS)
def test_the_last_clients_are_hostile_and_the_others_send_what_they_send_without_them(kind: str):
    honest, attacked = last_round(simulation()), last_round(simulation(Attack(kind, 2)))
    models = [
        {name: upload.task_parameters for name, upload in outcome.uploads.items()} for outcome in (honest, attacked)
    ]
    assert [same_bits(models[0][name], models[1][name]) for name in sorted(models[0])] == [True, True, False, False]
    clients = attacked.record.clients
    assert [clients[name].hostile for name in sorted(clients)] == [False, False, True, True]
    assert attacked.record.accuracy == pytest.approx((clients["client-0"].accuracy + clients["client-1"].accuracy) / 2)


def test_screening_leaves_a_tenfold_update_out_and_says_why():
    attack = dataclasses.replace(Attack("tenfold"))
    plain, screened = (last_round(simulation(attack, screens=screens)) for screens in (False, True))
    alone = last_round(simulation(num_clients=3))
    assert plain.record.clients["client-3"].quarantined == ""
    assert "plausible" in screened.record.clients["client-3"].quarantined
    assert [screened.record.clients[f"client-{place}"].quarantined for place in range(3)] == ["", "", ""]
    models: list[Parameters] = [one.downloads["client-0"].task_parameters for one in (plain, screened, alone)]
    assert same_bits(models[1], models[2])
    assert not same_bits(models[0], models[2])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"attack": "tenfold", "hostile": 2}, "somebody must be honest"),
        ({"method": "fedcil", "attack": "tenfold"}, "no task model"),
    ],
)
def test_an_attack_that_can_t_be_made_is_refused_before_anything_is_written(
    wrong: Mapping[str, Any], told: str, tmp_path: Path
):
    write_fashion_mnist(tmp_path / "data", train_per_class=60, test_per_class=3)
    fields: dict[str, Any] = {"method": "fedavg", "preset": "tiny", "out": tmp_path / "out", **wrong}
    spec = RunSpec(**fields, data_root=tmp_path / "data")
    with pytest.raises(SettingsError, match=told):
        prepare(spec)
    assert not (tmp_path / "out").exists()


def test_hostile_clients_without_an_attack_are_refused():
    with pytest.raises(SettingsError, match="--attack must say how"):
        RunSpec(method="fedavg", out=Path("runs/x"), hostile=2).check()


def test_boxes_have_no_labels_to_flip():
    boxes = type("Boxes", (), {"task": object(), "Upload": TaskUpload, "name": "boxes"})
    with pytest.raises(SettingsError, match="boxes"):
        Attack("label-flip").check(boxes, 3)
    Attack("label-flip").check(FedCIL(task=TOY), 3)


def test_an_attack_is_part_of_what_a_run_is(tmp_path: Path):
    write_fashion_mnist(tmp_path / "data", train_per_class=60, test_per_class=3)
    spec = RunSpec(method="fedavg", preset="tiny", out=tmp_path / "out", data_root=tmp_path / "data")
    plain = prepare(spec).identity
    hostile = prepare(dataclasses.replace(spec, attack="random", quarantine=True)).identity
    assert hostile == {**plain, "attack": {"kind": "random", "num_hostile": 1}, "quarantine": True}
    assert not {"robust", "hostile_share"} & plain["settings"].keys()
