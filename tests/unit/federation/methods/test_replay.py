from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replayfleet.federation.methods.kit.records import Draw, Parameters
from replayfleet.federation.methods.steps.replay import (
    counts_for_distribution,
    draw_replay,
    eager_sampler,
    generation_scale,
    recognised_share,
)
from replayfleet.models.build import build_generator, initialise
from tests.support.toy import TOY


def test_a_round_of_only_new_classes_replays_earlier_ones_up_to_its_own_count() -> None:
    assert generation_scale({0: 200, 1: 200, 2: 200, 3: 200}, {2: 200, 3: 200}) == {0: 200, 1: 200, 2: 0, 3: 0}


def test_a_revisit_scales_down_what_was_seen_more_often_now() -> None:
    # 0 and 1 were met twice, 2 and 3 once: the largest ratio is 200/400, so 2 and 3 shrink to 100.
    assert generation_scale({0: 400, 1: 400, 2: 200, 3: 200}, {0: 200, 1: 200}) == {0: 0, 1: 0, 2: 100, 3: 100}


def test_the_class_with_the_largest_ratio_sets_the_scale_and_the_cap() -> None:
    # Ratios 50/100 and 100/400: class 0 leads with 1/2; class 2 would be 300 but is capped at 50.
    assert generation_scale({0: 100, 1: 400, 2: 600}, {0: 50, 1: 100}) == {0: 0, 1: 0, 2: 50}


@pytest.mark.parametrize(("seen", "now"), [({0: 1}, {}), ({0: 1}, {0: 2}), ({0: 5}, {1: 1}), ({0: 5}, {0: 0})])
def test_impossible_counts_have_no_scale(seen: dict[int, int], now: dict[int, int]) -> None:
    with pytest.raises(ValueError, match=r"scale|seen"):
        generation_scale(seen, now)


def test_a_distribution_is_split_exactly_and_every_class_gets_something() -> None:
    assert counts_for_distribution({0: 1, 1: 1, 2: 1}, 10) == {0: 4, 1: 3, 2: 3}
    assert counts_for_distribution({0: 1, 1: 999}, 100) == {0: 1, 1: 99} | {0: 1}
    assert sum(counts_for_distribution({3: 7, 5: 11, 8: 13}, 1000).values()) == 1000


def _constant_sampler(parameters: Parameters) -> Draw:
    """A sub-generator that draws its latents' first entry everywhere."""
    shift = parameters["shift"]
    return lambda latents: (latents[:, :1, None, None] + shift).expand(-1, 1, 28, 28)


def _sign_judge(images: Tensor) -> Tensor:
    """Class 0 where the image is negative, class 1 where it is positive."""
    value = images.mean(dim=(1, 2, 3))
    return torch.stack([-value, value], dim=1)


def test_the_filter_keeps_only_what_the_judge_takes_for_the_class() -> None:
    generators = {0: {"shift": torch.tensor(0.0)}, 1: {"shift": torch.tensor(0.0)}}
    replay = draw_replay(
        generators, {0: 50, 1: 30}, _constant_sampler, _sign_judge, torch.Generator().manual_seed(0), spec=TOY
    )
    assert torch.equal(_sign_judge(replay.images).argmax(dim=1), replay.labels)
    assert replay.labels.bincount().tolist() == [50, 30]
    assert replay.num_filled == 0
    assert replay.num_tries > 80


def test_without_a_judge_every_sample_is_kept() -> None:
    replay = draw_replay(
        {0: {"shift": torch.tensor(9.0)}}, {0: 7}, _constant_sampler, None, torch.Generator().manual_seed(0), spec=TOY
    )
    assert replay.num_tries == 7
    assert len(replay.images) == 7


def test_when_tries_run_out_the_least_bad_samples_fill_the_rest() -> None:
    generators = {0: {"shift": torch.tensor(100.0)}}
    replay = draw_replay(
        generators,
        {0: 10},
        _constant_sampler,
        _sign_judge,
        torch.Generator().manual_seed(0),
        spec=TOY,
        max_tries_factor=4,
    )
    assert replay.num_tries == 40
    assert replay.num_filled == 10
    kept = replay.images.mean(dim=(1, 2, 3))
    assert kept.max() < 100 + 1.5  # the lowest ten of forty draws around 100


def test_a_class_without_sub_generator_is_refused() -> None:
    with pytest.raises(ValueError, match="class 3"):
        draw_replay({}, {3: 1}, _constant_sampler, None, torch.Generator(), spec=TOY)


def test_the_recognised_share_counts_every_sample_once() -> None:
    draw = _constant_sampler({"shift": torch.tensor(0.0)})
    share = recognised_share(draw, 1, _sign_judge, torch.Generator().manual_seed(0), 600)
    assert share == pytest.approx(0.5, abs=0.06)
    assert (
        recognised_share(_constant_sampler({"shift": torch.tensor(50.0)}), 0, _sign_judge, torch.Generator(), 64) == 0
    )


def test_the_eager_sampler_equals_the_generator_in_eval_mode() -> None:
    generator = initialise(build_generator(TOY), torch.Generator().manual_seed(3)).eval()
    latents = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    drawn = eager_sampler(TOY)(generator.state_dict())(latents)
    with torch.no_grad():
        assert torch.equal(drawn, generator(latents))
