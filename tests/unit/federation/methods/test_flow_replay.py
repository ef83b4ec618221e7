from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from replayfleet.federation.methods.affcl import (
    AFFCL,
    _LastModels,
    _Training,
    build_flow,
    credibility,
    draw_features,
    mean_density,
    replay_loss,
)
from replayfleet.federation.methods.affcl_records import FlowModels
from replayfleet.federation.methods.steps.incremental import soft_cross_entropy
from replayfleet.federation.methods.steps.modules import drawn_from
from replayfleet.models.build import initialise
from replayfleet.models.flow import ConditionalFlow, initialise_flow, standard_normal_log_density
from replayfleet.models.resnet_plus import NUM_FEATURES, build_resnet_plus
from tests.support.rng import rng
from tests.support.toy import TOY, toy_data


def normal_density(x: float, mean: float, variance: float) -> float:
    return math.exp(-((x - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)


def test_soft_cross_entropy_is_entropy_where_student_and_teacher_agree_and_more_elsewhere() -> None:
    teacher = torch.tensor([[2.0, 0.0, -2.0]])
    share = (teacher / 2).softmax(dim=1)
    entropy = -(share * share.log()).sum().item()
    assert soft_cross_entropy(teacher + 1.0, teacher, 2.0).item() == pytest.approx(entropy, rel=1e-6)
    student = torch.tensor([[0.0, 2.0, -2.0]])
    expected = -(share * (student / 2).log_softmax(dim=1)).sum().item()
    assert soft_cross_entropy(student, teacher, 2.0).item() == pytest.approx(expected, rel=1e-6)
    assert expected > entropy


def test_the_distillations_gradient_matches_a_finite_difference() -> None:
    teacher, student = torch.randn(3, 4, generator=rng()).double(), torch.randn(3, 4, generator=rng(1)).double()
    variable = student.clone().requires_grad_(True)
    soft_cross_entropy(variable, teacher, 2.0).backward()
    assert variable.grad is not None
    step = torch.zeros_like(student)
    step[1, 2] = 1e-6
    above, below = (soft_cross_entropy(student + sign * step, teacher, 2.0) for sign in (1, -1))
    numeric = (above - below).item() / 2e-6
    assert variable.grad[1, 2].item() == pytest.approx(numeric, abs=1e-7)


def test_credibility_is_the_local_latents_mean_density_and_the_default_for_classes_without_data() -> None:
    local_noise = torch.tensor([[0.0, 1.0], [2.0, 3.0], [5.0, 5.0]])  # class 0 twice, class 1 once
    noise = torch.tensor([[1.0, 2.0], [3.0, 2.0], [9.0, 9.0], [0.0, 0.0]])
    shares = credibility(noise, torch.tensor([0, 0, 1, 2]), local_noise, torch.tensor([0, 0, 1]), torch.tensor(0.125))
    peak = normal_density(0.0, 0.0, 1.0)
    assert shares[0].item() == pytest.approx(peak, rel=1e-4)
    assert shares[1].item() == pytest.approx((normal_density(2.0, 0.0, 1.0) + peak) / 2, rel=1e-4)
    assert shares[2:].tolist() == [0.125, 0.125]


def test_replay_that_looks_like_the_local_data_counts_more() -> None:
    local = 0.5 + 0.8 * torch.randn(64, 6, generator=rng())
    labels = torch.zeros(64, dtype=torch.int64)
    near = credibility(0.5 + 0.8 * torch.randn(32, 6, generator=rng(1)), labels[:32], local, labels, torch.tensor(0.0))
    far = credibility(4.0 + torch.randn(32, 6, generator=rng(2)), labels[:32], local, labels, torch.tensor(0.0))
    assert far.max() < near.min()


def test_mean_density_is_per_feature() -> None:
    log_densities = standard_normal_log_density(torch.zeros(2, 10))
    assert mean_density(log_densities, 10).item() == pytest.approx(normal_density(0.0, 0.0, 1.0), rel=1e-5)


def test_the_replay_loss_weighs_each_sample_and_the_whole_by_agreement() -> None:
    logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    each = F.cross_entropy(logits, labels, reduction="none")
    shares, agreement = torch.tensor([0.5, 0.1]), torch.tensor(0.3)
    weighted = (0.5 * each[0] + 0.1 * each[1]).item() / 2
    assert replay_loss(logits, labels, shares, agreement, 0.2).item() == pytest.approx(
        (0.8 * 0.3 + 0.2) * weighted, rel=1e-6
    )
    plain = replay_loss(logits, labels, torch.ones(2), agreement, 1.0)
    assert plain.item() == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)


def test_drawn_features_are_what_the_flow_maps_back_to_their_noise() -> None:
    flow = initialise_flow(build_flow(TOY, 8).to_empty(device="cpu"), rng())
    drawn = draw_features(flow, torch.tensor([0, 3, 1]), 4, rng(5))
    noise, _ = flow(drawn.features, F.one_hot(drawn.labels, 4).float())
    assert torch.allclose(noise, drawn.noise, atol=1e-4)
    assert not drawn.features.requires_grad
    assert torch.equal(draw_features(flow, drawn.labels, 4, rng(5)).features, drawn.features)


@pytest.mark.learning
def test_a_flow_learns_where_each_class_lies() -> None:
    flow = initialise_flow(ConditionalFlow(4, 2, 16), rng())
    adam = torch.optim.Adam(flow.parameters(), lr=5e-3)
    source = rng(1)
    for _ in range(150):
        labels = torch.randint(2, (64,), generator=source)
        features = 0.3 * torch.randn(64, 4, generator=source) + 2.0 * labels[:, None] - 1.0
        loss = -flow.log_density(features, F.one_hot(labels, 2).float()).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    means = [draw_features(flow, torch.full((200,), c), 2, rng(2)).features.mean().item() for c in (0, 1)]
    assert means[0] == pytest.approx(-1.0, abs=0.3)
    assert means[1] == pytest.approx(1.0, abs=0.3)


def test_the_three_losses_of_a_mini_batch_equal_their_closed_forms() -> None:
    module, old = (initialise(build_resnet_plus(TOY).to_empty(device="cpu"), rng(seed)).eval() for seed in (0, 1))
    flow, last_flow = (initialise_flow(build_flow(TOY, 8).to_empty(device="cpu"), rng(seed)) for seed in (2, 3))
    settings = AFFCL(
        task=TOY,
        flow_hidden=8,
        replay_weight=0.5,
        exploration=0.3,
        last_flow_weight=0.7,
        distillation=0.9,
        feature_distillation=1.1,
        output_distillation=1.3,
    )
    data, batch = toy_data({0: 3, 2: 3}), torch.arange(6)
    models = FlowModels(old.state_dict(), last_flow.state_dict())
    last = _LastModels.of(settings, models, data.images, [0, 1])
    one_hot = F.one_hot(data.labels, 4).float()
    features = module.features(data.images).detach()

    def training() -> _Training:
        return _Training(settings, module, flow, [0, 1, 2], last, rng(5))

    twin = rng(5)
    reminder = draw_features(last_flow, drawn_from([0, 1], 6, twin), 4, twin)
    expected = -flow.log_density(features, one_hot).mean()
    expected -= 0.7 * flow.log_density(reminder.features, F.one_hot(reminder.labels, 4).float()).mean()
    torch.testing.assert_close(training().flow_loss(features, data.labels), expected)

    twin = rng(5)
    replay = draw_features(flow, drawn_from([0, 1, 2], 6, twin), 4, twin)
    agreement = (flow.log_density(features, one_hot) / NUM_FEATURES).exp().mean()
    shares = credibility(replay.noise, replay.labels, flow(features, one_hot)[0], data.labels, agreement)
    logits = module.classify(replay.features)
    by_class = ((0.7 * agreement + 0.3) * shares * F.cross_entropy(logits, replay.labels, reduction="none")).mean()
    distilled = 0.9 * 1.3 * soft_cross_entropy(logits, old.classify(replay.features), 2.0)
    torch.testing.assert_close(training().upper_loss(features, data.labels), 0.5 * (by_class + distilled))

    earlier = old.features(data.images)
    logits = module.classify(features)
    expected = F.cross_entropy(logits, data.labels) + 0.9 * 1.1 * F.mse_loss(features, earlier)
    expected += 0.9 * 1.3 * soft_cross_entropy(logits, old.classify(earlier), 2.0)
    torch.testing.assert_close(training().task_loss(data.images, data.labels, batch), expected)
