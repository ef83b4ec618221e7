"""A method over a stream, all clients in one process: the same two functions and seeds as the deployed fleet."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from replayfleet.federation.methods.kit.beginning import first_download
from replayfleet.federation.methods.kit.each import spread_by
from replayfleet.federation.methods.kit.packing import sub_generators_among
from replayfleet.federation.methods.kit.placement import placed, placed_data, torch_device
from replayfleet.federation.methods.kit.promises import Untouched, aggregated, faults_named, local_result
from replayfleet.federation.methods.kit.records import ClientId, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.travel import published, remainder_among, sent, with_remainder
from replayfleet.federation.methods.lockstep import together
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.methods.steps.screening import TaskAnswers, answers_of, candidate_of, screen
from replayfleet.federation.methods.steps.serving import Chosen, chooses
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.federation.service.artefact_codec import EncodedArtefacts, decode_own, encode_artefacts
from replayfleet.federation.service.cluster.engine import HERE
from replayfleet.federation.service.fleet.presets import MAX_CHANGE
from replayfleet.federation.service.torch_setup import prepare_torch
from replayfleet.federation.simulator.attacks import Attack
from replayfleet.federation.simulator.checkpoints import Checkpoints, Snapshot
from replayfleet.federation.simulator.client_threads import ClientThreads, client_threads
from replayfleet.federation.simulator.measures.accounts import (
    Accounts,
    DigestAccounts,
    SetSizes,
    TensorAccounts,
    Traffic,
    packed_sizes,
)
from replayfleet.federation.simulator.measures.detection_evaluation import DetectionEvaluation, evaluate_boxes
from replayfleet.federation.simulator.measures.evaluation import Evaluation, evaluate
from replayfleet.federation.simulator.measures.metrics import weighted_accuracy
from replayfleet.federation.simulator.measures.work import Meter
from replayfleet.federation.simulator.records import ClientRecord, RoundRecord
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.simulator.serving import ServedModels
from replayfleet.federation.streams.datasets import AnyDataset, BoxDataset
from replayfleet.federation.streams.opening import AnyStream
from replayfleet.federation.streams.stream import Stream, client_id
from replayfleet.federation.streams.tasks import TaskStream

_CHOICE = "choice"
"""Of ``ClientRecord.cpu_s``: judging what to serve."""


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """A finished round, for whoever watches: what was measured, and the method's own values.

    Attributes:
        record: the measurements.
        uploads: client id -> what it sent.
        downloads: client id -> what it gets for the next round.
        aggregator_state: after the round.
        client_states: after the round.
        chosen: client id -> what it chose to serve, and of what; empty where clients serve what they download.
    """

    record: RoundRecord
    uploads: Mapping[ClientId, Any]
    downloads: Mapping[ClientId, Any]
    aggregator_state: Any
    client_states: Mapping[ClientId, Any]
    chosen: Mapping[ClientId, Chosen] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    """What goes from one round to the next; ``initial`` is round 0's download."""

    initial: Any
    aggregator: Any
    clients: dict[ClientId, Any]
    downloads: dict[ClientId, Any]
    accounts: Accounts
    aggregator_sampler: Sampler
    sizes: SetSizes = field(default_factory=SetSizes)
    remainders: dict[ClientId, Mapping[str, Parameters]] = field(default_factory=dict)
    packed: dict[int, int] = field(default_factory=dict)
    served: ServedModels = field(default_factory=ServedModels)
    records: list[RoundRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _LocalRound:
    """One client's half of a round; ``trained`` is the upload as it would be of an honest client."""

    trained: Any
    upload: Any
    traffic: Traffic
    train_s: float
    meter: Meter

    def size_of_everything(self, held: Mapping[str, int]) -> int:
        """Bytes of the upload and of those sets ``held`` (name -> bytes) that it left out."""
        uploaded = self.upload.pack().parameter_sets
        return self.traffic.everything_bytes + sum(size for name, size in held.items() if name not in uploaded)


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What a run consists of; equal values give equal parameters to the bit on CPU.

    Attributes:
        method: an instance of a class of ``METHODS``.
        dataset: both parts of the image set, or of the pictures with boxes.
        stream: which client meets which samples when.
        run_seed: of models and training; the stream has a seed of its own.
        sampler: how clients run their sub-generators; the aggregator runs them in PyTorch, as the deployed one does.
        num_threads: of torch; results depend on it.
        num_workers: clients that are trained, or mixed for, at the same time, with ``num_threads`` each; results don't
            depend on it.
        engine: where that is done: in this process, or on a Ray cluster (``federation.service.cluster.engine``).
        evaluates: measure accuracies; without, they are NaN and a run can't be resumed.
        torch_device: where methods compute.
        in_step: train what clients ask for at the same time as one network, which the method must be able to
            (``federation.methods.lockstep``); results differ from one by one in rounding.
        attack: what hostile clients do; None without any.
        screens: leave out uploads that no training makes, as the aggregator of a fleet does. What it leaves out beyond
            that, because aggregating or exporting fails with it, ends a simulation.
        perturbation: initial weights are scaled by 1 + this: the noise floor of a comparison.
        initial: the task model that everybody begins with; None: the method's random ones.
        clock: seconds, rising.
    """

    method: Any
    dataset: AnyDataset
    stream: AnyStream
    run_seed: int
    sampler: Sampler
    num_threads: int = 1
    num_workers: int = 1
    engine: str = HERE
    evaluates: bool = True
    torch_device: str = "cpu"
    in_step: bool = False
    attack: Attack | None = None
    screens: bool = False
    perturbation: float = 0.0
    initial: Parameters | None = None
    clock: Callable[[], float] = time.perf_counter

    def run(
        self,
        *,
        checkpoints: Checkpoints | None = None,
        on_round: Callable[[RoundOutcome], None] | None = None,
        on_client: Callable[[int, ClientId], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[RoundRecord]:
        """Run all rounds, or those that ``checkpoints`` doesn't hold yet.

        Args:
            checkpoints: where to keep the state after every round; its ``begin`` was called.
            on_round: called after every round that was run now.
            on_client: called with the round before each client's local round, by the thread that runs it. In step all
                clients begin before any trains.
            should_stop: asked after every round; True ends the run early.

        Returns:
            One record per round, those of an earlier, interrupted run included.

        Raises:
            ValueError: There are checkpoints but no accuracies to keep in them.
        """
        if checkpoints is not None and not self.evaluates:
            raise ValueError("checkpoints keep accuracies, but this run doesn't evaluate")
        prepare_torch(self.num_threads)
        state = self._restored(checkpoints) if checkpoints is not None else self._initial(TensorAccounts())
        with client_threads(self.num_workers, self.num_threads, self.engine) as threads:
            for round_index in range(len(state.records), self.stream.num_rounds):
                outcome = self._round(round_index, state, threads, checkpoints, on_client)
                if on_round is not None:
                    on_round(outcome)
                del outcome  # all its uploads, whose memory the next round's take
                if should_stop():
                    break
        return state.records

    def _clients(self) -> list[tuple[ClientId, int]]:
        """Client ids in the order in which their numbers are summed, with their indices in the stream."""
        return sorted((client_id(index), index) for index in range(self.stream.settings.num_clients))

    def _initial(self, accounts: Accounts) -> _State:
        client_state, aggregator_state = self.method.initial_states()
        names = [name for name, _ in self._clients()]
        initial = self._initial_download()
        for name in names:
            accounts.transfer(name, "down", initial.pack())
        return _State(
            initial=initial,
            aggregator=aggregator_state,
            clients=dict.fromkeys(names, client_state),
            downloads=dict.fromkeys(names, initial),
            accounts=accounts,
            aggregator_sampler=sampler_of(self.method),
        )

    def _initial_download(self) -> Any:
        drawn = first_download(self.method, self.run_seed, self.initial)
        if self.perturbation:
            drawn = _scaled(drawn, 1 + self.perturbation)
        return placed(drawn, torch_device(self.torch_device))

    def _round(
        self,
        round_index: int,
        state: _State,
        threads: ClientThreads,
        checkpoints: Checkpoints | None,
        on_client: Callable[[int, ClientId], None] | None,
    ) -> RoundOutcome:
        started = self.clock()
        local_rounds = self._local_rounds(round_index, state, threads, on_client)
        uploads = {name: local.upload for name, local in local_rounds.items()}

        aggregation_started, cpu_started = self.clock(), time.process_time()
        quarantined = self._screened(uploads, state)
        uploads = {name: upload for name, upload in uploads.items() if name not in quarantined}
        rng = seeded_generator(self.run_seed, round_index, "aggregator")
        downloads: Mapping[ClientId, Any] = {}
        if uploads:
            before = state.aggregator
            untouched = Untouched(self.method, before, *uploads.values())
            with spread_by(threads.map), faults_named(self.method, "aggregate", all_of_them=True):
                made = self.method.aggregate(before, uploads, rng, sampler=state.aggregator_sampler)
            untouched.check("aggregate")
            state.aggregator, downloads = aggregated(self.method, made, lambda: state.initial, state.clients)
            state.aggregator, downloads = self._published(state, before, downloads)
        state.downloads = {name: self._download(name, downloads, state) for name in state.clients}
        aggregate_s, aggregate_cpu_s = self.clock() - aggregation_started, time.process_time() - cpu_started
        self._choose(round_index, state, local_rounds)

        clients = {
            name: replace(
                self._measured(round_index, index, state, name, local_rounds.get(name)),
                hostile=self._is_hostile(index),
                quarantined=quarantined.get(name, ""),
            )
            for name, index in self._clients()
        }
        honest = {name: client for name, client in clients.items() if not client.hostile}
        saved = _encoded(state, checkpoints) if checkpoints is not None else None
        record = RoundRecord(
            round=round_index,
            accuracy=weighted_accuracy(
                {name: client.accuracy for name, client in honest.items()},
                {name: client.num_seen for name, client in honest.items()},
            ),
            clients=clients,
            aggregate_s=aggregate_s,
            aggregate_cpu_s=aggregate_cpu_s,
            round_s=self.clock() - started,
        )
        if checkpoints is not None and saved is not None:
            checkpoints.save(Snapshot(record, *saved, state.accounts.held))
        state.records.append(record)
        chosen = dict(state.served.chosen)
        return RoundOutcome(record, uploads, state.downloads, state.aggregator, dict(state.clients), chosen)

    def _choose(self, round_index: int, state: _State, local_rounds: Mapping[ClientId, _LocalRound]) -> None:
        """Let every client choose what it serves, where the fleet does so."""
        if not chooses(self.method):
            return
        own = {name: local.trained.task_parameters for name, local in local_rounds.items()}
        clients = {name: (state.clients[name], state.downloads[name], own.get(name)) for name in state.clients}
        state.served.choose(self.method, self.run_seed, round_index, self.sampler, clients)

    def _is_hostile(self, index: int) -> bool:
        return self.attack is not None and index >= self.stream.settings.num_clients - self.attack.num_hostile

    def _screened(self, uploads: Mapping[ClientId, Any], state: _State) -> dict[ClientId, str]:
        """Return whose uploads are left out, and why."""
        if not self.screens:
            return {}
        candidates = {name: candidate_of(upload, state.downloads[name]) for name, upload in uploads.items()}
        return screen(candidates, TaskAnswers(self.method.task), MAX_CHANGE)

    def _download(self, name: ClientId, downloads: Mapping[ClientId, Any], state: _State) -> Any:
        """What a client gets; whoever missed the round gets what the aggregator has kept for it."""
        if name in downloads:
            return downloads[name]
        return self.method.download_for(state.aggregator, name, state.initial)

    def _local_rounds(
        self,
        round_index: int,
        state: _State,
        threads: ClientThreads,
        on_client: Callable[[int, ClientId], None] | None,
    ) -> dict[ClientId, _LocalRound]:
        """Run the local rounds of all clients that are there, and keep their states."""
        present = self.stream.present(round_index)
        indices = {name: index for name, index in self._clients() if index in present}
        if self.in_step:
            return self._local_rounds_in_step(round_index, indices, state, on_client)

        def asked(client: tuple[ClientId, int]) -> tuple[Any, ...]:
            with threads.turn:
                if on_client is not None:
                    on_client(round_index, client[0])
                arguments, rng = self._arguments(round_index, *client, state)
                return (*arguments, rng)

        work = functools.partial(_local_round, self.method, self.sampler, self.clock)
        if threads.elsewhere is not None:  # which gets values, each when there is room for it
            results = threads.map(work, map(asked, indices.items()))
        else:
            results = threads.map(lambda client: work(asked(client)), indices.items())
        return {
            name: self._kept(round_index, (name, index), *done, state)
            for (name, index), done in zip(indices.items(), results, strict=True)
        }

    def _local_rounds_in_step(
        self,
        round_index: int,
        indices: Mapping[ClientId, int],
        state: _State,
        on_client: Callable[[int, ClientId], None] | None,
    ) -> dict[ClientId, _LocalRound]:
        started = self.clock()
        works, handed = {}, []
        for name, index in indices.items():
            if on_client is not None:
                on_client(round_index, name)
            arguments, rng = self._arguments(round_index, name, index, state)
            handed += [arguments[0], arguments[2]]
            with faults_named(self.method, "local_work", all_of_them=True):
                works[name] = self.method.local_work(*arguments, rng, sampler=self.sampler)
        untouched = Untouched(self.method, *handed)
        with faults_named(self.method, "local_work", all_of_them=True):
            results = together(works)
        untouched.check("local_work")
        each_s = (self.clock() - started) / max(1, len(results))
        return {
            name: self._kept(
                round_index, (name, indices[name]), local_result(self.method, result), each_s, Meter(), state
            )
            for name, result in results.items()
        }

    def _arguments(
        self, round_index: int, name: ClientId, index: int, state: _State
    ) -> tuple[tuple[Any, RoundData, Any], torch.Generator]:
        indices = self.stream.train_indices(index, round_index)
        if chooses(self.method):
            indices = state.served.parted(self.dataset, indices, self.run_seed, round_index, name)
        data = round_data(self.dataset.train, indices)
        if self.attack is not None and self._is_hostile(index):
            data = self.attack.data(data, self.method.task)
        data = placed_data(data, torch_device(self.torch_device))
        return (state.clients[name], data, state.downloads[name]), seeded_generator(self.run_seed, round_index, name)

    def _kept(
        self,
        round_index: int,
        client: tuple[ClientId, int],
        result: tuple[Any, Any],
        train_s: float,
        meter: Meter,
        state: _State,
    ) -> _LocalRound:
        name, index = client
        answers, owed = answers_of(self.method.task), state.remainders.get(name, {})
        done = sent(self.method, answers, *result, state.downloads[name], owed)
        state.clients[name], state.remainders[name] = done.state, done.remainder
        trained = upload = state.served.told(name, done.upload)
        if self.attack is not None and self._is_hostile(index):
            rng = seeded_generator(self.run_seed, round_index, f"{name}/attack")
            upload = self.attack.upload(upload, state.downloads[name], self.method, rng)
        traffic = _transferred(state.accounts, name, "up", upload, packed_sizes(done.rounded.values()))
        return _LocalRound(trained, upload, traffic, train_s, meter)

    def _published(
        self, state: _State, before: Any, downloads: Mapping[ClientId, Any]
    ) -> tuple[Any, Mapping[ClientId, Any]]:
        """Return the aggregator's state and the downloads as they travel."""
        aggregator, downloads, rounded = published(
            self.method,
            answers_of(self.method.task),
            state.aggregator,
            downloads,
            lambda name: self.method.download_for(before, name, state.initial),
        )
        state.packed = packed_sizes(rounded)
        return aggregator, downloads

    def _measured(
        self,
        round_index: int,
        index: int,
        state: _State,
        name: ClientId,
        local: _LocalRound | None,
    ) -> ClientRecord:
        download = state.downloads[name]
        tested = self._tested(round_index, index, download, state.served.parameters.get(name))
        chosen = state.served.chosen.get(name)
        down = _transferred(state.accounts, name, "down", download, state.packed)
        held = {
            set_name: state.sizes.of(parameters)
            for set_name, parameters in state.clients[name].pack().parameter_sets.items()
            if sub_generators_among(type(state.clients[name]), [set_name])
        }
        return ClientRecord(
            classes=self.stream.class_ids(index, round_index),
            accuracy=tested.accuracy,
            num_test=tested.num_samples,
            num_seen=self.stream.num_seen(index, round_index),
            class_accuracy=tested.class_accuracy(),
            accuracy_by_place=self._by_place(round_index, index, tested),
            accuracy_among_seen=self._among_seen(tested),
            accuracy_in_task=self._by_place(
                round_index, index, tested.in_task if isinstance(self.stream, TaskStream) else None
            ),
            mean_average_precision=tested.mean_average_precision,
            train_s=local.train_s if local else 0.0,
            bytes_up=local.traffic.num_bytes if local else 0,
            bytes_up_everything=local.size_of_everything(held) if local else 0,
            bytes_down=down.num_bytes,
            bytes_down_everything=down.everything_bytes,
            sub_generators_sent=sub_generators_among(type(local.upload), local.traffic.sent) if local else (),
            num_sub_generators_held=len(held),
            present=local is not None,
            num_updates=getattr(local.upload, "num_updates", None) if local else 0,
            cpu_s={
                **(local.meter.cpu_s if local else {}),
                **({_CHOICE: state.served.cpu_s[name]} if name in state.served.cpu_s else {}),
            },
            served=chosen.served.name if chosen else "",
            evidence=dict(chosen.served.scores) if chosen else {},
            sample_steps=local.meter.sample_steps if local else {},
            losses=tuple(loss if math.isfinite(loss) else None for loss in local.meter.losses) if local else (),
            epsilon=getattr(getattr(local and local.upload, "privacy", None), "epsilon", None),
        )

    def _tested(
        self, round_index: int, index: int, download: Any, chosen: Parameters | None
    ) -> Evaluation | DetectionEvaluation:
        indices = self.stream.test_indices(index, round_index)
        if not self.evaluates:
            return Evaluation(np.empty(0, dtype=np.bool_), indices[:0])
        device = torch_device(self.torch_device)
        judge = self.method.predictor(download) if chosen is None else judge_with(self.method.task, chosen)
        if isinstance(self.dataset, BoxDataset):
            return evaluate_boxes(self.dataset.task, judge, self.dataset.test, indices, device)
        if isinstance(self.stream, TaskStream):
            of_task = self.stream.classes_of_task(index, round_index)
            return evaluate(judge, self.dataset.test, indices, device, of_task=of_task)
        seen = np.isin(np.arange(self.dataset.task.num_classes), self.dataset.test.labels[indices])
        of_seen = np.broadcast_to(seen, (len(indices), len(seen)))
        return evaluate(judge, self.dataset.test, indices, device, of_task=of_seen)

    def _among_seen(self, tested: Evaluation | DetectionEvaluation) -> float | None:
        if isinstance(self.stream, TaskStream) or tested.in_task is None:
            return None
        return tested.in_task.accuracy

    def _by_place(
        self, round_index: int, index: int, tested: Evaluation | DetectionEvaluation | None
    ) -> dict[str, float]:
        if not self.evaluates or isinstance(self.stream, Stream) or tested is None:
            return {}
        return tested.group_accuracy(self.stream.test_places(index, round_index), self.stream.place_names)

    def _restored(self, checkpoints: Checkpoints) -> _State:
        snapshots = checkpoints.load()
        state = self._initial(DigestAccounts())
        if not snapshots:
            return state
        last = snapshots[-1]
        unpack = type(self.method).AggregatorState.unpack
        device = torch_device(self.torch_device)
        aggregator = unpack(decode_own(last.aggregator.blobs, last.aggregator.facts, checkpoints))
        state.aggregator = placed(aggregator, device)
        for name, stored in last.clients.items():
            artefacts = decode_own(stored.blobs, stored.facts, checkpoints)
            state.clients[name] = placed(type(self.method).ClientState.unpack(artefacts), device)
            state.remainders[name] = remainder_among(artefacts)
            state.served.restore(name, artefacts)
            state.downloads[name] = self.method.download_for(state.aggregator, name, state.initial)
        state.accounts = DigestAccounts(last.held)
        state.records = [snapshot.record for snapshot in snapshots]
        return state


def _local_round(
    method: Any, sampler: Sampler, clock: Callable[[], float], arguments: tuple[Any, ...]
) -> tuple[tuple[Any, Any], float, Meter]:
    """Return what a client's half of a round makes, how long it took, and what was counted."""
    started, meter = clock(), Meter()
    untouched = Untouched(method, arguments[0], arguments[2])
    with faults_named(method, "local_round", all_of_them=True):
        made = meter.local_round(method, arguments, sampler)
    result = local_result(method, made)
    untouched.check("local_round")
    return result, clock() - started, meter


def _transferred(accounts: Accounts, name: ClientId, direction: str, record: Any, packed: Mapping[int, int]) -> Traffic:
    """Count a transfer; ``packed`` is by the identity of parameter sets."""
    artefacts = record.pack()
    sets = artefacts.parameter_sets.items()
    return accounts.transfer(
        name, direction, artefacts, {key: packed[id(own)] for key, own in sets if id(own) in packed}
    )


def _scaled(record: Any, factor: float) -> Any:
    """Return a record whose every floating-point number is multiplied, in float64 until it is rounded."""
    packed = record.pack()
    sets = {
        name: {
            key: (tensor.to(torch.float64) * factor).to(tensor.dtype) if tensor.is_floating_point() else tensor
            for key, tensor in parameters.items()
        }
        for name, parameters in packed.parameter_sets.items()
    }
    return type(record).unpack(replace(packed, parameter_sets=sets))


def _encoded(state: _State, checkpoints: Checkpoints) -> tuple[EncodedArtefacts, dict[ClientId, EncodedArtefacts]]:
    """Store the states of the aggregator and of all clients."""
    clients = {
        name: encode_artefacts(
            state.served.packed(name, with_remainder(client.pack(), state.remainders.get(name, {}))), checkpoints
        )
        for name, client in state.clients.items()
    }
    return encode_artefacts(state.aggregator.pack(), checkpoints), clients
