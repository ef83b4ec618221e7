from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.pfedgrp_records import Upload
from replayfleet.federation.methods.steps.memory import Memory, MixedData, kind_of, retrainings, sampler_of
from replayfleet.federation.methods.steps.replay import Replay
from replayfleet.federation.methods.steps.sub_generators.gaussian import (
    components_of,
    counted_as,
    learned,
    merged,
    moments_of,
    new_mixture,
    pooled,
    reduced,
    smoothed_like,
    tells_more,
    without_small,
)
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import SubGenerator
from replayfleet.federation.wire.protocol.tensors import encode_arrays
from replayfleet.models.build import build_generator
from replayfleet.models.specs import LATENT_SIZE, MixtureSpec
from tests.support.rng import rng
from tests.support.toy import TOY, toy_data

ONE = MixtureSpec(TOY, 32)
FOUR = MixtureSpec(TOY, 16, 4)


def of_rank(rank: int, count: int = 40, seed: int = 0) -> Tensor:
    """Images (N, 1, 28, 28) that differ along few directions, so that a Gaussian holds them whole."""
    own = rng(seed)
    directions = torch.randn(rank, 784, generator=rng(9))
    return (0.01 * torch.randn(count, rank, generator=own) @ directions).reshape(count, 1, 28, 28) + 0.1 * seed


def drawn(spec: MixtureSpec, made: SubGenerator, count: int = 4000) -> Tensor:
    images: Tensor = kind_of(method(spec)).sampler()(made.generator)(torch.randn(count, LATENT_SIZE, generator=rng(5)))
    return images


def method(spec: MixtureSpec) -> PFedGRP:
    name = "pca-gaussian" if spec.num_components == 1 else "pca-mixture"
    return PFedGRP(task=TOY, sub_generator=name, pca_dims=spec.num_dims, pca_components=spec.num_components)


def test_it_draws_images_with_the_mean_and_the_covariance_of_those_that_it_learned() -> None:
    images = of_rank(5)
    found = drawn(ONE, learned(ONE, new_mixture(ONE), images, rng()))
    assert torch.allclose(found.mean(dim=0), images.mean(dim=0), atol=0.01)
    assert torch.allclose(found.flatten(1).T.cov(), images.flatten(1).T.cov(correction=0), atol=2e-4)


def test_two_rounds_leave_what_one_with_all_images_would() -> None:
    first, second = of_rank(5, 40), of_rank(5, 25, seed=2)
    apart = learned(ONE, learned(ONE, new_mixture(ONE), first, rng()), second, rng())
    together = learned(ONE, new_mixture(ONE), torch.cat([first, second]), rng())
    (left,), (right,) = components_of(apart.generator), components_of(together.generator)
    assert left.num_samples == right.num_samples == 65
    assert torch.allclose(left.mean, right.mean, atol=1e-3)
    assert torch.allclose(left.factor.T @ left.factor, right.factor.T @ right.factor, atol=1e-3)


def test_moments_of_clients_merge_to_those_of_all_their_images_in_any_order() -> None:
    parts = [of_rank(4, count, seed).flatten(1) for seed, count in enumerate((7, 30, 1))]
    every = moments_of(torch.cat(parts), 32)
    a, b, c = (moments_of(part, 32) for part in parts)
    for found in (merged(merged(a, b, 32), c, 32), merged(c, merged(b, a, 32), 32)):
        assert found.num_samples == every.num_samples
        assert torch.allclose(found.mean, every.mean, atol=1e-6)
        assert torch.allclose(found.factor.T @ found.factor, every.factor.T @ every.factor, atol=1e-6)


def test_what_has_no_room_are_the_directions_of_least_variance() -> None:
    pixels = of_rank(6, 200).flatten(1)
    kept, lost = moments_of(pixels, 4), torch.linalg.eigvalsh(pixels.T.cov(correction=0))[-6:-4].sum()
    missing = (pixels.T.cov(correction=0) - kept.factor.T @ kept.factor).trace()
    assert missing.item() == pytest.approx(lost.item(), rel=1e-3)


def test_more_images_than_pixels_take_the_other_way_to_the_same_moments() -> None:
    pixels = torch.randn(60, 8, generator=rng())
    few = moments_of(pixels, 8)
    assert torch.allclose(few.factor.T @ few.factor, pixels.T.cov(correction=0), atol=1e-5)


