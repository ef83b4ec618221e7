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


def test_the_downloaded_model_takes_the_place_of_the_served_one_unless_another_is_clearly_better_than_it() -> None:
    labels = [0, 1] * 20
    nearly, own = answering(1, 0, *labels[2:]), answering(*labels[:-1], 0)  # two wrong, one wrong
    candidates = {"served": answering(*[0] * 40), "personalised": nearly, "own": own}
    some = evidence(*labels, seen={0: 20, 1: 20})
    found = best_served(TOY, candidates, "served", some, "personalised")
    assert (found.name, found.lost, found.gain) == ("personalised", False, pytest.approx(0.475))
    worse = {**candidates, "personalised": answering(*[1] * 40)}
    found = best_served(TOY, worse, "served", some, "personalised")
    assert (found.name, found.lost) == ("own", True)


def test_choosing_needs_evidence_and_a_model_that_is_served() -> None:
    with pytest.raises(ValueError, match="on 0 samples"):
        best_served(TOY, {"a": answering()}, "a", evidence(seen={0: 1}))
    with pytest.raises(ValueError, match="'b' of"):
        best_served(TOY, {"a": answering(0)}, "b", evidence(0, seen={0: 1}))


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
    found: list[Evidence] = []

    def judged(spec: object, candidates: Any, before: str, evidence: Evidence, downloaded: str) -> Served:
        found.append(evidence)
        return Served(before, dict.fromkeys(candidates, 0.5), 0.0, 0.0)

    monkeypatch.setattr(serving, "best_served", judged)
    state = Memory({c: SubGenerator({"g": torch.zeros(1)}, {}) for c in (0, 1)}, {0: 30, 1: 10})
    download = Download(personalised=answering(0), average=answering(1))
    client = Standing(state, own=answering(0), held_out=held(1, 1, 1, pixel=1.0))
    chosen = choose(Fleet, client, download, torch.Generator(), sampler=drawn)
    assert chosen is not None
    assert list(chosen.candidates) == ["personalised", "average", "own"]
    assert torch.bincount(found[0].labels).tolist() == [serving.NUM_REPLAYED, 3]
    assert found[0].weights()[:3].sum() == pytest.approx(0.25)
    middle = found[0].images[3:, :, TOY.image_size // 2, TOY.image_size // 2]
    assert middle.tolist() == [pytest.approx([8 / 9] * TOY.image_shape[0])] * serving.NUM_REPLAYED
    chosen = choose(
        Fleet, Standing(state, own=answering(1), served=answering(0)), download, torch.Generator(), sampler=drawn
    )
    assert chosen is not None
    assert (list(chosen.candidates), chosen.served.name) == (["served", "personalised", "average"], "served")
    assert bool((found[1].images == 0).all()), "without real samples replay is as it was drawn"
    nothing = Standing(Memory(), own=answering(0))
    assert choose(Fleet, nothing, download, torch.Generator(), sampler=drawn) is None


def test_a_mixture_that_lost_to_the_clients_own_model_is_told_and_gets_more_of_that_the_next_time() -> None:
    labels = [0, 1] * 20
    own, mixed = answering(*labels), answering(*[0] * 40)
    some = evidence(*labels, seen={0: 20, 1: 20})
    lost = best_served(TOY, {"personalised": mixed, "own": own}, "personalised", some, "personalised")
    assert lost.lost
    won = best_served(TOY, {"personalised": own, "own": mixed}, "personalised", some, "personalised")
    assert not won.lost
    upload = Upload(task_parameters=own, sub_generators={}, seen={0: 1}, num_samples=1)
    record, shares = None, []
    for served in (None, lost, lost, won, won, won, won, won, won):
        record = ClientRecord.merged(record, serving.with_choice(upload, served))
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
