"""A taste of ``make fuzz``: some inputs for every decoder, always the same ones."""

from __future__ import annotations

from random import Random

import pytest

from replayfleet.federation.errors import MalformedMessage
from tests.fuzz.mutation import mutated
from tests.fuzz.piece import run_piece
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

NUM_INPUTS = {"bundles": 300, "conversations": 300, "settings": 500, "roots": 150, "releases": 150, "members": 60}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that overflow
@pytest.mark.parametrize("name", TARGETS)
def test_only_documented_errors_come_out_and_some_inputs_are_accepted(name: str) -> None:
    outcome = run_piece(TARGETS[name], f"smoke/{name}", NUM_INPUTS.get(name, 800))
    assert not outcome.findings, "\n".join(finding.trace for finding in outcome.findings)
    if name == "seals":  # no changed byte keeps a signature: only what happens to be unchanged is accepted
        for data in TARGETS[name].seeds():
            TARGETS[name].feed(data)
        return
    assert outcome.accepted, "no changed input is accepted: nothing behind the first check is reached"


def test_an_error_that_is_not_documented_is_found_once_with_its_input() -> None:
    def feed(data: bytes) -> None:
        if b"\xff" in data:
            raise KeyError("never to be seen")
        raise MalformedMessage("no")

    outcome = run_piece(Target(lambda: (b"seed",), feed, (MalformedMessage,)), "0", 500)
    assert outcome.findings[0].what == "a seed is refused: ['MalformedMessage no']"
    assert outcome.findings[1].what.startswith("KeyError at ")
    assert len(outcome.findings) == 2
    assert b"\xff" in outcome.findings[1].data


def test_one_seed_makes_the_same_inputs() -> None:
    target = TARGETS["frames"]
    made = [[mutated(one, Random(7), target.seeds(), target.form) for one in target.seeds()] for _ in range(2)]
    assert made[0] == made[1]
    assert made[0] != list(target.seeds())
