"""What can't be, whoever else is there: one upload alone, which nobody stands beside to be compared with."""

from __future__ import annotations

import torch

from replayfleet.federation.methods.kit.records import Artefacts, Parameters
from replayfleet.federation.methods.steps.screening import MAX_SAMPLES_A_ROUND, Candidate, screen


def screened(parameters: Parameters, num_samples: int) -> dict[str, str]:
    one = Candidate(Artefacts({"task": parameters}), {}, num_samples)
    return screen({"a": one}, lambda _: None, max_change=1.0)


def test_a_variance_just_below_zero_is_none() -> None:
    """One that is far below makes a model answer NaN, which is seen too."""
    assert not screened({"norm.running_var": torch.tensor([0.5, 0.0])}, 100)
    assert "negative variance" in screened({"norm.running_var": torch.tensor([0.5, -1e-7])}, 100)["a"]


def test_a_count_has_a_bound_though_there_is_no_other() -> None:
    parameters = {"head.weight": torch.ones(2, 2)}
    assert not screened(parameters, MAX_SAMPLES_A_ROUND)
    assert "num_samples" in screened(parameters, MAX_SAMPLES_A_ROUND + 1)["a"]
