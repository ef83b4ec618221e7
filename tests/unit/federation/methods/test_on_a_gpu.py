"""Every method on a real GPU, where there is one: the CPU's results but for rounding, which two rounds let grow."""

from __future__ import annotations

import pytest
import torch

from replayfleet.federation.methods.kit.placement import CPU, proved_device
from tests.support.method_rounds import VARIANTS, apart, method_named, on_the_cpu, rounds_on, toy_rounds

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)
OF_EITHER_SIGN = {"pfedgrp-plus", "pfedgrp with Gaussians"}
"""Methods with principal components, whose sign a library may choose."""


def test_a_gpu_proves_itself() -> None:
    assert proved_device("auto") == (GPU, "")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_method_computes_on_a_gpu_what_it_computes_on_the_cpu(name: str) -> None:
    if "DP-SGD" in name:
        pytest.importorskip("opacus")
    there = [on_the_cpu(one) for one in rounds_on(GPU, method_named(name), toy_rounds())]
    here = rounds_on(CPU, method_named(name), toy_rounds())
    answers = [one[-1].parameter_sets["answers"][""].argmax(dim=1) for one in (there, here)]
    assert float((answers[0] == answers[1]).double().mean()) >= 0.8  # a toy's answers are close to each other
    if name not in OF_EITHER_SIGN:
        assert max(apart(one, other) for one, other in zip(there[:-1], here[:-1], strict=True)) < 0.1
