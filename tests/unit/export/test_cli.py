"""What an operator sees of ``model-export`` when something is wrong: one line, exit code 2, nothing written."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from replayfleet.export import checking
from replayfleet.export.cli import main
from replayfleet.export.parameters import Model
from replayfleet.federation.errors import ArtefactRejected
from replayfleet.models.build import build_task_model
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec, TaskSpec
from replayfleet.runs import export_model

SHAPE = ["--image-size", "28", "--image-channels", "1"]
CARS = ["--picture-size", "64x32", "--classes", "car"]


def _state_dict(spec: AnyTaskSpec | None = None) -> dict[str, Any]:
    module = build_task_model(spec or TaskSpec(1, 28, ("a", "b")))
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


@pytest.fixture
def parameters(tmp_path: Path) -> Path:
    path = tmp_path / "parameters.safetensors"
    save_file({"w": np.eye(2, dtype=np.float32)}, path)
    return path


def fails(arguments: list[str]) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr


def task(file: Path, out: Path, **changes: str) -> list[str]:
    options = {"image-size": "28", "image-channels": "1", "classes": "a,b", "parameters": str(file)}
    options |= {"out": str(out)} | {name.replace("_", "-"): value for name, value in changes.items()}
    return ["task", *(part for name, value in options.items() for part in (f"--{name}", value))]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": "onxx"}, "unknown format 'onxx'; did you mean 'onnx'?"),
        ({"device": "jetsn"}, "unknown device 'jetsn'; did you mean 'jetson'?"),
        ({"device": "cpu", "format": "onnx"}, "--format and --device are both given"),
        ({"stem": "cifra"}, "unknown stem 'cifra'; did you mean 'cifar'?"),
        ({"image_size": "29"}, "image_size is 29, expected one of (28, 32, 64)"),
        ({"image_channels": "4"}, "image_channels is 4"),
        ({"classes": "a"}, "gives 1 names"),
        ({"parameters": "absent.safetensors"}, "absent.safetensors: can't be read"),
        ({}, "parameter 'blocks.0.conv1.weight' is missing (wrong-layout)"),
    ],
)
def test_bad_input_gives_one_line_and_writes_nothing(
    parameters: Path, tmp_path: Path, changes: dict[str, str], expected: str
):
    out = tmp_path / "out"
    assert expected in fails(task(parameters, out, **changes))
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.pt", "model.pt can't be onnx, which ends in .onnx; give that, or a folder"),
        ("parameters.safetensors", "parameters.safetensors is a file, expected a folder"),
        ("parameters.safetensors/new/model.onnx", "parameters.safetensors is a file; choose another"),
    ],
)
def test_a_place_where_no_such_file_can_be_is_refused_at_once(parameters: Path, name: str, expected: str):
    assert expected in fails(task(parameters, parameters.parent / name))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": "torchscript", "held": "h.npz"}, "did you mean --format onnx-fp16 or onnx-int8?"),
        ({"seed": "0"}, "--seed: --format onnx doesn't take it"),
        ({"format": "onnx-int8"}, "is judged before it is written; give --held FILE"),
        ({"format": "onnx-int8", "held": "h.npz"}, "needs samples to measure ranges on, other ones than --held"),
        ({"format": "onnx-fp16", "calibration": "c=x"}, "--calibration: unknown class 'c'"),
        ({"format": "onnx-fp16", "max_loss": "nan", "calibration": "absent.npz"}, "--max-loss: nan points, expected 0"),
        ({"format": "onnx-fp16", "calibration": "absent.npz"}, "absent.npz: can't be read"),
    ],
)
def test_a_combination_that_the_table_has_not_is_one_line_and_writes_nothing(
    tmp_path: Path, changes: dict[str, str], expected: str
):
    save_file(_state_dict(), tmp_path / "right.safetensors")
    out = tmp_path / "out"
    assert expected in fails(task(tmp_path / "right.safetensors", out, **changes))
    assert not out.exists()


def test_split_torchscript_is_refused(parameters: Path, tmp_path: Path):
    assert "did you mean --format onnx?" in fails(
        [*task(parameters, tmp_path / "out", format="torchscript"), "--split"]
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sub-generator", *SHAPE, "--format", "onnx-int8", "--held", "x"], "leave it out for a sub-generator"),
        (["sampler", *SHAPE, "--format", "onnx-int8"], "can't hold a sampler; did you mean 'onnx-fp16'?"),
        (["sampler", *SHAPE, "--split"], "computed into its graph"),
        (["sampler", *SHAPE, "--width", "48"], "--width: 48, expected 1 to 32, or a multiple of 32"),
        (["detector", *CARS, "--anchors", "0.1"], "--anchors: '0.1' is no pair of numbers"),
        (["detector", *CARS, "--anchors", "0.1x3"], "anchor is (0.1, 3.0), expected"),
        (["detector", *CARS, "--anchors", "0.1x0.1", "--stride", "7"], "stride is 7"),
    ],
)
def test_other_kinds_refuse_what_does_not_fit_them(
    parameters: Path, tmp_path: Path, arguments: list[str], expected: str
):
    command = [*arguments, "--parameters", str(parameters), "--out", str(tmp_path / "out")]
    assert expected in fails(command)
    assert not (tmp_path / "out").exists()


def test_torchscript_is_checked_only_by_a_digest_that_is_known(tmp_path: Path):
    (tmp_path / "m.pt").write_bytes(b"code")
    assert "give --sha256" in fails(["check", str(tmp_path / "m.pt")])
    assert "wrong-digest" in fails(["check", str(tmp_path / "m.pt"), "--sha256", "00"])


def test_what_a_torchscript_file_has_no_use_for_is_refused(parameters: Path, tmp_path: Path):
    (tmp_path / "m.pt").write_bytes(b"code")
    command = ["check", str(tmp_path / "m.pt"), "--sha256", "00", "--parameters", str(parameters)]
    assert "--parameters: a TorchScript file holds its own" in fails(command)


def test_an_onnx_file_of_another_digest_is_not_loaded(parameters: Path):
    assert "expected 00 (wrong-digest)" in fails(["check", str(parameters), "--sha256", "00"])


@pytest.mark.parametrize("side", [0, 2**20])
def test_an_input_of_no_or_too_many_values_is_refused_before_room_is_made_for_it(side: int):
    with pytest.raises(ArtefactRejected, match=rf"its input is 3 x {side} x {side}, expected 1 to"):
        list(checking._latencies(lambda x: x, (3, side, side), "", 1))
    with pytest.raises(ArtefactRejected, match=rf"its input is 3 x {side} x {side}, expected 1 to"):
        checking._check_facts(Path("m.onnx"), {}, cast(Any, SimpleNamespace(input_shape=(3, side, side), run=None)))


def test_what_a_file_says_of_itself_is_shown_and_obeyed_by_no_terminal():
    (line,) = checking._said({"kind": "task\x1b]0;owned\x07\nprovider  FAKE"})
    assert line == "kind              'task\\x1b]0;owned\\x07\\nprovider  FAKE'"


def test_a_pipe_or_a_device_is_no_file(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.onnx")
    assert "it is no file" in fails(["check", str(tmp_path / "pipe.onnx")])
    assert "it is no file" in fails(["check", "/dev/zero"])


def test_a_split_export_leaves_a_file_of_parameters_alone_that_is_not_of_an_export(tmp_path: Path):
    raw = tmp_path / "task.safetensors"
    save_file(_state_dict(), raw)
    before = raw.read_bytes()
    assert "is there, and not of an export" in fails([*task(raw, tmp_path), "--split"])
    assert raw.read_bytes() == before
    assert CliRunner().invoke(main, [*task(raw, tmp_path / "out"), "--split"]).exit_code == 0
    assert CliRunner().invoke(main, [*task(raw, tmp_path / "out"), "--split"]).exit_code == 0, "again"


def test_a_full_disk_is_named_by_the_file_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    raw = tmp_path / "task.safetensors"
    save_file(_state_dict(), raw)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    out = tmp_path / "a" / "b"
    assert f"{out / 'task.onnx'}: can't be written (No space left" in fails(task(raw, out))
    assert not (tmp_path / "a").exists()


def test_who_reads_the_first_lines_alone_is_told_of_no_file_that_cant_be_written(tmp_path: Path):
    """As of ``| head``: it said that None can't be written."""
    path = tmp_path / "m.onnx"
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 2]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), path)
    reads, writes = os.pipe()
    os.close(reads)
    code = f"from replayfleet.export.cli import main; main(['check', {str(path)!r}])"
    done = subprocess.run([sys.executable, "-c", code], check=False, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_unknown_command_gets_the_nearest_name():
    assert "unknown command 'tsk'; did you mean 'task'?" in fails(["tsk"])


def test_checking_a_file_that_is_no_model_says_so(parameters: Path):
    assert "it is not loaded (load-failed)" in fails(["check", str(parameters)])


def test_help_needs_neither_torch_nor_onnxruntime():
    code = (
        "import sys\nfrom replayfleet.export.cli import main\n"
        "main(['task', '--help'], standalone_mode=False)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'onnx', 'onnxruntime')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--image-channels" in done.stdout


def test_what_is_no_export_of_this_kind_is_not_replaced(tmp_path: Path):
    raw = tmp_path / "raw.safetensors"
    save_file(_state_dict(), raw)
    notes = tmp_path / "notes.onnx"
    notes.write_bytes(b"precious")
    assert f"{notes} is there, and is no export of a task; choose another --out" in fails(task(raw, notes))
    pipe = notes.with_name("pipe.onnx")
    os.mkfifo(pipe)
    assert f"{pipe} is no file" in fails(task(raw, pipe))
    assert pipe.is_fifo()
    assert notes.read_bytes() == b"precious"
    notes.unlink()
    for _ in range(2):  # its own it makes again
        assert CliRunner().invoke(main, task(raw, notes)).exit_code == 0
    script = tmp_path / "notes.pt"
    script.write_bytes(b"precious")
    assert "is no export of a task" in fails(task(raw, script, format="torchscript"))
    generator = ["sub-generator", *SHAPE, "--width", "1", "--parameters", str(raw), "--out", str(notes)]
    assert "is no export of a sub-generator" in fails(generator)


def test_a_pair_of_files_is_written_whole_or_not_at_all(tmp_path: Path):
    raw, out = tmp_path / "raw.safetensors", tmp_path / "out"
    save_file(_state_dict(), raw)
    assert CliRunner().invoke(main, [*task(raw, out), "--split"]).exit_code == 0
    before = (out / "task.safetensors").read_bytes()
    (out / "task.onnx").unlink()
    (out / "task.onnx").mkdir()
    save_file({name: np.zeros_like(value) for name, value in _state_dict().items()}, raw)
    assert f"{out / 'task.onnx'}: can't be written" in fails([*task(raw, out), "--split"])
    assert (out / "task.safetensors").read_bytes() == before
    assert sorted(path.name for path in out.iterdir()) == ["task.onnx", "task.safetensors"]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("classes", '["a", "b", "c"]', r"names 3 classes, its graph answers \[2\] for a picture"),
        ("input", "[3, 99, 99]", r"says input \[3, 99, 99\], its graph has \[1, 28, 28\]"),
    ],
)
def test_facts_that_contradict_the_graph_are_refused(tmp_path: Path, key: str, value: str, said: str):
    raw = tmp_path / "raw.safetensors"
    save_file(_state_dict(), raw)
    assert CliRunner().invoke(main, task(raw, tmp_path / "task.onnx")).exit_code == 0
    assert CliRunner().invoke(main, ["check", str(tmp_path / "task.onnx")]).exit_code == 0
    model = onnx.load(tmp_path / "task.onnx")
    for entry in model.metadata_props:
        if entry.key == f"replayfleet.{key}":
            entry.value = value
    onnx.save(model, tmp_path / "task.onnx")
    assert re.search(said, fails(["check", str(tmp_path / "task.onnx")]))


