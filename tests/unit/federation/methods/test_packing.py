from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import pytest
import torch

from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.packing import COUNT, COUNTS, WEIGHTS, ByClient, Inline, OneSet, Record
from replayfleet.federation.methods.kit.records import Artefacts, Parameters

ONE: Parameters = {"w": torch.ones(1)}


@dataclass(frozen=True)
class Client(Record):
    """What is held of a client."""

    model: Annotated[Parameters, OneSet()]
    seen: Annotated[Mapping[int, int], COUNTS]


@dataclass(frozen=True)
class Everything(Record):
    """One field of each sort."""

    model: Annotated[Parameters, OneSet("served", served=True)]
    count: Annotated[int, COUNT]
    extra: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    generators: Annotated[Mapping[int, Parameters], packing.SubGenerators()] = field(default_factory=dict)
    donors: Annotated[Mapping[int, Parameters], packing.SetsByClass("donor/")] = field(default_factory=dict)
    weights: Annotated[Mapping[str, float], WEIGHTS] = field(default_factory=dict)
    clients: Annotated[Mapping[str, Client], ByClient(part=Inline(kind=Client))] = field(default_factory=dict)
    latest: Annotated[Client | None, Inline(kind=Client)] = None


FULL = Everything(ONE, 3, {}, {7: ONE, -1: ONE}, {1: ONE}, {"a": 1.0}, {"a": Client(ONE, {2: 5})})


def test_a_record_packs_what_its_fields_declare_and_comes_back() -> None:
    packed = FULL.pack()
    assert set(packed.parameter_sets) == {
        "served",
        "sub-generator/7",
        "sub-generator/all",
        "donor/1",
        "clients/a/model",
    }
    assert packed.facts == {"count": 3, "aggregation_weights": {"a": 1.0}, "clients": {"a": {"2": 5}}}
    assert Everything.unpack(packed) == FULL


def test_others_ask_the_declaration() -> None:
    packed = FULL.pack()
    assert packing.place_of(Everything, "donor/1") == ("donor/", 1)
    assert packing.place_of(Everything, "donor/01") is None
    assert packing.served_name(Everything) == "served"
    assert sorted(packing.sub_generators_among(Everything, packed.parameter_sets)) == ["7", "all"]
    assert packing.weights_among(Everything, packed.facts) == {"a": 1.0}
    assert not packing.weights_among(Client, packed.facts)
    assert packing.served_name(object) is packing.place_of(object, "served") is None


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"count": True}, "count is True, expected a whole number"),
        ({"count": 2**41}, "expected a whole number"),
        ({}, "count is None"),
        ({"count": 1, "aggregation_weights": {"a": float("inf")}}, "the share inf, expected a finite number"),
        ({"count": 1, "aggregation_weights": {"a": float("nan")}}, "the share nan, expected a finite number"),
        ({"count": 1, "aggregation_weights": {"a": -0.5}}, "the share -0.5, expected a finite number"),
        ({"count": 1, "aggregation_weights": {"a": "1.0"}}, "the share '1.0', expected a finite number"),
        ({"count": 1, "aggregation_weights": {"a": [1.0]}}, "expected a finite number"),
        ({"count": 1, "aggregation_weights": {"a": True}}, "the share True, expected a finite number"),
        ({"count": 1, "aggregation_weights": 3}, "expected a map from client id"),
        ({"count": 1, "aggregation_weights": {}, "clients": {"a": {"x": 1}}}, "'model' is missing"),
    ],
)
def test_hostile_facts_are_refused(facts: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Everything.unpack(Artefacts({"served": ONE}, facts))


def test_a_field_that_declares_nothing_is_an_error_of_who_wrote_it() -> None:
    @dataclass(frozen=True)
    class Forgotten(Record):
        count: int = 0

    with pytest.raises(TypeError, match=r"Forgotten\.count is not declared"):
        Forgotten().pack()


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.deployable])
def test_what_a_device_serves_is_declared(name: str) -> None:
    assert packing.served_name(METHODS[name].Download) in {"task", "personalised"}
