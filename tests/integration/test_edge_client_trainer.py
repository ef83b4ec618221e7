"""The training process for real: it computes what the method computes, and a kill leaves the old state or the new."""

from __future__ import annotations

import functools
import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.torch_free import hide

from replayfleet.edge_client.flow import Samples
from replayfleet.edge_client.learning.local_training import LocalTraining, TrainerEvent, TrainerProcess
from replayfleet.edge_client.learning.training import trainer
from replayfleet.edge_client.learning.training.job import (
    BLOBS,
    ChooseJob,
    Chose,
    FromTrainer,
    RoundFile,
    TrainDone,
    TrainerReady,
    TrainFailed,
    TrainJob,
    read_round_data,
)
from replayfleet.edge_client.learning.training.trainer import run_job
from replayfleet.edge_client.state_store import StateStore, TrainingCommit, spec_digest
from replayfleet.federation.backoff import Backoff
from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.service.artefact_codec import decode_artefacts, encode_artefacts
from replayfleet.federation.service.fleet.spec import with_later_settings
from replayfleet.federation.simulator.measures.accounts import DigestOnly
from replayfleet.federation.wire.protocol.facts import decode_facts
from replayfleet.federation.wire.protocol.messages import FleetSpec, Manifest
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore, FileLook
from replayfleet.models.specs import TaskSpec
from tests.support.virtual_device import NAME, virtual_device

TASK = TaskSpec(1, 28, ("a", "b", "c"), stem="imagenet", generator_width=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {"local_epochs": 1, "batch_size": 8},
    "fedgp": {"local_epochs": 1, "batch_size": 8, "base": "der", "buffer_size": 12},
    "ideal": {"local_epochs": 1, "batch_size": 8},
    "pfedgrp": {
        "local_epochs": 1,
        "batch_size": 8,
        "sub_generator_epochs": 1,
        "first_sub_generator_epochs": 1,
        "gan_batch_size": 8,
        "gate_samples": 8,
        "max_tries_factor": 2,
    },
}


def spec(method: str, **more: Any) -> FleetSpec:
    task = {"image_channels": 1, "image_size": 28, "class_names": TASK.class_names}
    task |= {"stem": TASK.stem, "generator_width": TASK.generator_width}
    return FleetSpec("fleet", method, SETTINGS[method] | more, task, run_seed=3)


def method_of(agreed: FleetSpec) -> Any:
    return METHODS[agreed.method](task=TASK, **agreed.settings)


def samples(seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    return Samples(rng.uniform(-1, 1, (16, 1, 28, 28)).astype(np.float32), rng.integers(0, 2, 16))


def job(data_dir: Path, agreed: FleetSpec, round_index: int = 0, sampler: str = "eager") -> TrainJob:
    store = DiskBlobStore(data_dir / BLOBS)
    initial = method_of(agreed).initial_download(seeded_generator(3, 0, "initial"))
    encoded = encode_artefacts(initial.pack(), store)
    manifest = Manifest("down", "fleet", "c1", round_index, round_index + 1, encoded.blobs, encoded.facts)
    file = RoundFile(samples(round_index))
    return TrainJob(str(data_dir), "c1", agreed, manifest, round_index + 2, sampler, 1, file.path)  # type: ignore[arg-type]


def simulate(agreed: FleetSpec, num_rounds: int) -> tuple[Any, Any]:
    """What the simulator would compute: (state, upload) as encoded artefacts; once for all tests that ask for it."""
    return _simulated(msgspec.json.encode(agreed), num_rounds)


@functools.cache
def _simulated(encoded: bytes, num_rounds: int) -> tuple[Any, Any]:
    agreed = msgspec.json.decode(encoded, type=FleetSpec)
    method, store = method_of(agreed), DigestOnly()
    download = method.initial_download(seeded_generator(3, 0, "initial"))
    state, upload = method.initial_states()[0], None
    for round_index in range(num_rounds):
        held = samples(round_index)
        data = RoundData(torch.from_numpy(held.images), torch.from_numpy(held.labels))
        rng = seeded_generator(3, round_index, "c1")
        state, upload = method.local_round(state, data, download, rng, sampler=eager_sampler(TASK))
    return encode_artefacts(state.pack(), store), encode_artefacts(upload.pack(), store)


@pytest.mark.parametrize("method", ["fedavg", "fedgp"])
def test_a_round_is_trained_on_another_device_to_the_same_bits(method: str, tmp_path: Path) -> None:
    agreed = spec(method)
    with virtual_device():
        for index in range(2):
            run_job(msgspec.structs.replace(job(tmp_path, agreed, index), torch_device=NAME))
    state, upload = simulate(agreed, 2)
    assert (committed(tmp_path).state, committed(tmp_path).upload) == (state.blobs, upload.blobs)


def test_a_method_is_made_once_for_all_rounds_of_a_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FleetSpec] = []

    def counted(agreed: FleetSpec) -> Any:
        made.append(agreed)
        return method_of(agreed)

    monkeypatch.setattr(trainer, "method_of", counted)
    trainer._method_of.cache_clear()
    for index, agreed in enumerate((spec("fedavg"), spec("fedavg"), spec("fedavg", batch_size=16))):
        run_job(job(tmp_path, agreed, index))
    assert [agreed.settings["batch_size"] for agreed in made] == [8, 16]


