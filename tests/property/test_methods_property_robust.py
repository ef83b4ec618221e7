"""What holds of every robust average, whatever the uploads are."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.steps import averaging
from replayfleet.federation.methods.steps.robust import RULES, robust_average, tolerated

Sets = list[dict[str, torch.Tensor]]

ROBUST = [rule for rule in RULES if rule != "none"]
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 3, 3, 3), (5, 0, 2), (70, 71)])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64])


@st.composite
def honest_sets(draw: st.DrawFn) -> Sets:
    layout = draw(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=5))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return [
        {f"t{i}": (8 * torch.randn(shape, generator=rng)).to(dtype) for i, (shape, dtype) in enumerate(layout)}
        for _ in range(draw(st.integers(1, 7)))
    ]


@settings(deadline=None)
@given(honest_sets(), st.sampled_from(ROBUST), st.randoms(), st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.45]))
def test_the_order_of_uploads_changes_nothing(
    parameter_sets: Sets, rule: str, shuffler: random.Random, share: float
) -> None:
    found = robust_average(parameter_sets, rule, share)
    places = list(range(len(parameter_sets)))
    shuffler.shuffle(places)
    again = robust_average([parameter_sets[place] for place in places], rule, share)
    floating = {name for name, tensor in parameter_sets[0].items() if tensor.is_floating_point() and tensor.numel()}
    num_neighbours = len(places) - tolerated(len(places), share) - 2
    if not floating or (rule.endswith("krum") and num_neighbours < 2):
        return  # scores are equal, as those of two that are each other's one neighbour: then the first counts
    mean_of_chosen = rule.endswith("krum") and len(found.trusted) > 1
    for name in floating:
        if mean_of_chosen:  # a sum in another order
            assert torch.allclose(found.parameters[name], again.parameters[name], rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(found.parameters[name], again.parameters[name])


@settings(deadline=None)
@given(honest_sets(), st.sampled_from(ROBUST), st.sampled_from([-1e30, -1e4, -3.0, 1e3, 1e30]))
def test_a_hostile_minority_never_moves_an_entry_beyond_what_the_others_say(
    honest: Sets, rule: str, value: float
) -> None:
    """Krum moves it no further either, if what is hostile is far away; nearby it may be taken, and does no harm."""
    share = 0.3
    num_all = len(honest) + tolerated(len(honest), share)
    num_hostile = tolerated(num_all, share)
    layout = honest[0].items()
    if num_all != len(honest) + num_hostile or (rule.endswith("krum") and num_all < 2 * num_hostile + 3):
        return
    if rule.endswith("krum") and abs(value) < 1e3:
        return
    hostile = [{name: torch.full_like(tensor, _within(value, tensor.dtype)) for name, tensor in layout}] * num_hostile
    found = robust_average([*hostile, *honest], rule, share)
    for name, tensor in layout:
        said = torch.stack([one[name] for one in honest]).to(torch.float64)
        if tensor.is_floating_point() and tensor.numel():
            slack = 1e-2 * said.abs().max()
            moved = found.parameters[name].to(torch.float64)
            assert bool((moved <= said.amax(dim=0) + slack).all())
            assert bool((moved >= said.amin(dim=0) - slack).all())


def _within(value: float, dtype: torch.dtype) -> float:
    """Return the value, or the nearest that the type holds without becoming infinite."""
    limit = 6e4 if dtype == torch.float16 else 1e9 if dtype == torch.int64 else abs(value)
    return max(-limit, min(limit, value))


@settings(deadline=None)
@given(honest_sets(), st.sampled_from(ROBUST), st.sampled_from([1, 16, 1 << 12]), st.sampled_from([1, 40, 1 << 18]))
def test_blocks_change_no_bit_and_uploads_stay_as_they_are(
    parameter_sets: Sets, rule: str, small: int, block: int
) -> None:
    before = [{name: tensor.clone() for name, tensor in one.items()} for one in parameter_sets]
    whole = robust_average(parameter_sets, rule, 0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaging, "_SMALL", small)
        patch.setattr(averaging, "_BLOCK", block)
        if rule in {"median", "trimmed-mean"}:  # Krum's sums of distances are rounded block by block
            assert same_bits(robust_average(parameter_sets, rule, 0.2).parameters, whole.parameters)
    assert all(same_bits(one, other) for one, other in zip(before, parameter_sets, strict=True))
    assert [(name, tensor.dtype) for name, tensor in whole.parameters.items()] == [
        (name, tensor.dtype) for name, tensor in parameter_sets[0].items()
    ]
