from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps import serving
from replayfleet.federation.methods.steps.serving import Evidence, best_served
from tests.support.toy import TOY


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates answer what their parameters say, one class for each sample."""

    def judge_with(_spec: object, parameters: Parameters) -> object:
        return lambda _images: torch.nn.functional.one_hot(parameters["answers"], TOY.num_classes)

    monkeypatch.setattr(serving, "judge_with", judge_with)


def answering(*answers: int) -> dict[str, Tensor]:
    return {"answers": torch.tensor(answers)}


def evidence(*labels: int, seen: dict[int, int]) -> Evidence:
    return Evidence(torch.zeros(len(labels), 1), torch.tensor(labels), seen)


def test_a_class_counts_for_what_was_seen_of_it() -> None:
    some = evidence(0, 0, 0, 1, seen={0: 10, 1: 30, 2: 5})  # of class 2 there is no evidence
    assert some.weights().tolist() == pytest.approx([0.25 / 3] * 3 + [0.75])
    found = best_served(TOY, {"a": answering(0, 0, 0, 0), "b": answering(1, 1, 1, 1)}, "a", some)
    assert found.scores == pytest.approx({"a": 0.25, "b": 0.75})


def test_the_clearly_best_is_served() -> None:
    labels = [0, 1] * 20
    found = best_served(
        TOY,
        {"served": answering(*[0] * 40), "own": answering(*labels)},
        "served",
        evidence(*labels, seen={0: 20, 1: 20}),
    )
    assert found.name == "own"
    assert found.gain == pytest.approx(0.5)


def test_without_a_clear_gain_nothing_is_swapped() -> None:
    labels = [0, 1] * 20
    nearly = [*labels[:-2], 1, 0]
    better = best_served(
        TOY,
        {"served": answering(*nearly[:-4], 1, 0, *labels[-2:]), "own": answering(*nearly)},
        "served",
        evidence(*labels, seen={0: 20, 1: 20}),
    )
    assert (better.name, better.gain) == ("served", 0.0)
    equal = best_served(
        TOY, {"own": answering(*labels), "served": answering(*labels)}, "served", evidence(*labels, seen={0: 1, 1: 1})
    )
    assert equal.name == "served"


def test_choosing_needs_evidence_and_a_model_that_is_served() -> None:
    with pytest.raises(ValueError, match="on 0 samples"):
        best_served(TOY, {"a": answering()}, "a", evidence(seen={0: 1}))
    with pytest.raises(ValueError, match="'b' of"):
        best_served(TOY, {"a": answering(0)}, "b", evidence(0, seen={0: 1}))