def test_samples_of_a_round_that_is_trained_again_are_counted_once(tmp_path: Path) -> None:
    agreed = spec("pfedgrp")
    for index in (0, 1, 0, 1):  # after the second, the aggregator was restored to round 0
        run_job(job(tmp_path, agreed, index))
    labels = np.concatenate([samples(index).labels for index in range(2)])
    met = {str(label): int(count) for label, count in enumerate(np.bincount(labels))}
    assert decode_facts(committed(tmp_path).state_facts)["seen"] == met
    assert decode_facts(committed(tmp_path).upload_facts)["seen"] == met


def test_a_mixture_has_the_samples_of_a_round_that_is_trained_again_once(tmp_path: Path) -> None:
    agreed = spec("pfedgrp", sub_generator="pca-mixture", gate=False)
    for index in (0, 1, 0, 1):
        run_job(job(tmp_path, agreed, index))
    made, method = committed(tmp_path), method_of(agreed)
    upload = method.Upload.unpack(decode_artefacts(made.upload, made.upload_facts, DiskBlobStore(tmp_path / BLOBS)))
    method.check_upload(upload)  # an aggregator refuses a mixture of more images than its client says it has seen
    for class_id, mixture in upload.sub_generators.items():
        assert abs(int(mixture["num_samples"].sum()) - upload.seen[class_id]) <= len(mixture["num_samples"])


def test_a_buffer_keeps_the_samples_of_a_round_that_is_trained_again_once(tmp_path: Path) -> None:
    for method in ("fedgp", "ideal"):
        for index in (0, 1, 0, 1):
            run_job(job(tmp_path / method, spec(method), index))
    assert decode_facts(committed(tmp_path / "fedgp").state_facts)["num_seen"] == 32
    assert decode_facts(committed(tmp_path / "ideal").state_facts)["num_rounds"] == 2


def test_a_buffer_that_was_damaged_meets_the_samples_of_a_round_that_is_trained_again(tmp_path: Path) -> None:
    for index in (0, 1):
        run_job(job(tmp_path, spec("fedgp"), index))
    for blob in committed(tmp_path).state:
        DiskBlobStore(tmp_path / BLOBS).path(blob.digest).write_bytes(b"damaged")
    run_job(job(tmp_path, spec("fedgp"), 1))
    assert decode_facts(committed(tmp_path).state_facts)["num_seen"] == 16


def test_a_private_sub_generator_that_is_drawn_again_costs_again(tmp_path: Path) -> None:
    agreed, cost = spec("pfedgrp", sub_generator="pca-gaussian", dp_noise_multiplier=4.0, gate=False), []
    for index in (0, 1, 0):  # the first upload of round 0 may have reached the aggregator that was lost
        run_job(job(tmp_path, agreed, index))
        cost.append(committed(tmp_path).epsilon or 0.0)
    assert 0 < cost[0] < cost[1] < cost[2]


