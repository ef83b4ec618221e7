from __future__ import annotations

import pytest
import torch

from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.centralized import Centralized
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator, split_generator
from replayfleet.federation.methods.kit.task_records import TaskModels, TaskUpload
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.task_method import AveragingMethod
from replayfleet.federation.service.fleet.presets import STORES_DATA
from tests.support.toy import LEARNING, TOY, accuracy, run_rounds

SAMPLER = eager_sampler(TOY)


def test_the_table_of_methods_is_keyed_by_their_names() -> None:
    assert {name: method.name for name, method in METHODS.items()} == {name: name for name in METHODS}
    assert [name for name, method in METHODS.items() if method.stores_data] == [
        "agem",
        "centralized",
        "der",
        "fedgp",
        "icarl",
        "ideal",
    ]


def test_what_services_say_of_methods_that_store_data_is_true() -> None:
    assert sorted(STORES_DATA) == sorted(name for name, method in METHODS.items() if method.stores_data)


@pytest.mark.parametrize("kind", [kind for kind in METHODS.values() if issubclass(kind, AveragingMethod)])
def test_a_server_that_averages_weighs_by_samples_whatever_the_order_of_arrival(kind: type[AveragingMethod]) -> None:
    method = kind(task=TOY)
    uploads = {"b": TaskUpload({"w": torch.tensor([4.0])}, 30), "a": TaskUpload({"w": torch.tensor([0.0])}, 10)}
    state, downloads = method.aggregate(TaskModels(), uploads, torch.Generator(), sampler=SAMPLER)
    assert downloads["a"].task_parameters["w"].item() == 3.0
    assert downloads["a"].task_parameters is downloads["b"].task_parameters
    assert method.download_for(state, "late", downloads["a"]).task_parameters["w"].item() == 3.0
    _, other = method.aggregate(TaskModels(), dict(sorted(uploads.items())), torch.Generator(), sampler=SAMPLER)
    assert same_bits(other["b"].task_parameters, downloads["b"].task_parameters)
    assert same_bits(TaskModels.unpack(state.pack()).common, state.common)
    with pytest.raises(ValueError, match="without uploads"):
        method.aggregate(TaskModels(), {}, torch.Generator(), sampler=SAMPLER)


def test_centralized_gives_every_client_its_own_model_back() -> None:
    method = Centralized(task=TOY)
    uploads = {"a": TaskUpload({"w": torch.tensor([1.0])}, 1), "b": TaskUpload({"w": torch.tensor([2.0])}, 1)}
    state, downloads = method.aggregate(TaskModels(), uploads, torch.Generator(), sampler=SAMPLER)
    assert [downloads[c].task_parameters["w"].item() for c in "ab"] == [1.0, 2.0]
    _, later = method.aggregate(state, {"a": uploads["b"]}, torch.Generator(), sampler=SAMPLER)
    assert [later[c].task_parameters["w"].item() for c in "ab"] == [2.0, 2.0]


@pytest.mark.learning
def test_centralized_keeps_all_its_samples_and_doesnt_forget() -> None:
    rounds = [{"a": {0: 24, 1: 24}}, {"a": {2: 24, 3: 24}}]
    _, downloads = run_rounds(Centralized(task=TOY, **LEARNING), rounds)
    assert accuracy(downloads["a"].task_parameters, {0: 20, 1: 20, 2: 20, 3: 20}) > 0.9


@pytest.mark.parametrize("method", [FedAvg(task=TOY), Centralized(task=TOY)])
def test_a_round_without_uploads_is_refused(method: FedAvg | Centralized) -> None:
    with pytest.raises(ValueError, match="without uploads"):
        method.aggregate(TaskModels(), {}, torch.Generator(), sampler=SAMPLER)
    with pytest.raises(ValueError, match="num_samples"):
        method.check_upload(TaskUpload({}, 0))


def test_generators_depend_on_all_three_arguments_and_on_nothing_else() -> None:
    def draw(*arguments: int | str) -> float:
        return float(torch.rand(1, generator=seeded_generator(*arguments)))  # type: ignore[arg-type]

    reference = draw(0, 1, "a")
    torch.rand(3)
    assert draw(0, 1, "a") == reference
    assert len({draw(1, 1, "a"), draw(0, 2, "a"), draw(0, 1, "b"), reference}) == 4
    parent = seeded_generator(0, 0, "x")
    first, second = split_generator(parent), split_generator(parent)
    assert float(torch.rand(1, generator=first)) != float(torch.rand(1, generator=second))


def test_round_data_refuses_to_exist_when_wrong() -> None:
    images, labels = torch.zeros(2, 1, 28, 28), torch.tensor([1, 1])
    assert RoundData(images, labels).counts() == {1: 2}
    with pytest.raises(ValueError, match="2 images but 1 labels"):
        RoundData(images, labels[:1])
    with pytest.raises(ValueError, match="float32"):
        RoundData(images.double(), labels)
    with pytest.raises(ValueError, match="int64"):
        RoundData(images, labels.int())
