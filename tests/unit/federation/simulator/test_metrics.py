from __future__ import annotations

import pytest

from replayfleet.federation.simulator.measures import metrics


def test_acc_weighs_clients_by_the_samples_they_have_seen():
    acc = metrics.weighted_accuracy({"a": 0.5, "b": 0.8}, {"a": 100, "b": 300})
    assert acc == pytest.approx((100 * 0.5 + 300 * 0.8) / 400)


def test_acc_refuses_clients_that_differ_and_weights_of_zero():
    with pytest.raises(ValueError, match="'b'"):
        metrics.weighted_accuracy({"a": 0.5}, {"b": 1})
    with pytest.raises(ValueError, match="no client has seen"):
        metrics.weighted_accuracy({"a": 0.5}, {"a": 0})


def test_average_accuracy_is_the_mean_over_rounds():
    assert metrics.average_accuracy([0.5, 0.7, 0.9]) == pytest.approx(0.7)


def test_regret_is_positive_where_centralized_is_better():
    assert metrics.average_regret([0.5, 0.6], [0.7, 0.9]) == pytest.approx((0.2 + 0.3) / 2)
    assert metrics.average_regret([0.9], [0.7]) == pytest.approx(-0.2)


def test_regret_of_runs_of_unequal_length_is_refused():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        metrics.average_regret([0.5, 0.6], [0.7])


def test_afm_counts_falls_and_no_rises():
    assert metrics.average_forgetting_measure([0.8, 0.5, 0.9, 0.8]) == pytest.approx((0.3 + 0 + 0.1) / 3)
    assert metrics.average_forgetting_measure([0.8]) == 0


def test_forgetting_is_the_best_earlier_accuracy_minus_the_last():
    history = [{0: 0.9}, {0: 0.4, 1: 0.6}, {0: 0.5, 1: 0.8, 2: 1.0}]
    assert metrics.forgetting(history) == pytest.approx({0: 0.4, 1: -0.2})


def test_the_last_round_itself_is_no_earlier_best():
    assert metrics.forgetting([{0: 0.2}, {0: 0.9}]) == pytest.approx({0: -0.7})


def test_forgetting_notices_a_class_that_was_no_longer_tested():
    with pytest.raises(ValueError, match=r"classes \[1\]"):
        metrics.forgetting([{1: 0.5}, {0: 0.5}])


def test_average_forgetting_takes_the_mean_over_clients_and_classes():
    histories = {"a": [{0: 0.9, 1: 0.5}, {0: 0.5, 1: 0.5}], "b": [{2: 0.8}, {2: 0.2}]}
    assert metrics.average_forgetting(histories) == pytest.approx((0.4 + 0.0 + 0.6) / 3)
    assert metrics.average_forgetting({"a": [{0: 0.9}]}) == 0


@pytest.mark.parametrize(("correct", "total"), [(1, 0), (-1, 2), (3, 2)])
def test_an_impossible_accuracy_is_refused(correct: int, total: int):
    with pytest.raises(ValueError, match="no accuracy"):
        metrics.accuracy(correct, total)


def test_the_update_count_sums_rounds_and_takes_the_mean_over_clients():
    assert metrics.average_update_count({"a": [2, 0, 1], "b": [2, 2, 2]}) == pytest.approx((3 + 6) / 2)
    with pytest.raises(ValueError, match="no"):
        metrics.average_update_count({})


def test_the_spread_over_seeds_is_the_sample_standard_deviation():
    summary = metrics.over_seeds([0.7, 0.8, 0.9])
    assert (summary.mean, summary.spread) == (pytest.approx(0.8), pytest.approx(0.1))
    assert summary.num_seeds == 3


def test_one_seed_has_no_spread_and_no_seed_no_mean():
    assert metrics.over_seeds([0.7]) == metrics.Summary(0.7, None, 1)
    with pytest.raises(ValueError, match="no seeds"):
        metrics.over_seeds([])


def test_forgetting_of_tasks_is_from_the_best_end_of_a_task_to_the_last_one():
    by_task = [{"1": 0.9}, {"1": 0.5, "2": 0.8}, {"1": 0.6, "2": 0.1, "3": 0.7}]
    assert metrics.task_forgetting(by_task) == pytest.approx((0.3 + 0.7) / 2)
    assert metrics.task_forgetting(by_task[:1]) == 0.0
    assert metrics.task_ends(9, [3, 6]) == [2, 5, 8]
    assert metrics.task_ends(2, [3, 6]) == [1]
