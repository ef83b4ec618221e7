from __future__ import annotations

import pytest
import torch

from replayfleet.federation.simulator.measures.memorisation import memorisation


def samples(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)


TRAINED, HELD_OUT = samples(40, 1), samples(40, 2)


def test_copies_of_training_samples_are_found_out() -> None:
    found = memorisation(TRAINED + 0.1 * samples(40, 3), TRAINED, HELD_OUT, rng())
    assert found.nearer.value == 1.0
    assert found.membership.value == 1.0
    assert found.nearer.p == found.membership.p == pytest.approx(0.001)
    assert found.distance_ratio < 0.3


def test_copies_of_held_out_samples_count_the_other_way() -> None:
    found = memorisation(HELD_OUT + 0.1 * samples(40, 3), TRAINED, HELD_OUT, rng())
    assert found.nearer.value == found.membership.value == 0.0
    assert found.nearer.p == found.membership.p == 1.0


def test_fresh_samples_of_the_distribution_lie_within_the_floor() -> None:
    fresh = [memorisation(samples(200, seed), TRAINED, HELD_OUT, rng()) for seed in range(10, 20)]
    for found in fresh:
        assert abs(found.nearer.value - 0.5) < 4 * found.nearer.floor_std
        assert abs(found.membership.value - 0.5) < 4 * found.membership.floor_std
    assert 0.7 < sum(found.distance_ratio for found in fresh) / len(fresh) < 1.3


def test_where_all_distances_are_equal_nothing_can_be_told() -> None:
    same = torch.zeros(20, 1, 4, 4)
    found = memorisation(samples(5, 1), same, same, rng())
    assert found.membership.value == 0.5
    assert found.membership.floor_std == 0.0
    assert found.membership.p == 1.0


def test_the_area_is_the_share_of_pairs_in_the_right_order() -> None:
    found = memorisation(samples(30, 9), TRAINED, HELD_OUT, rng())
    nearest = [torch.cdist(part.flatten(1), samples(30, 9).flatten(1)).amin(dim=1) for part in (TRAINED, HELD_OUT)]
    assert found.membership.value == pytest.approx(float((nearest[0][:, None] < nearest[1]).float().mean()), abs=1e-6)


@pytest.mark.parametrize(("generated", "trained", "held_out"), [(0, 4, 4), (4, 0, 0), (4, 4, 3)])
def test_sets_that_cant_be_compared_are_refused(generated: int, trained: int, held_out: int) -> None:
    with pytest.raises(ValueError, match="as many held-out as training"):
        memorisation(samples(generated, 0), samples(trained, 1), samples(held_out, 2), rng())
