"""The golden vector catches a model that isn't the one promised."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from replayfleet.export.running.artefact import Array, check_probe, make_probe, probe_input
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.wire.protocol.messages import Probe

SHAPE = (1, 4, 4)
WEIGHT = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)


def model(x: Array) -> Array:
    return x.reshape(len(x), 16) @ WEIGHT


def probe() -> Probe:
    return make_probe(model, SHAPE, seed=7, batch_size=2, tolerance=1e-3)


def refusal(run: Callable[[Array], Array], golden: Probe) -> str:
    with pytest.raises(ArtefactRejected) as caught:
        check_probe(run, golden, SHAPE, (3,))
    assert caught.value.reason is Reason.PROBE_MISMATCH
    return caught.value.detail


def test_the_input_is_what_the_message_documents():
    expected = np.random.default_rng(7).uniform(-1, 1, (2, *SHAPE)).astype(np.float32)
    found = probe_input(7, 2, SHAPE)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_the_model_that_made_it_passes_to_the_bit_also_after_travelling():
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(probe()), type=Probe)
    assert check_probe(model, travelled, SHAPE, (3,)) == 0.0


def test_rounding_passes_and_another_model_does_not():
    assert 0 < check_probe(lambda x: model(x) + np.float32(5e-4), probe(), SHAPE, (3,)) <= 1e-3
    assert "off the golden vector by" in refusal(lambda x: model(x) + np.float32(2e-3), probe())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_fail_on_both_sides(bad: float):
    refusal(lambda x: model(x) * np.float32(bad), probe())
    refusal(model, msgspec.structs.replace(probe(), logits=(bad,) * 6))
    with pytest.raises(ArtefactRejected, match="not-finite"):
        make_probe(lambda x: model(x) * np.float32(bad), SHAPE, seed=1)


def test_a_tolerance_of_nan_accepts_nothing():
    refusal(model, msgspec.structs.replace(probe(), tolerance=float("nan")))


@pytest.mark.parametrize(
    "change", [{"batch_size": 0}, {"batch_size": 10**9}, {"seed": -1}, {"logits": (0.0,) * 5}, {"batch_size": 3}]
)
def test_a_probe_that_can_not_be_run_is_refused_before_it_costs_memory(change: dict[str, object]):
    refusal(Mock(side_effect=AssertionError("the model was run")), msgspec.structs.replace(probe(), **change))


def test_a_model_with_another_number_of_classes_is_refused():
    assert "expected (2, 3)" in refusal(lambda x: model(x)[:, :2], probe())
