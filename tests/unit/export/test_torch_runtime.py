"""PyTorch as a runtime like the others."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from replayfleet.export.running.runtimes import Runtime
from replayfleet.export.torch_runtime import TorchModel, torchscript_model
from replayfleet.export.torchscript import torchscript_bytes
from replayfleet.federation.errors import ArtefactRejected

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def module() -> nn.Module:
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0).reshape(2, 3))
        layer.bias.zero_()
    return layer


def script(facts: dict[str, str]) -> tuple[bytes, str]:
    data = torchscript_bytes(module(), (3,), facts)
    return data, hashlib.sha256(data).hexdigest()


def test_eager_and_torchscript_are_runtimes_that_agree():
    eager: Runtime = TorchModel(module(), (3,))
    scripted: Runtime = torchscript_model(*script({"input": "[3]"}))
    assert (eager.runs_on, scripted.runs_on) == ("eager", "TorchScript")
    assert eager.input_shape == scripted.input_shape == (3,)
    expected = X @ np.arange(6, dtype=np.float32).reshape(2, 3).T
    np.testing.assert_allclose(eager.run(X), expected, atol=1e-6)
    np.testing.assert_allclose(scripted.run(X), expected, atol=1e-6)


@pytest.mark.parametrize("x", [X.astype(np.float64), X[:, :2], X[0], X[:0]])
def test_a_wrong_batch_is_refused_as_by_onnx_runtime(x: np.ndarray):
    with pytest.raises(ValueError, match=r"expected \(B, 3\) float32 with B >= 1"):
        TorchModel(module(), (3,)).run(x)


def test_what_pytorch_fails_on_is_refused_in_one_line():
    with pytest.raises(ArtefactRejected, match="PyTorch failed on a batch of 2") as caught:
        TorchModel(nn.Linear(4, 2), (3,)).run(X)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("facts", [{}, {"input": "three"}, {"input": "3"}])
def test_a_file_that_doesnt_say_its_input_is_refused(facts: dict[str, str]):
    with pytest.raises(ArtefactRejected, match=r"without the fact replayfleet\.input"):
        torchscript_model(*script(facts))
