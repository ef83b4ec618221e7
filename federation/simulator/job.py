"""From the command line's values to a checked simulation, and from its records to files.

``prepare`` checks everything and writes nothing; ``Job.run`` writes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.devices.probing import probe
from replayfleet.export.first_model import initial_parameters
from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.claimed import claimed
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.extensions import DATASETS_GROUP, METHODS_GROUP, MODELS_GROUP, code_of
from replayfleet.federation.methods import ALL_METHODS, METHODS
from replayfleet.federation.methods.kit.placement import device_type, torch_device
from replayfleet.federation.methods.kit.records import Sampler
from replayfleet.federation.methods.steps.memory import kind_of, sampler_of
from replayfleet.federation.paths import RESULT, without_machine
from replayfleet.federation.service.artefact_codec import encode_parameters
from replayfleet.federation.service.fleet.variants import VARIANTS, resolved
from replayfleet.federation.service.words import count_of
from replayfleet.federation.simulator.attacks import Attack
from replayfleet.federation.simulator.charts import accuracy_chart, loss_chart
from replayfleet.federation.simulator.checkpoints import Checkpoints, as_noted_now, holds_rounds, holds_run
from replayfleet.federation.simulator.measures.detection_metrics import require_metric
from replayfleet.federation.simulator.records import LateChange, kept_accuracy, losses
from replayfleet.federation.simulator.result import (
    Part,
    Result,
    commit,
    hardware,
    read_result,
    summary_beside,
    versions,
)
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.settings import method_fields, method_from, settings_of, stream_settings
from replayfleet.federation.simulator.simulation import RoundOutcome, Simulation
from replayfleet.federation.streams.datasets import (
    DATASETS,
    OF_ANY_FILES,
    AnyDataset,
    BoxDataset,
    Dataset,
    default_image_size,
    load_any_dataset,
)
from replayfleet.federation.streams.labelled_images import digest_of
from replayfleet.federation.streams.opening import open_stream
from replayfleet.federation.streams.stream import StreamSettings, plain_settings
from replayfleet.federation.wire.protocol.tensors import digest
from replayfleet.models.build import build_task_model
from replayfleet.models.specs import ARCHITECTURES, plain_task

_CHART = "accuracy.png"
_LOSSES = "losses.png"
_STATE = "state"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A checked run.

    Attributes:
        spec: what was asked for.
        simulation: what to run.
        identity: what defines it, as JSON values.
        compared: other runs on the same stream.
        command: what was typed, `without_machine`.
    """

    spec: RunSpec
    simulation: Simulation
    identity: dict[str, Any]
    compared: list[Result]
    command: list[str]

    @property
    def headline(self) -> str:
        """One line for the operator."""
        identity, stream = self.identity, self.simulation.stream
        size = stream.settings
        overlap = f" with {count_of(size.overlap, 'class')} shared" if size.overlap else ""
        absent = f" ({size.num_absent} absent)" if size.num_absent else ""
        storing = ", clients store real samples" if self.simulation.method.stores_data else ""
        return (
            f"{self.spec.method} on {identity['dataset']}, {size.scenario}{overlap}: "
            f"{count_of(size.num_clients, 'client')}{absent}, {count_of(stream.num_rounds, 'round')}, "
            f"seed {identity['run_seed']}, {identity['sampler']} sampler, --threads {identity['num_threads']}{storing}"
        )

    @property
    def measure(self) -> str:
        """What its accuracies are, for people."""
        return "mAP@0.5" if isinstance(self.simulation.dataset, BoxDataset) else "accuracy"

    def run(self, *, on_round: Callable[[RoundOutcome], None], on_client: Callable[[int, str], None]) -> Result | None:
        """Run all rounds that are left, and write the result and its chart; None if ``minutes`` passed before.

        Raises:
            SettingsError: Another process runs in ``out``, or what it holds can't be resumed.
        """
        with claimed(self.spec.out / _STATE):
            return self._run(on_round, on_client)

    def _run(self, on_round: Callable[[RoundOutcome], None], on_client: Callable[[int, str], None]) -> Result | None:
        started, stream, spec = time.monotonic(), self.simulation.stream, self.spec
        checkpoints = Checkpoints(spec.out / _STATE)
        if spec.resume:  # nothing is removed: the same rounds have the same result, which takes the place of an old one
            checkpoints.begin(self.identity, resume=True)
        else:
            _remove(spec.out, (RESULT, _CHART, _LOSSES))
            checkpoints.begin(self.identity, resume=False)
        if self.simulation.initial is not None:  # also of one that was killed before it had written it
            checkpoints.put(encode_parameters(self.simulation.initial))
        num_before = checkpoints.num_rounds()
        part = Part(
            first_round=num_before,
            hardware=hardware(self.simulation.torch_device),
            versions=versions() | versions([code["package"] for code in self.identity.get("packages", {}).values()]),
            commit=commit(),
            command=[word.encode(errors="backslashreplace").decode() for word in self.command],  # paths need no UTF-8
        )
        parts = checkpoints.noted_parts(part, num_rounds=stream.num_rounds)
        ends = math.inf if spec.minutes is None else started + 60 * spec.minutes
        last_round_s = 0.0

        def note_round(outcome: RoundOutcome) -> None:
            nonlocal last_round_s
            last_round_s = outcome.record.round_s
            on_round(outcome)

        records = self.simulation.run(
            checkpoints=checkpoints,
            on_round=note_round,
            on_client=on_client,
            should_stop=lambda: time.monotonic() + last_round_s > ends,  # the next takes about as long
        )
        if len(records) < stream.num_rounds:
            return None
        last, described = parts[-1], stream.described()
        kept = kept_accuracy(records, LateChange(**described["late_change"])) if "late_change" in described else {}
        try:
            summary = summary_beside(records, self.compared) | kept
        except ValueError as error:  # somebody changed a round
            raise SettingsError(f"{spec.out}: its rounds don't fit ({error}); begin anew with --overwrite") from error
        result = Result(
            run=self.identity,
            stream=described,
            rounds=records,
            summary=summary,
            hardware=last.hardware,
            versions=last.versions,
            commit=last.commit,
            wall_s=time.monotonic() - started + sum(record.round_s for record in records[:num_before]),
            command=last.command,
            label=spec.method,
            parts=parts if len(parts) > 1 else [],
        )
        clients = count_of(stream.settings.num_clients, "client")
        where = {
            "title": f"{self.identity['dataset']}, {stream.settings.scenario}, {clients}",
            "changes": described["changes"],
            "change_name": described["change_name"],
        }
        runs = [result, *self.compared]
        write_atomic(spec.out / _CHART, accuracy_chart([run.curve() for run in runs], measure=self.measure, **where))
        falling = loss_chart([(run.curve().label, losses([run.rounds])) for run in runs], **where)
        if falling is not None:
            write_atomic(spec.out / _LOSSES, falling)
        write_atomic(spec.out / RESULT, result.encode())
        return result


