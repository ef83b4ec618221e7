from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from replayfleet.edge_client.serving.slot import Candidate, Model, ModelSlot, RollBack
from replayfleet.export.running.artefact import check_probe
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.wire.protocol.messages import Probe

Images = NDArray[np.float32]


def constant(*logits: float) -> Model:
    return lambda images: np.tile(np.array(logits, np.float32), (len(images), 1))


def candidate(version: int, model: Model | None = None, load: Callable[[], Model] | None = None) -> Candidate:
    served = model or constant(version, 0)
    probe = Probe(seed=1, batch_size=2, logits=(version, 0.0, version, 0.0), tolerance=1e-4)
    return Candidate(
        version, version, (1, 2, 2), load or (lambda: served), lambda m: check_probe(m, probe, (1, 2, 2), (2,))
    )


def _reason(slot: ModelSlot, refused: Candidate) -> Reason:
    with pytest.raises(ArtefactRejected) as caught:
        slot.install(refused)
    return caught.value.reason


def test_an_installed_model_serves_and_the_one_before_is_kept() -> None:
    assert ModelSlot().active is None
    slot = ModelSlot()
    slot.install(candidate(1))
    first = slot.active
    slot.install(candidate(2))
    assert (slot.active.version, slot.previous, slot.num_swaps) == (2, first, 2)


def test_an_older_model_never_replaces_a_newer_one() -> None:
    slot = ModelSlot()
    slot.install(candidate(5))
    loaded: list[int] = []
    assert _reason(slot, candidate(4, load=lambda: loaded.append(4) or constant(4, 0))) is Reason.STALE_VERSION
    assert loaded == []  # nor does it cost anything
    assert slot.active.version == 5


def test_a_model_is_warmed_up_with_one_frame_before_it_is_checked() -> None:
    asked: list[tuple[int, float]] = []

    def model(images: Images) -> Images:
        asked.append((len(images), float(np.abs(images).max())))
        return constant(1, 0)(images)

    ModelSlot().install(candidate(1, model))
    assert asked[0] == (1, 0.0)
    assert len(asked) == 2


def test_installing_the_active_version_again_changes_nothing() -> None:
    slot = ModelSlot()
    served = slot.install(candidate(5))
    assert slot.install(candidate(5)) is served
    assert slot.num_swaps == 1


def test_a_model_that_misses_its_golden_vector_is_not_served() -> None:
    slot = ModelSlot()
    good = slot.install(candidate(1))
    for wrong in (constant(2.0 + 2e-4, 0), constant(float("nan"), 0), constant(2, 0, 0)):
        assert _reason(slot, candidate(2, wrong)) is Reason.PROBE_MISMATCH
    assert slot.active is good
    assert slot.install(candidate(2)).version == 2


def test_a_model_that_does_not_load_or_run_is_not_served() -> None:
    def missing() -> Model:
        raise RuntimeError("no such operator\nFoo")

    def crashes(images: Images) -> Images:
        raise RuntimeError("bad shape")

    def says_nothing() -> Model:
        raise MemoryError

    slot = ModelSlot()
    assert _reason(slot, candidate(1, load=missing)) is Reason.LOAD_FAILED
    with pytest.raises(ArtefactRejected, match="version 1: MemoryError"):
        slot.install(candidate(1, load=says_nothing))
    assert _reason(slot, candidate(1, crashes)) is Reason.LOAD_FAILED
    assert slot.active is None


def test_a_rolled_back_version_is_not_installed_again() -> None:
    slot = ModelSlot()
    slot.install(candidate(1))
    slot.install(candidate(2))
    back = slot.roll_back(2)
    assert back.version == 1
    assert slot.roll_back(1) is None, "nothing precedes version 1"
    assert _reason(slot, candidate(2)) is Reason.STALE_VERSION
    assert slot.install(candidate(3)).version == 3


def test_a_late_failure_report_does_not_roll_a_newer_model_back() -> None:
    slot = ModelSlot()
    slot.install(candidate(1))
    slot.install(candidate(2))
    assert slot.roll_back(1) is None
    assert slot.active.version == 2


def test_the_old_model_answers_while_the_new_one_loads() -> None:
    slot = ModelSlot()
    slot.install(candidate(1))
    loading, finish = threading.Event(), threading.Event()

    def slow() -> Model:
        loading.set()
        assert finish.wait(60)
        return constant(2, 0)

    swap = threading.Thread(target=slot.install, args=(candidate(2, load=slow),))
    swap.start()
    assert loading.wait(60)
    assert slot.active.version == 1
    finish.set()
    swap.join(60)
    assert slot.active.version == 2


def test_another_runtime_of_the_active_version_takes_over_and_is_no_swap() -> None:
    slot = ModelSlot()
    slot.install(candidate(1))
    slot.install(candidate(2))
    engine = constant(2, 0)
    assert slot.upgrade(2, engine)
    assert slot.active.model is engine
    assert (slot.active.version, slot.active.round, slot.num_swaps) == (2, 2, 2)
    assert slot.upgrade(2, constant(2, 0)), "one engine may follow another"
    back = slot.roll_back(2)
    assert back.version == 1


