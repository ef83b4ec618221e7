from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from replayfleet.federation.methods import fedem_records as em
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.fedem import FedEM, mixture_logits, responsibilities, weighted_cross_entropy
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Artefacts, Parameters, RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.models.build import build_task_model, initialise
from tests.support.rng import rng
from tests.support.toy import LEARNING, TOY, accuracy, run_rounds, toy_data

SAMPLER = eager_sampler(TOY)
QUICK: dict[str, Any] = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01, "weight_decay": 0.0}


def model(seed: int) -> Parameters:
    return dict(initialise(build_task_model(TOY), rng(seed)).state_dict())


def local(method: FedEM, data: RoundData, download: em.Download, seed: int = 0) -> em.Upload:
    upload: em.Upload = method.local_round(NoState(), data, download, rng(seed), sampler=SAMPLER)[1]
    return upload


def share_right(method: FedEM, download: em.Download, data: RoundData) -> float:
    return float((method.predictor(download)(data.images).argmax(dim=1) == data.labels).float().mean())


def test_responsibilities_equal_bayes_rule() -> None:
    losses = torch.tensor([[0.0, 2.0], [math.log(4), 2.0], [9.0, 0.0]])
    shares = (0.2, 0.8, 0.0)
    found = responsibilities(losses, shares)
    assert found[:, 0].tolist() == pytest.approx([0.2 / (0.2 + 0.8 / 4), 0.2 / (0.2 + 0.8 / 4), 0.0])
    assert found[:, 1].tolist() == pytest.approx([0.2, 0.8, 0.0])
    assert found.sum(dim=0).tolist() == pytest.approx([1.0, 1.0])


def test_huge_losses_leave_the_responsibilities_finite() -> None:
    found = responsibilities(torch.tensor([[5000.0], [5000.0]]), (0.5, 0.5))
    assert found.flatten().tolist() == [0.5, 0.5]


def test_a_learner_that_diverged_explains_nothing_and_says_nothing() -> None:
    lost = torch.full((1, 2), torch.nan)
    found = responsibilities(torch.cat([torch.tensor([[1.0, 2.0], [1.0, torch.inf]]), lost]), (0.25, 0.25, 0.5))
    assert found.T.tolist() == [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]
    said = torch.randn(2, 4, generator=rng())
    for share in (1.0, 0.5):  # of the round in which it diverges, and of who is absent then, its share is what it was
        mixed = mixture_logits([said, torch.full_like(said, torch.nan)], (share, 1 - share))
        assert torch.allclose(mixed.log_softmax(dim=1), said.log_softmax(dim=1))
    em.check_shares(tuple(responsibilities(lost.expand(3, 2), (0.2, 0.3, 0.5)).mean(dim=1).tolist()), 3)


def test_an_e_step_and_the_mean_never_lower_the_likelihood() -> None:
    losses = 3 * torch.rand(3, 50, generator=rng())
    shares: tuple[float, ...] = (0.6, 0.3, 0.1)
    likelihoods = []
    for _ in range(5):
        likelihoods.append(float(torch.logsumexp(torch.tensor(shares).log()[:, None] - losses, dim=0).sum()))
        shares = tuple(responsibilities(losses, shares).mean(dim=1).tolist())
    assert likelihoods == sorted(likelihoods)
    assert likelihoods[-1] > likelihoods[0]


def test_the_mixture_predicts_the_weighted_mean_of_probabilities() -> None:
    logits = [torch.randn(5, 4, generator=rng(seed)) for seed in range(3)]
    shares = (0.5, 0.3, 0.2)
    expected = sum(share * part.softmax(dim=1) for share, part in zip(shares, logits, strict=True))
    assert isinstance(expected, torch.Tensor)
    found = mixture_logits(logits, shares)
    assert torch.allclose(found.exp(), expected, atol=1e-6)
    assert torch.allclose(mixture_logits(logits, (0.0, 1.0, 0.0)).exp(), logits[1].softmax(dim=1), atol=1e-6)


def test_the_weighted_loss_and_its_gradient_equal_their_closed_forms() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]], requires_grad=True)
    loss = weighted_cross_entropy(logits, torch.tensor([0, 1]), torch.tensor([0.25, 1.0]))
    loss.backward()
    assert loss.item() == pytest.approx((0.25 * math.log(1 + math.exp(-2)) + math.log(2)) / 2)
    assert logits.grad is not None
    surprise = 1 / (1 + math.exp(2))
    expected = [-0.25 * surprise / 2, 0.25 * surprise / 2, 0.25, -0.25]
    assert logits.grad.flatten().tolist() == pytest.approx(expected)


