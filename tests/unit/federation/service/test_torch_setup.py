"""A program of others that computes with ours finds PyTorch as it left it, and ours finds it as it comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from replayfleet.federation.service.torch_setup import prepare_torch, torch_as_it_comes


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


def test_of_two_that_compute_at_once_the_first_to_end_takes_nothing_from_the_other() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    try:
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other, ThreadPoolExecutor(1) as program:
            first, second = torch_as_it_comes(), torch_as_it_comes()
            for thread, computing in ((one, first), (other, second)):
                thread.submit(computing.__enter__).result()
                thread.submit(prepare_torch, 1).result()
            one.submit(first.__exit__, None, None, None).result()
            assert torch.get_default_dtype() == torch.float32
            assert other.submit(torch.get_num_threads).result() == 1
            other.submit(second.__exit__, None, None, None).result()
            assert torch.get_default_dtype() == torch.float64
            assert program.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(before)


def test_a_package_that_chose_another_dtype_when_it_was_imported_chose_it_for_nobody_else() -> None:
    before = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    try:
        prepare_torch(before)
        assert torch.zeros(1).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_within_another_leaves_it_its_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch_as_it_comes():
            prepare_torch(1)
            with torch_as_it_comes():
                prepare_torch(3)
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
