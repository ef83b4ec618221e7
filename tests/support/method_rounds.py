"""Two rounds of any method on any torch device, with everything that two clients and an aggregator held in them."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.late import drawn_back
from replayfleet.federation.methods.kit.placement import placed, placed_data
from replayfleet.federation.methods.kit.records import Artefacts, RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.lockstep import together
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.simulator.settings import method_from
from tests.support.toy import TOY, toy_data

QUICK = {
    "local_epochs": 1,
    "local_iterations": 2,
    "batch_size": 6,
    "sub_generator_epochs": 1,
    "first_sub_generator_epochs": 1,
    "gan_batch_size": 6,
    "replay_per_client": 8,
    "aggregation_epochs": 1,
    "gate_samples": 8,
    "max_tries_factor": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "pfedgrp by the median": {"robust": "median"},
    "pfedgrp with Gaussians": {"sub_generator": "pca-mixture"},
    "pfedgrp with DP-SGD": {"dp_noise_multiplier": 1.0},
    "fedgp over DER": {"base": "der"},
}
VARIANTS = [*METHODS, *(name for name in SETTINGS if name not in METHODS)]


def method_named(name: str, task: Any = TOY) -> Any:
    kind = METHODS[name.split()[0]]
    quick = {key: value for key, value in QUICK.items() if key in inspect.signature(kind).parameters}
    changes = {key: str(value) for key, value in (quick | SETTINGS.get(name, {})).items()}
    return method_from(kind, task, "tiny", changes)


def rounds_on(device: torch.device, method: Any, data: list[RoundData], *, in_step: bool = False) -> list[Artefacts]:
    """Return everything that two clients and an aggregator held in two rounds, all of it computed on ``device``.

    In the second one of them is late.
    """
    client, aggregator = (placed(one, device) for one in method.initial_states())
    initial = placed(method.initial_download(seeded_generator(0, 0, "initial")), device)
    clients, downloads = dict.fromkeys("ab", client), dict.fromkeys("ab", initial)
    held: list[Artefacts] = []
    for index in range(2):
        local_round = method.local_work if in_step else method.local_round  # of the same arguments
        made = {
            name: local_round(
                clients[name],
                placed_data(data[2 * index + place], device),
                downloads[name],
                seeded_generator(0, index, name),
                sampler=sampler_of(method),
            )
            for place, name in enumerate(clients)
        }
        made = together(made) if in_step else made
        clients = {name: state for name, (state, _) in made.items()}
        uploads = {name: upload for name, (_, upload) in made.items()}
        uploads["b"] = drawn_back(method, uploads["b"], downloads["b"], index) if index else uploads["b"]
        rng = seeded_generator(0, index, "aggregator")
        aggregator, given = method.aggregate(aggregator, uploads, rng, sampler=sampler_of(method))
        downloads = {name: given[name] for name in clients}
        held += [one.pack() for one in (*clients.values(), *uploads.values(), aggregator, *downloads.values())]
    answers = method.predictor(downloads["a"])(placed_data(data[0], device).images)
    held.append(Artefacts({"answers": {"": answers}}, {}))
    for one in held:
        assert {tensor.device for each in one.parameter_sets.values() for tensor in each.values()} <= {device}
    return held


def on_the_cpu(one: Artefacts) -> Artefacts:
    sets = {name: {key: tensor.cpu() for key, tensor in each.items()} for name, each in one.parameter_sets.items()}
    return Artefacts(sets, one.facts)


def toy_rounds() -> list[RoundData]:
    """Return the data of two clients in two rounds."""
    return [toy_data({c: 6, c + 1: 5}, seed=c) for c in (0, 1, 2, 0)]


def apart(one: Artefacts, other: Artefacts) -> float:
    """Return the largest distance of a parameter set from that of the same name, of the second's length."""
    largest = 0.0
    for name, parameters in other.parameter_sets.items():
        mine = torch.cat([one.parameter_sets[name][key].double().flatten() for key in parameters])
        theirs = torch.cat([tensor.double().flatten() for tensor in parameters.values()])
        largest = max(largest, float((mine - theirs).norm() / theirs.norm().clamp_min(1e-12)))
    return largest
