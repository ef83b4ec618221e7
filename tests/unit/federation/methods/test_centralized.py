from __future__ import annotations

from pathlib import Path

from replayfleet.federation.methods.centralized import Centralized
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.task_records import TaskDownload
from replayfleet.federation.service.artefact_codec import decode_own, encode_artefacts
from replayfleet.federation.simulator.checkpoints import Checkpoints
from tests.support.toy import toy_data
from tests.support.two_stages import ONE_EPOCH, SAMPLER, TOY, random_model

NUM_ROUNDS = 3


def after_three_rounds(checkpoints: Checkpoints | None = None) -> Parameters:
    """Return a client's model; with ``checkpoints`` its state goes to disk and back after every round."""
    method, download = Centralized(task=TOY, **ONE_EPOCH), TaskDownload(random_model())
    state, _ = method.initial_states()
    for index in range(NUM_ROUNDS):
        data, rng = toy_data({index: 4, index + 1: 4}, seed=index), seeded_generator(0, index, "a")
        state, upload = method.local_round(state, data, download, rng, sampler=SAMPLER)
        download = TaskDownload(upload.task_parameters)
        if checkpoints is not None:
            stored = encode_artefacts(state.pack(), checkpoints)
            state = method.ClientState.unpack(decode_own(stored.blobs, stored.facts, checkpoints))
    return download.task_parameters


def test_a_client_that_is_stored_after_every_round_gets_the_same_model_to_the_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({}, resume=False)
    assert same_bits(after_three_rounds(checkpoints), after_three_rounds())


def test_what_is_written_doesnt_grow_with_the_rounds(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({}, resume=False)
    after_three_rounds(checkpoints)
    sizes = [path.stat().st_size for path in tmp_path.glob("blobs/*")]
    assert len(sizes) == NUM_ROUNDS
    assert len(set(sizes)) == 1


def test_a_round_costs_the_same_however_late_it_is_where_a_number_of_samples_is_set() -> None:
    method, download = Centralized(task=TOY, **ONE_EPOCH, samples_per_round=5), TaskDownload(random_model())
    state, _ = method.initial_states()
    drawn = []
    for index in range(NUM_ROUNDS):
        data, rng = toy_data({index: 4, index + 1: 4}, seed=index), seeded_generator(0, index, "a")
        work = method.local_work(state, data, download, rng, sampler=SAMPLER)
        job = next(work).job
        drawn.append(job.images)
        state = state.with_round(data)
        known = {image.numpy().tobytes() for image in state.all_of("images")}
        assert {image.numpy().tobytes() for image in job.images} <= known
    assert [len(images) for images in drawn] == [5, 5, 5]
