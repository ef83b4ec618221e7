from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.image_sets import small_dataset
from support.nudge_method import BIAS, NudgeMethod, NudgeUpload

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.privacy import Account
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.simulator.checkpoints import Checkpoints
from replayfleet.federation.simulator.measures import accounts
from replayfleet.federation.simulator.records import RoundRecord, summarise
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.simulator.simulation import Simulation
from replayfleet.federation.streams.stream import Stream, StreamSettings

TASK_BYTES = 2_800_000
"""Somewhat less than the task model's parameters."""


def simulation(  # all have defaults
    num_rounds: int = 4,
    num_clients: int = 2,
    run_seed: int = 0,
    num_absent: int = 0,
    perturbation: float = 0.0,
    **fields: Any,
):
    dataset = small_dataset()
    wanted = StreamSettings(
        scenario="circulating",
        num_clients=num_clients,
        num_rounds=num_rounds,
        samples_per_class=3,
        num_absent=num_absent,
    )
    stream = Stream(wanted, dataset.train.labels, dataset.test.labels, dataset.task.num_classes)
    return Simulation(
        method=NudgeMethod(task=dataset.task, **fields),
        dataset=dataset,
        stream=stream,
        run_seed=run_seed,
        perturbation=perturbation,
        sampler=None,
        num_threads=1,
        clock=itertools.count().__next__,
    )


def biases(simulated: Simulation, **keywords: Any):
    """Run and return the last downloads' biases by client, with the records."""
    outcomes = []
    records = simulated.run(on_round=outcomes.append, **keywords)
    return {name: d.task_parameters[BIAS] for name, d in outcomes[-1].downloads.items()}, records


def without_times(records: list[RoundRecord]):
    return [
        dataclasses.replace(
            record,
            aggregate_s=0,
            round_s=0,
            aggregate_cpu_s=0,
            clients={name: dataclasses.replace(client, train_s=0, cpu_s={}) for name, client in record.clients.items()},
        )
        for record in records
    ]


def test_a_run_equals_the_method_s_functions_called_by_hand():
    simulated = simulation(num_rounds=2)
    method, stream, train = simulated.method, simulated.stream, simulated.dataset.train
    client, aggregator = method.initial_states()
    downloads = dict.fromkeys(("client-0", "client-1"), method.initial_download(seeded_generator(0, 0, "initial")))
    states = dict.fromkeys(downloads, client)
    for index in range(2):
        uploads = {}
        for place, name in enumerate(downloads):
            data = round_data(train, stream.train_indices(place, index))
            rng = seeded_generator(0, index, name)
            states[name], uploads[name] = method.local_round(states[name], data, downloads[name], rng, sampler=None)
        rng = seeded_generator(0, index, "aggregator")
        aggregator, downloads = method.aggregate(aggregator, uploads, rng, sampler=None)
    simulated_biases, _ = biases(simulated)
    for name, download in downloads.items():
        assert torch.equal(download.task_parameters[BIAS], simulated_biases[name])


