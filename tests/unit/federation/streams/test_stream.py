from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.simulator import SCENARIOS
from replayfleet.federation.streams.stream import Stream, StreamSettings, circulating, gradual

FASHION = (np.tile(np.arange(10), 6000), np.tile(np.arange(10), 1000))
SMALL = (np.tile(np.arange(10), 60), np.tile(np.arange(10), 20))


def stream(
    scenario: str = "circulating",
    *,
    labels: Any = SMALL,
    num_clients: int = 3,
    samples_per_class: int = 6,
    **settings: Any,
):
    wanted = StreamSettings(scenario=scenario, num_clients=num_clients, samples_per_class=samples_per_class, **settings)
    return Stream(wanted, *labels, num_classes=10)


def test_circulating_repeats_all_task_types_in_one_order():
    assert circulating(5, 12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_gradual_replaces_the_earlier_task_type_after_a_fifth_of_the_rounds():
    assert gradual(5, 20) == [0, 1, 0, 1, 2, 1, 2, 1, 2, 3, 2, 3, 4, 3, 4, 3, 4, 0, 4, 0]


@pytest.mark.parametrize("num_rounds", [3, 6, 7, 10, 15, 33, 150])
def test_no_task_type_comes_twice_running(num_rounds: int):
    order = gradual(5, num_rounds)
    assert all(before != after for before, after in itertools.pairwise(order))


def test_the_paper_s_150_rounds_use_every_part_once_in_both_scenarios():
    for scenario in SCENARIOS.values():
        assert np.bincount(scenario.task_types(5, 150)).tolist() == [30] * 5


@pytest.mark.parametrize("scenario", ["gradual", "circulating"])
def test_fashion_mnist_lasts_for_the_paper_s_150_rounds_with_33_test_samples_a_class(scenario: str):
    paper = stream(scenario, labels=FASHION, samples_per_class=200)
    assert paper.num_rounds == paper.settings.num_rounds == 150
    assert len(paper.train_indices(0, 0)) == 400
    assert len(paper.test_indices(0, 0)) == 2 * (1000 // 30)
    assert len(paper.test_indices(0, 149)) == 150 * 2 * 33


@pytest.mark.parametrize("scenario", ["gradual", "circulating"])
def test_cifar_10_has_the_paper_s_120_rounds_though_its_parts_last_for_125(scenario: str):
    labels = (np.tile(np.arange(10), 5000), np.tile(np.arange(10), 1000))
    assert stream(scenario, labels=labels, samples_per_class=200).num_rounds == 120
    assert stream(scenario, labels=labels, samples_per_class=200, num_rounds=125).num_rounds == 125


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_client_never_meets_a_training_sample_twice(scenario: str):
    some = stream(scenario, num_rounds=50)
    met = np.concatenate([some.train_indices(1, index) for index in range(50)])
    assert len(met) == 600
    assert len(np.unique(met)) == len(met)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_round_brings_equally_many_samples_of_each_of_its_classes(scenario: str):
    some = stream(scenario, num_rounds=10)
    for index in (0, 4, 7):
        labels = SMALL[0][some.train_indices(2, index)]
        classes, counts = np.unique(labels, return_counts=True)
        assert tuple(classes) == some.class_ids(2, index)
        assert counts.tolist() == [6, 6]


def test_classes_come_mixed_within_a_round():
    labels = SMALL[0][stream().train_indices(0, 0)]
    assert np.count_nonzero(np.diff(labels)) > 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_test_sets_only_grow_and_cover_exactly_the_classes_met(scenario: str):
    some = stream(scenario)
    before = np.array([], dtype=np.int64)
    met: set[int] = set()
    for index in range(some.num_rounds):
        now = some.test_indices(0, index)
        met |= set(some.class_ids(0, index))
        assert now[: len(before)].tolist() == before.tolist()
        assert len(np.unique(now)) == len(now) == (index + 1) * 2 * 2
        assert set(SMALL[1][now]) == met
        before = now


def test_what_a_client_meets_does_not_depend_on_the_others():
    few, many = stream(num_clients=2), stream(num_clients=9)
    for index in range(5):
        assert few.train_indices(1, index).tolist() == many.train_indices(1, index).tolist()
        assert few.test_indices(1, index).tolist() == many.test_indices(1, index).tolist()


def test_clients_and_seeds_have_task_types_and_samples_of_their_own():
    some, other = stream(), stream(seed=1)
    orders = {tuple(s.class_ids(client, index) for index in range(5)) for s in (some, other) for client in range(3)}
    assert len(orders) == 6
    assert some.train_indices(0, 0).tolist() != some.train_indices(1, 0).tolist()


def test_task_types_divide_the_classes():
    some = stream(num_clients=1)
    classes = [class_id for index in range(5) for class_id in some.class_ids(0, index)]
    assert sorted(classes) == list(range(10))


def test_a_stream_is_the_same_on_every_machine_and_numpy():
    some = stream(num_clients=2)
    drawn = [some.train_indices(client, 7) for client in range(2)] + [some.test_indices(1, 7)]
    digest = hashlib.sha256(np.concatenate(drawn).astype("<i8").tobytes()).hexdigest()
    assert digest == "334a7edc992d1ce7fff601f3dcd0f100653452fd053d0d2b77f9b7dc9c738f17"


@pytest.mark.parametrize("too_many", [51, 10**15])
def test_too_many_rounds_are_refused_with_the_number_that_is_possible(too_many: int):
    with pytest.raises(SettingsError, match=f"lasts for 50 rounds on this data, not for {too_many}"):
        stream(num_rounds=too_many)
    assert stream(num_rounds=50).num_rounds == 50


def test_a_class_with_few_samples_limits_the_rounds():
    labels = np.concatenate([np.tile(np.arange(10), 6), np.tile(np.arange(9), 54)])
    some = stream(labels=(labels, SMALL[1]), num_clients=1)
    assert some.num_rounds < 50
    some.train_indices(0, some.num_rounds - 1)
    with pytest.raises(SettingsError, match=f"lasts for {some.num_rounds} rounds"):
        stream(labels=(labels, SMALL[1]), num_clients=1, num_rounds=some.num_rounds + 1)


def test_of_rounds_that_are_too_many_fewer_are_said_to_last_though_more_would_do_too():
    """13 rounds of ``gradual`` bring one of five task types four times, 15 each three times."""
    given = {"samples_per_class": 20, "test_samples_per_class": 4}
    assert stream("gradual", num_rounds=15, **given).num_rounds == 15
    with pytest.raises(SettingsError, match="lasts for 12 rounds on this data, not for 13; ask for fewer"):
        stream("gradual", num_rounds=13, **given)


def test_a_data_set_smaller_than_one_round_is_refused():
    with pytest.raises(SettingsError, match="lasts for 0 rounds"):
        stream(samples_per_class=61)


def test_a_test_set_too_small_for_its_parts_is_refused():
    with pytest.raises(SettingsError, match="class 0 has 20 test samples for 60 parts"):
        stream(samples_per_class=1)


def test_a_class_that_does_not_last_is_called_by_its_name():
    labels = np.repeat(np.arange(10), [3, *[60] * 9])
    settings = StreamSettings(scenario="gradual", num_clients=2, num_rounds=3, samples_per_class=20)
    with pytest.raises(SettingsError, match="class 'coat' has too few for one"):
        Stream(settings, labels, labels, 10, ("coat", *"bcdefghij"))


def test_more_test_samples_per_round_mean_fewer_rounds():
    assert stream(test_samples_per_class=5).num_rounds == 5 * (20 // 5)
    with pytest.raises(SettingsError, match="lower samples_per_class or test_samples_per_class"):
        stream(test_samples_per_class=5, num_rounds=21)


def test_samples_seen_rise_with_the_rounds():
    assert [stream().num_seen(1, index) for index in range(3)] == [12, 24, 36]


def test_changes_are_where_the_mixture_changes():
    assert stream(num_rounds=12).changes() == [5, 10]
    assert stream("gradual", num_rounds=20).changes() == [4, 8, 12, 16]


def test_extreme_is_one_cycle_of_all_task_types_unless_more_is_asked_for():
    some = stream("extreme")
    assert some.num_rounds == 5
    assert sorted(c for index in range(5) for c in some.class_ids(2, index)) == list(range(10))
    assert some.changes() == []
    longer = stream("extreme", num_rounds=7)
    assert longer.class_ids(0, 5) == some.class_ids(0, 0)
    assert longer.changes() == [5]


@pytest.mark.parametrize(("num_classes", "per_class", "tests"), [(62, 1900, 200), (100, 500, 100)])
def test_expt_3_has_31_rounds_on_emnist_and_50_on_cifar_100(num_classes: int, per_class: int, tests: int):
    labels = [np.tile(np.arange(num_classes), number) for number in (per_class, tests)]
    wanted = StreamSettings(scenario="extreme", num_clients=10, test_samples_per_class=100)
    assert Stream(wanted, *labels, num_classes).num_rounds == num_classes // 2


@pytest.mark.parametrize("num_clients", [5, 10, 20, 30])
def test_fleets_of_the_paper_s_sizes_meet_150_rounds_each(num_clients: int):
    some = stream("gradual", labels=FASHION, samples_per_class=200, num_clients=num_clients)
    assert some.num_rounds == 150
    last = num_clients - 1
    assert len(some.train_indices(last, 149)) == 400
    assert some.num_seen(last, 149) == 60_000
    assert some.present(149) == tuple(range(num_clients))


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("overlap", [1, 2, 4, 6])
def test_neighbouring_task_types_share_as_many_classes_as_asked_for(scenario: str, overlap: int):
    some = stream(scenario, overlap=overlap, num_rounds=5)
    for client in range(3):
        task_types = some._task_types(client)
        assert [len(classes) for classes in task_types] == [2 + overlap] * 5
        for before, after in zip(task_types, [*task_types[1:], task_types[0]], strict=True):
            assert len(set(before) & set(after)) == overlap


@pytest.mark.parametrize(("overlap", "num_rounds"), [(0, 150), (2, 70), (4, 50), (6, 30)])
def test_wider_tasks_make_fewer_rounds(overlap: int, num_rounds: int):
    """T = floor(6000 / (200 (2 + overlap))) 10."""
    some = stream("gradual", labels=FASHION, samples_per_class=200, overlap=overlap)
    assert some.num_rounds == num_rounds
    assert len(some.train_indices(0, 0)) == 200 * (2 + overlap)
    assert some.num_seen(0, 1) == 400 * (2 + overlap)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("overlap", [2, 6])
def test_a_class_of_several_task_types_brings_new_samples_every_time(scenario: str, overlap: int):
    some = stream(scenario, overlap=overlap, num_rounds=10)
    met = np.concatenate([some.train_indices(1, index) for index in range(10)])
    assert len(np.unique(met)) == len(met) == 10 * 6 * (2 + overlap)
    tested = some.test_indices(1, 9)
    assert len(np.unique(tested)) == len(tested) == 10 * 2 * (2 + overlap)


def test_classes_that_no_task_type_has_stay_away_with_overlap_too():
    some = stream(classes_per_task=3, overlap=2, num_rounds=3)
    met = [some.class_ids(0, index) for index in range(3)]
    assert len(set().union(*met)) == 9
    assert all(len(set(one) & set(other)) == 2 for one, other in itertools.combinations(met, 2))


@pytest.mark.parametrize(("overlap", "classes_per_task", "most"), [(7, 2, 6), (1, 5, 0), (-1, 2, "0 or more")])
def test_an_overlap_that_no_ring_has_is_refused(overlap: int, classes_per_task: int, most: object):
    with pytest.raises(SettingsError, match=f"overlap is {overlap}, expected .*{most}"):
        stream(overlap=overlap, classes_per_task=classes_per_task)


def test_absent_clients_are_drawn_anew_in_every_round_but_the_first():
    some = stream(num_clients=10, num_absent=4, num_rounds=20)
    assert some.present(0) == tuple(range(10))
    rounds = [some.present(index) for index in range(1, 20)]
    assert {len(present) for present in rounds} == {6}
    assert len(set(rounds)) > 15
    assert set().union(*rounds) == set(range(10))
    other = stream(num_clients=10, num_absent=4, num_rounds=20, seed=1)
    assert [other.present(index) for index in range(1, 20)] != rounds


def test_the_task_of_a_round_passes_an_absent_client_by():
    all_there, some = (stream(num_absent=number, num_rounds=20) for number in (0, 1))
    for client in range(3):
        present = [index for index in range(20) if client in some.present(index)]
        assert 0 < len(present) < 20
        for index in range(20):
            if index in present:
                assert some.class_ids(client, index) == all_there.class_ids(client, index)
                assert some.train_indices(client, index).tolist() == all_there.train_indices(client, index).tolist()
            else:
                assert some.class_ids(client, index) == ()
                assert some.train_indices(client, index).tolist() == []
                assert some.test_indices(client, index).tolist() == some.test_indices(client, index - 1).tolist()
        assert some.num_seen(client, 19) == 12 * len(present)
        assert len(some.test_indices(client, 19)) == 4 * len(present)


@pytest.mark.parametrize("num_absent", [-1, 3, 4])
def test_a_round_without_clients_is_refused(num_absent: int):
    with pytest.raises(SettingsError, match=f"num_absent is {num_absent}, expected 0 to 2"):
        stream(num_absent=num_absent)


def test_an_unknown_scenario_is_refused_with_the_nearest_name():
    with pytest.raises(SettingsError, match="did you mean 'circulating'"):
        stream("circular")


@pytest.mark.parametrize("name", ["num_clients", "num_rounds", "samples_per_class", "classes_per_task"])
def test_counts_below_one_are_refused(name: str):
    with pytest.raises(SettingsError, match=f"{name} is 0"):
        StreamSettings(**{"scenario": "gradual", "num_clients": 2, name: 0})


def test_gradual_needs_two_task_types():
    with pytest.raises(SettingsError, match="needs 2"):
        stream("gradual", classes_per_task=6)


def test_what_other_tools_import_is_there_and_loads_nothing_before_it_is_asked_for():
    code = (
        "import sys\nimport replayfleet.federation.streams, replayfleet.federation.simulator as simulator\n"
        "assert not {'numpy', 'torch'} & sys.modules.keys()\n"
        "from replayfleet.federation.streams import SCENARIOS\n"
        "assert simulator.SCENARIOS is SCENARIOS and list(SCENARIOS) == ['gradual', 'circulating', 'extreme']\n"
        "found = [getattr(simulator, name) for name in simulator.__all__]\n"
        "assert simulator.average_regret([0.5], [0.75]) == 0.25 and 'torch' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_all_test_samples_are_met_by_the_last_round_where_zero_asks_for_them():
    for scenario in ("gradual", "circulating"):
        some = stream(scenario, test_samples_per_class=0, num_rounds=20)
        assert some.num_rounds == 20
        assert sorted(some.test_indices(0, 19)) == list(range(len(SMALL[1])))
    with pytest.raises(SettingsError, match="say how many with num_rounds"):
        stream(test_samples_per_class=0)
    with pytest.raises(SettingsError, match="scenario driving doesn't know"):
        StreamSettings(scenario="driving", num_clients=2, test_samples_per_class=0)


def test_classes_that_come_with_several_task_types_have_test_samples_for_each():
    some = stream("gradual", test_samples_per_class=0, num_rounds=20, overlap=2)
    met = some.test_indices(0, 19).tolist()
    assert len(met) == len(set(met))
