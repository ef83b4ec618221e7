"""A program of others that computes with ours finds PyTorch as it left it, and ours finds it as it comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from replayfleet.federation.service.torch_setup import torch_as_it_comes


@pytest.mark.parametrize("theirs", [torch.no_grad, torch.inference_mode])
def test_gradients_are_there_for_who_trains_in_a_program_that_wants_none(
    theirs: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    with theirs():
        with torch_as_it_comes():
            weight = torch.ones(1, requires_grad=True)
            (weight * torch.ones(1)).backward()
        assert not torch.is_grad_enabled()
    assert weight.grad is not None
