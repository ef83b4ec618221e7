from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Artefacts, Parameters
from replayfleet.federation.methods.kit.task_records import TaskModels, TaskUpload
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.steps.robust import (
    krum_order,
    robust_average,
    squared_distances,
    tolerated,
    trimmed_mean,
)
from replayfleet.federation.methods.steps.screening import Candidate, answers_of, screen
from replayfleet.federation.service.fleet.presets import MAX_CHANGE
from tests.support.toy import LEARNING, TOY, accuracy, run_rounds

RULES = ("median", "trimmed-mean", "krum", "multi-krum")


def sets(*values: float) -> list[Parameters]:
    return [{"w": torch.tensor([value, -value])} for value in values]


def average(parameter_sets: Sequence[Parameters], rule: str, share: float = 0.2) -> float:
    found = robust_average(parameter_sets, rule, share)
    return found.parameters["w"][0].item()


def test_extremes_at_either_end_are_left_out_of_a_trimmed_mean():
    assert average(sets(1e30, 1.0, 4.0, 10.0, -1e30), "trimmed-mean") == 5.0


@pytest.mark.parametrize(("values", "expected"), [((3.0,), 3.0), ((1.0, 5.0), 3.0), ((9.0, 1.0, 2.0), 2.0)])
def test_the_median_is_the_middle_value_or_the_mean_of_two(values: tuple[float, ...], expected: float):
    assert average(sets(*values), "median") == expected


def test_krum_takes_the_set_in_the_thick_of_the_others():
    # f = 1 of 5: the sums of squared distances to the two nearest are 5, 2, 5, 13 and huge, twice each for two entries
    values = sets(0.0, 1.0, 2.0, 4.0, 1e6)
    assert krum_order(values, 1) == [1, 0, 2, 3, 4]
    assert average(values, "krum") == 1.0


def test_multi_krum_is_the_mean_of_all_but_the_hostile_number():
    assert average(sets(0.0, 1.0, 2.0, 5.0, 1e6), "multi-krum") == 2.0


def test_distances_count_every_floating_tensor_and_no_integers():
    first = {"w": torch.zeros(2, 2), "running_var": torch.ones(3), "num_batches_tracked": torch.tensor(1)}
    second = {"w": torch.ones(2, 2), "running_var": torch.zeros(3), "num_batches_tracked": torch.tensor(9)}
    assert squared_distances([first, second], [first]).flatten().tolist() == pytest.approx([0.0, 7.0])


def test_distances_of_honest_sets_survive_beside_a_huge_one():
    assert squared_distances(sets(0.0, 1.0, 1e30), sets(0.0))[1, 0].item() == pytest.approx(2.0)
    assert krum_order(sets(1e30, 0.0, 3.0, 4.0, 4.5), 1)[:2] == [3, 4]


def test_distances_of_sets_survive_beside_huge_entries_that_they_share():
    one, other = ({"w": torch.tensor([1e9, place])} for place in (0.0, 1.0))
    assert squared_distances([one, other], [one]).flatten().tolist() == [0.0, 1.0]


def test_integer_buffers_are_the_middle_one():
    counted = [{"num_batches_tracked": torch.tensor(count)} for count in (10**12, 3, 5, 4)]
    assert trimmed_mean(counted, 1)["num_batches_tracked"].item() == 4


def test_a_cut_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="less than half of 4 sets"):
        trimmed_mean(sets(1, 2, 3, 4), 2)


