r"""The driving demo's detectors without its clock: as many boxes found, round by round, whatever the machine.

    python -m replayfleet.scripts.experiments.demo_boxes --data-root DATA --out runs/demo-boxes.json
    python -m replayfleet.scripts.experiments.demo_boxes --data-root DATA --out runs/at-once.json --at-once

Two vehicles, the towns, their orders, the pictures of each round, those held out, the task and the method are those of
``make demo-carla`` (``scripts.carla.plan``); rounds follow one another as fast as they are trained, in one process. In
the demo a round has what came until it began, which is this when training keeps up. ``--at-once`` trains a single
detector on all pictures of all towns together: a bound for what the fleet could find.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Picture, Samples
from replayfleet.edge_client.frames.views import Detector
from replayfleet.edge_client.learning.quality import boxes_found
from replayfleet.export.first_model import initial_parameters
from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.beginning import first_download
from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.methods.steps.task_model import Optimisation, judge_with, train_task_model
from replayfleet.federation.paths import ANY_PATH, NEW_FILE
from replayfleet.federation.service.command import run_command
from replayfleet.federation.service.fleet.spec import make_spec, method_of
from replayfleet.federation.service.settings import split_overrides
from replayfleet.federation.simulator.measures.detection_metrics import evaluate_detector
from replayfleet.federation.simulator.result import hardware, versions
from replayfleet.federation.streams.box_labels import box_labels
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import DetectionSpec
from replayfleet.scripts.carla.plan import FULL, VEHICLES, Plan, Work
from replayfleet.scripts.carla.quality import EVERYWHERE
from replayfleet.scripts.carla.roads import RecordedRoads, Scene, find_recording, thin


def samples(scenes: list[Scene], task: DetectionSpec) -> Samples:
    """Return scenes as the detector sees them, with their boxes."""
    view = Detector(task)
    pictures = [Picture("front", place, scene.pixels, 0.0, scene.boxes) for place, scene in enumerate(scenes)]
    labels = [
        box_labels(scene.boxes.corners, scene.boxes.class_ids, picture.size, task.max_boxes)
        for scene, picture in zip(scenes, pictures, strict=True)
    ]
    return Samples(np.concatenate([view.inputs(picture).images for picture in pictures]), np.stack(labels))


def drive(plan: Plan, work: Work, overrides: dict[str, str], first: Path | None) -> dict[str, Any]:
    """Run all rounds; return boxes found by round, and mAP at the end, in percent.

    Boxes are those of the held-out pictures of the towns that a vehicle has reached, and under ``EVERYWHERE`` those of
    all towns: these stay the same from round to round.
    """
    (task, learned, held_out), size = towns_of(plan, work), plan.size
    method, settings = _method(plan, work, task, overrides)
    given = None if first is None else initial_parameters(first, method, plan.seed)
    sampler, (state, aggregator) = sampler_of(method), method.initial_states()
    states, downloads = (dict.fromkeys(VEHICLES, each) for each in (state, first_download(method, plan.seed, given)))
    towns = {name: plan.drive(work, index).towns for index, name in enumerate(VEHICLES)}
    rounds = []
    for number in range(size.num_rounds):
        place, part = divmod(number, size.rounds_per_town)
        uploads = {}
        for name in VEHICLES:
            whole = learned[towns[name][place]]
            chosen = np.array_split(np.arange(len(whole)), size.rounds_per_town)[part]
            data = RoundData(torch.from_numpy(whole.images[chosen]), torch.from_numpy(whole.labels[chosen]))
            rng = seeded_generator(plan.seed, number, name)
            states[name], uploads[name] = method.local_round(states[name], data, downloads[name], rng, sampler=sampler)
        rng = seeded_generator(plan.seed, number, "aggregator")
        aggregator, downloads = method.aggregate(aggregator, uploads, rng, sampler=sampler)
        met = {name: [held_out[town] for town in towns[name][: place + 1]] for name in VEHICLES}
        found = {name: _found(task, downloads[name].task_parameters, met[name]) for name in VEHICLES}
        found[EVERYWHERE] = _found(task, downloads[VEHICLES[0]].task_parameters, list(held_out.values()))
        rounds.append(found)
        print(f"round {number}: " + ", ".join(f"{name} {value:.1f} %" for name, value in found.items()), flush=True)
    return {
        "boxes_found": rounds,
        "map50": _map50(task, downloads[VEHICLES[0]].task_parameters, list(held_out.values())),
        "settings": settings,
    }


def at_once(plan: Plan, work: Work, overrides: dict[str, str]) -> dict[str, Any]:
    """Train a detector on all towns' pictures; return boxes found by town and mAP, in percent, held out."""
    task, learned, held_out = towns_of(plan, work)
    method, settings = _method(plan, work, task, overrides)
    whole, rng = _joined(list(learned.values())), torch.Generator().manual_seed(plan.seed)
    start = initialise(build_task_model(task), rng).state_dict()
    images, labels = torch.from_numpy(whole.images), torch.from_numpy(whole.labels)
    parameters = train_task_model(task, start, images, labels, Optimisation.of(method), rng)
    tests = {town: [each] for town, each in held_out.items()} | {EVERYWHERE: list(held_out.values())}
    found = {place: _found(task, parameters, each) for place, each in tests.items()}
    return {
        "boxes_found": found,
        "boxes_found_in_training": _found(task, parameters, [whole]),
        "map50": _map50(task, parameters, list(held_out.values())),
        "settings": settings,
    }