def _remove(out: Path, names: Sequence[str]) -> None:
    try:
        for name in names:
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(f"{error.filename} can't be replaced ({error.strerror}); choose another --out") from error


def prepare(spec: RunSpec, command: Sequence[str] = ()) -> Job:
    """Check everything, read the data set's labels, and return what is ready to run.

    Raises:
        SettingsError: Something can't be done; nothing was written.
    """
    asked, spec = spec, without_variant(spec)
    wanted = wanted_stream(spec)
    _check_out(spec.out, resume=spec.resume, overwrite=spec.overwrite)
    data = load_any_dataset(spec.dataset, data_root=spec.data_root, image_size=spec.image_size, download=spec.download)
    if isinstance(data, Dataset):
        _check_apart(spec.out, data)
    simulation = simulation_of(spec, wanted, data)
    torch_device(spec.torch_device)
    build_task_model(simulation.method.task, device="meta")
    identity = identity_of(spec, simulation)
    if spec.resume:
        Checkpoints(spec.out / _STATE).check_same(identity)
    compared = [read_result(path, identity) for path in spec.compare]
    if sum(other.run["method"] == "centralized" for other in compared) > 1:
        raise SettingsError("--compare: more than one run of centralized; regret is measured against one")
    return Job(
        spec=asked,
        simulation=simulation,
        identity=identity,
        compared=compared,
        command=without_machine(command),
    )


