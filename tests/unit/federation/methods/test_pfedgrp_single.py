"""Ablation AS3 of pFedGRP: one generator of doubled width for all classes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replayfleet.federation.methods.kit.packing import ALL_CLASSES, SubGenerators, same_bits
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.pfedgrp_records import AggregatorState, ClientState, Download, Upload
from replayfleet.federation.methods.steps.memory import kind_of, sampler_of
from replayfleet.federation.methods.steps.replay import draw_labelled_replay
from replayfleet.models.build import build_critic, build_generator
from replayfleet.models.counting import count_parameters
from replayfleet.models.specs import TaskSpec
from tests.support.toy import SHORT_PFEDGRP, TOY, toy_data

SINGLE = PFedGRP(task=TOY, generators="single", **SHORT_PFEDGRP)
SAMPLER = sampler_of(SINGLE)


@pytest.fixture(scope="module")
def first_round() -> tuple[Download, ClientState, Upload]:
    initial = SINGLE.initial_download(seeded_generator(0, 0, "initial"))
    state, upload = SINGLE.local_round(
        ClientState(), toy_data({0: 10, 1: 10}), initial, seeded_generator(0, 0, "a"), sampler=SAMPLER
    )
    return initial, state, upload


def test_the_generator_has_the_papers_size() -> None:
    fashion = TaskSpec(1, 28, tuple("0123456789"), generator_width=16)
    kind = kind_of(PFedGRP(task=fashion, generators="single"))
    assert kind.graph_spec is not None
    pair = build_generator(kind.graph_spec), build_critic(kind.graph_spec)
    assert sum(count_parameters(module) for module in pair) == 536_384


def test_one_generator_travels_under_the_name_all(first_round: tuple[Download, ClientState, Upload]) -> None:
    _, state, upload = first_round
    assert sorted(upload.pack().parameter_sets) == ["sub-generator/all", "task"]
    assert sorted(state.pack().parameter_sets) == ["critic/all", "sub-generator/all"]
    assert upload.seen == {0: 10, 1: 10}
    SINGLE.check_upload(upload)
    layout = SINGLE.upload_layout("sub-generator/all")
    assert {k: t.shape for k, t in layout.items()} == {
        k: t.shape for k, t in upload.sub_generators[ALL_CLASSES].items()
    }
    assert SINGLE.upload_layout("sub-generator/0") is None
    assert replace(SINGLE, generators="per-class").upload_layout("sub-generator/all") is None


def test_it_is_trained_in_every_round_whatever_the_gate_says(
    first_round: tuple[Download, ClientState, Upload],
) -> None:
    initial, state, upload = first_round
    assert upload.num_updates == 1
    relaxed = replace(SINGLE, gate_threshold=0.0)
    later, again = relaxed.local_round(
        state, toy_data({2: 10}, seed=1), initial, seeded_generator(0, 1, "a"), sampler=SAMPLER
    )
    assert again.num_updates == 1
    assert not same_bits(later.sub_generators[ALL_CLASSES].generator, state.sub_generators[ALL_CLASSES].generator)


def test_the_aggregator_replays_it_and_gives_it_back_after_a_lost_disk(
    first_round: tuple[Download, ClientState, Upload],
) -> None:
    _, state, upload = first_round
    aggregated, downloads = SINGLE.aggregate(
        AggregatorState(), {"a": upload}, seeded_generator(0, 0, "aggregator"), sampler=SAMPLER
    )
    download = Download.unpack(downloads["a"].pack())
    kept = ClientState().recovered_from(download.sub_generators, download.seen)
    assert kept.seen == state.seen
    assert same_bits(kept.sub_generators[ALL_CLASSES].generator, state.sub_generators[ALL_CLASSES].generator)
    again = AggregatorState.unpack(aggregated.pack())
    assert same_bits(
        again.clients["a"].sub_generators[ALL_CLASSES], aggregated.clients["a"].sub_generators[ALL_CLASSES]
    )


def test_what_only_the_filter_can_label_needs_the_filter() -> None:
    with pytest.raises(ValueError, match="filter_replay"):
        replace(SINGLE, filter_replay=False)
    with pytest.raises(ValueError, match="warm_start"):
        replace(SINGLE, warm_start=True)


def test_names_of_classes_and_their_keys_are_each_others_inverse() -> None:
    parameters = {"w": torch.zeros(1)}
    part, name = SubGenerators(), "sub-generator/"
    sets = part.pack({ALL_CLASSES: parameters, 3: parameters, 12: parameters}, name).parameter_sets
    assert list(sets) == ["sub-generator/all", "sub-generator/3", "sub-generator/12"]
    assert list(part.unpack(Artefacts(sets), name, None)) == [ALL_CLASSES, 3, 12]
    for stray in ("sub-generator/", "sub-generator/-1", "sub-generator/03", "sub-generator/x", "task", "all", "3"):
        assert part.place(stray, name) is None


def _steps(latents: Tensor) -> Tensor:
    """A generator whose images are constant: 0, 1, 2 or 3, by the first latent."""
    value = (latents[:, 0] * 2).round().clamp(0, 3)
    return value[:, None, None, None].expand(-1, 1, 28, 28)


def _nearest(images: Tensor) -> Tensor:
    """Class c where the image is about c."""
    value = images.mean(dim=(1, 2, 3))
    return -(value[:, None] - torch.arange(4)).abs()


def _draw(counts: dict[int, int], factor: int) -> tuple[Tensor, Tensor, int, int]:
    rng = torch.Generator().manual_seed(0)
    replay = draw_labelled_replay(_steps, counts, _nearest, rng, spec=TOY, max_tries_factor=factor)
    return replay.images.mean(dim=(1, 2, 3)), replay.labels, replay.num_tries, replay.num_filled


def test_the_judge_labels_what_one_generator_draws_until_the_counts_are_met() -> None:
    values, labels, tries, filled = _draw({0: 20, 1: 10, 3: 5}, 50)
    assert labels.bincount().tolist() == [20, 10, 0, 5]
    assert torch.equal(values, labels.float())
    assert filled == 0
    assert 35 < tries <= 35 * 50


def test_when_tries_run_out_the_samples_nearest_to_a_class_fill_it() -> None:
    values, labels, tries, filled = _draw({2: 10, 3: 6}, 2)
    assert tries == 32
    assert labels.bincount().tolist() == [0, 0, 10, 6]
    assert filled == int((values != labels).sum()) > 0
    everything = _steps(torch.randn(32, 100, generator=torch.Generator().manual_seed(0))).mean(dim=(1, 2, 3))
    not_threes = everything[everything < 3].sort(descending=True).values
    assert torch.equal(values[labels == 2], not_threes[:10])  # twos, then ones, then zeros


def test_nothing_wanted_draws_nothing() -> None:
    values, labels, tries, filled = _draw({0: 0}, 3)
    assert (len(values), len(labels), tries, filled) == (0, 0, 0, 0)
