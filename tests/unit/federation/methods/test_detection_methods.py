"""Which methods learn a detection task, that they do, and that the others say so before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.lockstep import together
from replayfleet.federation.methods.steps.detection_loss import detection_loss
from replayfleet.federation.methods.steps.memory import sampler_of
from tests.support.shapes import SHAPES, shape_pictures

NEEDS_CLASSES = {
    "affcl", "ewc", "fedavg-replay", "fedcil", "fedem", "icarl", "lander", "lwf", "mfcl", "pfedgraph",
    "pfedgraph-replay", "pfedgrp", "pfedgrp-plus", "sdd", "target",
}  # fmt: skip
TINY = replace(SHAPES, width=2, stride=16)
QUICK: dict[str, Any] = {"local_epochs": 8, "batch_size": 3, "learning_rate": 0.03}
SHORT: dict[str, Any] = QUICK | {"local_epochs": 1}
DETECTING = ["fedavg", "fedprox", "centralized"]


@pytest.mark.parametrize("name", sorted(NEEDS_CLASSES))
def test_a_method_that_needs_classes_refuses_boxes_before_anything_runs(name: str):
    with pytest.raises(ValueError, match=f"method '{name}' needs one class for every picture"):
        METHODS[name](task=SHAPES)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - NEEDS_CLASSES))
def test_all_others_take_a_detection_task(name: str):
    method = METHODS[name](task=SHAPES)
    download = method.initial_download(seeded_generator(0, 0, "initial"))
    assert method.upload_layout("task")["head.weight"].shape == (14, 256, 1, 1)
    assert method.predictor(download)(shape_pictures(2).images).shape == (2, *SHAPES.output_shape)


def test_of_boxes_there_is_nothing_to_draw():
    with pytest.raises(ValueError, match="no sub-generators"):
        sampler_of(METHODS["fedavg"](task=SHAPES))({})


def two_rounds(method: Any) -> tuple[Any, list[dict[str, Any]], list[Any]]:
    """Run a method for two rounds with two clients; return (a client's state, uploads by round, downloads by round)."""
    client_state, aggregator_state = method.initial_states()
    initial = method.initial_download(seeded_generator(0, 0, "initial"))
    states: dict[str, Any] = dict.fromkeys("ab", client_state)
    downloads: dict[str, Any] = dict.fromkeys("ab", initial)
    sampler, all_uploads, all_downloads = sampler_of(method), [], [downloads]
    for index in range(2):
        uploads = {}
        for position, client in enumerate("ab"):
            rng, data = seeded_generator(0, index, client), shape_pictures(3 + position, seed=2 * index + position)
            states[client], uploads[client] = method.local_round(
                states[client], data, downloads[client], rng, sampler=sampler
            )
            method.check_upload(uploads[client])
        rng = seeded_generator(0, index, "aggregator")
        aggregator_state, downloads = method.aggregate(aggregator_state, uploads, rng, sampler=sampler)
        all_uploads.append(uploads)
        all_downloads.append(downloads)
    return states["a"], all_uploads, all_downloads


@pytest.mark.parametrize("name", DETECTING)
def test_rounds_of_boxes_run_travel_and_reach_a_lower_loss(name: str):
    method = METHODS[name](task=TINY, **QUICK)
    state, uploads, downloads = two_rounds(method)
    first, last = downloads[0]["a"], method.Download.unpack(downloads[-1]["a"].pack())
    data, judges = shape_pictures(3, seed=2), [method.predictor(one) for one in (first, last)]
    losses = [float(detection_loss(TINY, judge(data.images), data.labels)) for judge in judges]
    assert losses[1] < losses[0]
    again = method.Upload.unpack(uploads[0]["a"].pack())
    assert same_bits(again.task_parameters, uploads[0]["a"].task_parameters)
    assert again.num_samples == 3
    unpacked = method.ClientState.unpack(state.pack())
    assert unpacked.pack().facts == state.pack().facts


def test_centralized_keeps_all_boxes_that_it_met():
    state, _, _ = two_rounds(METHODS["centralized"](task=TINY, **SHORT))
    assert state.all_of("labels").shape == (6, SHAPES.max_boxes, 5)


def test_in_step_with_others_a_detector_is_trained_to_the_bits_of_alone():
    method = METHODS["fedavg"](task=TINY, **SHORT)
    download, sampler = method.initial_download(seeded_generator(0, 0, "initial")), sampler_of(method)
    pictures = {client: shape_pictures(3, seed=seed) for seed, client in enumerate("ab")}

    def arguments(client: str, data: RoundData) -> tuple[Any, ...]:
        return method.initial_states()[0], data, download, seeded_generator(0, 0, client)

    works = {c: method.local_work(*arguments(c, data), sampler=sampler) for c, data in pictures.items()}
    results = together(works)
    for client, data in pictures.items():
        _, upload = method.local_round(*arguments(client, data), sampler=sampler)
        assert same_bits(upload.task_parameters, results[client][1].task_parameters)


def test_a_proximal_term_of_nothing_is_fedavg():
    uploads = [two_rounds(METHODS[n](task=TINY, **SHORT, **extra))[1] for n, extra in PAIR]
    assert same_bits(uploads[0][0]["a"].task_parameters, uploads[1][0]["a"].task_parameters)
    assert torch.isfinite(uploads[0][0]["a"].task_parameters["head.weight"]).all()


PAIR: list[tuple[str, dict[str, Any]]] = [("fedavg", {}), ("fedprox", {"mu": 0.0})]
