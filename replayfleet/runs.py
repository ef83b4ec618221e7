"""Runs and what they learned, for programs of others: simulate one, or open what a simulation or a fleet left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from replayfleet.export.parameters import Model
from replayfleet.export.running.artefact import Array
from replayfleet.federation.errors import UNREADABLE, SettingsError, nearest
from replayfleet.federation.paths import given_path
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec, TaskSpec

if TYPE_CHECKING:
    from torch import nn

    from replayfleet.federation.simulator.result import Result
    from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec, Manifest

_SUB_GENERATOR = "sub-generator/"
_TASK = "task"
_TRACES = {
    "state/round-*.json": "state/run.json",
    "result.json": "state/run.json",
    "aggregator.sqlite": "fleet.json",
    "state/held": "fleet.json",
}
"""What only a run leaves -> the file that says which one it is."""
_Sets: TypeAlias = Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk.

    Attributes:
        path: its folder.
        kind: who left it.
        method: what learns, for example ``pfedgrp``.
        settings: of the method, without those that came later and change nothing.
        task: what is learned: classes, image size, channels.
        clients: whose models are here.
        num_rounds: that are complete.
        results: everything that a finished simulation measured, as in ``result.json``; None otherwise.
    """

    path: Path
    kind: Literal["simulation", "aggregator", "client"]
    method: str
    settings: Mapping[str, Any]
    task: AnyTaskSpec
    clients: tuple[str, ...]
    num_rounds: int
    results: Result | None
    _sets: Callable[[str], _Sets]

    def task_model(self, client: str | int | None = None) -> Model:
        """Return the model that a client serves after the last complete round.

        Args:
            client: name, or number in a simulation; may be left out where there is only one.

        Raises:
            SettingsError: There is no such client, or it has no model yet.
        """
        kind = "detector" if isinstance(self.task, DetectionSpec) else "task"
        with _refusing_damage(self.path):
            return Model(kind, self.task, self._sets(self._client(client))[_TASK])

    def sub_generators(self, client: str | int | None = None) -> dict[str, Model]:
        """Return the sub-generators that a client has, by the class that each draws; ``all`` draws every class.

        Raises:
            SettingsError: There is no such client, or they are of another kind than WGAN-GP, not read from runs.
        """
        if (kind := self.settings.get("sub_generator", "wgan-gp")) != "wgan-gp":
            raise SettingsError(
                f"{self.path}: its sub-generators are of the kind {kind}; only wgan-gp is read from runs"
            )
        models = {}
        with _refusing_damage(self.path):
            for name, parameters in self._sets(self._client(client)).items():
                if name.startswith(_SUB_GENERATOR):
                    drawn = name.removeprefix(_SUB_GENERATOR)
                    label = self.task.class_names[int(drawn)] if drawn.isdecimal() else drawn
                    models[label] = Model("sub-generator", self.task, parameters)
        return models

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another process as its folder, which is opened anew there."""
        return open_run, (self.path,)

    def _client(self, asked: str | int | None) -> str:
        if asked is None and len(self.clients) == 1:
            return self.clients[0]
        if not self.clients:
            raise SettingsError(f"{self.path} holds no client's model yet")
        if asked is None:
            raise SettingsError(f"{self.path} has several clients, name one of {', '.join(self.clients)}")
        for name in (str(asked), f"client-{asked}"):
            if name in self.clients:
                return name
        raise SettingsError(f"{self.path} has no client {str(asked)!r}{nearest(str(asked), self.clients)}")


def simulate(
    method: str,
    *,
    out: Path | str,
    dataset: str = "fashion-mnist",
    scenario: str = "circulating",
    settings: str = "small",
    set: Mapping[str, Any] | None = None,
    on_round: Callable[[Any], None] = lambda _: None,
    **more: Any,
) -> Run:
    """Run a method over a stream, all clients in this process, as ``fleet-sim`` does; equal arguments, equal bits.

    What this process set in PyTorch (threads, default dtype and device, denormals) doesn't count, and stays as it was.

    Args:
        method: a name that ``fleet-sim --list`` shows.
        out: folder for results and models; it may not hold a run yet.
        dataset: what images there are.
        scenario: what comes when.
        settings: preset of the stream's size and of the method.
        set: single settings on top, for example ``{"local_epochs": 1}``.
        on_round: called with each round's measurements (``RoundOutcome``).
        more: any other field of ``replayfleet.federation.simulator.run_spec.RunSpec``: clients, rounds, seed,
            data_root, workers, compare, resume, ...

    Raises:
        SettingsError: Something can't be done; nothing was written.
    """
    from replayfleet.federation.service.torch_setup import let_idle_threads_sleep, torch_as_it_comes

    let_idle_threads_sleep()
    from replayfleet.federation.service.settings import settings_of
    from replayfleet.federation.simulator.job import prepare
    from replayfleet.federation.simulator.run_spec import RunSpec

    if not isinstance(set or {}, Mapping):
        raise SettingsError(f"set is a {type(set).__name__}, expected settings by name")
    if not isinstance(settings, str):  # else the error names preset, as it is called further in
        raise SettingsError(f"settings is {settings!r:.80}, expected a preset's name")
    if not callable(on_round):
        raise SettingsError(f"on_round is {on_round!r:.80}, expected what is called with each round's measurements")
    overrides = tuple(f"{key}={_written(value)}" for key, value in (set or {}).items())
    out, ours = _path("out", out), {"preset", "overrides"}  # settings and set, here
    known = [field.name for field in dataclasses.fields(RunSpec) if field.name not in ours]
    for name in more:
        if name not in known:
            raise SettingsError(f"simulate has no argument {name!r}{nearest(name, known)}")
    more |= {"method": method, "dataset": dataset, "scenario": scenario, "preset": settings}
    more = {  # NumPy's numbers and texts are Python's
        name: one.item() if isinstance(one, (Real, str)) and hasattr(one, "item") else one for name, one in more.items()
    }
    more |= {name: _path(name, more[name]) for name in ("data_root", "initial") if more.get(name) is not None}
    compared = more.get("compare", ())
    several = [compared] if isinstance(compared, (str, os.PathLike)) else compared
    if not isinstance(several, Iterable):
        raise SettingsError(f"compare is a {type(several).__name__}, expected paths of other runs")
    more["compare"] = tuple(_path("compare", one) for one in several)
    spec = RunSpec(out=out, overrides=overrides, **more)
    with _arguments_named(one.flag for one in settings_of(RunSpec).values()):
        spec.check()
        with torch_as_it_comes():
            prepare(spec, spec.command()).run(on_round=on_round, on_client=lambda *_: None)
    return open_run(out)


def open_run(path: Path | str) -> Run:
    """Open what a simulation, an aggregator or a client left in a folder, also while it runs; nothing is changed there.

    Args:
        path: ``--out`` of ``fleet-sim``, or ``--data-dir`` of ``aggregator`` or ``edge-client`` (or the folder that has
            them as ``aggregator`` and ``client``, as the packaged units do).

    Raises:
        SettingsError: It is none of these, or is damaged.
    """
    path = _path("path", path).absolute()  # models are read later, where the program may have gone elsewhere
    if path.is_file():
        raise SettingsError(f"{path} is a file, expected the folder of a run: --out of fleet-sim, or a --data-dir")
    with _refusing_damage(path):
        if (path / "state" / "run.json").is_file():
            return _simulation(path)
        for folder in (path, path / "aggregator", path / "client"):
            role = _role(folder)
            if role == "aggregator":
                return _aggregator(folder)
            if role == "client":
                return _client(folder)
    for trace, file in _TRACES.items():
        if any(path.glob(trace)):
            raise SettingsError(f"{path / file} is missing, and says what run this is; copy its folder whole")
    raise SettingsError(f"{path} holds no run; expected --out of fleet-sim, or --data-dir of aggregator or edge-client")


def _written(value: Any) -> str:
    """Return a setting as ``--set`` takes it."""
    if isinstance(value, (list, tuple, dict)):
        return msgspec.json.encode(value, enc_hook=str).decode()
    return "null" if value is None else str(value)


def _path(name: str, value: Any) -> Path:
    try:
        return given_path(os.fspath(value))
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{name}: {error}") from error


def export_model(model: Model, out: Path | str, *, format: str = "onnx", threads: int = 2) -> tuple[Path, ...]:
    """Export a model as ``model-export`` does, and return the files; nothing is written unless they agree with it.

    Args:
        model: of a run.
        out: a folder, or a file.
        format: ``onnx`` or ``torchscript``; those that round are judged on samples, which ``model-export`` takes.
        threads: of the comparison.

    Raises:
        ArtefactRejected: The parameters don't fit, or the exported model answers otherwise.
        SettingsError: Another format, or a file can't be there.
    """
    from replayfleet.export.formats import chosen_format
    from replayfleet.export.job import Request, run_export
    from replayfleet.export.subject import Architecture
    from replayfleet.federation.service.torch_setup import torch_as_it_comes

    with _arguments_named(("--format", "--out")), torch_as_it_comes():
        row = chosen_format(format, None)
        if row.max_loss_points is not None:
            raise SettingsError(f"format {format!r} rounds, and is judged on samples; model-export takes them")
        if threads < 1:
            raise SettingsError(f"threads is {threads}, expected at least 1")
        request = Request(Architecture(model.kind, model.spec), row, _path("out", out), threads)
        return tuple(path for path, _, _ in run_export(request, model.parameters).files)


def as_network(model: Model) -> nn.Module:
    """Return a model as a PyTorch network in eval mode, of float32 on the CPU.

    Raises:
        ArtefactRejected: The parameters don't fit, or aren't finite.
    """
    from replayfleet.export.parity import load_parameters
    from replayfleet.federation.service.torch_setup import torch_as_it_comes
    from replayfleet.models.build import build_generator, build_task_model

    is_generator = model.kind == "sub-generator" and isinstance(model.spec, TaskSpec)
    with torch_as_it_comes():
        module = build_generator(model.spec) if is_generator else build_task_model(model.spec)  # type: ignore[arg-type]
        load_parameters(module, model.parameters)
    return module.eval()


def stored_model(path: Path, client: str | None, kind: str, class_: str | None) -> Model:
    """Return what ``model-export --from`` names.

    Raises:
        SettingsError: There is no such model.
    """
    run = open_run(path)
    if kind != "sub-generator":
        return run.task_model(client)
    found = run.sub_generators(client)
    names, wanted = run.task.class_names, class_
    if class_ is not None and class_ not in names and class_.isdecimal() and int(class_) < len(names):
        wanted = names[int(class_)]
    if wanted is None and len(found) == 1:
        (wanted,) = found
    if wanted not in found:
        have = ", ".join(found) or "none"
        raise SettingsError(f"--class: {class_ or 'missing'}; {path} has sub-generators of {have} for this client")
    return found[str(wanted)]


def _simulation(path: Path) -> Run:
    from replayfleet.federation.service.artefact_codec import decode_own
    from replayfleet.federation.service.fleet.spec import build_method
    from replayfleet.federation.simulator.checkpoints import Checkpoints
    from replayfleet.federation.simulator.result import Result
    from replayfleet.federation.simulator.serving import ServedModels

    checkpoints = Checkpoints(path / "state")
    identity = _json(path / "state" / "run.json")
    spec_type: type[AnyTaskSpec] = TaskSpec if "image_size" in identity["task"] else DetectionSpec
    task = msgspec.convert(identity["task"], type=spec_type)
    finished = path / "result.json"
    results = None
    if finished.exists():
        with _refusing_damage(finished):
            results = msgspec.json.decode(finished.read_bytes(), type=Result)
    snapshots = checkpoints.load()  # after the results: it may finish meanwhile
    if results is not None and len(snapshots) < len(results.rounds):
        lacks = checkpoints.round_path(len(snapshots))
        raise SettingsError(f"{lacks} is missing: the run has {len(results.rounds)} rounds; copy its folder whole")

    def sets(client: str) -> _Sets:
        from replayfleet.federation.methods import ALL_METHODS
        from replayfleet.federation.methods.kit.beginning import first_download

        method: Any = build_method(ALL_METHODS.named(identity["method"]), task, identity["settings"])
        if not method.deployable:
            raise SettingsError(f"{path}: {identity['method']} predicts with more than a task model, so it has none")
        last, own, served = snapshots[-1].aggregator, snapshots[-1].clients[client], ServedModels()
        try:
            state = type(method).AggregatorState.unpack(decode_own(last.blobs, last.facts, checkpoints))
            remembered = decode_own(own.blobs, own.facts, checkpoints)
            served.restore(client, remembered)
        except SettingsError as error:
            if checkpoints.num_rounds() == len(snapshots):
                raise
            raise SettingsError(f"{path} has gone on since it was opened; open it again") from error
        initial = first_download(method, identity["run_seed"], checkpoints.first_model())
        download = method.download_for(state, client, initial)
        packed = download.pack().parameter_sets | remembered.parameter_sets  # of FedAVG-replay none is downloaded
        wanted = {name: tensors for name, tensors in packed.items() if name.startswith(_SUB_GENERATOR)}
        wanted[_TASK] = served.parameters.get(client, download.task_parameters)
        return {name: {key: tensor.numpy() for key, tensor in tensors.items()} for name, tensors in wanted.items()}

    clients = tuple(sorted(snapshots[-1].clients)) if snapshots else ()
    num_rounds = len(snapshots)
    return Run(path, "simulation", identity["method"], identity["settings"], task, clients, num_rounds, results, sets)


def _aggregator(folder: Path) -> Run:
    from replayfleet.aggregator.store import AggregatorStore

    with contextlib.closing(AggregatorStore(folder, read_only=True)) as store:
        spec, downloads = store.spec(), {name: store.download(name) for name in store.clients()}
        num_rounds = store.round().index if spec is not None else 0
    if spec is None:
        raise SettingsError(f"{folder}: its fleet has not begun yet")
    known = {name: download for name, download in downloads.items() if download is not None}
    return _deployed(folder, "aggregator", spec, known, num_rounds)


def _client(folder: Path) -> Run:
    from replayfleet.edge_client.state_store import StateStore

    store = StateStore(folder, read_only=True)
    held = store.held()
    if held is None:
        raise SettingsError(f"{folder}: this client has no model yet")
    own, commit = held.served, store.remembered(held.spec)
    if commit is not None:
        own = msgspec.structs.replace(own, blobs=(*own.blobs, *_sub_generators(commit.state)))
    return _deployed(folder, "client", held.spec, {held.manifest.client_id: own}, held.manifest.round)


def _deployed(
    folder: Path,
    kind: Literal["aggregator", "client"],
    spec: FleetSpec,
    downloads: Mapping[str, Manifest],
    num_rounds: int,
) -> Run:
    from replayfleet.federation.service.fleet.task import task_of
    from replayfleet.federation.wire.protocol.tensors import decode_arrays
    from replayfleet.federation.wire.transport.blob_store import look_up

    def sets(client: str) -> _Sets:
        manifest = downloads[client]
        if manifest.serving is None:
            raise SettingsError(f"{folder}: the download of {client} has no task model")
        names = {manifest.serving.model: _TASK}
        names |= {entry.name: entry.name for entry in _sub_generators(manifest.blobs)}
        digests = {entry.name: entry.digest for entry in manifest.blobs}
        return {name: decode_arrays(look_up(folder / "blobs", digests[stored])) for stored, name in names.items()}

    clients = tuple(sorted(downloads))
    return Run(folder, kind, spec.method, spec.settings, task_of(spec), clients, num_rounds, None, sets)


def _sub_generators(blobs: Iterable[BlobEntry]) -> list[BlobEntry]:
    return [entry for entry in blobs if entry.name.startswith(_SUB_GENERATOR)]


def _role(folder: Path) -> str:
    from replayfleet.federation.service.data_dir import FORMAT_VERSION

    marker = folder / "fleet.json"
    if not marker.is_file():
        return ""
    found = _json(marker)
    if found.get("format") != FORMAT_VERSION:
        raise SettingsError(f"{marker}: format {found.get('format')}, this program reads {FORMAT_VERSION}")
    return str(found.get("role"))


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SettingsError(f"{path} can't be read ({error})") from error


@contextlib.contextmanager
def _arguments_named(flags: Iterable[str]) -> Iterator[None]:
    """Have errors about options of the command line be about arguments of the same names."""
    try:
        yield
    except SettingsError as error:
        words = rf"(?<![^\s'\"(,;])(?:{'|'.join(sorted(flags, reverse=True))})(?![\w/-])"
        named = re.sub(words, lambda flag: flag[0][2:].replace("-", "_"), str(error))
        if named == str(error):
            raise
        raise SettingsError(named) from error


@contextlib.contextmanager
def _refusing_damage(path: Path) -> Iterator[None]:
    """Tell of a folder whose files don't say what ours say; it may come from anywhere."""
    try:
        yield
    except (*UNREADABLE, TypeError, LookupError, AttributeError, IsADirectoryError, sqlite3.Error) as error:
        raise SettingsError(f"{path} is damaged, or of another version ({type(error).__name__}: {error})") from error