def test_a_gpu_that_fails_costs_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, local_round = spec("fedavg"), METHODS["fedavg"].local_round

    def worn(method: Any, state: Any, data: RoundData, *rest: Any, **how: Any) -> Any:
        if data.images.device.type != "cpu":
            raise torch.AcceleratorError("an illegal memory access was encountered")
        return local_round(method, state, data, *rest, **how)

    monkeypatch.setattr(METHODS["fedavg"], "local_round", worn)
    with virtual_device():
        run_job(msgspec.structs.replace(job(tmp_path, agreed), torch_device=NAME))
    assert committed(tmp_path).upload == simulate(agreed, 1)[1].blobs


def test_a_file_of_the_downloaded_model_that_is_gone_is_told(tmp_path: Path) -> None:
    wanted = job(tmp_path, spec("fedavg"))
    DiskBlobStore(tmp_path / BLOBS).collect(set())
    with pytest.raises(ReplayfleetError, match=r"a file of the downloaded model is gone .*; the next start fetches it"):
        run_job(wanted)


def test_a_device_that_this_machine_has_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="torch device 'lazy' can't be used"):
        run_job(msgspec.structs.replace(job(tmp_path, spec("fedavg")), torch_device=NAME))


class Harness:
    """A ``LocalTraining`` with real processes and a test's clock."""

    def __init__(self) -> None:
        self.events: queue.Queue[TrainerEvent] = queue.Queue()
        self.training = LocalTraining(lambda _idle: TrainerProcess(self.events.put), Backoff(0.01, 0.01))
        self.verified: dict[str, FileLook] = {}

    def until_end(self) -> TrainDone | TrainFailed | Chose:
        while True:  # to the test's own limit: a first import of torch takes a minute on a disk that is busy
            try:
                ended = self.training.handle(self.events.get(timeout=0.05), time.monotonic())
            except queue.Empty:
                ended = None
            self.training.tick(time.monotonic())
            if isinstance(ended, TrainDone):
                self.verified = ended.verified
                return msgspec.structs.replace(ended, verified={})
            if ended is not None:
                return ended


@pytest.fixture(scope="module")
def shared() -> Iterator[Harness]:
    """One process for all tests that leave it alive: each takes seconds to import torch."""
    made = Harness()
    yield made
    made.training.stop()


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.training.stop()


def committed(data_dir: Path) -> TrainingCommit:
    commit = StateStore(data_dir).training()
    assert commit is not None
    return commit


@pytest.mark.parametrize("method", ["fedavg", "fedgp", "pfedgrp"])
def test_the_process_computes_what_the_simulator_computes_to_the_bit(
    method: str, shared: Harness, tmp_path: Path
) -> None:
    agreed = spec(method)
    for round_index in (0, 1):
        shared.training.begin(job(tmp_path, agreed, round_index))
        ended = shared.until_end()
        assert isinstance(ended, TrainDone)
        assert ended.round == round_index
    commit = committed(tmp_path)
    assert commit.epsilon is commit.delta is None
    state, upload = simulate(agreed, 2)
    assert (commit.state, commit.state_facts) == (state.blobs, state.facts)
    assert (commit.upload, commit.upload_facts) == (upload.blobs, upload.facts)
    store, sent = DiskBlobStore(tmp_path / BLOBS), {entry.digest for entry in commit.upload}
    for digest in sent:
        store.read(digest)
    assert shared.verified == store.verified(sent)
    assert (commit.round, commit.version, commit.num_samples) == (1, 3, 16)
    assert commit.num_sub_generators == (2 if method == "pfedgrp" else 0)
    assert commit.train_s > 0


def test_the_process_chooses_what_to_serve_with_a_golden_vector_and_the_next_upload_tells_it(
    shared: Harness, tmp_path: Path
) -> None:
    agreed = spec("pfedgrp", serve="best")
    shared.training.begin(job(tmp_path, agreed, 0))
    assert shared.until_end() == TrainDone(0)
    later = job(tmp_path, agreed, 1)
    own = next(entry for entry in committed(tmp_path).upload if entry.name == "task")
    kept = RoundFile(samples(7))
    asked = ChooseJob(str(tmp_path), "c1", agreed, later.manifest, None, "eager", 1, kept.path)
    shared.training.begin(asked)
    chose: Any = shared.until_end()
    assert (chose.round, chose.version) == (1, later.manifest.version)
    assert chose.choice.scores.keys() == {"personalised", "average", "own"}
    again = msgspec.structs.replace(asked, served=own)  # the same model twice: of equals the served one
    shared.training.begin(again)
    other: Any = shared.until_end()
    assert other.choice.scores["served"] == other.choice.scores["own"] == chose.choice.scores["own"]
    if other.choice.name == "served":
        assert (other.choice.parameters.digest, len(other.choice.probe.logits)) == (own.digest, 8 * 3)
    shared.training.begin(msgspec.structs.replace(later, choice=chose.choice))
    assert shared.until_end() == TrainDone(1)
    told = decode_facts(committed(tmp_path).upload_facts)["served"]
    assert (told["name"], told["scores"], told["lost"]) == (chose.choice.name, chose.choice.scores, chose.choice.lost)
    kept.close()
    shared.training.begin(asked)
    failed = shared.until_end()
    assert isinstance(failed, TrainFailed)
    assert shared.training.problem == "", "no round failed"


