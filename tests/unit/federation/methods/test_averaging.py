from __future__ import annotations

import pytest
import torch

from replayfleet.federation.methods.steps import averaging
from replayfleet.federation.methods.steps.averaging import weighted_average


def test_the_average_equals_the_weighted_sum_of_every_tensor() -> None:
    sets = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -2.0])}]
    result = weighted_average(sets, torch.tensor([0.25, 0.75]))
    assert torch.equal(result["w"], torch.tensor([2.5, -1.0]))


def test_sums_run_in_float64_so_small_terms_survive() -> None:
    sets = [{"w": torch.tensor([1e8])}, {"w": torch.tensor([1.0])}, {"w": torch.tensor([-1e8])}]
    result = weighted_average(sets, torch.full((3,), 1 / 3, dtype=torch.float64))
    assert result["w"].item() == pytest.approx(1 / 3, rel=1e-6)


def test_integer_buffers_come_from_the_heaviest_set_and_keep_their_dtype() -> None:
    sets = [{"n": torch.tensor(3)}, {"n": torch.tensor(8)}]
    result = weighted_average(sets, torch.tensor([0.4, 0.6]))
    assert result["n"].item() == 8
    assert result["n"].dtype == torch.int64


def test_inputs_are_untouched_and_outputs_are_new_tensors() -> None:
    first = {"w": torch.ones(2), "n": torch.tensor(1)}
    result = weighted_average([first], torch.tensor([1.0]))
    result["w"].zero_()
    result["n"].zero_()
    assert first["w"].sum() == 2
    assert first["n"].item() == 1


@pytest.mark.parametrize(
    "weights", [[0.2, 0.3], [0.5, 0.6], [1.5, -0.5], [float("nan"), 1.0], [1.0], [0.2, 0.3, 0.5], [float("inf"), 0]]
)
def test_weights_that_are_no_distribution_are_refused(weights: list[float]) -> None:
    sets = [{"w": torch.ones(1)}, {"w": torch.ones(1)}]
    with pytest.raises(ValueError, match="weights"):
        weighted_average(sets, torch.tensor(weights))


def test_sets_with_other_keys_shapes_or_dtypes_are_refused() -> None:
    weights = torch.tensor([0.5, 0.5])
    good = {"w": torch.ones(2)}
    with pytest.raises(ValueError, match="keys: v, w"):
        weighted_average([good, {"v": torch.ones(2)}], weights)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        weighted_average([good, {"w": torch.ones(3)}], weights)
    with pytest.raises(ValueError, match="float64"):
        weighted_average([good, {"w": torch.ones(2, dtype=torch.float64)}], weights)
    with pytest.raises(ValueError, match="no parameter sets"):
        weighted_average([], torch.empty(0))


def test_sets_are_summed_in_their_order_however_few_are_at_hand_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    sizes = {"large": (70, 70), "small": (5,), "scalar": ()}
    sets = [{name: torch.randn(size, generator=rng) for name, size in sizes.items()} for _ in range(7)]
    weights = torch.rand(7, generator=rng, dtype=torch.float64)
    weights /= weights.sum()
    at_once = weighted_average(sets, weights)
    monkeypatch.setattr(averaging, "_AT_HAND", 2)
    in_turns = weighted_average(sets, weights)
    assert all(torch.equal(at_once[name], in_turns[name]) for name in sizes)


def test_a_set_of_another_layout_is_named_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "_AT_HAND", 2)
    sets = [{"w": torch.ones(2)}] * 4 + [{"w": torch.ones(3)}]
    with pytest.raises(ValueError, match="parameter set 4"):
        weighted_average(sets, torch.full((5,), 0.2))
