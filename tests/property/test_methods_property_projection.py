"""Whatever the gradients, a projected step doesn't work against the reference."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replayfleet.federation.methods.steps.projection import project_conflicting


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two vectors of one length, from aligned to opposed, of any scale that float32 has."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    length = draw(st.integers(1, 40))
    reference = torch.randn(length, generator=rng, dtype=torch.float64)
    lean = draw(st.integers(-30, 30)) / 10
    gradient = torch.randn(length, generator=rng, dtype=torch.float64) + lean * reference
    scales = [10.0 ** draw(st.integers(-25, 25)) for _ in range(2)]
    return (scales[0] * gradient).float(), (scales[1] * reference).float()


def slope(left: Tensor, right: Tensor) -> float:
    """Cosine of two vectors, in float64; 0 if one has no length."""
    wide, other = left.double(), right.double()
    norm = wide.norm() * other.norm()
    return float(wide @ other / norm) if norm > 0 else 0.0


@settings(deadline=None)
@given(pairs())
def test_the_result_never_points_against_the_reference_and_never_grows(pair: tuple[Tensor, Tensor]) -> None:
    gradient, reference = pair
    projected = project_conflicting(gradient, reference)
    against = float(projected.double() @ (reference.double() / reference.double().norm()))
    assert against >= -1e-6 * float(gradient.double().norm())
    assert projected.double().norm() <= gradient.double().norm() * (1 + 1e-6)
    if slope(gradient, reference) >= 0:
        assert projected is gradient


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 20), st.sampled_from([1e-4, 1e-2, 1.0]))
def test_to_first_order_a_step_never_increases_the_loss_on_the_reference(seed: int, size: int, step: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=rng, dtype=torch.float64)
    target, at, gradient = torch.randn(3, size, generator=rng, dtype=torch.float64)

    def loss(point: Tensor) -> Tensor:
        residual: Tensor = matrix @ point - target
        return 0.5 * residual.square().sum()

    projected = project_conflicting(gradient, matrix.T @ (matrix @ at - target))
    change = loss(at - step * projected) - loss(at)
    second_order = 0.5 * step**2 * (matrix @ projected).square().sum()  # all that a quadratic has beyond its slope
    assert change <= second_order + 1e-9 * (1 + loss(at))
