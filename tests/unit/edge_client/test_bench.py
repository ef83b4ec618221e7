"""What ``edge-client bench`` measures, and how it says so; real runtimes and processes, for fractions of seconds."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save as format_safetensors

from replayfleet.edge_client.bench import running
from replayfleet.edge_client.bench.command import bench
from replayfleet.edge_client.bench.messages import Latency, Measured, Trial, Unusable, Variant, latency_of, percentile
from replayfleet.edge_client.bench.report import line, tail
from replayfleet.edge_client.bench.running import Bench, Row
from replayfleet.edge_client.bench.settings import BenchSettings
from replayfleet.edge_client.bench.subject import (
    OUR_TASK,
    Subject,
    from_data_dir,
    from_file,
    of_our_own,
    task_from,
    task_of_facts,
)
from replayfleet.edge_client.bench.worker import MIN_RUNS, measured, timed
from replayfleet.edge_client.state_store import HeldDownload, StateStore
from replayfleet.export.graphs.graph import task_graph
from replayfleet.export.running.facts import task_facts
from replayfleet.export.running.inspection import inspect_graph
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.fleet.spec import make_spec
from replayfleet.federation.wire.protocol.messages import BlobEntry, Manifest, Probe, Serving
from replayfleet.federation.wire.protocol.tensors import encode_arrays
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.specs import DetectionSpec, TaskSpec

QUICK = 0.01
DETECTS = DetectionSpec(3, 64, 96, ("car", "bus"), ((0.1, 0.2), (0.3, 0.4)), stride=16)
PYRAMID = replace(DETECTS, stride=8, architecture="pyramid")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return of_our_own(tmp_path_factory.mktemp("ours"))


def trial_of(variant: Variant, runtime: str = "CPU", **changes: Any) -> Trial:
    trial = Trial(
        runtime=runtime,
        variant=variant,
        task=msgspec.to_builtins(OUR_TASK),
        batches=(1, 4),
        num_threads=1,
        seconds=QUICK,
    )
    return msgspec.structs.replace(trial, **changes)


def test_the_model_that_comes_along_is_todays_task_model(ours: Subject):
    """Made by ``replayfleet.export.graphs.graph.task_graph(OUR_TASK)``; write it again when this fails."""
    graph = Path(ours.variants[0].model).read_bytes()
    assert inspect_graph(graph).parameters == inspect_graph(task_graph(OUR_TASK)).parameters
    assert task_of_facts({"kind": "no model"}) is None


def test_every_precision_of_it_is_there_with_all_that_makes_them(ours: Subject):
    assert [(variant.form, variant.precision) for variant in ours.variants] == [
        ("onnx", "fp32"),
        ("torchscript", "fp32"),
        ("eager", "fp32"),
        ("onnx", "fp16"),
        ("onnx", "int8"),
    ]
    assert ours.lacking == ()


def test_without_torch_and_onnx_the_rest_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("replayfleet.edge_client.bench.subject.importlib.util.find_spec", lambda name: None)
    subject = of_our_own(tmp_path)
    assert [variant.form for variant in subject.variants] == ["onnx"]
    assert [name for name, _ in subject.lacking] == ["torchscript", "eager", "fp16", "int8"]
    assert all("not installed" in why for _, why in subject.lacking)


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4], ids=["onnx", "torchscript", "eager", "fp16", "int8"])
def test_every_form_is_measured_by_really_running_it(ours: Subject, index: int):
    variant = ours.variants[index]
    runtime = {"torchscript": "TorchScript", "eager": "eager"}.get(variant.form, "CPU")
    found = measured(trial_of(variant, runtime))
    assert isinstance(found, Measured), found
    assert found.runs_on == {"TorchScript": "TorchScript", "eager": "eager"}.get(runtime, "CPUExecutionProvider")
    assert set(found.latency_s) == {1, 4}
    for latency in found.latency_s.values():
        assert 0 < latency.p50 <= latency.p95 <= latency.p99
        assert latency.num_runs >= MIN_RUNS
    assert found.resident_bytes > 10 << 20


@pytest.mark.parametrize("runtime", ["CUDA", "TensorRT"])
def test_a_runtime_that_isnt_here_says_why_instead_of_numbers(ours: Subject, runtime: str):
    found = measured(trial_of(ours.variants[0], runtime))
    assert isinstance(found, Unusable)
    assert "can't be used" in found.why


def test_a_model_that_answers_with_nan_is_not_measured(ours: Subject, tmp_path: Path):
    layouts = inspect_graph(Path(ours.variants[0].model).read_bytes()).parameters
    broken = {name: np.full(layout.shape, np.nan, layout.dtype) for name, layout in layouts.items()}
    (tmp_path / "broken.safetensors").write_bytes(format_safetensors(broken))
    found = measured(
        trial_of(msgspec.structs.replace(ours.variants[0], parameters=str(tmp_path / "broken.safetensors")))
    )
    assert found == Unusable("it answers with something else than numbers")


def test_the_process_that_measures_answers_in_json_or_dies_with_a_reason(
    ours: Subject, monkeypatch: pytest.MonkeyPatch
):
    found = running._tried(trial_of(ours.variants[0], batches=(1,)))
    assert isinstance(found, Measured)
    code = "import os, sys; sys.stderr.write('no memory left\\n'); sys.stderr.flush(); os.kill(os.getpid(), 9)"
    monkeypatch.setattr(running, "WORKER_COMMAND", (sys.executable, "-c", code))
    assert running._tried(trial_of(ours.variants[0])) == Unusable("its process ended with -9: no memory left")


def test_percentiles_are_values_that_were_measured():
    ordered = [float(number) for number in range(1, 101)]
    assert [percentile(ordered, share) for share in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert percentile([3.0], 0.99) == 3
    assert latency_of([2.0, 1.0, 3.0]) == Latency(2, 3, 3, 3)
    assert len(timed(lambda: None, 0.0)) == MIN_RUNS


@pytest.mark.parametrize("task", [OUR_TASK, DETECTS, PYRAMID, TaskSpec(3, 64, ("a", "b"), stem="imagenet")])
def test_a_task_survives_json_and_a_files_facts(task: TaskSpec | DetectionSpec):
    assert task_from(json.loads(json.dumps(msgspec.to_builtins(task)))) == task
    found = task_of_facts(task_facts(task))
    assert (found.image_shape, found.class_names, found.output_shape) == (
        task.image_shape,
        task.class_names,
        task.output_shape,
    )


def test_files_that_are_no_models_are_refused_by_name(tmp_path: Path, ours: Subject):
    (tmp_path / "noise.onnx").write_bytes(b"noise")
    with pytest.raises(SettingsError, match=r"noise\.onnx: "):
        from_file(tmp_path / "noise.onnx", None)
    with pytest.raises(SettingsError, match="can't be read"):
        from_file(tmp_path / "absent.onnx", None)
    with pytest.raises(SettingsError, match="name it with --parameters"):
        from_file(Path(ours.variants[0].model), None)
    with pytest.raises(SettingsError, match="no client has run there"):
        from_data_dir(tmp_path, tmp_path)


def test_looking_at_what_a_client_serves_leaves_its_data_dir_as_it_is(tmp_path: Path):
    """A record that couldn't be read was removed, under a client that perhaps runs."""
    (tmp_path / "blobs").mkdir()
    with pytest.raises(SettingsError, match="nothing is served there yet"):
        from_data_dir(tmp_path, tmp_path)
    assert not (tmp_path / "state").exists()
    record = tmp_path / "state" / "held"
    record.parent.mkdir()
    record.write_bytes(b"of a later version")
    with pytest.raises(SettingsError, match="held is damaged"):
        from_data_dir(tmp_path, tmp_path)
    assert record.read_bytes() == b"of a later version"


