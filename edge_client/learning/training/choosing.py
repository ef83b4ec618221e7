"""In the training process: which model the device serves, by its own evidence, where the fleet lets it choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replayfleet.edge_client.learning.training.job import (
    BLOBS,
    ChooseJob,
    Chose,
    parameter_sets_of,
)
from replayfleet.edge_client.learning.training.stored import load_state, sampler_for, samples_of
from replayfleet.edge_client.state_store import Choice, StateStore, spec_digest
from replayfleet.export.golden import golden_vector
from replayfleet.federation.methods.kit.packing import model_fields, served_name
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.serving import (
    OWN,
    SERVED,
    Served,
    Standing,
    choose,
    seed_of_evidence,
    with_choice,
)
from replayfleet.federation.service.artefact_codec import StoredParameters, open_artefacts
from replayfleet.federation.service.fleet.spec import method_of
from replayfleet.federation.service.torch_setup import prepare_torch
from replayfleet.federation.wire.protocol.messages import BlobEntry, Probe
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.build import build_task_model


def run_choice(job: ChooseJob) -> Chose:
    """Choose as the simulator does; what is chosen gets a golden vector, which serving must reproduce.

    Nothing is written: after a death in between the download is offered again, and chosen of anew.

    Raises:
        ArtefactRejected: The download doesn't decode, or what was chosen answers with NaN.
        SettingsError: This build doesn't know the fleet's method, settings or task.
        ValueError: The download isn't one of this method.
        OSError: The samples are gone.
    """
    method: Any = method_of(job.spec)
    prepare_torch(job.num_threads)
    data_dir, manifest = Path(job.data_dir), job.manifest
    blobs, records = DiskBlobStore(data_dir / BLOBS, job.verified), StateStore(data_dir)
    download = method.Download.unpack(open_artefacts(parameter_sets_of(manifest), manifest.facts, blobs))
    entries = {entry.name: entry for entry in manifest.blobs}
    own = _own(job, records, method)
    if own is not None:
        entries[OWN] = own
    if job.served is not None:
        entries[SERVED] = job.served
    ended = manifest.round - 1
    chosen = choose(
        method,
        Standing(
            load_state(method, records, blobs, job.spec)[0],
            _stored(own, blobs),
            _stored(entries.get(SERVED), blobs),
            samples_of(job.held_out) if job.held_out else None,
        ),
        download,
        seed_of_evidence(job.spec.run_seed, ended, job.client_id),
        sampler=sampler_for(job, blobs, method, "cpu"),
    )
    if chosen is None:
        return Chose(manifest.round, manifest.version, None)
    name = chosen.served.name
    if name == served_name(type(download)):
        return Chose(manifest.round, manifest.version, choice_of(chosen.served))
    probe = _golden(method.task, chosen.parameters)
    return Chose(manifest.round, manifest.version, choice_of(chosen.served, entries[name], probe))


def choice_of(served: Served, parameters: BlobEntry | None = None, probe: Probe | None = None) -> Choice:
    """Return a choice as it is kept; without ``parameters`` what was downloaded to be served is."""
    return Choice(served.name, dict(served.scores), served.gain, served.error, served.lost, parameters, probe)


def told(upload: Any, choice: Choice | None) -> Any:
    """Return an upload that tells what was chosen of the download before it, where its method wants to know."""
    if choice is None:
        return upload
    return with_choice(upload, Served(choice.name, choice.scores, choice.gain, choice.error, choice.lost))


def _own(job: ChooseJob, records: StateStore, method: Any) -> BlobEntry | None:
    """Return what was trained in the round that the download ends, as it was uploaded."""
    commit, name = records.training(), model_fields(method.Upload)["task_parameters"]
    if commit is None or (commit.round, commit.spec_digest) != (job.manifest.round - 1, spec_digest(job.spec)):
        return None
    return next((entry for entry in commit.upload if entry.name == name), None)


def _stored(entry: BlobEntry | None, blobs: DiskBlobStore) -> Parameters | None:
    return None if entry is None else StoredParameters(entry, blobs)


def _golden(task: Any, parameters: Parameters) -> Probe:
    module = build_task_model(task)
    module.load_state_dict(dict(parameters))
    return golden_vector(task, module)
