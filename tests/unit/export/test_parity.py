"""The gate that keeps a wrong export from being written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from replayfleet.export.parity import ParityError, check_parity, eager_run, load_parameters
from replayfleet.export.running.artefact import Array
from replayfleet.federation.errors import ArtefactRejected, Reason


def double(x: Array) -> Array:
    return 2 * x


def test_equal_models_agree_exactly():
    assert check_parity("onnx", double, double, (3,)) == 0.0


def test_the_worst_difference_over_all_batches_is_returned():
    worst = check_parity("onnx", lambda x: double(x) + np.float32(len(x) * 1e-6), double, (3,))
    assert worst == pytest.approx(64e-6, rel=0.02)


def test_a_difference_at_one_batch_size_only_is_found():
    with pytest.raises(ParityError, match="onnx differs from the eager model by 1 at batch 2") as caught:
        check_parity("onnx", lambda x: double(x) + (len(x) == 2), double, (3,))
    assert caught.value.worst == pytest.approx(1.0)


def test_nan_and_another_shape_are_differences():
    with pytest.raises(ParityError, match="by nan"):
        check_parity("onnx", lambda x: x * np.float32(np.nan), double, (3,))
    with pytest.raises(ParityError, match="by inf"):
        check_parity("onnx", lambda x: double(x)[:, :1], double, (3,))


def test_a_model_that_answers_with_infinity_agrees_with_nothing():
    """Whatever the export answered was accepted, in another shape too."""
    for candidate in (double, lambda x: double(x)[:, :1]):
        with pytest.raises(ParityError, match="by inf"):
            check_parity("onnx", candidate, lambda x: x + np.float32(np.inf), (3,))


def test_the_eager_model_runs_in_eval_mode():
    module = nn.BatchNorm1d(3).train()
    eager_run(module)(np.ones((2, 3), np.float32))
    assert not module.training
    assert module.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("change", "reason", "expected"),
    [
        ({"weight": None}, Reason.WRONG_LAYOUT, "'weight' is missing"),
        ({"scale": np.ones(1, np.float32)}, Reason.WRONG_LAYOUT, "'scale' has no place in the model"),
        (
            {"bias": np.ones(3, np.float32)},
            Reason.WRONG_LAYOUT,
            r"'bias' is \(3,\) float32, the model needs \(2,\) float32",
        ),
        ({"bias": np.ones(2)}, Reason.WRONG_LAYOUT, "float64"),
        ({"bias": np.array([1, np.inf], np.float32)}, Reason.NOT_FINITE, "'bias' holds NaN or infinity"),
    ],
)
def test_parameters_of_another_model_are_refused_by_name(
    change: dict[str, Array | None], reason: Reason, expected: str
):
    module = nn.Linear(3, 2)
    before = module.bias.detach().clone()
    arrays = {name: value.numpy() for name, value in module.state_dict().items()} | change
    with pytest.raises(ArtefactRejected, match=expected) as caught:
        load_parameters(module, {name: value for name, value in arrays.items() if value is not None})
    assert caught.value.reason is reason
    assert torch.equal(module.bias, before)
