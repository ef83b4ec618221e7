from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from replayfleet.federation.methods import affcl
from replayfleet.federation.methods import affcl_records as aff
from replayfleet.federation.methods.affcl import AFFCL
from replayfleet.federation.methods.affcl_records import FlowModels
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator, split_generator
from replayfleet.federation.methods.kit.task_records import NoState
from replayfleet.federation.methods.steps.modules import shuffled_batches
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.steps.task_model import trainable, trained_parameters
from replayfleet.federation.service.fleet.presets import TASKS, settings_for
from replayfleet.models.flow import ConditionalFlow
from replayfleet.models.resnet_plus import ResNetPlus, build_resnet_plus
from tests.support.toy import TOY, run_rounds, toy_data

SAMPLER = eager_sampler(TOY)
QUICK = AFFCL(
    task=TOY,
    flow_hidden=8,
    local_iterations=2,
    replay_batch_size=8,
    adam_learning_rate=1e-3,
    flow_learning_rate=1e-3,
)


def same(one: Parameters, other: Parameters) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def build_and_load(parameters: Parameters) -> ResNetPlus:
    return trainable(build_resnet_plus(TOY), parameters).eval()


def initial(method: AFFCL = QUICK) -> aff.Download:
    return method.initial_download(seeded_generator(0, 0, "initial"))


def local(method: AFFCL, download: aff.Download, seed: int = 0) -> FlowModels:
    rng = seeded_generator(seed, 0, "a")
    state, upload = method.local_round(NoState(), toy_data({0: 6, 1: 6}), download, rng, sampler=SAMPLER)
    assert state == NoState()
    assert upload.now == {0: 6, 1: 6}
    return upload.models


def test_a_round_leaves_its_download_alone_and_depends_on_its_seed_alone() -> None:
    download = replace(initial(), classes=(0, 2))
    results = [local(QUICK, download, seed) for seed in (0, 0, 1)]
    assert same(download.models.task, initial().models.task)
    assert same(download.models.flow, initial().models.flow)
    assert same(results[0].task, results[1].task)
    assert same(results[0].flow, results[1].flow)
    assert not same(results[0].flow, results[2].flow)
    assert all(torch.isfinite(value).all() for value in results[0].task.values())


def test_without_replay_and_distillation_the_task_model_learns_by_plain_cross_entropy() -> None:
    plain = local(replace(QUICK, replay_weight=0.0, distillation=0.0), replace(initial(), classes=(0, 1, 2))).task
    data = toy_data({0: 6, 1: 6})
    module = trainable(build_resnet_plus(TOY), initial().models.task).to(memory_format=torch.channels_last)
    adam = torch.optim.Adam(module.parameters(), lr=1e-3)
    for batch in shuffled_batches(12, 8, 2, split_generator(seeded_generator(0, 0, "a"))):
        loss = F.cross_entropy(module(data.images[batch]), data.labels[batch])
        adam.zero_grad()
        loss.backward()
        adam.step()
    expected = trained_parameters(module)
    assert all(torch.allclose(plain[name], value, atol=1e-6) for name, value in expected.items())


@pytest.mark.parametrize(
    "change",
    [
        {"replay_weight": 0.0},
        {"distillation": 0.0},
        {"feature_distillation": 0.0},
        {"output_distillation": 0.0},
        {"exploration": 1.0},
        {"replay_layers": "fc2"},
    ],
)
def test_every_setting_of_the_losses_changes_the_task_model(change: dict[str, float | str]) -> None:
    known = replace(initial(), classes=(0, 1, 2))
    loud = replace(QUICK, replay_weight=1.0)
    assert not same(local(loud, known).task, local(replace(loud, **change), known).task)  # type: ignore[arg-type]


def test_the_first_round_has_nothing_to_be_reminded_of() -> None:
    first = local(QUICK, initial())
    assert same(first.task, local(replace(QUICK, distillation=0.0, last_flow_weight=0.0), initial()).task)
    known = replace(initial(), classes=(2, 3))
    assert not same(local(QUICK, known).flow, local(replace(QUICK, last_flow_weight=0.0), known).flow)


