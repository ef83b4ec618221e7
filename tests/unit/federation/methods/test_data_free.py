"""Losses of data-free synthesis, each against a closed form or a finite difference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.steps.data_free import LayerStatistics
from replayfleet.federation.methods.steps.incremental import (
    absent_classes,
    current_loss,
    distilled_classes,
    head_weighted_distance,
    soft_cross_entropy,
)
from replayfleet.models.build import build_task_model, initialise
from tests.support.rng import rng
from tests.support.toy import TOY, toy_data


def layer(mean: float, variance: float, running_mean: float, running_variance: float) -> LayerStatistics:
    return LayerStatistics(*(torch.tensor([v]) for v in (mean, variance, running_mean, running_variance)))


def test_the_divergence_of_equal_statistics_is_zero():
    assert data_free.batch_norm_divergence([layer(0.3, 2.0, 0.3, 2.0)]).item() == pytest.approx(0.0, abs=1e-6)


def test_the_divergence_is_that_of_two_gaussians_from_running_to_batch():
    real, batch = torch.distributions.Normal(0.5, 2.0), torch.distributions.Normal(-1.0, 3.0)
    expected = torch.distributions.kl_divergence(real, batch)
    statistics = layer(-1.0, 9.0, 0.5, 4.0)
    torch.testing.assert_close(data_free.batch_norm_divergence([statistics]), expected)
    both = data_free.batch_norm_divergence([statistics, layer(0.0, 1.0, 0.0, 1.0)])
    torch.testing.assert_close(both, expected / 2)


def test_the_distance_adds_the_norms_of_means_and_variances_over_layers():
    first = LayerStatistics(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 1.0]), torch.zeros(2), torch.ones(2))
    second = layer(0.0, 3.0, 0.0, 1.0)
    assert data_free.batch_norm_distance([first, second], (), 0.9).item() == pytest.approx(5.0 + 2.0)


def test_the_distance_compares_a_moving_average_where_there_is_a_history():
    history = [(torch.tensor([1.0]), torch.tensor([1.0]))]
    distance = data_free.batch_norm_distance([layer(11.0, 1.0, 0.0, 1.0)], history, 0.9)
    assert distance.item() == pytest.approx(0.9 * 1 + 0.1 * 11)
    ((mean, variance),) = data_free.blend_statistics(history, [layer(11.0, 6.0, 0.0, 1.0)], 0.9)
    assert (mean.item(), variance.item()) == pytest.approx((2.0, 1.5))


def test_information_is_lost_if_all_images_are_of_one_class_and_not_if_classes_balance():
    sure = 50.0 * torch.eye(4)
    assert data_free.information_loss(sure).item() == pytest.approx(0.0, abs=1e-6)
    assert data_free.information_loss(sure[:1].repeat(4, 1)).item() == pytest.approx(1.0)
    halves = data_free.information_loss(sure[[0, 0, 1, 1]])
    assert halves.item() == pytest.approx(1 - math.log(2) / math.log(4))
    assert data_free.information_loss(torch.ones(3, 1)).item() == 0.0


def test_the_own_labels_loss_is_cross_entropy_with_the_class_it_names_itself():
    logits = torch.tensor([[1.0, 3.0], [4.0, 0.0]])
    expected = F.cross_entropy(logits / 2, torch.tensor([1, 0]))
    torch.testing.assert_close(data_free.own_label_loss(logits, 2.0), expected)
    assert data_free.own_label_loss(1000 * logits, 1000.0).item() < data_free.own_label_loss(logits, 1000.0).item()


def test_the_blur_is_a_gaussian_of_standard_deviation_root_two_and_sums_to_one():
    kernel = data_free.blur_kernel()
    assert kernel.sum().item() == pytest.approx(1.0)
    assert (kernel[2, 3] / kernel[2, 2]).item() == pytest.approx(math.exp(-1 / (2 * math.sqrt(2) ** 2)))
    assert (kernel[0, 0] / kernel[2, 2]).item() == pytest.approx(math.exp(-8 / 4))


def test_a_flat_image_is_smooth_and_a_point_becomes_the_kernel():
    assert data_free.smoothness_loss(torch.full((1, 3, 6, 6), 0.4)).item() == pytest.approx(0.0, abs=1e-12)
    point = torch.zeros(1, 2, 9, 9)
    point[0, 1, 4, 4] = 1.0
    out = data_free.blurred(point)
    torch.testing.assert_close(out[0, 1, 2:7, 2:7], data_free.blur_kernel())
    assert not out[0, 0].any()


@pytest.mark.parametrize("where", data_free.AGREEMENTS)
def test_the_adversarial_term_is_the_negative_divergence_of_the_images_that_count(where: str):
    teacher = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    student = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    counted = 0 if where == "agree" else 1
    p, q = (torch.distributions.Categorical(logits=logits[counted]) for logits in (teacher, student))
    expected = -torch.distributions.kl_divergence(p, q) / 2
    torch.testing.assert_close(data_free.adversarial_loss(teacher, student, where), expected)


def test_the_bounding_loss_is_free_inside_the_ball():
    features = torch.tensor([[0.1, 0.1], [1.0, 0.0]])
    assert data_free.bounding_loss(features[:1], torch.zeros(1, 2), 0.015).item() == 0.0
    assert data_free.bounding_loss(features, torch.zeros(2, 2), 0.015).item() == pytest.approx((0.5 - 0.015) / 2)


@pytest.mark.parametrize(("num_classes", "num_features"), [(10, 128), (5, 3)])
def test_anchors_are_orthogonal_as_far_as_there_is_room_and_always_the_same(num_classes: int, num_features: int):
    anchors = data_free.label_anchors(num_classes, num_features, 5.0)
    torch.testing.assert_close(anchors.norm(dim=1), torch.full((num_classes,), 5.0))
    assert anchors.min() >= 0.0  # features never are below it
    products = anchors @ anchors.T
    if num_classes <= num_features:
        torch.testing.assert_close(products, 25 * torch.eye(num_classes), atol=1e-4, rtol=0)
    else:
        assert (products - torch.diag(products.diag())).max() < 24.9
    assert torch.equal(anchors, data_free.label_anchors(num_classes, num_features, 5.0))


def test_gradients_of_the_losses_agree_with_finite_differences():
    logits = torch.randn(3, 4, generator=rng(), dtype=torch.float64)
    other = torch.randn(3, 4, generator=rng(1), dtype=torch.float64)
    running = torch.rand(4, generator=rng(2), dtype=torch.float64) + 0.5

    def statistics(batch: Tensor) -> list[LayerStatistics]:
        variance, mean = torch.var_mean(batch, dim=0, correction=0)
        return [LayerStatistics(mean, variance, running - 1, running)]

    losses = [
        lambda x: data_free.batch_norm_divergence(statistics(x)),
        lambda x: data_free.batch_norm_distance(statistics(x), (), 0.9),
        data_free.information_loss,
        lambda x: data_free.own_label_loss(x, 3.0),
        lambda x: data_free.smoothness_loss(x.view(1, 1, 3, 4).repeat(1, 1, 2, 2)),
        lambda x: data_free.adversarial_loss(other, x, "agree") + data_free.adversarial_loss(x, other, "disagree"),
        lambda x: data_free.bounding_loss(x, other, 0.1),
        lambda x: soft_cross_entropy(x, other, 2.0),
        lambda x: head_weighted_distance(x, other, torch.ones(2, 4, dtype=torch.float64)),
        lambda x: current_loss(x, torch.tensor([0, 2, 0]), (1,)),
    ]
    for loss in losses:
        assert torch.autograd.gradcheck(loss, logits.clone().requires_grad_(True))


def test_observing_sees_every_batch_norms_input_and_changes_nothing():
    teacher = data_free.frozen_task_model(TOY, initialise(build_task_model(TOY), rng()).state_dict())
    images = toy_data({0: 3, 2: 2}).images.requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    judged = data_free.observe(teacher, images)
    assert len(judged.layers) == 6
    first = teacher.conv(images)
    torch.testing.assert_close(judged.layers[0].mean, first.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(judged.layers[0].variance, first.var(dim=(0, 2, 3), correction=0))
    assert judged.layers[0].running_variance is teacher.norm.running_var
    torch.testing.assert_close(judged.logits, teacher(images))
    data_free.batch_norm_divergence(judged.layers).backward()
    assert images.grad.abs().sum() > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert all(not module._forward_pre_hooks for module in teacher.modules())


def test_augmentation_shifts_and_mirrors_each_image_by_itself():
    images = torch.arange(1.0, 10.0).view(1, 1, 3, 3).repeat(256, 1, 1, 1)
    plain = data_free.augmented(images, 0, rng())
    kinds = {tuple(image.flatten().tolist()) for image in plain}
    assert kinds == {tuple(images[0].flatten().tolist()), tuple(images[0].flip(dims=(2,)).flatten().tolist())}
    shifted = data_free.augmented(images, 1, rng())
    assert len({tuple(image.flatten().tolist()) for image in shifted}) == 18
    assert torch.equal(shifted, data_free.augmented(images, 1, rng()))


def test_bytes_keep_images_to_half_a_step():
    images = torch.rand(2, 1, 5, 5, generator=rng()) * 2 - 1
    assert (data_free.from_bytes(data_free.to_bytes(images)) - images).abs().max() <= 1 / 255 + 1e-6
    assert data_free.to_bytes(torch.tensor([-3.0, -1.0, 1.0, 3.0])).tolist() == [0, 0, 255, 255]


def test_absent_classes_were_seen_but_not_now_unless_all_logits_count():
    assert absent_classes((0, 1, 2), {1: 5, 3: 5}) == (0, 2)
    assert absent_classes((0, 1, 2), {1: 5, 3: 5}, "all") == ()
    assert absent_classes((), {1: 5}) == ()
    assert distilled_classes((0, 2), 4) == (0, 2)
    assert distilled_classes((0, 2), 4, "all") == (0, 1, 2, 3)


def test_the_current_loss_ignores_absent_logits_alone():
    logits = torch.tensor([[1.0, 9.0, 2.0], [0.0, 9.0, 3.0]], requires_grad=True)
    labels = torch.tensor([0, 2])
    loss = current_loss(logits, labels, (1,))
    torch.testing.assert_close(loss, F.cross_entropy(logits[:, [0, 2]], torch.tensor([0, 1])))
    loss.backward()
    assert not logits.grad[:, 1].any()
    assert torch.equal(current_loss(logits, labels, ()), F.cross_entropy(logits, labels))


def test_soft_cross_entropy_has_no_factor_of_the_temperature():
    student, teacher = torch.randn(2, 5, 3, generator=rng()).unbind()
    expected = -((teacher / 2).softmax(1) * (student / 2).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(soft_cross_entropy(student, teacher, 2.0), expected)


def test_features_may_move_where_the_old_head_does_not_look():
    head = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    start = torch.zeros(1, 3)
    assert head_weighted_distance(torch.tensor([[0.0, 0.0, 5.0]]), start, head).item() == 0.0
    assert head_weighted_distance(torch.tensor([[1.0, 1.0, 5.0]]), start, head).item() == pytest.approx((1 + 4) / 2)