def test_a_data_dir_of_another_format_is_not_measured(tmp_path: Path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "fleet.json").write_text('{"format": 2, "fleet": "yard", "role": "client", "owner": "cam-1"}')
    with pytest.raises(SettingsError, match="format 2, this process is of format 1; use the version"):
        from_data_dir(tmp_path, tmp_path)


def test_a_served_model_that_is_damaged_stays_where_its_client_finds_it(tmp_path: Path):
    """It was removed, and folders were made beside it."""
    blob = tmp_path / "blobs" / "aa" / ("a" * 64)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"damaged")
    serving = Serving("graph/task", "task", Probe(0, 1, (0.0,), 1e-4))
    entries = tuple(BlobEntry(name, blob.name, 7) for name in (serving.graph, serving.parameters))
    agreed = make_spec("yard", "fedavg", OUR_TASK, preset="tiny", overrides={}, run_seed=0)
    StateStore(tmp_path).hold(HeldDownload(Manifest("down", "yard", "cam-1", 1, 1, entries, b"\x80", serving), agreed))
    with pytest.raises(SettingsError, match="is damaged"):
        from_data_dir(tmp_path, tmp_path)
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == ["aa"]
    assert blob.read_bytes() == b"damaged"


def test_a_client_that_serves_a_rounded_model_is_measured_with_it_and_with_what_it_was_made_of(
    ours: Subject, tmp_path: Path
):
    """Its float16 was called float32 and what was made of it int8, and PyTorch was given no parameters."""
    exact, rounded = (next(each for each in ours.variants if each.precision == name) for name in ("fp32", "fp16"))
    blobs, files = DiskBlobStore(tmp_path / "blobs"), (exact.model, exact.parameters, rounded.model)
    names = ("graph/task", "task", "graph/task-fp16", "graph/rounded-from/task")
    contents = (*(Path(file).read_bytes() for file in files), encode_arrays({}))
    entries = tuple(BlobEntry(name, blobs.put(data), len(data)) for name, data in zip(names, contents, strict=True))
    serving = Serving("graph/task-fp16", "graph/rounded-from/task", Probe(0, 1, (0.0,), 1e-4))
    agreed = make_spec("yard", "fedavg", OUR_TASK, preset="tiny", overrides={}, run_seed=0)
    StateStore(tmp_path).hold(HeldDownload(Manifest("down", "yard", "cam-1", 1, 1, entries, b"\x80", serving), agreed))
    found = from_data_dir(tmp_path, tmp_path).variants
    assert [(each.form, each.precision) for each in found] == [
        ("onnx", "fp16"),
        ("onnx", "fp32"),
        ("torchscript", "fp32"),
        ("eager", "fp32"),
        ("onnx", "int8"),
    ]
    assert Path(found[0].model).read_bytes() == Path(rounded.model).read_bytes()
    assert [Path(path).read_bytes() for path in (found[3].model, found[3].parameters)] == list(contents[:2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": Path("m"), "data_dir": Path("d")}, "both MODEL and --data-dir"),
        ({"parameters": Path("p")}, "belongs to MODEL"),
        ({"batches": (0,)}, "batches is \\(0,\\), expected a list, each of which is a whole number, 1 to 4096"),
        ({"threads": 0}, "threads is 0, expected a whole number, 1 to 256"),
        ({"seconds": float("nan")}, "seconds is nan"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words):
        BenchSettings(**options)


def test_a_source_that_can_not_be_used_is_refused_before_anything_is_measured(ours: Subject):
    variant = ours.variants[0]
    settings = BenchSettings(model=Path(variant.model), parameters=Path(variant.parameters), source="rtsx://cam")
    measured_before: list[Row] = []
    with pytest.raises(SettingsError, match="unknown source scheme 'rtsx'"):
        running.run_bench(settings, measured_before.append)
    assert not measured_before


def test_a_source_and_no_frames_are_not_given_together():
    ran = CliRunner().invoke(bench, ["--source", "synthetic://street", "--no-frames"])
    assert isinstance(ran.exception, SettingsError)


def test_rows_say_numbers_or_the_reason():
    latency = {1: Latency(0.001, 0.002, 0.003, 50)}
    row = Row("CPU", "fp32", Measured("CPUExecutionProvider", 0.1, latency, 90_000_000, 60_000_000))
    expected = "CPU fp32 batch 1: p50 1.00, p95 2.00, p99 3.00 90 MB (60 for the model and its runtime)"
    assert _words(line(row)) == expected
    assert _words(line(Row("CUDA", "any", Unusable("no GPU")))) == "CUDA any not here: no GPU"
    ended = tail(Bench("m", 1, (row,), None, "no source was asked for", {"board": "PC"}))
    assert _words(ended[0]) == "frames no source was asked for"


def test_the_command_prints_json_with_everything(ours: Subject, tmp_path: Path):
    variant = ours.variants[0]
    arguments = [variant.model, "--parameters", variant.parameters, "--batch", "1", "--seconds", "0.2", "--json"]
    ran = CliRunner().invoke(bench, [*arguments, "--source", "synthetic://street?rate=50"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.output)
    usable = {row["runtime"]: row for row in found["rows"] if row["usable"]}
    assert usable.keys() == {"CPU"}
    assert usable["CPU"]["latency_s"]["1"]["p50"] > 0
    lacking = {row["runtime"]: row["why"] for row in found["rows"] if not row["usable"]}
    assert lacking.keys() == {"TensorRT", "CUDA", "TorchScript", "eager"}
    assert all(lacking.values())
    frames = found["frames"]
    assert frames["runs_on"] == "CPUExecutionProvider"
    assert frames["per_second"] > 0
    assert frames["could_per_second"] > 0
    assert frames["age_s"]["p50"] > 0


def _words(text: str) -> str:
    return " ".join(text.split())
