"""``model-export`` from a safetensors file to files that a device can serve."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import replayfleet.export.subject
from replayfleet.export.cli import main
from replayfleet.export.parity import eager_run
from replayfleet.export.running.artefact import Array, Run
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.export.torchscript import load_torchscript
from replayfleet.models.build import build_generator, build_task_model, initialise
from replayfleet.models.specs import LATENT_SIZE, TaskSpec

SPEC = TaskSpec(1, 28, ("shirt", "shoe", "bag"), generator_width=8)
SHAPE = ["--image-size", "28", "--image-channels", "1"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def task(tmp_path: Path) -> tuple[Run, list[str]]:
    module = initialise(build_task_model(SPEC), torch.Generator().manual_seed(0))
    save_file(module.state_dict(), tmp_path / "t.safetensors")
    options = ["task", "--parameters", str(tmp_path / "t.safetensors"), *SHAPE, "--classes", "shirt,shoe,bag"]
    return eager_run(module), options


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_one_onnx_file_holds_everything(task: tuple[Run, list[str]], tmp_path: Path):
    eager, options = task
    out = tmp_path / "out"
    output = invoke(*options, "--out", str(out), "--threads", "1")
    assert [path.name for path in out.iterdir()] == ["task.onnx"]
    data = (out / "task.onnx").read_bytes()
    assert f"{len(data):,} bytes  sha256 {hashlib.sha256(data).hexdigest()}" in output
    model = OnnxModel(data, {}, num_threads=1)
    x = np.random.default_rng(0).standard_normal((3, *SPEC.image_shape), dtype=np.float32)
    close(model.run(x), eager(x))
    next_command = output.splitlines()[-1].split()[1:]
    assert next_command[0] == "model-export"
    facts = invoke(*next_command[1:])
    assert json.dumps(SPEC.class_names) in facts
    assert "CPUExecutionProvider" in facts


def test_split_files_are_joined_by_the_command_that_is_printed(task: tuple[Run, list[str]], tmp_path: Path):
    out = tmp_path / "out"
    output = invoke(*task[1], "--out", str(out), "--split", "--threads", "1")
    assert (out / "task.onnx").stat().st_size < 32_000
    assert (out / "task.safetensors").stat().st_size > 2_000_000
    assert "batch 64" in invoke(*output.splitlines()[-1].split()[2:])


def test_torchscript_loads_by_its_printed_digest(task: tuple[Run, list[str]], tmp_path: Path):
    eager, options = task
    out = tmp_path / "model.pt"
    output = invoke(*options, "--out", str(out), "--format", "torchscript", "--threads", "1")
    script = load_torchscript(out.read_bytes(), output.split("sha256 ")[1].split()[0])
    x = np.ones((2, *SPEC.image_shape), dtype=np.float32)
    close(eager_run(script)(x), eager(x))
    words = output.splitlines()[-1].split()[2:]
    assert "parameters_sha256" in invoke(*words)
    assert "parameters_sha256" in invoke(*words[:-1], words[-1].upper())


def test_a_sub_generator_is_exported_in_its_own_width(tmp_path: Path):
    module = initialise(build_generator(SPEC), torch.Generator().manual_seed(0))
    save_file(module.state_dict(), tmp_path / "g.safetensors")
    out = tmp_path / "shirt.onnx"
    invoke(
        "sub-generator",
        "--parameters",
        str(tmp_path / "g.safetensors"),
        *SHAPE,
        "--width",
        "8",
        "--out",
        str(out),
        "--threads",
        "1",
    )
    latents = np.ones((2, LATENT_SIZE), dtype=np.float32)
    close(OnnxModel(out.read_bytes(), {}, num_threads=1).run(latents), eager_run(module)(latents))


def test_a_model_that_differs_is_never_written(
    task: tuple[Run, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        replayfleet.export.subject, "eager_run", lambda module: lambda x: eager_run(module)(x) + np.float32(1e-3)
    )
    out = tmp_path / "out"
    result = CliRunner().invoke(main, [*task[1], "--out", str(out)])
    assert result.exit_code == 2
    assert "differs from the eager model by 0.001 at batch 1" in result.stderr
    assert "nothing was written" in result.stderr
    assert not out.exists()
