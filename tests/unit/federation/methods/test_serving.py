from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from replayfleet.federation.methods.kit.records import Artefacts, Parameters, RoundData
from replayfleet.federation.methods.pfedgrp import with_own
from replayfleet.federation.methods.pfedgrp_records import ClientRecord, Download, Upload
from replayfleet.federation.methods.steps import serving
from replayfleet.federation.methods.steps.memory import Memory
from replayfleet.federation.methods.steps.serving import CHOICE, Evidence, Served, Standing, best_served, choose
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import SubGenerator
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


LABELS = [0, 1] * 20
SEEN = {0: 20, 1: 20}


def served(candidates: dict[str, Parameters], downloaded: str, *pieces: Evidence) -> Served:
    return best_served(TOY, candidates, downloaded, pieces or [evidence(*LABELS, seen=SEEN)])


def test_a_class_counts_for_what_was_seen_of_it_and_each_piece_of_evidence_for_as_much() -> None:
    some = evidence(0, 0, 0, 1, seen={0: 10, 1: 30, 2: 5})  # of class 2 there is no evidence
    assert some.weights().tolist() == pytest.approx([0.25 / 3] * 3 + [0.75])
    candidates = {"a": answering(0, 0, 0, 0), "b": answering(1, 1, 1, 1)}
    assert served(candidates, "a", some).scores == pytest.approx({"a": 0.25, "b": 0.75})
    twice = served(candidates, "a", some, evidence(0, 0, 0, 0, seen={0: 10, 1: 30}))
    assert twice.scores == pytest.approx({"a": (0.25 + 1) / 2, "b": (0.75 + 0) / 2})


def test_what_was_downloaded_is_served_without_a_clear_gain() -> None:
    nearly = answering(*LABELS[:-2], 1, 0)
    found = served(
        {"served": answering(*LABELS), "personalised": nearly, "own": answering(*LABELS[:-1], 0)}, "personalised"
    )
    assert (found.name, found.lost, found.gain) == ("personalised", False, pytest.approx(-0.05))
    equal = served({"own": answering(*LABELS), "personalised": answering(*LABELS)}, "personalised")
    assert (equal.name, equal.gain, equal.error) == ("personalised", 0.0, 0.0)


def test_the_best_of_those_that_are_clearly_better_is_served() -> None:
    worse = {"served": answering(*[0] * 40), "personalised": answering(*[1] * 40)}
    found = served({**worse, "average": answering(*LABELS[:-8], *[0] * 8), "own": answering(*LABELS)}, "personalised")
    assert (found.name, found.lost, found.gain) == ("own", True, pytest.approx(0.5))
    kept = served({"served": answering(*LABELS), "personalised": answering(*[1] * 40)}, "personalised")
    assert (kept.name, kept.lost, kept.gain) == ("served", False, 0.0)


def test_a_model_that_is_clearly_better_on_one_piece_of_evidence_alone_is_not_served() -> None:
    candidates = {"personalised": answering(*[1] * 40), "own": answering(*[0] * 40)}
    zeros, ones = evidence(*[0] * 40, seen=SEEN), evidence(*LABELS, seen=SEEN)
    assert served(candidates, "personalised", zeros).name == "own"
    both = served(candidates, "personalised", zeros, ones)
    assert (both.name, both.lost) == ("personalised", False)


def test_choosing_needs_evidence_and_a_downloaded_model() -> None:
    with pytest.raises(ValueError, match=r"on \[0\] samples"):
        served({"a": answering()}, "a", evidence(seen={0: 1}))
    with pytest.raises(ValueError, match=r"on \[\] samples"):
        best_served(TOY, {"a": answering()}, "a", [])
    with pytest.raises(ValueError, match="'b' of"):
        served({"a": answering(0)}, "b", evidence(0, seen={0: 1}))


class Fleet:
    task = TOY


