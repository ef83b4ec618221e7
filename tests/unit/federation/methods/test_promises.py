"""What a package's method gives is held against what a method promises, and every mistake is named."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch

from replayfleet.federation.errors import MethodFault
from replayfleet.federation.extensions import is_ours
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.promises import (
    Untouched,
    aggregated,
    faults_named,
    local_result,
    remembered_layout,
)
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload, TaskModels, TaskUpload
from replayfleet.federation.methods.lockstep import alone, together
from replayfleet.models.specs import TaskSpec


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Theirs(FedAvg):
    name: ClassVar[str] = "theirs"


METHOD = Theirs(task=TaskSpec(1, 28, ("a", "b"), "cifar", 2))
INITIAL = METHOD.initial_download(torch.Generator().manual_seed(0))
MODEL = INITIAL.task_parameters
BIAS = "head.bias"


def upload(count: Any = 3, **changed: Any) -> TaskUpload:
    return TaskUpload({**MODEL, **changed}, count)


def with_bias(value: Any) -> dict[str, Any]:
    return {**MODEL, BIAS: value}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, r"local_round returned None, expected \(NoState, TaskUpload\)"),
        (upload(), r"returned TaskUpload, expected"),
        ((upload(), NoState()), r"returned \(TaskUpload, NoState\), expected"),
        ((NoState(), TaskUpload({BIAS: MODEL[BIAS]}, 3)), r"an upload's 'task' lacks \[[^]]*\]$"),
        (
            (NoState(), TaskUpload(with_bias(torch.zeros(3)), 3)),
            r"'head.bias' as \(3,\) torch.float32, expected \(2,\)",
        ),
        ((NoState(), TaskUpload(with_bias(MODEL[BIAS].half()), 3)), r"torch.float16, expected \(2,\) torch.float32"),
        ((NoState(), TaskUpload(with_bias(MODEL[BIAS].numpy()), 3)), "has ndarray as 'head.bias', expected a tensor"),
        ((NoState(), upload(-3)), "no fleet takes its upload: num_samples is -3"),
        ((NoState(), upload(2.5)), r"no fleet takes its upload: num_samples is 2\.5"),
    ],
)
def test_a_local_round_that_gives_something_else_is_told_what_was_expected(result: Any, said: str) -> None:
    with pytest.raises(MethodFault, match=f"method 'theirs', of an installed package: .*{said}"):
        local_result(METHOD, result)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, r"aggregate returned None, expected \(TaskModels, Mapping\)"),
        (({}, TaskModels()), r"aggregate returned \(dict, TaskModels\), expected"),
        ((TaskModels(), {"cam-1": MODEL}), "gave OrderedDict for cam-1, expected TaskDownload"),
        ((TaskModels(), {"cam-9": INITIAL}), "for 'cam-9', who isn't one of cam-1, cam-2"),
        ((TaskModels(), {"cam-1": TaskDownload([*MODEL.values()])}), "is list, expected a mapping of names to tensors"),  # type: ignore[arg-type]
        ((TaskModels(), {"cam-1": TaskDownload(with_bias(torch.zeros(9)))}), r"'head.bias' as \(9,\)"),
        (
            (TaskModels(), {"cam-1": TaskDownload(with_bias(MODEL[BIAS] + 1))}),
            r"download_for\(state, 'cam-1', \.\.\.\) isn't the download that aggregate returned",
        ),
    ],
)
def test_an_aggregation_that_gives_something_else_is_told_what_was_expected(result: Any, said: str) -> None:
    with pytest.raises(MethodFault, match=said):
        aggregated(METHOD, result, lambda: INITIAL, {"cam-1": None, "cam-2": None})


def test_what_is_as_promised_passes_also_where_it_is_not_finite() -> None:
    model = with_bias(torch.full((2,), torch.nan))
    assert local_result(METHOD, made := (NoState(), TaskUpload(model, 3))) is made
    state = TaskModels(common=model)
    copied = TaskDownload({name: tensor.clone() for name, tensor in model.items()})
    assert aggregated(METHOD, (state, {"cam-1": copied}), lambda: INITIAL) == (state, {"cam-1": copied})
    assert not is_ours(Theirs)
    assert is_ours(FedAvg)
    assert local_result(FedAvg(task=METHOD.task), None) is None, "tests hold of ours what is asked of others"


def test_a_state_that_gives_a_model_of_another_kind_is_the_methods_fault_and_no_gpus() -> None:
    for kept in (with_bias(MODEL[BIAS].double()), with_bias(torch.zeros(1)), with_bias(torch.zeros(3))):
        with pytest.raises(MethodFault, match="isn't the download that aggregate returned"):
            aggregated(METHOD, (TaskModels(common=kept), {"cam-1": INITIAL}), lambda: INITIAL)


def test_the_layout_of_uploads_is_made_once_and_of_names_that_are_not_known_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Making it builds a module, which takes longer than to average a hundred uploads."""
    asked: list[str] = []

    def upload_layout(self: Theirs, name: str) -> Any:
        asked.append(name)
        return MODEL if name == "task" else None

    monkeypatch.setattr(Theirs, "upload_layout", upload_layout)
    one, other = (dataclasses.replace(METHOD, task=TaskSpec(1, 28, names)) for names in (("a", "b"), ("c", "d")))
    for _ in range(3):
        local_result(one, (NoState(), upload()))
        assert remembered_layout(one)("odd") is None
    assert asked == ["task", *["odd"] * 3]
    local_result(other, (NoState(), upload()))
    assert asked.count("task") == 2, "another method has layouts of its own"


