"""What training with DP-SGD has cost: an account per class of one client, kept over rounds and restarts.

The unit is one sample of one client: two data sets are neighbours if one has a sample more. A sample has one class and
so reaches one sub-generator, whatever else is trained; all trainings of that class compose. ``docs/privacy.md`` says
what this promises and what it doesn't.

Abadi et al. 2016, "Deep Learning with Differential Privacy"; Mironov 2017, "Renyi Differential Privacy"; Mironov et al.
2019, "Renyi Differential Privacy of the Sampled Gaussian Mechanism". The arithmetic is opacus', an extra that is
imported where a sub-generator was trained with noise, and nowhere else.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.records import Artefacts, Facts

NOISE = (0.1, 1000.0)
"""Noise multipliers that say something: below, epsilon is in the thousands; above, nothing is learnt."""

DELTA = (1e-15, 0.1)
"""Possible deltas."""

_RATE = (1 / packing.MAX_SAMPLES, 1.0)
_MAX_STEPS = 2**40
_MAX_KINDS = 4096
"""Different trainings of one class: 90 sample rates per power of ten, times the noises that a fleet ever had."""


class Trained(NamedTuple):
    """Steps of the sampled Gaussian mechanism.

    Attributes:
        noise_multiplier: standard deviation of the noise, over the norm that a sample's gradient is clipped to.
        sample_rate: with which each sample took part in a step, independently of others.
        num_steps: how many.
    """

    noise_multiplier: float
    sample_rate: float
    num_steps: int


History: TypeAlias = tuple[Trained, ...]
"""All that one sub-generator went through; it composes, in whatever order."""


def composed(history: History, more: Trained) -> History:
    """Return the history with more steps; equal mechanisms are counted together, so it doesn't grow with rounds."""
    steps = {(one.noise_multiplier, one.sample_rate): one.num_steps for one in history}
    kind = (more.noise_multiplier, more.sample_rate)
    steps[kind] = steps.get(kind, 0) + more.num_steps
    return tuple(Trained(*of, num_steps) for of, num_steps in steps.items() if num_steps)


def joined(history: History, other: History) -> History:
    """Return what two copies of one account tell together: of each mechanism the more steps of both."""
    known = {one[:2]: one.num_steps for one in history}
    for one in other:
        history = composed(history, one._replace(num_steps=max(0, one.num_steps - known.get(one[:2], 0))))
    return history


def require_opacus() -> None:
    """Check that the accountant is installed.

    Raises:
        SettingsError: It isn't; names the extra.
    """
    if importlib.util.find_spec("opacus") is None:
        raise SettingsError("sub-generators with differential privacy need opacus; install replayfleet[dp]")


_ORDERS = (*(1 + n / 10 for n in range(1, 100)), *range(12, 64), *(2**power for power in range(6, 13)))
"""Of Renyi differential privacy: opacus' own, and beyond their last, 63, those that much noise asks for."""


def epsilon_of(history: History, delta: float) -> float:
    """Return epsilon of a history at ``delta``, by Renyi differential privacy; 0 where nothing was trained.

    Raises:
        SettingsError: opacus isn't installed.
    """
    if not history:
        return 0.0
    require_opacus()
    from opacus.accountants.analysis.rdp import get_privacy_spent

    # Mironov 2017, Proposition 1: at each order, what mechanisms cost adds up
    costs = [sum(one.num_steps * _cost_of_a_step(*one[:2])[place] for one in history) for place in range(len(_ORDERS))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best order is the first or the last: a bound all the same
        epsilon, _ = get_privacy_spent(orders=_ORDERS, rdp=costs, delta=delta)
    return max(0.0, float(epsilon))  # the formula goes below 0 for large deltas


@lru_cache(maxsize=4096)
def _cost_of_a_step(noise_multiplier: float, sample_rate: float) -> tuple[float, ...]:
    from opacus.accountants.analysis.rdp import compute_rdp

    costs = compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=_ORDERS)
    return tuple(float(cost) for cost in costs)