def towns_of(plan: Plan, work: Work) -> tuple[DetectionSpec, dict[str, Samples], dict[str, Samples]]:
    """Return the task, and by town the pictures that are learned from and those held out."""
    task, roads = plan.detector_task(work), plan.roads
    assert isinstance(roads, RecordedRoads)
    learned, held_out = (
        {town: samples(list(scenes(town)), task) for town in roads.towns} for scenes in (roads.learned, roads.held_out)
    )
    return task, learned, held_out


def _method(plan: Plan, work: Work, task: DetectionSpec, overrides: dict[str, str]) -> tuple[Any, dict[str, object]]:
    """Return the method, and the settings that make it one."""
    settings: dict[str, object] = {**{key: str(value) for key, value in work.overrides.items()}, **overrides}
    spec = make_spec("demo", work.method, task, preset=work.preset, overrides=settings, run_seed=plan.seed)
    return method_of(spec), settings


def _found(task: DetectionSpec, parameters: Parameters, tests: list[Samples]) -> float:
    judge = judge_with(task, parameters)

    def answer(images: NDArray[np.float32]) -> NDArray[np.float32]:
        outputs: NDArray[np.float32] = judge(torch.from_numpy(images)).numpy()
        return outputs

    return 100 * boxes_found(answer, _joined(tests), task)


def _map50(task: DetectionSpec, parameters: Parameters, tests: list[Samples]) -> float:
    whole, judge = _joined(tests), judge_with(task, parameters)
    return 100 * evaluate_detector(task, judge, torch.from_numpy(whole.images), torch.from_numpy(whole.labels)).map50


def _joined(parts: list[Samples]) -> Samples:
    return Samples(np.concatenate([part.images for part in parts]), np.concatenate([part.labels for part in parts]))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--data-root", type=ANY_PATH, required=True, help="Folder that holds carla/.")
@click.option("--out", type=NEW_FILE, required=True, help="JSON file to write.")
@click.option("--initial", type=ANY_PATH, help="Detector to begin with, as `aggregator serve --initial` takes it.")
@click.option("--at-once", is_flag=True, help="One detector, from all towns' pictures together.")
@click.option("--set", "overrides", multiple=True, help="A setting on top of the demo's, key=value.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of models and training.")
def demo_boxes(**options: Any) -> None:
    """Train the demo's detectors on its roads without waiting for them."""
    given = SimpleNamespace(**options)
    torch.set_num_threads(1)
    recording = find_recording(given.data_root, None)
    if recording is None:
        raise SettingsError(f"{given.data_root} holds no recorded driving")
    (work,) = (work for work in FULL.works if work.detector is not None)
    overrides = split_overrides(given.overrides)
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder)
        roads = thin(recording, into / "roads", num_towns=FULL.num_towns, frames_per_town=FULL.frames_per_town)
        plan = Plan(out=into, size=FULL, roads=roads, seed=given.seed)
        result = at_once(plan, work, overrides) if given.at_once else drive(plan, work, overrides, given.initial)
    more = {"seed": given.seed, "cpu_s": time.process_time(), "hardware": hardware(), "versions": versions()}
    write_atomic(given.out, msgspec.json.format(msgspec.json.encode({**result, **more}), indent=1) + b"\n")
    print(f"written to {given.out}: mAP@0.5 {result['map50']:.1f} % on all held-out pictures")


if __name__ == "__main__":
    run_command(demo_boxes, "demo-boxes")
