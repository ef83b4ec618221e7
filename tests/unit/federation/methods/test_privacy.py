"""Accounts of privacy; what they say as facts needs no opacus, what epsilon is does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit import privacy
from replayfleet.federation.methods.kit.privacy import ACCOUNT, Account, Trained, composed, epsilon_of, joined
from replayfleet.federation.methods.kit.records import Artefacts

ONCE = Trained(1.0, 0.1, 100)
ACCOUNTED = Account(1e-5, {3: (ONCE, Trained(2.0, 1.0, 5))}, {3: 4.5})


def test_equal_mechanisms_are_counted_together_and_others_stand_beside_them() -> None:
    history = composed(composed(composed((), ONCE), Trained(1.0, 0.2, 10)), ONCE)
    assert history == (Trained(1.0, 0.1, 200), Trained(1.0, 0.2, 10))
    assert composed(history, Trained(3.0, 0.1, 0)) == history


def test_of_two_copies_of_an_account_each_mechanism_counts_as_the_later_one_says() -> None:
    early, late = (ONCE, Trained(2.0, 1.0, 5)), (Trained(1.0, 0.1, 300), Trained(3.0, 1.0, 2), Trained(2.0, 1.0, 4))
    assert set(joined(early, late)) == {Trained(1.0, 0.1, 300), Trained(2.0, 1.0, 5), Trained(3.0, 1.0, 2)}
    assert joined((), early) == joined(early, ()) == joined(early, early) == early


def test_nothing_trained_cost_nothing() -> None:
    assert epsilon_of((), 1e-5) == 0.0
    assert Account.of({1: ()}, 1e-5) == Account(1e-5)
    assert Account(1e-5).epsilon == 0.0


def test_a_client_has_spent_what_its_dearest_class_did() -> None:
    assert Account(1e-5, {}, {0: 1.5, 4: 3.25, 7: 0.5}).epsilon == 3.25


def test_full_batches_cost_what_the_gaussian_mechanism_costs() -> None:
    sigma, steps, delta = 20.0, 50, 1e-5
    # RDP of T Gaussian mechanisms is T a / (2 s^2) (Mironov 2017, Corollary 3); to (epsilon, delta) by Balle et al.
    # 2020, Theorem 21
    orders = [1 + n / 1000 for n in range(1, 200_000)]
    expected = min(
        steps * a / (2 * sigma**2) + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in orders
    )
    assert epsilon_of((Trained(sigma, 1.0, steps),), delta) == pytest.approx(expected, rel=5e-3)


def test_another_accountant_finds_a_little_less() -> None:
    from opacus.accountants import PRVAccountant

    other = PRVAccountant()
    other.history = [(1.5, 0.1, 300), (2.0, 0.2, 100)]
    exact = other.get_epsilon(1e-5)
    ours = epsilon_of((Trained(1.5, 0.1, 300), Trained(2.0, 0.2, 100)), 1e-5)
    assert exact < ours < 1.2 * exact


def test_more_steps_cost_more_and_more_noise_less() -> None:
    base = epsilon_of((ONCE,), 1e-5)
    assert epsilon_of((ONCE._replace(num_steps=200),), 1e-5) > base
    assert epsilon_of((ONCE, Trained(1.0, 0.2, 10)), 1e-5) > base
    assert epsilon_of((ONCE._replace(noise_multiplier=2.0),), 1e-5) < base
    assert epsilon_of((ONCE._replace(sample_rate=0.05),), 1e-5) < base


def test_much_noise_is_told_without_a_warning() -> None:
    assert 0 < epsilon_of((Trained(500.0, 0.01, 10),), 1e-5) < 0.1


def test_a_missing_accountant_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"install replayfleet\[dp\]"):
        epsilon_of((Trained(1.25, 0.125, 77),), 1e-5)


def test_an_account_is_read_again_as_it_was_written() -> None:
    packed = ACCOUNT.pack(ACCOUNTED, "privacy")
    assert packed.facts == {
        "privacy": {"delta": 1e-5, "epsilons": {"3": 4.5}, "trainings": {"3": [[1.0, 0.1, 100], [2.0, 1.0, 5]]}}
    }
    assert ACCOUNT.unpack(packed, "privacy", None) == ACCOUNTED


def test_no_account_leaves_no_fact() -> None:
    assert ACCOUNT.pack(None, "privacy") == Artefacts()
    assert ACCOUNT.unpack(Artefacts(), "privacy", None) is None


def changed(**parts: Any) -> dict[str, Any]:
    return {"delta": 1e-5, "epsilons": {"3": 4.5}, "trainings": {"3": [[1.0, 0.1, 100]]}} | parts


HUGE = 10**400


@pytest.mark.parametrize(
    "raw",
    [
        [],
        "much",
        {},
        changed(more=1),
        changed(delta=0.0),
        changed(delta=math.nan),
        changed(delta="1e-5"),
        changed(delta=0.5),
        changed(epsilons={}),
        changed(epsilons=[4.5]),
        changed(epsilons={"3": -1.0}),
        changed(epsilons={"3": math.inf}),
        changed(epsilons={"3": math.nan}),
        changed(epsilons={"3": HUGE}),
        changed(epsilons={"3": True}),
        changed(epsilons={"3": 4.5, "4": 1.0}),
        changed(epsilons={"three": 4.5}, trainings={"three": [[1.0, 0.1, 100]]}),
        changed(epsilons={"-3": 4.5}, trainings={"-3": [[1.0, 0.1, 100]]}),
        changed(epsilons={"3" * 9: 4.5}, trainings={"3" * 9: [[1.0, 0.1, 100]]}),
        changed(trainings={"3": []}),
        changed(trainings={"3": {}}),
        changed(trainings={"3": [[1.0, 0.1]]}),
        changed(trainings={"3": [1.0]}),
        changed(trainings={"3": ["abc"]}),
        changed(trainings={"3": [[0.0, 0.1, 100]]}),
        changed(trainings={"3": [[1e-300, 0.1, 100]]}),
        changed(trainings={"3": [[math.nan, 0.1, 100]]}),
        changed(trainings={"3": [[1.0, 0.0, 100]]}),
        changed(trainings={"3": [[1.0, 1.5, 100]]}),
        changed(trainings={"3": [[1.0, 1e-300, 100]]}),
        changed(trainings={"3": [[1.0, 0.1, 0]]}),
        changed(trainings={"3": [[1.0, 0.1, 1.5]]}),
        changed(trainings={"3": [[1.0, 0.1, HUGE]]}),
        changed(trainings={"3": [[1.0, 0.1, True]]}),
        changed(trainings={"3": [[1.0, 0.1, 1]] * 5000}),
    ],
)
def test_an_impossible_account_is_refused_in_one_short_line(raw: Any) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - what they say differs
        ACCOUNT.unpack(Artefacts(facts={"privacy": raw}), "privacy", None)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_the_largest_numbers_that_are_taken_have_an_epsilon() -> None:
    worst = Trained(privacy.NOISE[0], 1.0, 2**40)
    least = Trained(privacy.NOISE[1], 2.0**-40, 1)
    assert math.isfinite(epsilon_of((worst,), privacy.DELTA[0]))
    assert epsilon_of((least,), privacy.DELTA[1]) >= 0
