"""Every method on a real GPU, where there is one: the CPU's results but for rounding, which two rounds let grow."""

from __future__ import annotations

import pytest
import torch

from replayfleet.federation.methods.kit.placement import CPU, proved_device
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.methods.steps import captured
from replayfleet.federation.methods.steps.sub_generators.grouped_gan import SubGeneratorJob, train_sub_generators
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import GanSchedule, new_sub_generator
from tests.support.method_rounds import VARIANTS, apart, method_named, on_the_cpu, rounds_on, toy_rounds
from tests.support.toy import TOY

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


def test_steps_that_are_recorded_end_where_they_end_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = GanSchedule(
        num_epochs=6, batch_size=4, learning_rate=1e-4, betas=(0.5, 0.9), critic_steps_per_generator_step=2
    )

    def trained() -> Artefacts:
        rng, jobs = torch.Generator().manual_seed(0), []
        for index in range(2):
            start, images = new_sub_generator(TOY, rng), torch.rand(10, *TOY.image_shape, generator=rng)
            jobs.append(SubGeneratorJob(start.on(GPU), images.to(GPU), torch.Generator().manual_seed(index)))
        made = train_sub_generators(TOY, jobs, schedule)
        return on_the_cpu(Artefacts({str(index): one.generator for index, one in enumerate(made)}, {}))

    replays = []
    replay = torch.cuda.CUDAGraph.replay
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(replay(graph)))
        recorded = trained()
    assert len(replays) == (12 - captured.WARM_UPS) + (6 - captured.WARM_UPS) + (9 - captured.WARM_UPS)
    monkeypatch.setattr(captured, "WARM_UPS", 1 << 30)
    assert apart(recorded, trained()) < 1e-2