@pytest.mark.parametrize(
    ("num_uploads", "share", "expected"),
    [(5, 0.2, 1), (10, 0.2, 2), (10, 0.3, 3), (4, 0.2, 1), (3, 0.2, 1), (2, 0.4, 0), (1, 0.4, 0), (9, 0.0, 0)],
)
def test_the_share_is_rounded_up_but_stays_a_minority(num_uploads: int, share: float, expected: int):
    assert tolerated(num_uploads, share) == expected


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("buffer", ["running_mean", "running_var"])
def test_statistics_of_batchnorm_are_protected_too(rule: str, buffer: str):
    honest: list[Parameters] = [{"w": torch.ones(4), buffer: torch.full((3,), 1.0 + place / 10)} for place in range(4)]
    poisoned: Parameters = {"w": torch.ones(4), buffer: torch.full((3,), 1e6)}
    found = robust_average([*honest, poisoned], rule, 0.2)
    assert found.trusted == (0, 1, 2, 3)
    assert 1.0 <= found.parameters[buffer].max().item() <= 1.31


@pytest.mark.parametrize("kind", [FedAvg, PFedGRP])
@pytest.mark.parametrize(
    ("wrong", "told"),
    [({"robust": "mode"}, "robust is 'mode'"), ({"hostile_share": 0.5}, "less"), ({"hostile_share": -0.1}, "0 to 0.5")],
)
def test_impossible_settings_are_refused(kind: type[Any], wrong: Mapping[str, Any], told: str):
    with pytest.raises(ValueError, match=told):
        kind(task=TOY, **wrong)


def aggregated(method: Any, models: Mapping[str, Parameters], num_samples: Mapping[str, int]) -> Parameters:
    uploads = {name: TaskUpload(model, num_samples.get(name, 1)) for name, model in models.items()}
    _, downloads = method.aggregate(TaskModels(), uploads, torch.Generator(), sampler=None)
    return downloads["a"].task_parameters


@pytest.mark.parametrize("rule", RULES)
def test_a_claim_of_many_samples_buys_nothing_and_the_order_of_arrival_changes_nothing(rule: str):
    models = dict(zip("abcde", sets(0.1, 0.2, 0.3, 0.4, 9.0), strict=True))
    plain = aggregated(FedAvg(task=TOY, robust=rule), models, {})
    assert same_bits(plain, aggregated(FedAvg(task=TOY, robust=rule), dict(reversed(models.items())), {"e": 10**7}))
    assert plain["w"][0].item() < 0.41


@pytest.fixture(scope="module")
def learned() -> Parameters:
    _, downloads = run_rounds(FedAvg(task=TOY, **LEARNING), [{"a": {0: 24, 1: 24}, "b": {0: 24, 1: 24}}])
    return downloads["a"].task_parameters


@pytest.mark.learning
@pytest.mark.parametrize("rule", RULES)
def test_a_broken_client_harms_fedavg_and_no_robust_average(rule: str, learned: Parameters):
    broken = {name: torch.full_like(tensor, 100) for name, tensor in learned.items()}
    models = {"a": learned, "b": learned, "c": learned, "d": learned, "e": broken}
    counts = {0: 20, 1: 20}
    pulled = accuracy(aggregated(FedAvg(task=TOY), models, {}), counts)
    assert accuracy(aggregated(FedAvg(task=TOY, robust=rule), models, {}), counts) > max(0.75, pulled + 0.2)


@pytest.mark.learning
def test_what_screening_lets_pass_can_make_a_mean_useless_and_no_robust_average(learned: Parameters):
    """As docs/quarantine.md says: statistics of one of five, moved by less than honest training moves them."""
    moved = {name: tensor + 1 if name.endswith("running_mean") else tensor for name, tensor in learned.items()}
    models = {"a": learned, "b": learned, "c": learned, "d": learned, "e": moved}
    base = {"task": learned}
    sent = {name: Candidate(Artefacts({"task": model}), base, 100) for name, model in models.items()}
    assert not screen(sent, answers_of(TOY), MAX_CHANGE)
    counts = {0: 20, 1: 20}
    assert accuracy(aggregated(FedAvg(task=TOY), models, {}), counts) < 0.7 < accuracy(learned, counts)
    for rule in RULES:
        assert accuracy(aggregated(FedAvg(task=TOY, robust=rule), models, {}), counts) > 0.75
