"""Errors say the same wherever they are read."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import pytest

from replayfleet.export.parity import ParityError
from replayfleet.federation.errors import ArtefactRejected, Reason, ReplayfleetError, SettingsError
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
