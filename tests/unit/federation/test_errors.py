"""Errors say the same wherever they are read."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import pytest

from replayfleet.export.parity import ParityError
from replayfleet.federation.errors import (
    ArtefactRejected,
    Reason,
    ReplayfleetError,
    SettingsError,
    is_out_of_memory,
)
from replayfleet.federation.service.settings import WrongValueError


@pytest.mark.parametrize(
    "error",
    [
        SettingsError("no such method"),
        WrongValueError("clients", "clients is 0, expected at least 1"),
        ArtefactRejected(Reason.NOT_FINITE, "head.weight"),
        ParityError("task.onnx", 1, 0.5, 1e-4),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_whole_out_of_a_pool_of_processes(error: ReplayfleetError) -> None:
    there = ForkingPickler.loads(ForkingPickler.dumps(error))
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))


def test_memory_that_ran_out_is_known_by_who_says_so_in_which_words() -> None:
    assert is_out_of_memory(RuntimeError("could not create a primitive")), "oneDNN's words"
    assert not is_out_of_memory(RuntimeError("could not create a primitive descriptor for a convolution"))
    assert not is_out_of_memory(RuntimeError("memory")), "only what says that an allocation failed"
    assert not is_out_of_memory(ValueError("client 'bad_alloc' sent no counts")), "a member's words"


def test_memory_that_ran_out_is_known_in_what_was_raised_for_it() -> None:
    class RuntimeException(Exception):  # as of ONNX Runtime
        __module__ = "onnxruntime.capi.onnxruntime_pybind11_state"

    refused = ArtefactRejected(Reason.LOAD_FAILED, "ONNX Runtime failed on a batch of 8")
    refused.__cause__ = RuntimeException("bfc_arena.cc:360 Failed to allocate memory for requested buffer of size 9")
    assert is_out_of_memory(refused)
    refused.__cause__ = RuntimeException("input has another shape")
    assert not is_out_of_memory(refused)