@dataclass(frozen=True, slots=True)
class Account:
    """What one client's sub-generators have cost so far, as it says itself.

    Attributes:
        delta: for which ``epsilons`` hold.
        histories: class id -> what its sub-generator went through.
        epsilons: class id -> epsilon of that.
    """

    delta: float
    histories: Mapping[int, History] = field(default_factory=dict)
    epsilons: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, histories: Mapping[int, History], delta: float) -> Account:
        """Return the account of these histories."""
        spent = {class_id: history for class_id, history in sorted(histories.items()) if history}
        return cls(delta, spent, {class_id: epsilon_of(history, delta) for class_id, history in spent.items()})

    @property
    def epsilon(self) -> float:
        """Of the client: the largest of its classes', for a sample is in one of them (parallel composition)."""
        return max(self.epsilons.values(), default=0.0)


def encoded_histories(histories: Mapping[int, History]) -> dict[str, Any]:
    """Return histories as facts."""
    return {str(class_id): [list(one) for one in history] for class_id, history in sorted(histories.items())}


def decoded_histories(raw: Any, name: str) -> dict[int, History]:
    """Return histories again, from facts that may be hostile.

    Raises:
        ValueError: A number is impossible, or there are more than any fleet has.
    """
    return {class_id: _history(listed, f"{name}[{class_id}]") for class_id, listed in _by_class(raw, name).items()}


def _history(raw: Any, name: str) -> History:
    if not isinstance(raw, (list, tuple)) or not 1 <= len(raw) <= _MAX_KINDS:
        raise ValueError(f"{name} is {raw!r:.40}, expected 1 to {_MAX_KINDS} trainings")
    return tuple(_trained(one, name) for one in raw)


def _trained(raw: Any, name: str) -> Trained:
    if not isinstance(raw, (list, tuple)) or len(raw) != 3:
        raise ValueError(f"{name} has {raw!r:.40}, expected noise, sample rate and steps")
    noise, rate, steps = raw
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= _MAX_STEPS:
        raise ValueError(f"{name} has {steps!r:.40} steps, expected a whole number from 1 to {_MAX_STEPS}")
    return Trained(_number(noise, name, *NOISE), _number(rate, name, *_RATE), steps)


def _number(raw: Any, name: str, low: float, high: float) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not low <= raw <= high:
        raise ValueError(f"{name} has {raw!r:.40}, expected a number of {low:g} to {high:g}")
    return float(raw)


def _by_class(raw: Any, name: str) -> dict[int, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"fact {name!r} is {type(raw).__name__}, expected a map from class id")
    for class_id in raw:
        if not (str(class_id).isdecimal() and len(str(class_id)) <= 6):
            raise ValueError(f"fact {name!r} has class id {class_id!r:.40}, expected a non-negative whole number")
    return {int(class_id): value for class_id, value in raw.items()}


@dataclass(frozen=True, slots=True)
class _AccountFact(packing.Fact):
    """An ``Account``, or None, which leaves no fact: without DP-SGD all is as it would be if there were none."""

    def pack(self, value: Any, name: str) -> Artefacts:
        return Artefacts() if value is None else packing.Fact.pack(self, value, name)


def _encoded_account(account: Account) -> dict[str, Any]:
    epsilons = {str(class_id): epsilon for class_id, epsilon in sorted(account.epsilons.items())}
    return {"delta": account.delta, "epsilons": epsilons, "trainings": encoded_histories(account.histories)}


def _decoded_account(raw: Any, name: str) -> Account | None:
    if raw is None:
        return None
    if not isinstance(raw, Mapping) or raw.keys() != {"delta", "epsilons", "trainings"}:
        raise ValueError(f"fact {name!r} is {raw!r:.40}, expected delta, epsilons and trainings")
    histories = decoded_histories(raw["trainings"], name)
    spent = _by_class(raw["epsilons"], name)
    if spent.keys() != histories.keys():
        raise ValueError(f"fact {name!r} has epsilons of classes {sorted(spent)[:8]}, trained were others")
    epsilons = {class_id: _number(value, name, 0.0, sys.float_info.max) for class_id, value in spent.items()}
    return Account(_number(raw["delta"], name, *DELTA), histories, epsilons)


ACCOUNT = _AccountFact("privacy", _decoded_account, _encoded_account)
"""What a client spent, in uploads and downloads."""


def account_among(kind: type[Any], facts: Facts) -> Account | None:
    """Return the account in a packed record's facts, as operators see it; None if it has none."""
    return _decoded_account(facts.get(ACCOUNT.name), ACCOUNT.name) if packing.declares(kind, ACCOUNT) else None