def test_what_a_half_raises_is_named_with_its_line_and_ends_no_process() -> None:
    def half(error: BaseException, method: Any = METHOD, **how: bool) -> None:
        with faults_named(method, "aggregate", **how):
            raise error

    ours = FedAvg(task=METHOD.task)
    for exits in (SystemExit(0), SystemExit("done")):
        with pytest.raises(MethodFault, match=r"'theirs', of an installed package: aggregate raised SystemExit"):
            half(exits)
    with pytest.raises(MethodFault, match=r"aggregate raised ValueError: odd \(.*test_promises.py, line \d+\)"):
        half(ValueError("odd"), all_of_them=True)
    for said in ("local_work returned None", "method 'theirs', of an installed package: local_work returned None"):
        with pytest.raises(MethodFault, match=r"^method 'theirs', of an installed package: local_work returned None$"):
            half(MethodFault(said))
    for passes, method, how in (
        (RuntimeError("a GPU's"), METHOD, {}),
        (MemoryError(), METHOD, {"all_of_them": True}),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), METHOD, {"all_of_them": True}),
        (OSError(28, "full"), METHOD, {"all_of_them": True}),
        (KeyboardInterrupt(), METHOD, {"all_of_them": True}),
        (ValueError(), ours, {"all_of_them": True}),
    ):
        with pytest.raises(type(passes)):
            half(passes, method, **how)


def test_what_is_changed_in_place_is_noticed_for_others_share_it() -> None:
    untouched = Untouched(METHOD, download := TaskDownload({BIAS: torch.zeros(2)}))
    _ = download.task_parameters[BIAS] + 1
    untouched.check("local_round")
    download.task_parameters[BIAS].add_(1)
    with pytest.raises(MethodFault, match="local_round changed its arguments in place; others have the same tensors"):
        untouched.check("local_round")


def test_local_work_that_is_no_generator_or_yields_something_else_is_told() -> None:
    def yields_a_model() -> Any:
        yield MODEL

    for work, said in (((NoState(), upload()), "returned tuple, expected a generator"), (None, "returned None")):
        with pytest.raises(MethodFault, match=f"local_work {said}"):
            alone(work)
    with pytest.raises(MethodFault, match="local_work yielded OrderedDict, expected TrainTaskModel"):
        together({"cam-1": yields_a_model()})
