"""What can't be, whoever else is there: one upload alone, which nobody stands beside to be compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from replayfleet.federation.methods.kit.records import Artefacts, Parameters
from replayfleet.federation.methods.steps.screening import (
    MAX_SAMPLES_A_ROUND,
    MAX_VALUE,
    Candidate,
    answers_of,
    screen,
)
from replayfleet.models.build import build_task_model, initialise
from tests.support.toy import TOY


def screened(parameters: Parameters, num_samples: int) -> dict[str, str]:
    one = Candidate(Artefacts({"task": parameters}), {}, num_samples)
    return screen({"a": one}, lambda _: None, max_change=1.0)


def test_a_variance_just_below_zero_is_none() -> None:
    """One that is far below makes a model answer NaN, which is seen too."""
    assert not screened({"norm.running_var": torch.tensor([0.5, 0.0])}, 100)
    assert "negative variance" in screened({"norm.running_var": torch.tensor([0.5, -1e-7])}, 100)["a"]


def test_a_bias_that_ends_a_channel_for_everybody_is_seen_though_no_matrix_moved() -> None:
    start = {"head.weight": torch.ones(2, 2), "head.bias": torch.zeros(2), "norm.running_mean": torch.zeros(2)}
    for key, moved, is_refused in (
        ("head.bias", -101.0, True),
        ("head.bias", -99.0, False),
        ("norm.running_mean", 1e4, 0),
    ):
        uploaded = {**start, key: torch.tensor([0.0, moved])}
        found = screen({"a": Candidate(Artefacts({"task": uploaded}), {"task": start}, 100)}, lambda _: None, 1.0)
        assert found == (
            {"a": f"task: what {key} moved by in this round is 101, at most 100 is plausible"} if is_refused else {}
        )


def test_of_a_model_that_is_not_finite_itself_nothing_is_said_against_who_began_with_another() -> None:
    """A method may leave NaN in the aggregator's state; who would have got it goes on with the model before."""
    uploaded = {"head.weight": torch.ones(2, 2), "head.bias": torch.ones(2)}
    for spoilt in ("head.weight", "head.bias"):
        for value in (float("nan"), float("inf")):
            start = {key: torch.full_like(tensor, value if key == spoilt else 0.5) for key, tensor in uploaded.items()}
            one = Candidate(Artefacts({"task": uploaded}), {"task": start}, 100)
            assert not screen({"a": one}, lambda _: None, max_change=2.0)
    far = {key: torch.full_like(tensor, 1e-3) for key, tensor in uploaded.items()}
    one = Candidate(Artefacts({"task": uploaded}), {"task": far}, 100)
    assert "its change in this round" in screen({"a": one}, lambda _: None, max_change=2.0)["a"]


def test_a_model_that_is_not_finite_hides_nothing_while_the_client_has_another() -> None:
    uploaded = {"head.weight": torch.ones(2, 2)}
    spoilt, far = ({"head.weight": torch.full((2, 2), value)} for value in (float("nan"), 1e-3))
    for own, average in ((spoilt, far), (far, spoilt)):
        one = Candidate(Artefacts({"task": uploaded}), {"task": own, "average": average}, 100)
        assert "its change in this round" in screen({"a": one}, lambda _: None, max_change=2.0)["a"]


def test_a_count_has_a_bound_though_there_is_no_other() -> None:
    parameters = {"head.weight": torch.ones(2, 2)}
    assert not screened(parameters, MAX_SAMPLES_A_ROUND)
    assert "num_samples" in screened(parameters, MAX_SAMPLES_A_ROUND + 1)["a"]


def test_a_sub_generator_of_huge_numbers_is_seen_though_nobody_else_sent_one() -> None:
    for value in (MAX_VALUE, 2 * MAX_VALUE):
        one = Candidate(Artefacts({"sub-generator/0": {"w": torch.tensor([0.5, -value])}}), {}, 100)
        told = {} if value == MAX_VALUE else {"a": "sub-generator/0: w holds 2e+06, at most 1e+06 is plausible"}
        assert screen({"a": one}, lambda _: None, max_change=1.0) == told


def test_a_count_far_beyond_those_of_the_others_buys_nothing() -> None:
    def counted(most: int) -> dict[str, str]:
        parameters = {"head.weight": torch.ones(2, 2)}
        counts = {"a": 100, "b": 300, "c": most}
        sent = {name: Candidate(Artefacts({"task": parameters}), {}, count) for name, count in counts.items()}
        return screen(sent, lambda _: None, max_change=1.0)

    assert counted(12_000) == {}
    assert counted(13_000) == {"c": "num_samples is 1.3e+04, at most 1.28e+04 is plausible"}


class Read(Mapping[str, torch.Tensor]):
    """A model as it lies on a disk: each look at a tensor reads it."""

    def __init__(self, tensors: Parameters) -> None:
        self.tensors, self.reads = tensors, 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads += 1
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_an_upload_is_read_once_whatever_is_asked_of_it() -> None:
    """Of a late one each look computes anew."""
    model = initialise(build_task_model(TOY), torch.Generator().manual_seed(0)).state_dict()
    start, sent = Read(model), Read(model)
    one = Candidate(Artefacts({"task": sent}), {"task": start}, 100)
    assert not screen({"a": one, "b": one}, answers_of(TOY), max_change=1.0)
    assert sent.reads == 2 * len(model)
    assert start.reads < 3 * 2 * len(model)


def test_a_base_is_run_only_where_an_upload_answers_more_than_any_may() -> None:
    def run(answered: float, before: float) -> tuple[dict[str, str], int]:
        asked = []

        def answers(parameters: Parameters) -> torch.Tensor:
            asked.append(parameters)
            return parameters["w"]

        sent, start = ({"w": torch.tensor([value])} for value in (answered, before))
        one = Candidate(Artefacts({"task": sent}), {"task": start}, 1)
        return screen({"a": one}, answers, max_change=1.0), len(asked)

    assert run(20.0, 20.0) == ({}, 1)
    assert run(5000.0, 5000.0) == ({}, 2)
    refused, num_asked = run(5000.0, 1.0)
    assert "its largest answer to a fixed input is 5e+03" in refused["a"]
    assert num_asked == 2