def without_variant(spec: RunSpec) -> RunSpec:
    """Return the same request with a method's name and settings in place of a variant's name."""
    method, settings = resolved(spec.method, spec.preset)
    given = spec.changes()
    overrides = [f"{key}={text}" for key, text in {**settings, **given}.items()]
    return dataclasses.replace(spec, method=method, overrides=tuple(overrides))


def wanted_stream(spec: RunSpec) -> StreamSettings:
    """Return the stream that was asked for, before the data have been looked at.

    Raises:
        SettingsError: The method, the data set or a setting is unknown or out of range.
    """
    ALL_METHODS.named(spec.method, VARIANTS)
    return stream_settings(
        spec.preset,
        spec.dataset,
        default_image_size(spec.dataset) if spec.image_size is None else spec.image_size,
        spec.changes(),
        {
            "scenario": spec.scenario,
            "seed": spec.seed,
            "num_clients": spec.clients,
            "num_rounds": spec.rounds,
            "overlap": spec.overlap,
            "num_absent": spec.absent,
        },
    )


def simulation_of(spec: RunSpec, wanted: StreamSettings, data: AnyDataset) -> Simulation:
    """Return what is to be run; nothing is trained or written yet, and a GPU needn't be there.

    Raises:
        SettingsError: The method refuses a setting, the data don't last, or what measures detectors isn't installed.
    """
    if isinstance(data, BoxDataset):
        require_metric()
    data = _with_model(data, spec.model)
    kind = ALL_METHODS.named(spec.method, VARIANTS)
    if spec.serve is not None and "serve" not in method_fields(kind):
        raise SettingsError(f"--serve {spec.serve}: clients of {spec.method} serve what they download; leave it out")
    method = method_from(kind, data.task, spec.preset, spec.changes())
    can_in_step = can_train_in_step(type(method)) and plain_task(data.task).get("architecture") is None
    if spec.in_step and not can_in_step:
        raise SettingsError(
            f"{spec.method} with {spec.model} can't train in step on {spec.dataset}; without --in-step its clients "
            "train one by one"
        )
    attack = Attack(spec.attack, spec.hostile) if spec.attack else None
    if attack is not None:
        attack.check(method, wanted.num_clients)
    on_gpu = device_type(spec.torch_device) != "cpu"
    in_step = on_gpu if spec.in_step is None else spec.in_step
    workers = spec.workers or (1 if on_gpu else max(1, probe().num_cores // spec.threads))
    stream, data = open_stream(wanted, data)
    return Simulation(
        method=method,
        dataset=data,
        stream=stream,
        run_seed=spec.seed,
        sampler=_sampler(spec.sampler, method, spec.threads),
        num_threads=spec.threads,
        num_workers=workers,
        engine=spec.engine,
        torch_device=spec.torch_device,
        in_step=in_step and can_in_step,
        attack=attack,
        screens=spec.quarantine,
        perturbation=spec.perturb_weights,
        initial=None if spec.initial is None else initial_parameters(spec.initial, method, spec.seed),
    )


def _with_model(data: AnyDataset, architecture: str) -> AnyDataset:
    if architecture == ARCHITECTURES[0]:
        return data
    if isinstance(data, BoxDataset):
        raise SettingsError(f"--model {architecture} classifies images, and those of {data.name} have boxes")
    return dataclasses.replace(data, task=dataclasses.replace(data.task, architecture=architecture))


def can_train_in_step(kind: type[Any] | None) -> bool:
    """Return whether a method's clients can train at the same time as one network (``local_work``)."""
    return bool(getattr(kind, "trains_as_one", hasattr(kind, "local_work")))


def identity_of(spec: RunSpec, simulation: Simulation) -> dict[str, Any]:
    """Return what defines a run, as JSON values: equal identities give equal results.

    Later settings are left out where they change nothing, so that earlier results are still those of the same run.
    """
    identity = {
        "method": spec.method,
        "settings": settings_of(simulation.method),
        "preset": spec.preset,
        "dataset": spec.dataset,
        "task": plain_task(simulation.dataset.task),
        "stream": plain_settings(simulation.stream.settings),
        "run_seed": spec.seed,
        "sampler": spec.sampler,
        "num_threads": spec.threads,
    }
    device = device_type(simulation.torch_device)
    if device != "cpu" or simulation.in_step:  # left out where a run is as runs ever were
        identity |= {"torch_device": device, "in_step": simulation.in_step}
    if simulation.attack is not None:
        identity["attack"] = dataclasses.asdict(simulation.attack)
    if simulation.screens:
        identity["quarantine"] = True
    if simulation.perturbation:
        identity["perturb_weights"] = simulation.perturbation
    if simulation.initial is not None:
        identity["initial"] = digest(encode_parameters(simulation.initial))
    used: list[tuple[str, str, Container[str]]] = [
        (METHODS_GROUP, spec.method, METHODS),
        (DATASETS_GROUP, spec.dataset, DATASETS),
    ]
    used.append((MODELS_GROUP, getattr(simulation.dataset.task, "architecture", ""), ARCHITECTURES))
    packages = {f"{group} {name}": code for group, name, ours in used if (code := code_of(group, name, ours))}
    if packages:
        identity["packages"] = packages
    if spec.dataset in OF_ANY_FILES or spec.dataset not in DATASETS:
        identity["samples"] = digest_of((simulation.dataset.train, simulation.dataset.test))
    return as_noted_now(msgspec.json.decode(msgspec.json.encode(identity)))


def _sampler(name: str, method: Any, num_threads: int) -> Sampler:
    kind = kind_of(method)
    if name == "eager":
        return sampler_of(method)
    if kind is None:
        raise SettingsError(f"{method.name} has no sub-generators that sampler {name!r} could run; leave --sampler out")
    from replayfleet.export.graphs.graph import sub_generator_graph
    from replayfleet.export.running.sampler import onnx_sampler

    if kind.graph_spec is None:
        raise SettingsError(
            f"sampler {name!r} can't run sub-generators of kind {method.sub_generator!r}; take --sampler eager"
        )
    return onnx_sampler(sub_generator_graph(kind.graph_spec), num_threads)


def _check_apart(out: Path, data: Dataset) -> None:
    """Raise SettingsError for a folder that is a class of the data set, or would be: its charts are pictures too."""
    names = getattr(data.train.images, "names", ()) if data.name == "folder" else ()
    folders = [Path(folder) for folder in {name.rpartition("/")[0] for name in names}]
    if any(out.resolve() == folder.resolve() or out.resolve().parent == folder.parent.resolve() for folder in folders):
        raise SettingsError(
            f"out dir {out} lies among the classes of data set {data.name}, and its charts would be pictures of one; "
            "choose another with --out"
        )


def _check_out(out: Path, *, resume: bool, overwrite: bool) -> None:
    is_taken = (out / RESULT).exists() or holds_rounds(out / _STATE)
    is_elses = not (out / _STATE).exists() and any((out / name).exists() for name in (_CHART, _LOSSES))
    if (is_taken or is_elses) and not resume and not overwrite:
        raise SettingsError(
            f"out dir {out} holds an earlier run; continue it with --resume, replace it with --overwrite, "
            "or choose another with --out"
        )
    if resume and not (is_taken or holds_run(out / _STATE)):
        raise SettingsError(f"out dir {out} holds no run to resume; leave --resume out")
