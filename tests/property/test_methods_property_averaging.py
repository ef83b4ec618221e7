"""The blocked average equals, to the bit, one that sums tensor by tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayfleet.federation.methods.steps import averaging
from replayfleet.federation.methods.steps.averaging import weighted_average

Sets = list[dict[str, torch.Tensor]]

SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (16, 17), (2, 3, 3, 3), (5, 0, 2), (70, 71)])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])


def tensor_by_tensor(sets: Sets, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """The definition: every tensor for itself, set after set, in float64."""
    average = {}
    for name, example in sets[0].items():
        total = torch.zeros(example.shape, dtype=torch.float64)
        for weight, parameters in zip(weights.tolist(), sets, strict=True):
            total.add_(parameters[name].to(torch.float64), alpha=weight)
        average[name] = total.to(example.dtype)
    return average


@st.composite
def problems(draw: st.DrawFn) -> tuple[Sets, torch.Tensor]:
    layout = draw(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=6))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sets = [
        {f"t{i}": torch.randn(shape, generator=rng).to(dtype) for i, (shape, dtype) in enumerate(layout)}
        for _ in range(draw(st.integers(1, 5)))
    ]
    shares = torch.rand(len(sets), generator=rng, dtype=torch.float64)
    return sets, shares / shares.sum()


@settings(deadline=None)
@given(problems(), st.sampled_from([1, 16, 1 << 12]), st.sampled_from([1, 40, 1 << 18]))
def test_the_average_has_the_bits_of_a_sum_tensor_by_tensor(
    problem: tuple[Sets, torch.Tensor], small: int, block: int
) -> None:
    sets, weights = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaging, "_SMALL", small)
        patch.setattr(averaging, "_BLOCK", block)
        average = weighted_average(sets, weights)
    expected = tensor_by_tensor(sets, weights)
    assert list(average) == list(expected)
    for name, tensor in expected.items():
        assert average[name].dtype == tensor.dtype
        assert torch.equal(average[name], tensor)


def test_the_layout_in_memory_changes_no_bits() -> None:
    rng = torch.Generator().manual_seed(0)
    sets = [{"w": torch.randn(64, 32, 3, 3, generator=rng)} for _ in range(3)]
    strided = [{"w": one["w"].to(memory_format=torch.channels_last)} for one in sets]
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    assert torch.equal(weighted_average(strided, weights)["w"], weighted_average(sets, weights)["w"])
    assert weighted_average(strided, weights)["w"].is_contiguous()


def test_averaged_tensors_share_no_memory() -> None:
    average = weighted_average([{"a": torch.ones(2), "b": torch.ones(3)}], torch.ones(1))
    assert average["a"].untyped_storage().data_ptr() != average["b"].untyped_storage().data_ptr()
