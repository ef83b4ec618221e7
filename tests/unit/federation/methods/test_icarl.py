"""iCaRL: who is chosen to stay, what is learnt beside it, and that no more than the buffer is kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.icarl import Exemplars, ICaRL, herded
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.task_records import TaskDownload
from replayfleet.federation.methods.steps.kept_samples import IMAGES, LABELS
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.models.build import build_task_model, initialise
from tests.support.toy import TOY, run_rounds, toy_data

QUICK: dict[str, Any] = {"local_epochs": 2, "batch_size": 8, "learning_rate": 0.02, "weight_decay": 0.0}
SMALL = replace(TOY, architecture="lenet")


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(initialise(build_task_model(SMALL), torch.Generator().manual_seed(seed)).state_dict())


def local_round(method: ICaRL, state: Exemplars, counts: dict[int, int], start: dict[str, torch.Tensor]) -> Any:
    rng = seeded_generator(0, 0, "a")
    return method.local_round(state, toy_data(counts), TaskDownload(start), rng, sampler=eager_sampler(SMALL))


def test_the_first_chosen_is_nearest_to_the_mean_and_each_next_mends_it() -> None:
    features = F.normalize(torch.randn(7, 3, generator=torch.Generator().manual_seed(3)), dim=1)
    mean = features.mean(dim=0)
    rows = herded(features, 4).tolist()
    assert len(set(rows)) == 4
    for size in range(1, 5):
        earlier = rows[: size - 1]
        errors = {
            row: float((mean - features[[*earlier, row]].mean(dim=0)).norm()) for row in range(7) if row not in earlier
        }
        assert rows[size - 1] == min(errors, key=errors.__getitem__)
    assert herded(features, 2).tolist() == rows[:2]  # a set cut short is what a smaller one would have been
    assert sorted(herded(features, 99).tolist()) == list(range(7))
    assert min(float((mean - features[list(two)].mean(dim=0)).norm()) for two in combinations(range(7), 2)) <= float(
        (mean - features[rows[:2]].mean(dim=0)).norm()
    )


def test_a_first_round_is_fedavg_to_the_bit() -> None:
    rounds = [{"a": {0: 8, 1: 8}, "b": {1: 8}}]
    _, ours = run_rounds(ICaRL(task=TOY, **QUICK), rounds)
    _, fedavg = run_rounds(FedAvg(task=TOY, **QUICK), rounds)
    assert same_bits(ours["a"].task_parameters, fedavg["a"].task_parameters)


def test_the_buffer_is_shared_evenly_and_survives_packing() -> None:
    method = ICaRL(task=SMALL, **QUICK, buffer_size=9)
    state, upload = local_round(method, Exemplars(), {0: 8, 1: 8}, model())
    assert state.samples[LABELS].tolist() == [0] * 4 + [1] * 4
    first = state.samples[IMAGES][:4]
    state, _ = local_round(method, Exemplars.unpack(state.pack()), {2: 8}, upload.task_parameters)
    assert state.met == (0, 1, 2)
    assert state.samples[LABELS].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert torch.equal(state.samples[IMAGES][:3], first[:3])  # those chosen last go first


def test_more_classes_than_the_buffer_has_room_for_keep_it_at_its_size() -> None:
    state, _ = local_round(ICaRL(task=SMALL, **QUICK, buffer_size=2), Exemplars(), {0: 3, 1: 3, 2: 3}, model())
    assert state.samples[LABELS].tolist() == [0, 1]


def test_a_sample_that_is_kept_and_met_again_counts_once() -> None:
    data = toy_data({0: 4, 1: 2})
    kept = Exemplars({IMAGES: data.images[[0, 5]], LABELS: data.labels[[0, 5]]}, (0, 1))
    assert len(kept.joined(data).labels) == 6
    only_zeros = replace(data, images=data.images[:4], labels=data.labels[:4])
    assert kept.joined(only_zeros).labels.tolist() == [0, 0, 0, 0, 1]


def test_what_the_downloaded_model_says_of_earlier_classes_holds_the_model() -> None:
    start = model(5)
    state = Exemplars({IMAGES: toy_data({0: 2, 1: 2}).images, LABELS: torch.tensor([0, 0, 1, 1])}, (0, 1))
    images = toy_data({0: 8, 1: 8}).images
    said = judge_with(SMALL, start)(images)[:, :2].softmax(dim=1)
    apart = []
    for weight in (0.0, 20.0):
        method = ICaRL(task=SMALL, **{**QUICK, "local_epochs": 20, "momentum": 0.0}, distillation_weight=weight)
        _, upload = local_round(method, state, {2: 8, 3: 8}, start)
        says = judge_with(SMALL, upload.task_parameters)(images)[:, :2].softmax(dim=1)
        apart.append(float((says - said).abs().mean()))
    assert apart[1] < apart[0]


@pytest.mark.parametrize(
    ("settings", "message"), [({"buffer_size": 1}, "buffer_size"), ({"distillation_weight": -1.0}, "distillation")]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ICaRL(task=TOY, **settings)