def test_a_round_estimates_the_shares_with_the_downloaded_learners_in_eval_mode() -> None:
    method, data = FedEM(task=TOY, **QUICK, num_learners=2), toy_data({0: 8, 1: 8})
    download = em.Download((model(0), model(1)), (0.7, 0.3))
    upload = local(method, data, download)
    losses = torch.stack(
        [
            F.cross_entropy(judge_with(TOY, learner)(data.images), data.labels, reduction="none")
            for learner in download.learners
        ]
    )
    joint = torch.tensor([0.7, 0.3], dtype=torch.float64)[:, None] * (-losses.double()).exp()
    expected = (joint / joint.sum(dim=0)).mean(dim=1)
    assert upload.shares == pytest.approx(expected.tolist(), rel=1e-6)
    assert upload.num_samples == 16


def test_a_learner_without_responsibility_learns_nothing() -> None:
    method, data = FedEM(task=TOY, **QUICK, num_learners=2), toy_data({0: 8, 1: 8})
    upload = local(method, data, em.Download((model(0), model(1)), (1.0, 0.0)))
    assert upload.shares == (1.0, 0.0)
    assert torch.equal(upload.learners[1]["head.weight"], model(1)["head.weight"])
    assert not torch.equal(upload.learners[0]["head.weight"], model(0)["head.weight"])


def test_one_learner_is_fedavg_to_the_bit() -> None:
    rounds = [{"a": {0: 8, 1: 4}, "b": {2: 8}}, {"a": {3: 8}, "b": {1: 8}}]
    _, ours = run_rounds(FedEM(task=TOY, **QUICK, num_learners=1), rounds)
    _, theirs = run_rounds(FedAvg(task=TOY, **QUICK), rounds)
    assert same_bits(ours["a"].task_parameters, theirs["a"].task_parameters)


def test_the_first_learner_starts_where_fedavg_does_and_the_others_elsewhere() -> None:
    download = FedEM(task=TOY).initial_download(seeded_generator(0, 0, "initial"))
    assert len(download.learners) == 3
    assert download.shares == pytest.approx((1 / 3,) * 3)
    fedavg: TaskDownload = FedAvg(task=TOY).initial_download(seeded_generator(0, 0, "initial"))
    assert same_bits(download.task_parameters, fedavg.task_parameters)
    assert not same_bits(download.learners[0], download.learners[1])


def test_the_aggregator_averages_each_learner_by_volume_whatever_the_order_of_arrival() -> None:
    method = FedEM(task=TOY, num_learners=2)

    def upload(first: float, second: float, num_samples: int, share: float) -> em.Upload:
        learners = ({"w": torch.tensor([first])}, {"w": torch.tensor([second])})
        return em.Upload(learners, (share, 1 - share), num_samples)

    uploads = {"b": upload(4.0, 8.0, 30, 0.25), "a": upload(0.0, 0.0, 10, 0.5)}
    state, downloads = method.aggregate(em.AggregatorState(), uploads, rng(), sampler=SAMPLER)
    assert [learner["w"].item() for learner in downloads["a"].learners] == [3.0, 6.0]
    assert downloads["a"].shares == (0.5, 0.5)
    assert downloads["b"].task_parameters["w"].item() == 6.0
    _, other = method.aggregate(em.AggregatorState(), dict(sorted(uploads.items())), rng(), sampler=SAMPLER)
    assert other == downloads
    _, later = method.aggregate(state, {"a": uploads["a"]}, rng(), sampler=SAMPLER)
    assert later["b"].shares == (0.25, 0.75)
    initial = em.Download(uploads["a"].learners, (0.5, 0.5))
    late = method.download_for(state, "late", initial)
    assert late.learners is state.learners
    assert late.shares == (0.5, 0.5)
    assert method.download_for(state, "b", initial) == downloads["b"]
    assert method.download_for(em.AggregatorState(), "b", initial) is initial