def test_a_failing_round_is_reported_and_the_process_lives_on(shared: Harness, tmp_path: Path) -> None:
    shared.training.begin(msgspec.structs.replace(job(tmp_path, spec("fedavg")), spec=spec("fedavg", epochs=1)))
    failed = shared.until_end()
    assert isinstance(failed, TrainFailed)
    assert "has no setting 'epochs'" in failed.error
    pid = shared.training.pid
    shared.training.begin(job(tmp_path, spec("fedavg")))
    assert shared.until_end() == TrainDone(0)
    assert shared.training.pid == pid


def test_noise_for_privacy_is_the_devices_own_and_what_it_cost_is_on_record(tmp_path: Path) -> None:
    agreed = spec("pfedgrp", dp_noise_multiplier=2.0)
    uploads = []
    for name in ("one", "two"):
        run_job(job(tmp_path / name, agreed))
        commit = committed(tmp_path / name)
        uploads.append({entry.name: entry.digest for entry in commit.upload})
        assert commit.delta == 1e-5
        assert commit.epsilon is not None
        assert commit.epsilon > 0
    known = {entry.name: entry.digest for entry in simulate(agreed, 1)[1].blobs}
    assert len({each["task"] for each in (*uploads, known)}) == 1
    assert len({each["sub-generator/0"] for each in (*uploads, known)}) == 3