def test_equal_seeds_give_equal_bits_and_other_seeds_do_not():
    first, again, other = (biases(simulation(run_seed=seed))[0]["client-0"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_perturbed_initial_weights_are_scaled_and_begin_another_run():
    plain, scaled = simulation(), simulation(perturbation=0.01)
    before, after = (one._initial_download().pack().parameter_sets for one in (plain, scaled))
    floats = [(key, name) for key, sets in before.items() for name, t in sets.items() if t.is_floating_point()]
    assert floats
    for key, name in floats:
        assert torch.allclose(after[key][name], 1.01 * before[key][name])
    assert not torch.equal(*(biases(one)[0]["client-0"] for one in (plain, scaled)))


def test_a_strong_nudge_makes_a_model_right_on_half_of_the_classes_it_met():
    _, records = biases(simulation(num_rounds=1, num_clients=1, strength=1e3))
    client = records[0].clients["client-0"]
    assert client.accuracy == records[0].accuracy == 0.5
    assert sorted(client.class_accuracy.values()) == [0, 1]
    assert set(client.class_accuracy) == set(client.classes)


def test_records_count_samples_and_tests():
    _, records = biases(simulation(num_rounds=3))
    assert [record.round for record in records] == [0, 1, 2]
    assert [record.clients["client-1"].num_seen for record in records] == [6, 12, 18]
    assert [record.clients["client-1"].num_test for record in records] == [2, 4, 6]


def test_a_sub_generator_that_did_not_change_costs_nothing():
    _, records = biases(simulation(num_rounds=4))
    clients = [record.clients["client-0"] for record in records]
    assert [len(client.sub_generators_sent) for client in clients] == [2, 2, 0, 0]
    assert [client.num_sub_generators_held for client in clients] == [2, 4, 4, 4]
    assert clients[2].bytes_up < clients[0].bytes_up
    assert clients[2].bytes_up_everything > clients[2].bytes_up > TASK_BYTES
    assert clients[0].bytes_up_everything == clients[0].bytes_up


def test_records_say_what_privacy_cost_and_a_summary_has_the_largest_of_it(monkeypatch: pytest.MonkeyPatch):
    _, without = biases(simulation(num_rounds=2))
    assert {client.epsilon for record in without for client in record.clients.values()} == {None}
    assert "epsilon" not in summarise(without)
    spent = iter([Account(1e-5, {}, {0: 1.5}), Account(1e-5, {}, {0: 7.0, 1: 2.0}), Account(1e-5), Account(1e-5)])
    monkeypatch.setattr(NudgeUpload, "privacy", property(lambda _: next(spent)), raising=False)
    _, records = biases(simulation(num_rounds=2))
    assert [record.clients[name].epsilon for record in records for name in sorted(record.clients)] == [1.5, 7.0, 0, 0]
    assert summarise(records)["epsilon"] == 7.0


def test_retrained_sub_generators_are_sent_again_by_class():
    _, records = biases(simulation(num_rounds=4, retrain=True))
    last = records[3].clients["client-0"]
    assert sorted(last.sub_generators_sent) == sorted(str(class_id) for class_id in last.classes)


def test_an_absent_client_neither_trains_nor_sends_and_is_measured_with_what_the_aggregator_keeps_for_it():
    simulated = simulation(num_clients=3, num_absent=1)
    trained, outcomes = [], []
    simulated.run(on_client=lambda index, name: trained.append((index, name)), on_round=outcomes.append)
    assert len(trained) == 3 + 3 * 2
    for index in range(1, 4):
        before, outcome = outcomes[index - 1], outcomes[index]
        (name,) = [name for name, client in outcome.record.clients.items() if not client.present]
        client, earlier = outcome.record.clients[name], before.record.clients[name]
        assert (index, name) not in trained
        assert name not in outcome.uploads
        assert outcome.client_states[name] is before.client_states[name]
        assert torch.equal(outcome.downloads[name].task_parameters[BIAS], before.downloads[name].task_parameters[BIAS])
        assert (client.classes, client.train_s, client.sub_generators_sent) == ((), 0, ())
        assert (client.bytes_up, client.bytes_up_everything, client.bytes_down) == (0, 0, 0)
        assert client.num_sub_generators_held == earlier.num_sub_generators_held
        assert (client.num_test, client.num_seen) == (earlier.num_test, earlier.num_seen)
        assert (client.accuracy, client.class_accuracy) == (earlier.accuracy, earlier.class_accuracy)


def test_acc_weighs_an_absent_client_by_what_it_has_seen():
    _, records = biases(simulation(num_clients=3, num_absent=2, num_rounds=4))
    clients = records[-1].clients.values()
    seen = [client.num_seen for client in clients]
    assert sum(seen) == 6 * (3 + 3 * 1)
    assert len(set(seen)) > 1
    mean = sum(client.num_seen * client.accuracy for client in clients) / sum(seen)
    assert records[-1].accuracy == pytest.approx(mean)


def test_thirty_clients_are_no_limit():
    _, records = biases(simulation(num_clients=30, num_absent=26, num_rounds=2))
    assert [sum(client.present for client in record.clients.values()) for record in records] == [30, 4]
    assert len(records[-1].clients) == 30


@pytest.mark.parametrize("num_absent", [0, 1])
def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path: Path, num_absent: int):
    whole, records = biases(simulation(num_rounds=4, num_clients=3, num_absent=num_absent))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({"seed": 0}, resume=False)

    last = max(name for name, client in records[2].clients.items() if client.present)

    def stop(round_index: int, name: str) -> None:
        if (round_index, name) == (2, last):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulation(num_rounds=4, num_clients=3, num_absent=num_absent).run(checkpoints=checkpoints, on_client=stop)
    checkpoints.begin({"seed": 0}, resume=True)
    seen = []
    resumed, resumed_records = biases(
        simulation(num_rounds=4, num_clients=3, num_absent=num_absent),
        checkpoints=checkpoints,
        on_client=lambda index, _: seen.append(index),
    )
    assert set(seen) == {2, 3}
    assert without_times(resumed_records) == without_times(records)
    for name, bias in whole.items():
        assert torch.equal(bias, resumed[name])


def test_bytes_and_bits_are_the_same_with_and_without_checkpoints(tmp_path: Path):
    for place, fields in enumerate(({}, {"retrain": True}, {"num_absent": 1})):
        checkpoints = Checkpoints(tmp_path / str(place))
        checkpoints.begin({}, resume=False)
        kept, kept_records = biases(simulation(num_rounds=4, **fields), checkpoints=checkpoints)
        passing, passing_records = biases(simulation(num_rounds=4, **fields))
        assert without_times(passing_records) == without_times(kept_records)
        assert all(torch.equal(bias, kept[name]) for name, bias in passing.items())


def test_a_run_that_keeps_nothing_hashes_no_parameters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accounts, "digest", Mock(side_effect=AssertionError("hashed")))
    assert len(simulation(num_rounds=2).run()) == 2


