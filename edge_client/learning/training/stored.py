"""What a job of the training process begins with: the client's samples, its state, and what draws from that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replayfleet.edge_client.learning.training.job import SUB_GENERATOR_GRAPH, AnyJob, read_round_data
from replayfleet.edge_client.state_store import StateStore, TrainingCommit
from replayfleet.federation.errors import ArtefactRejected
from replayfleet.federation.service.artefact_codec import BlobFiles, open_artefacts
from replayfleet.federation.service.fleet.spec import with_later_settings
from replayfleet.federation.wire.protocol.messages import FleetSpec

if TYPE_CHECKING:
    from replayfleet.federation.methods.kit.records import RoundData


def samples_of(path: str) -> RoundData:
    """Return the samples of a ``RoundFile``; raises as ``read_round_data``."""
    import torch

    from replayfleet.federation.methods.kit.records import RoundData

    samples = read_round_data(path)
    return RoundData(torch.from_numpy(samples.images), torch.from_numpy(samples.labels))


def remembered(records: StateStore, spec: FleetSpec) -> TrainingCommit | None:
    """Return the latest finished round whose state is good under ``spec``.

    Of a fleet that was founded again too, by a version that leaves out the settings which change nothing.
    """
    found = records.remembered(spec)
    return found if found is not None else records.remembered(with_later_settings(spec))


def load_state(method: Any, records: StateStore, blobs: BlobFiles, spec: FleetSpec) -> tuple[Any, dict[str, Any], str]:
    """Return the client's state, what it owes, and what an operator should know: as committed, or a new client's."""
    commit, fresh = remembered(records, spec), method.initial_states()[0]
    if commit is None and records.training() is not None:
        return fresh, {}, "the fleet's agreement changed; the earlier state is kept aside, until that one comes back"
    if commit is None:
        return fresh, {}, f"method {method.name!r} keeps real samples on this device" if method.stores_data else ""
    from replayfleet.federation.methods.kit.travel import remainder_among

    try:
        artefacts = open_artefacts(commit.state, commit.state_facts, blobs)
        return method.ClientState.unpack(artefacts), remainder_among(artefacts), ""
    except (ArtefactRejected, KeyError, ValueError) as error:
        note = f"state of round {commit.round} is damaged ({error}), going on with what the aggregator sent"
        return fresh, {}, note


def sampler_for(job: AnyJob, blobs: BlobFiles, method: Any, device_type: str) -> Any:
    """Return what draws replay: the download's graph as the client asks for it, where that can be, else PyTorch."""
    graphs = [entry for entry in job.manifest.blobs if entry.name == SUB_GENERATOR_GRAPH]
    if job.sampler == "onnx" and graphs and device_type == "cpu":
        from replayfleet.export.running.sampler import onnx_sampler

        return onnx_sampler(blobs.read(graphs[0].digest), num_threads=job.num_threads)
    from replayfleet.federation.methods.steps.memory import sampler_of

    return sampler_of(method)