def test_a_round_needs_no_more_than_the_extra_train_brings_and_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = (
        "onnx",
        "onnxscript",
        "matplotlib",
        "rich",
        "jinja2",
        "cv2",
        "diffusers",
        "opacus",
        "scipy",
        "torch._dynamo",
        "sympy",
    )
    path = os.pathsep.join(filter(None, [hide(absent, tmp_path / "hook"), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    device = Harness()
    try:
        device.training.begin(job(tmp_path, spec("pfedgrp")))
        assert device.until_end() == TrainDone(0)
    finally:
        device.training.stop()


def test_a_killed_process_leaves_the_earlier_commit_and_the_round_is_trained_again(
    harness: Harness, tmp_path: Path
) -> None:
    agreed = spec("fedavg")
    harness.training.begin(job(tmp_path, agreed, 0))
    assert harness.until_end() == TrainDone(0)
    before = committed(tmp_path)
    endless = spec("fedavg", local_epochs=100_000)
    harness.training.begin(job(tmp_path, endless, 1))
    pid = harness.training.pid
    assert pid is not None
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    while harness.training.num_restarts == 0:
        event = harness.events.get(timeout=60) if harness.training.pid == pid else TrainerReady()
        harness.training.handle(event, time.monotonic())
        harness.training.tick(time.monotonic())
    assert committed(tmp_path) == before
    harness.training.job = job(tmp_path, agreed, 1)  # the same round, now one that ends
    assert harness.until_end() == TrainDone(1)
    assert committed(tmp_path).round == 1


@pytest.mark.parametrize("survivors", range(3))
def test_a_kill_between_any_two_writes_leaves_the_old_state_or_the_new(
    survivors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed = spec("pfedgrp")
    run_job(job(tmp_path, agreed, 0))
    before = committed(tmp_path)
    writes = 0
    real = DiskBlobStore.put

    class Killed(BaseException):
        pass

    def dies(self: DiskBlobStore, data: bytes) -> str:
        nonlocal writes
        writes += 1
        if writes > survivors:
            raise Killed
        return real(self, data)

    second = job(tmp_path, agreed, 1)
    monkeypatch.setattr(DiskBlobStore, "put", dies)
    with pytest.raises(Killed):
        run_job(second)
    monkeypatch.undo()
    assert committed(tmp_path) == before
    store = DiskBlobStore(tmp_path / BLOBS)
    decode_artefacts(before.state, before.state_facts, store)
    run_job(second)
    state, _ = simulate(agreed, 2)
    assert committed(tmp_path).state == state.blobs


def test_a_damaged_state_is_noticed_and_the_round_is_trained_from_the_download(tmp_path: Path) -> None:
    agreed = spec("pfedgrp")
    run_job(job(tmp_path, agreed, 0))
    lost = next(entry for entry in committed(tmp_path).state if entry.name.startswith("critic/"))
    path = DiskBlobStore(tmp_path / BLOBS).path(lost.digest)
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    done = run_job(job(tmp_path, agreed, 1))
    assert "state of round 0 is damaged" in done.note
    assert committed(tmp_path).round == 1


def test_nobody_waits_for_a_rounds_pace_to_be_written_down(tmp_path: Path) -> None:
    records, there = StateStore(tmp_path), []

    def say(word: FromTrainer) -> None:
        if isinstance(word, TrainDone):
            there.append((records.training() is not None, (tmp_path / "state" / "pace").exists()))

    run_job(job(tmp_path, spec("fedavg")), say)
    assert there == [(True, False)]
    assert (tmp_path / "state" / "pace").exists()


def test_a_device_that_begins_to_keep_real_samples_says_so(tmp_path: Path) -> None:
    notes = [run_job(job(tmp_path, spec("fedgp"), index)).note for index in range(2)]
    assert notes == ["method 'fedgp' keeps real samples on this device", ""]
    assert run_job(job(tmp_path / "other", spec("fedavg"), 0)).note == ""


def test_a_state_of_another_agreement_is_kept_aside_until_that_comes_back(tmp_path: Path) -> None:
    run_job(job(tmp_path, spec("pfedgrp"), 0))
    before = decode_facts(committed(tmp_path).state_facts)["seen"]
    done = run_job(job(tmp_path, spec("fedavg"), 0))
    assert "agreement changed" in done.note
    assert committed(tmp_path).spec_digest == spec_digest(spec("fedavg"))
    DiskBlobStore(tmp_path / BLOBS).collect(StateStore(tmp_path).blobs_in_use())
    assert run_job(job(tmp_path, spec("pfedgrp"), 1)).note == ""
    after = decode_facts(committed(tmp_path).state_facts)["seen"]
    assert sum(after.values()) > sum(before.values()) > 0


def test_a_fleet_founded_again_without_settings_that_change_nothing_goes_on_with_what_was_learned(
    tmp_path: Path,
) -> None:
    lean = spec("pfedgrp")
    run_job(job(tmp_path, with_later_settings(lean), 0))  # as founded by a version that spelt all settings out
    before = decode_facts(committed(tmp_path).state_facts)["seen"]
    assert run_job(job(tmp_path, lean, 1)).note == ""
    assert committed(tmp_path).spec_digest == spec_digest(lean)
    assert sum(decode_facts(committed(tmp_path).state_facts)["seen"].values()) > sum(before.values()) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "fedavgg"}, "unknown method 'fedavgg'"),
        ({"settings": {"epochs": 3}}, "has no setting 'epochs'"),
        ({"task": {"image_channels": 1, "image_size": 28, "class_names": "ab"}}, "task is not usable"),
    ],
)
def test_an_agreement_that_this_build_does_not_know_fails_in_one_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    asked = job(tmp_path, spec("fedavg"))
    with pytest.raises(SettingsError, match=message):
        run_job(msgspec.structs.replace(asked, spec=msgspec.structs.replace(asked.spec, **change)))
    assert StateStore(tmp_path).training() is None


def test_round_data_survive_their_file_and_are_gone_with_it() -> None:
    file = RoundFile(samples(4))
    again = read_round_data(file.path)
    assert np.array_equal(again.images, samples(4).images)
    assert np.array_equal(again.labels, samples(4).labels)
    assert str(Path(file.path).readlink()).startswith("/memfd:"), "on no disk"
    file.close()
    file.close()
    assert not Path(file.path).exists()