def test_what_travels_and_what_is_stored_come_back_to_the_bit() -> None:
    learners = (model(0), model(1), model(2))
    download = em.Download(learners, (0.1, 0.2, 0.7))
    upload = em.Upload(learners, (0.1, 0.2, 0.7), 5)
    state = em.AggregatorState(learners, {"a": (0.1, 0.2, 0.7)})
    assert em.Download.unpack(download.pack()) == download
    assert em.Upload.unpack(upload.pack()) == upload
    assert em.AggregatorState.unpack(state.pack()) == state
    assert em.AggregatorState.unpack(Artefacts()) == em.AggregatorState()
    assert sorted(upload.pack().parameter_sets) == ["task/0", "task/1", "task/2"]
    assert download.task_parameters is learners[2]


def test_impossible_uploads_settings_and_records_are_refused() -> None:
    method = FedEM(task=TOY, num_learners=2)
    two: em.Learners = ({}, {})
    for wrong, match in [
        (em.Upload(two, (0.5, 0.5), 0), "num_samples"),
        (em.Upload(({},), (1.0,), 1), "learners"),
        (em.Upload(two, (0.5, 0.6), 1), "sum to 1"),
        (em.Upload(two, (1.5, -0.5), 1), "non-negative"),
        (em.Upload(two, (math.nan, 0.5), 1), "sum to 1"),
        (em.Upload(two, (1.0,), 1), "shares"),
    ]:
        with pytest.raises(ValueError, match=match):
            method.check_upload(wrong)
    method.check_upload(em.Upload(two, (0.5, 0.5), 1))
    with pytest.raises(ValueError, match="shares"):
        em.Download(two, (1.0,))
    with pytest.raises(ValueError, match="shares"):
        em.Upload.unpack(Artefacts({"task/0": {}}, {"shares": "all", "num_samples": 1}))
    with pytest.raises(ValueError, match="task/0"):
        em.Upload.unpack(Artefacts({"task": {}}, {"shares": [1.0], "num_samples": 1}))
    with pytest.raises(ValueError, match="without uploads"):
        method.aggregate(em.AggregatorState(), {}, rng(), sampler=SAMPLER)
    with pytest.raises(ValueError, match="num_learners"):
        FedEM(task=TOY, num_learners=0)
    assert method.upload_layout("task/1") is not None
    assert method.upload_layout("task/2") is None
    assert method.upload_layout("task") is None


def test_one_seed_gives_the_same_bits_and_the_download_stays_untouched() -> None:
    method, data = FedEM(task=TOY, **QUICK, num_learners=2), toy_data({0: 6, 1: 6})
    download = em.Download((model(0), model(1)), (0.5, 0.5))
    first, second = local(method, data, download, seed=3), local(method, data, download, seed=3)
    assert first.shares == second.shares
    for index in range(2):
        assert same_bits(first.learners[index], second.learners[index])
        assert same_bits(download.learners[index], model(index))


@pytest.mark.learning
def test_learners_stay_apart_where_clients_label_alike_images_differently_which_no_single_model_can_serve() -> None:
    quick = {**LEARNING, "local_epochs": 1}
    plain = toy_data({0: 32, 1: 32})
    data = {"a": plain, "b": RoundData(plain.images, 1 - plain.labels)}
    one = FedEM(task=TOY, **{**quick, "local_epochs": 6}, num_learners=1)
    learners = tuple(local(one, own, em.Download((model(0),), (1.0,))).learners[0] for own in data.values())
    method = FedEM(task=TOY, **quick, num_learners=2)
    uploads = {client: local(method, own, em.Download(learners, (0.5, 0.5))) for client, own in data.items()}
    assert uploads["a"].shares[0] > 0.9
    assert uploads["b"].shares[1] > 0.9
    _, downloads = method.aggregate(em.AggregatorState(), uploads, rng(), sampler=SAMPLER)
    for client, own in data.items():
        assert share_right(method, downloads[client], own) > 0.9
    assert accuracy(downloads["a"].task_parameters, {0: 20, 1: 20}) > 0.9
    assert accuracy(downloads["b"].task_parameters, {0: 20, 1: 20}) < 0.1


@pytest.mark.learning
def test_it_learns_the_toy_problem() -> None:
    method = FedEM(task=TOY, **LEARNING, num_learners=2)
    rounds = [{"a": {0: 16, 1: 16, 2: 16}}]
    _, downloads = run_rounds(method, rounds)
    assert share_right(method, downloads["a"], toy_data(dict.fromkeys(range(3), 20), seed=99)) > 0.8
