"""Bound runs, on the processor: no GPU is at hand, so ``device="cpu"`` stands in for ``cuda``.

The buffers, the bookkeeping and ONNX Runtime's binding are real.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from replayfleet.export.running.binding import MAX_OWN_BYTES, MAX_SIZES, BoundRuns, OwnBuffers


class Watched:
    """A real session that writes down how each batch was run."""

    def __init__(self) -> None:
        graph = helper.make_graph(
            [helper.make_node("Mul", ["x", "x"], ["y"])],
            "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        self.session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self.plain: list[int] = []
        self.num_bound = 0

    def run(self, names: list[str], inputs: dict[str, Any], options: Any = None) -> Any:
        self.plain.append(len(inputs["x"]))
        return self.session.run(names, inputs, options)

    def io_binding(self) -> Any:
        return self.session.io_binding()

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        self.num_bound += 1
        self.session.run_with_iobinding(binding, options)


def batch(size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng([size, seed]).standard_normal((size, 2)).astype(np.float32)


def test_every_batch_gets_its_own_answer_and_earlier_answers_stay():
    watched = Watched()
    runs = BoundRuns(watched, ("x", "y"), device="cpu")
    xs = [batch(size, seed) for size in (1, 3, 1, 2, 3, 1) for seed in (0, 1)]
    answers = [runs.run(x) for x in xs]
    for x, answer in zip(xs, answers, strict=True):
        np.testing.assert_array_equal(answer, x * x)
    assert watched.plain == [1, 3, 2]  # each size is bound once


def test_the_callers_array_is_never_written_to():
    runs = BoundRuns(Watched(), ("x", "y"), device="cpu")
    first, second = batch(2, 0), batch(2, 1)
    kept = first.copy()
    runs.run(first)
    runs.run(second)
    np.testing.assert_array_equal(first, kept)


def test_buffers_of_many_sizes_make_room_for_each_other_and_the_latest_used_stay():
    watched = Watched()
    runs = BoundRuns(watched, ("x", "y"), device="cpu")
    for size in (1, 2, 1, *range(3, 2 + MAX_SIZES), 1, 2):
        runs.run(batch(size))
    assert watched.plain == [1, 2, *range(3, 2 + MAX_SIZES), 2]
    assert len(runs._bound) == MAX_SIZES


def test_a_threads_own_buffers_give_the_answers_of_a_plain_run_and_leave_earlier_ones_alone():
    watched = Watched()
    own = OwnBuffers(watched, ("x", "y"))
    xs = [batch(size, seed) for seed in range(3) for size in (1, 3)]
    answers = [own.run(x) for x in xs]
    for x, answer in zip(xs, answers, strict=True):
        np.testing.assert_array_equal(answer, x * x)
    assert watched.plain == [1, 3]  # the first of each size
    assert watched.num_bound == 4


def test_large_batches_and_many_sizes_get_no_buffers_of_their_own():
    watched = Watched()
    own = OwnBuffers(watched, ("x", "y"))
    large = MAX_OWN_BYTES // 16 + 1
    for size in (large, large, *range(1, MAX_SIZES + 3), 1, MAX_SIZES + 2):
        x = batch(size)
        np.testing.assert_array_equal(own.run(x), x * x)
    assert watched.plain == [large, large, *range(1, MAX_SIZES + 3), MAX_SIZES + 2]
    assert watched.num_bound == 1


@pytest.mark.parametrize("through", [partial(BoundRuns, device="cpu"), OwnBuffers], ids=["shared", "their own"])
def test_threads_never_mix_their_answers_whether_they_share_buffers_or_not(through: Callable[..., Any]):
    runs = through(Watched(), ("x", "y"))
    wrong: list[int] = []

    def serve(number: int) -> None:
        for seed in range(200):
            x = batch(1 + seed % 2, number * 1000 + seed)
            if not np.array_equal(runs.run(x), x * x):
                wrong.append(number)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not wrong