def test_smoothed_images_keep_what_a_gaussian_of_theirs_holds_and_nothing_else() -> None:
    few, many = of_rank(5), of_rank(60, 100)
    assert torch.allclose(smoothed_like(few, 8), few, atol=1e-4), "five directions have room in eight"
    pixels = many.flatten(1).to(torch.float64)
    apart = pixels - pixels.mean(dim=0)
    _, _, directions = torch.linalg.svd(apart, full_matrices=False)
    closed = pixels.mean(dim=0) + apart @ directions[:8].T @ directions[:8]
    assert torch.allclose(smoothed_like(many, 8).flatten(1).to(torch.float64), closed, atol=1e-3)
    assert torch.equal(smoothed_like(few[:1], 8), few[:1]), "a single image is its class's mean"


def test_a_mixture_keeps_apart_what_one_gaussian_would_mix() -> None:
    images = torch.cat([torch.full((60, 1, 28, 28), -0.9), torch.full((20, 1, 28, 28), 0.9)])
    levels = drawn(FOUR, learned(FOUR, new_mixture(FOUR), images, rng())).mean(dim=(1, 2, 3))
    assert (levels.abs() > 0.8).all()
    assert (levels > 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


def test_a_mixture_that_merges_its_closest_components_keeps_number_and_mean() -> None:
    parts = [of_rank(3, 5, seed).flatten(1) for seed in (0, 3, 1, 2)]
    left = reduced([moments_of(part, 16) for part in parts], 2, 16)
    assert [one.num_samples for one in left] == [10, 10]
    mean = torch.stack([one.mean * one.num_samples for one in left]).sum(dim=0) / 20
    assert torch.allclose(mean, torch.cat(parts).mean(dim=0), atol=1e-5)


@pytest.mark.parametrize("spec", [ONE, FOUR], ids=["gaussian", "mixture"])
def test_one_seed_gives_the_same_bits_and_the_start_stays_as_it_is(spec: MixtureSpec) -> None:
    start = learned(spec, new_mixture(spec), of_rank(5), rng())
    before = {name: tensor.clone() for name, tensor in start.generator.items()}
    again = [learned(spec, start, of_rank(5, seed=1), rng(3)).generator for _ in range(2)]
    assert same_bits(again[0], again[1])
    assert same_bits(start.generator, before)


@pytest.mark.parametrize("spec", [ONE, FOUR], ids=["gaussian", "mixture"])
def test_a_single_image_is_enough(spec: MixtureSpec) -> None:
    image = of_rank(5, 1, seed=3)
    assert torch.allclose(drawn(spec, learned(spec, new_mixture(spec), image, rng()), 5), image, atol=1e-3)


@pytest.mark.parametrize("spec", [ONE, FOUR])
def test_it_tells_more_with_many_more_images_or_other_ones(spec: MixtureSpec) -> None:
    held = learned(spec, new_mixture(spec), of_rank(5, 100), rng())
    alike = [of_rank(5, 100, seed) - 0.1 * seed for seed in (1, 2)]
    twice = learned(spec, held, alike[0], rng())
    thrice = learned(spec, twice, alike[1], rng())
    elsewhere = learned(spec, held, of_rank(5, 40, seed=3) + 1.0, rng())
    found = [tells_more(one.generator, held.generator, 3.0) for one in (held, twice, thrice, elsewhere)]
    assert found == [False, False, True, True]
    assert tells_more(held.generator, new_mixture(spec).generator, 3.0), "who holds an empty one knows nothing"


def test_ones_own_images_count_as_much_as_all_that_somebody_else_claims_to_have_met() -> None:
    theirs = learned(FOUR, new_mixture(FOUR), of_rank(5, 100), rng()).generator
    boasting = {**theirs, "num_samples": theirs["num_samples"] * 2**33}
    lent = counted_as(boasting, 40)
    assert 36 <= int(lent["num_samples"].sum()) <= 44
    own = learned(FOUR, SubGenerator(lent, {}), of_rank(5, 40, seed=3) - 1.0, rng())
    assert drawn(FOUR, own).mean() < of_rank(5, 100).mean() - 0.3
    assert counted_as(theirs, 200)["num_samples"].sum() == 100


def test_no_image_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        learned(ONE, new_mixture(ONE), of_rank(2, 0), rng())


def test_it_has_the_layout_that_travels_and_takes_fifty_kilobytes() -> None:
    made = learned(ONE, new_mixture(ONE), of_rank(5), rng()).generator
    layout = kind_of(method(ONE)).layout()
    assert {name: (t.shape, t.dtype) for name, t in made.items()} == {n: (t.shape, t.dtype) for n, t in layout.items()}
    assert len(encode_arrays({name: tensor.numpy() for name, tensor in made.items()})) < 53_000


def test_pooled_mixtures_of_nobody_draw_nothing_and_the_empty_ones_count_nothing() -> None:
    known = learned(ONE, new_mixture(ONE), of_rank(5), rng()).generator
    empty = dict(build_generator(ONE).state_dict())
    assert same_bits(pooled(ONE, [empty, known]), pooled(ONE, [known]))


@pytest.mark.parametrize("counts", [[-1], [0], [2**50]])
def test_an_upload_whose_counts_no_images_give_is_refused(counts: list[int]) -> None:
    own = learned(ONE, new_mixture(ONE), of_rank(5), rng()).generator
    broken = {**own, "num_samples": torch.tensor(counts)}
    upload = Upload(task_parameters={}, sub_generators={0: broken}, seen={0: 40}, num_samples=3)
    with pytest.raises(ValueError, match="expected none below 0"):
        method(ONE).check_upload(upload)
    method(ONE).check_upload(replace(upload, sub_generators={0: own}))
    with pytest.raises(ValueError, match="class 0 met 40 images, expected at most 4"):
        method(ONE).check_upload(replace(upload, sub_generators={0: own}, seen={0: 3}))


@pytest.mark.parametrize("value", [6e4, -6e4])
def test_whatever_an_upload_holds_is_clipped_to_what_images_hold(value: float) -> None:
    own = learned(FOUR, new_mixture(FOUR), of_rank(5), rng()).generator
    wild = {n: torch.full_like(t, value) if t.is_floating_point() else t for n, t in own.items()}
    assert drawn(FOUR, SubGenerator(wild, {})).abs().max().item() <= 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pca_dims": 100}, "expected 1 to 99"),
        ({"pca_components": 17, "sub_generator": "pca-mixture"}, "expected 1 to 16"),
        ({"generators": "single"}, "draws one class"),
        ({"dp_noise_multiplier": 1.0, "sub_generator": "pca-mixture"}, "cluster of 'pca-mixture' isn't hidden"),
        ({"sub_generator": "pca"}, "sub_generator is 'pca'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PFedGRP(**{"task": TOY, "sub_generator": "pca-gaussian", **settings})


def test_no_component_holds_its_images_whole_where_its_class_has_more() -> None:
    """k-means begins with the farthest images, which stay alone: the mean of such a part is the image itself."""
    spec = MixtureSpec(TOY, 2, 4)
    far = torch.linspace(-1, 1, 5)[:, None, None, None] * torch.ones(5, *TOY.image_shape)
    images = torch.cat([far, far[:1], far[-1:]])
    mixture = learned(spec, new_mixture(spec), images, torch.Generator().manual_seed(0)).generator
    counts = [int(count) for count in mixture["num_samples"] if count]
    assert sum(counts) == len(images)
    assert min(counts) >= spec.num_dims + 2 or len(counts) == 1
    alone = learned(spec, new_mixture(spec), images[:1], torch.Generator().manual_seed(0)).generator
    assert [int(count) for count in alone["num_samples"] if count] == [1], "there is nothing to merge it with"
    many = [moments_of(torch.randn(count, 3), 2) for count in (4, 5, 6)]
    assert without_small(many, 2) == many, "nor is there a need"
    few = [moments_of(torch.randn(count, 3), 2) for count in (3, 5, 6)]
    assert sorted(one.num_samples for one in without_small(few, 2)) in ([5, 9], [6, 8]), "three lie in two directions"


def test_images_that_are_to_be_met_again_count_once() -> None:
    settings, data = PFedGRP(task=TOY, sub_generator="pca-mixture", gate=False), toy_data({0: 20})
    known = learned(FOUR, new_mixture(FOUR), data.images, rng())
    nothing = Replay(torch.empty(0, *TOY.image_shape), torch.empty(0, dtype=torch.int64), 0, 0)

    def begun(seen: int) -> Tensor:
        memory, mixed = Memory({0: known}, {0: seen}), MixedData(data, nothing)
        work = retrainings(settings, memory, mixed, lambda images: images, rng(), sampler_of(settings))
        return work[0].start.generator["num_samples"]

    assert int(begun(0).sum()) == int((known.generator["num_samples"] > 0).sum())  # its round is trained again
    assert torch.equal(begun(20), known.generator["num_samples"])
    assert int(begun(10).sum()) in range(7, 15)