def held(*labels: int, pixel: float = 0.0) -> RoundData:
    """Black images with one pixel that isn't, in the middle."""
    images = torch.zeros(len(labels), *TOY.image_shape)
    images[:, :, TOY.image_size // 2, TOY.image_size // 2] = pixel
    return RoundData(images, torch.tensor(labels))


def drawn(parameters: Parameters) -> Any:
    return lambda latents: torch.zeros(len(latents), *TOY.image_shape)


def test_evidence_is_real_where_the_round_brought_the_class_and_replay_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[list[Evidence]] = []

    def judged(spec: object, candidates: Any, downloaded: str, evidence: list[Evidence]) -> Served:
        found.append(evidence)
        return Served(downloaded, dict.fromkeys(candidates, 0.5), 0.0, 0.0)

    monkeypatch.setattr(serving, "best_served", judged)
    state = Memory({c: SubGenerator({"g": torch.zeros(1)}, {}) for c in (0, 1)}, {0: 30, 1: 10})
    download = Download(personalised=answering(0), average=answering(1))
    client = Standing(state, own=answering(0), held_out=held(1, 1, 1, pixel=1.0))
    chosen = choose(Fleet, client, download, torch.Generator(), sampler=drawn)
    assert list(chosen.candidates) == ["personalised", "average", "own"]
    (mixed, replayed) = found[0]
    assert torch.bincount(mixed.labels).tolist() == [serving.NUM_REPLAYED, 3]
    assert mixed.weights()[:3].sum() == pytest.approx(0.25)
    middle = mixed.images[3:, :, TOY.image_size // 2, TOY.image_size // 2]
    assert middle.tolist() == [pytest.approx([8 / 9] * TOY.image_shape[0])] * serving.NUM_REPLAYED
    assert torch.bincount(replayed.labels).tolist() == [serving.NUM_REPLAYED * 3 // 4, serving.NUM_REPLAYED // 4]
    assert bool((replayed.images == 0).all()), "the other piece is replay as it was drawn"
    chosen = choose(
        Fleet, Standing(state, own=answering(1), served=answering(0)), download, torch.Generator(), sampler=drawn
    )
    assert (list(chosen.candidates), chosen.served.name) == (["served", "personalised", "average"], "personalised")
    (alone,) = found[1]
    assert bool((alone.images == 0).all()), "without real samples there is replay alone"
    nothing = Standing(Memory(), own=answering(0))
    assert choose(Fleet, nothing, download, torch.Generator(), sampler=drawn) is None


def test_a_mixture_that_lost_to_the_clients_own_model_is_told_and_gets_more_of_that_the_next_time() -> None:
    own, mixed = answering(*LABELS), answering(*[0] * 40)
    lost = served({"personalised": mixed, "own": own}, "personalised")
    assert lost.lost
    won = served({"personalised": own, "own": mixed}, "personalised")
    assert not won.lost
    upload = Upload(task_parameters=own, sub_generators={}, seen={0: 1}, num_samples=1)
    record, shares = None, []
    for told in (None, lost, lost, won, won, won, won, won, won):
        record = ClientRecord.merged(record, serving.with_choice(upload, told))
        shares.append(record.own_share)
    assert shares == [0.0, 0.5, 0.75, 0.375, 0.1875, 0.09375, 0.046875, 0.0, 0.0]
    assert with_own(torch.tensor([0.5, 0.5]), 1, 0.5).tolist() == [0.25, 0.75]
    weights = torch.tensor([0.2, 0.8])
    assert with_own(weights, 0, 0.0) is weights


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": {"own": 1.5}, "name": "own"},
        {"scores": {"own": math.nan}, "name": "own"},
        {"scores": {"own": True}, "name": "own"},
        {"name": "nobody"},
        {"name": ["own"]},
        {"scores": {f"model-{index}": 0.5 for index in range(9)}, "name": "model-0"},
        {"scores": {"x" * 33: 0.5}, "name": "x" * 33},
        {"gain": 7.0},
        {"error": -1.0},
        {"error": math.inf},
        {"lost": 1},
        {"scores": [0.5]},
    ],
)
def test_a_choice_that_nobody_can_have_made_is_refused(changes: dict[str, Any]) -> None:
    told = Served("own", {"own": 0.75, "personalised": 0.5}, 0.25, 0.125, True)
    packed = CHOICE.pack(told, "served")
    assert CHOICE.unpack(packed, "served", None) == told
    assert CHOICE.unpack(Artefacts(), "served", None) is None, "an upload of before"
    with pytest.raises(ValueError, match="served"):
        CHOICE.unpack(Artefacts(facts={"served": packed.facts["served"] | changes}), "served", None)
    with pytest.raises(ValueError, match="a choice"):
        CHOICE.unpack(Artefacts(facts={"served": "own"}), "served", None)
