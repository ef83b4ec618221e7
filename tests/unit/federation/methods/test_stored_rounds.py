from __future__ import annotations

import pytest

from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.methods.steps.kept_samples import StoredRounds
from tests.support.toy import toy_data


def test_what_is_stored_comes_back_to_the_bit_and_an_earlier_round_is_never_written_again() -> None:
    stored = StoredRounds().with_round(toy_data({0: 2})).with_round(toy_data({1: 3}))
    packed = stored.pack()
    assert sorted(packed.parameter_sets) == ["stored/0", "stored/1"]
    again = StoredRounds.unpack(packed)
    assert again.all_of("labels").tolist() == [0, 0, 1, 1, 1]
    assert again.all_of("images").equal(stored.all_of("images"))
    grown = again.with_round(toy_data({2: 1})).pack().parameter_sets
    assert grown["stored/0"] is again.rounds[0]
    assert StoredRounds.unpack(StoredRounds().pack()) == StoredRounds()
    for damaged in (Artefacts({}, {"num_rounds": 2}), Artefacts({"stored/1": {}}, {"num_rounds": 1})):
        with pytest.raises(ValueError, match=r"num_rounds is 2|'stored/0' is missing"):
            StoredRounds.unpack(damaged)


def test_a_single_set_of_all_rounds_is_read_too() -> None:
    data = toy_data({0: 2, 1: 3})
    stored = StoredRounds.unpack(Artefacts({"samples": {"images": data.images, "labels": data.labels}}))
    assert stored.with_round(toy_data({2: 1})).all_of("labels").tolist() == [0, 0, 1, 1, 1, 2]
    assert StoredRounds.unpack(Artefacts()) == StoredRounds()
    with pytest.raises(ValueError, match="num_rounds is None"):
        StoredRounds.unpack(Artefacts({"others": {}}))


def test_a_round_on_the_samples_of_the_last_one_is_stored_once() -> None:
    data, other = toy_data({0: 2}), toy_data({1: 2})
    stored = StoredRounds().with_round(data).with_round(data)
    assert len(stored.rounds) == 1
    assert len(stored.with_round(other).with_round(data).rounds) == 3