@pytest.mark.parametrize(("key", "value"), [("classes", '["car", "bus"]'), ("anchors", "[[0.1, 0.1], [0.2, 0.2]]")])
def test_a_detector_that_names_more_than_its_graph_answers_is_refused(tmp_path: Path, key: str, value: str):
    """Whoever read its outputs by what it says read others."""
    spec = DetectionSpec(3, 32, 64, ("car",), ((0.1, 0.1),), width=1)
    (file,) = export_model(Model("detector", spec, _state_dict(spec)), tmp_path / "detector.onnx", threads=1)
    assert CliRunner().invoke(main, ["check", str(file)]).exit_code == 0
    model = onnx.load(file)
    next(entry for entry in model.metadata_props if entry.key == f"replayfleet.{key}").value = value
    onnx.save(model, file)
    said = r"names \d classes and \d anchors, its graph answers \[6, 1, 2\] for a picture"
    assert re.search(said, fails(["check", str(file)]))


@pytest.mark.parametrize("size", ["64", "infx32", "64.9x32"])
def test_half_a_pixel_and_one_side_are_no_size(parameters: Path, tmp_path: Path, size: str):
    asked = ["detector", "--parameters", str(parameters), "--classes", "car", "--picture-size", size]
    assert re.search("expected .*as (in )?64x32", fails([*asked, "--anchors", "0.1x0.1", "--out", str(tmp_path)]))


def test_parameters_that_dont_say_their_network_are_exported_when_it_is_named(tmp_path: Path):
    pyramid = DetectionSpec(3, 32, 64, ("car",), anchors=((0.1, 0.1),), width=4, architecture="pyramid")
    save_file(_state_dict(pyramid), tmp_path / "d.safetensors")
    cars = ["detector", *CARS, "--anchors", "0.1x0.1", "--width", "4", "--parameters", str(tmp_path / "d.safetensors")]
    save_file(_state_dict(TaskSpec(1, 28, ("a", "b"), architecture="lenet")), tmp_path / "t.safetensors")
    asked = {"pyramid": [*cars, "--out", str(tmp_path)], "lenet": task(tmp_path / "t.safetensors", tmp_path)}
    for name, words in asked.items():
        assert "wrong-layout" in fails(words)
        assert CliRunner().invoke(main, [*words, "--architecture", name]).exit_code == 0
    assert "architecture is 'pyramyd'" in fails([*asked["pyramid"], "--architecture", "pyramyd"])
