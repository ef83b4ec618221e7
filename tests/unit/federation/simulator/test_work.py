from __future__ import annotations

from itertools import count

from support.nudge_method import NudgeMethod

from replayfleet.federation.methods.centralized import Centralized
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.task_records import TaskDownload
from replayfleet.federation.simulator.measures.work import Meter
from tests.support.toy import toy_data
from tests.support.two_stages import ONE_EPOCH, SAMPLER, TOY, random_model


def test_a_round_is_measured_part_by_part_and_is_the_same_round():
    method, data = Centralized(task=TOY, **ONE_EPOCH), toy_data({0: 4, 1: 4}, seed=0)
    start, download = method.initial_states()[0], TaskDownload(random_model())
    seconds = count()
    meter = Meter(clock=lambda: float(next(seconds)))
    _, upload = meter.local_round(method, (start, data, download, seeded_generator(0, 0, "a")), SAMPLER)
    _, plain = method.local_round(start, data, download, seeded_generator(0, 0, "a"), sampler=SAMPLER)
    assert same_bits(upload.task_parameters, plain.task_parameters)
    assert meter.sample_steps == {"task model": 8}
    assert [0 < loss < 10 for loss in meter.losses] == [True], "one epoch"
    assert meter.cpu_s == {"task model": 1.0, "rest": 2.0}


def test_of_a_method_that_trains_by_itself_all_is_one_part():
    assert not hasattr(NudgeMethod, "local_work")
    meter = Meter()
    meter.local_round(_Itself(), (1, 2), None)
    assert meter.cpu_s.keys() == {"rest"}


class _Itself:
    def local_round(self, state: int, data: int, *, sampler: None) -> tuple[int, int]:
        return state, data