def test_both_models_are_averaged_by_samples_for_everybody_whatever_the_order_of_arrival() -> None:
    uploads = {
        "b": aff.Upload(FlowModels({"w": torch.tensor([4.0])}, {"f": torch.tensor([8.0])}), {2: 30}),
        "a": aff.Upload(FlowModels({"w": torch.tensor([0.0])}, {"f": torch.tensor([0.0])}), {0: 10}),
    }
    empty = aff.AggregatorState(("c",), None)
    results = [
        QUICK.aggregate(empty, dict(order), torch.Generator(), sampler=SAMPLER)
        for order in (uploads.items(), reversed(uploads.items()))
    ]
    for state, downloads in results:
        assert sorted(downloads) == ["a", "b", "c"]
        assert downloads["c"] is state.latest
        assert downloads["a"].task_parameters["w"].item() == 3.0
        assert downloads["a"].models.flow["f"].item() == 6.0
        assert downloads["a"].classes == (0, 2)
    state = results[0][0]
    later, _ = QUICK.aggregate(state, {"a": uploads["a"]}, torch.Generator(), sampler=SAMPLER)
    assert later.latest.classes == (0, 2)
    assert QUICK.download_for(state, "late", initial()) is state.latest
    first = initial()
    assert QUICK.download_for(aff.AggregatorState(), "late", first) is first


def test_everything_that_travels_or_is_stored_comes_back_to_the_bit() -> None:
    state, downloads = run_rounds(QUICK, [{"a": {0: 8, 1: 8}}])
    back = aff.AggregatorState.unpack(state.pack())
    assert back.latest is not None
    assert back.clients == ("a",)
    assert back.latest.classes == (0, 1)
    assert same(back.latest.models.flow, downloads["a"].models.flow)
    assert aff.AggregatorState.unpack(aff.AggregatorState().pack()) == aff.AggregatorState()
    upload = aff.Upload(downloads["a"].models, {1: 3})
    sent = aff.Upload.unpack(upload.pack())
    assert (sent.now, sent.num_samples) == ({1: 3}, 3)
    assert same(sent.models.task, upload.models.task)


def test_uploads_of_another_shape_or_with_impossible_counts_are_refused() -> None:
    upload = aff.Upload(initial().models, {0: 3})
    for name, sent in upload.pack().parameter_sets.items():
        layout = QUICK.upload_layout(name)
        assert {key: (value.shape, value.dtype) for key, value in layout.items()} == {
            key: (value.shape, value.dtype) for key, value in sent.items()
        }
    assert QUICK.upload_layout("generator") is None
    QUICK.check_upload(upload)
    for wrong in ({9: 1}, {}):
        with pytest.raises(ValueError, match=r"class|samples"):
            QUICK.check_upload(replace(upload, now=wrong))
    with pytest.raises(ValueError, match="without uploads"):
        QUICK.aggregate(aff.AggregatorState(), {}, torch.Generator(), sampler=SAMPLER)
    with pytest.raises(ValueError, match="replay_layers"):
        AFFCL(task=TOY, replay_layers="all")


def test_the_flow_grows_with_the_images() -> None:
    method = AFFCL(task=TASKS["cifar-10"], **settings_for("affcl", "paper", 32))
    layout = method.upload_layout("flow")
    assert sum(tensor.numel() for tensor in layout.values()) == 17_715_712
    assert settings_for("affcl", "paper", 64) == {"flow_hidden": 2048}


@pytest.mark.learning
def test_replay_keeps_what_the_layers_above_the_features_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a flow that draws what earlier features were, and finds this round's probable: in so few steps none does.

    Features move too, which replay can't stop, so what is judged are the upper layers, on the features as they were.
    """
    keeping = replace(QUICK, local_iterations=30, replay_batch_size=16, replay_weight=1.0)
    rounds = [{"a": {0: 24, 1: 24}}, {"a": {2: 24, 3: 24}}]
    earlier = build_and_load(run_rounds(keeping, rounds[:1])[1]["a"].models.task)
    with torch.no_grad():
        known = {class_id: earlier.features(toy_data({class_id: 24}, 7).images) for class_id in range(4)}
    draw = affcl.draw_features

    def ideal(flow: ConditionalFlow, classes: torch.Tensor, num_classes: int, rng: torch.Generator) -> Any:
        which = torch.randint(24, (len(classes),), generator=rng)
        features = [known[int(class_id)][index] for class_id, index in zip(classes, which, strict=True)]
        return replace(draw(flow, classes, num_classes, rng), features=torch.stack(features))

    def accuracy_above(method: AFFCL) -> float:
        upper = build_and_load(run_rounds(method, rounds)[1]["a"].models.task)
        answers = torch.cat([upper.classify(known[class_id]).argmax(dim=1) == class_id for class_id in (0, 1)])
        return float(answers.float().mean())

    forgotten = accuracy_above(replace(keeping, replay_weight=0.0))
    monkeypatch.setattr(affcl, "draw_features", ideal)
    monkeypatch.setattr(affcl, "mean_density", lambda *_: torch.ones(()))
    kept = accuracy_above(keeping)
    assert kept > 0.7
    assert kept > forgotten + 0.4