def test_a_runtime_that_misses_the_golden_vector_or_fails_does_not_take_over() -> None:
    def fails(images: Images) -> Images:
        raise RuntimeError("engine was built for another board")

    slot = ModelSlot()
    good = slot.install(candidate(2))
    for wrong, reason in ((constant(1, 0), Reason.PROBE_MISMATCH), (fails, Reason.LOAD_FAILED)):
        with pytest.raises(ArtefactRejected) as caught:
            slot.upgrade(2, wrong)
        assert caught.value.reason is reason
    assert slot.active is good


def test_a_runtime_that_comes_too_late_is_not_used() -> None:
    slot = ModelSlot()
    assert not slot.upgrade(1, constant(1, 0)), "nothing serves yet"
    slot.install(candidate(1))
    slot.install(candidate(2))
    assert not slot.upgrade(1, constant(1, 0))

    def rolled_back_meanwhile(images: Images) -> Images:
        slot.roll_back(2)
        return constant(2, 0)(images)

    assert not slot.upgrade(2, rolled_back_meanwhile)
    assert slot.active.version == 1


class Process:
    """Stands in for a model with a process."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.state = "runs"
        self.ended = threading.Event()

    def __call__(self, images: Images) -> Images:
        self.state = "runs"
        return constant(self.version, 0)(images)

    def rest(self) -> None:
        self.state = "rests"

    def close(self) -> None:
        self.state = "closed"
        self.ended.set()


def test_a_model_is_on_probation_until_it_is_confirmed_and_then_its_predecessor_rests() -> None:
    slot = ModelSlot()
    first, second = Process(1), Process(2)
    slot.install(candidate(1, first))
    assert slot.on_probation is None, "nothing precedes it"
    served = slot.install(candidate(2, second))
    assert slot.on_probation is served
    assert not slot.confirm(1)
    assert slot.confirm(2)
    assert (slot.on_probation, first.state, second.state) == (None, "rests", "runs")
    assert slot.roll_back(2) is slot.active
    assert second.ended.wait(60)


def test_a_model_that_nobody_confirmed_is_let_go_and_never_returned_to() -> None:
    slot = ModelSlot()
    processes = [Process(version) for version in range(4)]
    for version in (1, 2, 3):
        slot.install(candidate(version, processes[version]))
    assert processes[2].ended.wait(60)
    back = slot.roll_back(3, Reason.HUNG, "no answer")
    assert back.version == 1
    assert slot.last_rollback == RollBack(3, 3, Reason.HUNG, "no answer")
    assert processes[3].ended.wait(60)
    assert processes[1].state == "runs"


def test_after_a_roll_back_what_serves_is_confirmed_and_the_one_to_return_to() -> None:
    slot, first = ModelSlot(), Process(1)
    slot.install(candidate(1, first))
    slot.install(candidate(2))
    back = slot.roll_back(2)
    assert (slot.on_probation, slot.num_rollbacks) == (None, 1)
    slot.install(candidate(3))
    assert slot.previous is back
    assert slot.roll_back(3) is back
    assert first.state == "runs"


def test_a_runtime_that_another_one_follows_is_let_go_and_one_that_follows_itself_is_not() -> None:
    slot, slower, faster = ModelSlot(), Process(1), Process(1)
    slot.install(candidate(1, slower))
    assert slot.upgrade(1, faster)
    assert slower.ended.wait(60)
    assert slot.upgrade(1, faster)
    assert not faster.ended.wait(0.05)


def test_a_machine_that_has_no_thread_left_swaps_and_rolls_back_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = ModelSlot()
    processes = [Process(version) for version in range(4)]
    monkeypatch.setattr("threading.Thread.start", Mock(side_effect=RuntimeError("can't start new thread")))
    for version in (1, 2, 3):
        slot.install(candidate(version, processes[version]))
    assert slot.roll_back(3).version == 1
    assert [process.state for process in processes[1:]] == ["runs", "closed", "closed"]


def test_what_is_refused_or_cleared_is_let_go_at_once() -> None:
    slot = ModelSlot()
    wrong = Process(7)
    assert _reason(slot, candidate(1, wrong)) is Reason.PROBE_MISMATCH
    assert wrong.state == "closed"
    served = Process(2)
    slot.install(candidate(2, served))
    slot.clear()
    assert served.state == "closed"
    assert (slot.active, slot.previous, slot.on_probation) == (None, None, None)


def test_a_model_that_was_loading_when_the_slot_was_cleared_is_not_served() -> None:
    slot = ModelSlot()

    late = Process(1)

    def cleared_meanwhile() -> Model:
        slot.clear()
        return late

    assert _reason(slot, candidate(1, load=cleared_meanwhile)) is Reason.STALE_VERSION
    assert slot.active is None
    assert late.ended.wait(60), "or its process would stay"