def test_a_run_without_evaluation_differs_in_accuracies_only(tmp_path: Path):
    measured, records = biases(simulation(num_rounds=2))
    bits, unmeasured = biases(dataclasses.replace(simulation(num_rounds=2), evaluates=False))
    assert all(torch.equal(bias, measured[name]) for name, bias in bits.items())
    assert all(math.isnan(record.accuracy) for record in unmeasured)
    assert [r.clients["client-0"].bytes_up for r in unmeasured] == [r.clients["client-0"].bytes_up for r in records]
    with pytest.raises(ValueError, match="accuracies"):
        dataclasses.replace(simulation(), evaluates=False).run(checkpoints=Checkpoints(tmp_path))


def test_a_finished_run_resumes_to_its_records(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({}, resume=False)
    records = simulation().run(checkpoints=checkpoints)
    assert simulation().run(checkpoints=checkpoints) == records


def test_only_the_last_round_s_tensors_are_kept(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({}, resume=False)
    simulation(num_rounds=3, retrain=True).run(checkpoints=checkpoints)
    snapshot = checkpoints.load()[-1]
    named = {entry.digest for state in (snapshot.aggregator, *snapshot.clients.values()) for entry in state.blobs}
    assert {path.stem for path in (tmp_path / "blobs").iterdir()} == named


def test_the_first_download_is_made_once_in_a_run(monkeypatch: pytest.MonkeyPatch):
    made, real = [], NudgeMethod.initial_download

    def counted(method: NudgeMethod, rng: torch.Generator) -> Any:
        made.append(method)
        return real(method, rng)

    monkeypatch.setattr(NudgeMethod, "initial_download", counted)
    simulation(num_rounds=3, num_clients=3, num_absent=1).run()
    assert len(made) == 1


def test_a_round_s_uploads_are_gone_before_the_next_round_makes_its_own():
    def uploads() -> int:
        return sum(type(one) is NudgeUpload for one in gc.get_objects())

    before, alive = uploads(), []
    simulation(num_rounds=3).run(on_round=lambda outcome: None, on_client=lambda *_: alive.append(uploads() - before))
    assert alive == [0, 1] * 3, "as the first of two clients begins, and the second"


def test_the_number_of_torch_threads_is_set_for_the_run_only():
    before = torch.get_num_threads()
    seen = []
    simulation(num_rounds=1).run(on_client=lambda *_: seen.append(torch.get_num_threads()))
    assert seen == [1, 1]
    assert torch.get_num_threads() == before


def test_another_run_is_not_resumed(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({"method": "fedavg", "seed": 1}, resume=False)
    with pytest.raises(SettingsError, match="seed was 1, is now 2"):
        checkpoints.begin({"method": "fedavg", "seed": 2}, resume=True)


def test_whoever_resumes_a_run_of_an_earlier_version_is_told_all_settings_that_it_began_with(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({"settings": {"sub_generator": "pca-gaussian"}}, resume=False)
    now = {"settings": {"sub_generator": "pca-mixture", "detail_share": 0.5, "smooth_share": 1.0}}
    same = "resume with --set detail_share=0.0 --set smooth_share=0.0 --set sub_generator=pca-gaussian, or"
    with pytest.raises(SettingsError, match=same):
        checkpoints.begin(now, resume=True)
    for other in {"sub_generator": "pca-gaussian", "labelled_among": "new"}, {}:  # a later version, or an earlier one
        with pytest.raises(SettingsError, match="resume with the version that began it, or"):
            checkpoints.begin({"settings": other}, resume=True)
    (tmp_path / "run.json").write_text('{"settings": [1]}')
    with pytest.raises(SettingsError, match="resume with the same options, or"):
        checkpoints.begin(now, resume=True)


def test_nothing_is_no_run_to_resume(tmp_path: Path):
    with pytest.raises(SettingsError, match="no run to resume"):
        Checkpoints(tmp_path / "absent").begin({}, resume=True)
    assert not (tmp_path / "absent").exists()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({}, resume=False)
    name = checkpoints.put(b"tensors")
    assert checkpoints.read(name) == b"tensors"
    (tmp_path / "blobs" / f"{name}.safetensors").write_bytes(b"tensorz")
    with pytest.raises(SettingsError, match="is damaged"):
        checkpoints.read(name)
    (tmp_path / "round-0000.json").write_bytes(b"{")
    with pytest.raises(SettingsError, match="can't be read"):
        checkpoints.load()


def test_a_missing_round_is_noticed(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({}, resume=False)
    simulation(num_rounds=2).run(checkpoints=checkpoints)
    (tmp_path / "round-0000.json").unlink()
    with pytest.raises(SettingsError, match=r"round-0000\.json is missing"):
        checkpoints.load()


def test_a_checkpoint_of_another_round_is_told_from_a_missing_one(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({}, resume=False)
    simulation(num_rounds=2).run(checkpoints=checkpoints)
    shutil.copyfile(tmp_path / "round-0000.json", tmp_path / "round-0001.json")
    with pytest.raises(SettingsError, match=r"round-0001\.json holds round 0; "):
        checkpoints.load()


def test_a_new_run_begins_with_an_empty_folder(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({}, resume=False)
    simulation(num_rounds=1).run(checkpoints=checkpoints)
    checkpoints.begin({}, resume=False)
    assert checkpoints.load() == []
    assert not list((tmp_path / "blobs").iterdir())
