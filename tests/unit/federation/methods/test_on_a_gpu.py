"""Every method on a real GPU, where there is one: the CPU's results but for rounding, which two rounds let grow."""

from __future__ import annotations

import pytest
import torch

from replayfleet.federation.methods.kit.placement import CPU, proved_device
from tests.support.method_rounds import VARIANTS, method_named, on_the_cpu, rounds_on, toy_rounds

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)


def test_a_gpu_proves_itself() -> None:
    assert proved_device("auto") == (torch.device("cuda"), "")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_method_computes_on_a_gpu_what_it_computes_on_the_cpu(name: str) -> None:
    if "DP-SGD" in name:
        pytest.importorskip("opacus")
    there = [on_the_cpu(one) for one in rounds_on(GPU, method_named(name), toy_rounds())]
    here = rounds_on(CPU, method_named(name), toy_rounds())
    for one, other in zip(there, here, strict=True):
        assert one.parameter_sets.keys() == other.parameter_sets.keys()
        for each, of_cpu in zip(one.parameter_sets.values(), other.parameter_sets.values(), strict=True):
            for key, tensor in of_cpu.items():
                assert torch.allclose(each[key].double(), tensor.double(), rtol=0.05, atol=0.05), key
