"""``make mutants`` takes an hour; whether its list fits the code is known in a moment."""

from __future__ import annotations

from tests.mutants import GUARDS, ROOT, listed


def test_every_mutant_breaks_one_place_and_names_tests_that_are_there() -> None:
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in listed()}
    odd = [mutant.what for mutant in listed() if texts[mutant.file].count(mutant.old) != 1]
    assert odd == []
    missing = {test for mutant in listed() for test in mutant.tests if not (ROOT / test.split("::")[0]).exists()}
    assert missing == set()


def test_all_that_trust_rests_on_is_taken_out_by_some_mutant() -> None:
    assert {mutant.guard for mutant in listed()} - {""} == {*GUARDS}
