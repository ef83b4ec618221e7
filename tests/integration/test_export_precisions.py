"""``model-export`` in float16 and INT8, of all that it exports: judged before written, loaded as a device does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import replayfleet.export.subject
from replayfleet.export.cli import main
from replayfleet.export.graphs.sampler_graph import TimedNetwork, eager_sampler, solver_steps, timed_network
from replayfleet.export.parity import eager_run
from replayfleet.export.running.artefact import Array
from replayfleet.export.running.facts import own_facts
from replayfleet.export.running.inspection import inspect_graph
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.models.build import build_generator, build_task_model, initialise
from replayfleet.models.ddpm import build_denoiser
from replayfleet.models.specs import LATENT_SIZE, DetectionSpec, TaskSpec

SPEC = TaskSpec(1, 28, ("shirt", "shoe", "bag"), generator_width=4)
DETECTOR = DetectionSpec(3, 64, 96, ("car", "bike"), ((0.2, 0.2), (0.5, 0.6)), width=4, stride=16)
SHAPE = ["--image-size", "28", "--image-channels", "1"]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Threads that wait for each other take most of the time where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def as_if_trained(module: nn.Module, gain: float) -> nn.Module:
    """Give BatchNorm statistics that matter, and answers that tell inputs apart."""
    rng = torch.Generator().manual_seed(0)
    initialise(module, rng)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_(0.0, 0.05, generator=rng)
                layer.running_var.uniform_(0.1, 0.4, generator=rng)
                layer.bias.normal_(0.0, 0.3, generator=rng)
            elif isinstance(layer, nn.ConvTranspose2d):
                layer.weight.mul_(gain)
    return module.eval()


def saved(module: nn.Module, path: Path) -> str:
    save_file(module.state_dict(), path)
    return str(path)


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def served(path: Path) -> OnnxModel:
    return OnnxModel(path.read_bytes(), {}, num_threads=1)


def facts(path: Path) -> dict[str, str]:
    return own_facts(inspect_graph(path.read_bytes()).metadata)


@pytest.fixture
def task(tmp_path: Path) -> tuple[nn.Module, list[str]]:
    """Return a task model, and a command that calibrates with replay of two sub-generators."""
    module = as_if_trained(build_task_model(SPEC), 1.0)
    generator = saved(as_if_trained(build_generator(SPEC), 5.0), tmp_path / "shirt.safetensors")
    options = ["task", "--parameters", saved(module, tmp_path / "t.safetensors"), *SHAPE, "--classes", "shirt,shoe,bag"]
    calibration = ["--calibration", f"shirt={generator}", "--calibration", f"bag={generator}", "--threads", "1"]
    return module, [*options, *calibration]


def test_int8_is_small_exact_enough_reproducible_and_calibrated_from_replay(
    task: tuple[nn.Module, list[str]], tmp_path: Path
):
    module, command = task
    command = [*command, "--format", "onnx-int8", "--samples", "64", "--max-loss", "5"]
    output = invoke(*command, "--out", str(tmp_path / "out"))
    path = tmp_path / "out" / "task-int8.onnx"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    data = path.read_bytes()
    assert f"{len(data):,} bytes" in output
    ratio = float(output.split(" of onnx in float32")[0].split()[-1])
    assert 0.2 < ratio <= 0.3
    assert "points lost, at most 5 are accepted" in output
    assert "agreement on 2,000 samples:" in output
    x = np.random.default_rng(0).uniform(-1, 1, (50, 1, 28, 28)).astype(np.float32)
    expected = eager_run(module)(x)
    assert np.abs(served(path).run(x) - expected).max() < expected.std()
    assert json.loads(facts(path)["classes"]) == ["shirt", "shoe", "bag"]
    assert facts(path)["format"] == "onnx-int8"
    assert facts(path)["calibration"].startswith("64 samples, seed 0, sha256 ")
    parameters = (tmp_path / "t.safetensors").read_bytes()
    assert facts(path)["parameters_sha256"] == hashlib.sha256(parameters).hexdigest()
    for trace in (str(tmp_path), str(REPOSITORY), "site-packages", "onnx.quantize"):
        assert trace.encode() not in data
    assert "batch 64" in invoke(*output.splitlines()[-1].split()[2:])

    np.savez(tmp_path / "held.npz", images=x, labels=eager_run(module)(x).argmax(axis=1))
    command += ["--held", str(tmp_path / "held.npz"), "--max-loss", "100"]  # judged quicker; the model is the same
    other = tmp_path / "elsewhere"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    again = [sys.executable, "-m", "replayfleet.export.cli", *command, "--out", str(other)]
    code = "import sys; from replayfleet.export.cli import main; main(sys.argv[1:])"
    again[1:3] = ["-c", code]
    done = subprocess.run(again, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    assert (other / path.name).read_bytes() == data
    assert invoke(*command, "--seed", "1", "--out", str(tmp_path / "seeded"))
    assert (tmp_path / "seeded" / path.name).read_bytes() != data


def test_a_loss_beyond_the_limit_writes_nothing(task: tuple[nn.Module, list[str]], tmp_path: Path):
    module, command = task
    images = np.random.default_rng(1).uniform(-1, 1, (200, 1, 28, 28)).astype(np.float32)
    logits = eager_run(module)(images)
    sure = np.argsort(np.ptp(logits, axis=1))[:100]  # the least sure ones, which rounding turns over
    np.savez(tmp_path / "held.npz", images=images[sure], labels=logits[sure].argmax(axis=1))
    np.savez(tmp_path / "dark.npz", images=np.full((70, 1, 28, 28), -1e-3, np.float32))
    out = tmp_path / "out"
    wrong = [*command[: command.index("--calibration")], "--calibration", str(tmp_path / "dark.npz")]
    wrong += ["--format", "onnx-int8", "--samples", "64", "--held", str(tmp_path / "held.npz"), "--out", str(out)]
    result = CliRunner().invoke(main, wrong)
    assert result.exit_code == 2
    assert "nothing was written" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("chosen", [("--format", "onnx-fp16"), ("--device", "jetson-orin-nano")])
def test_float16_halves_the_file_and_is_judged_on_held_data(
    chosen: tuple[str, str], task: tuple[nn.Module, list[str]], tmp_path: Path
):
    module, command = task
    x = np.random.default_rng(2).uniform(-1, 1, (64, 1, 28, 28)).astype(np.float32)
    np.savez(tmp_path / "held.npz", images=x, labels=eager_run(module)(x).argmax(axis=1))
    options = [*chosen, "--held", str(tmp_path / "held.npz"), "--max-loss", "2"]
    output = invoke(*command[: command.index("--calibration")], *options, "--out", str(tmp_path))
    assert "accuracy on 64 held samples" in output
    path = tmp_path / "task-fp16.onnx"
    assert path.stat().st_size < 0.52 * 4 * sum(value.numel() for value in module.state_dict().values())
    for count in (1, 2, 64):
        expected = eager_run(module)(x[:count])
        assert np.abs(served(path).run(x[:count]) - expected).max() < 0.02 * expected.std()
    assert "calibration" not in facts(path)


@pytest.mark.parametrize("name", ["onnx-fp16", "onnx-int8"])
def test_a_sub_generator_needs_nothing_but_its_parameters(tmp_path: Path, name: str):
    module = as_if_trained(build_generator(SPEC), 5.0)
    command = ["sub-generator", "--parameters", saved(module, tmp_path / "g.safetensors"), *SHAPE, "--width", "4"]
    samples = ["--samples", "64"] if name == "onnx-int8" else []
    output = invoke(*command, "--format", name, *samples, "--out", str(tmp_path))
    assert "agreement on pixels of 256 drawn images" in output
    latents = np.random.default_rng(0).standard_normal((3, LATENT_SIZE), dtype=np.float32)
    path = tmp_path / f"sub-generator{name.removeprefix('onnx')}.onnx"
    expected, found = eager_run(module)(latents), served(path).run(latents)
    assert expected.std() > 0.1
    assert np.abs(found - expected).mean() < 0.02


@pytest.mark.parametrize("name", ["onnx", "onnx-fp16", "onnx-int8", "torchscript"])
def test_a_detector_is_exported_in_every_format(tmp_path: Path, name: str):
    module = as_if_trained(build_task_model(DETECTOR), 1.0)
    with torch.no_grad():
        module.head.weight.mul_(2)
        module.head.bias.zero_()
    pictures = np.random.default_rng(0).integers(0, 256, (116, 3, 64, 96), dtype=np.uint8)
    np.savez(tmp_path / "pictures.npz", images=pictures)
    command = ["detector", "--parameters", saved(module, tmp_path / "d.safetensors"), "--picture-size", "96x64"]
    command += ["--classes", "car,bike", "--anchors", "0.2x0.2,0.5x0.6", "--width", "4", "--stride", "16"]
    if name in {"onnx-fp16", "onnx-int8"}:
        command += ["--calibration", str(tmp_path / "pictures.npz"), "--max-loss", "15"]
        command += ["--samples", "64"] if name == "onnx-int8" else []
    output = invoke(*command, "--format", name, "--out", str(tmp_path / "out"), "--threads", "1")
    assert invoke(*output.splitlines()[-1].split()[2:])
    if name == "torchscript":
        return
    (path,) = (tmp_path / "out").iterdir()
    x: Array = pictures[:2].astype(np.float32) / np.float32(127.5) - np.float32(1)
    expected = eager_run(module)(x)
    assert np.abs(served(path).run(x) - expected).mean() < 0.1 * expected.std()
    assert facts(path)["kind"] == "detector"
    assert ("agreement on boxes" in output) == (name != "onnx")


def test_the_solver_written_down_is_the_solver_that_runs():
    steps = solver_steps(20)
    assert [step.before == 0 for step in steps] == [True, *[False] * 18, True]
    assert (steps[-1].keep, steps[-1].towards) == (0.0, 1.0)
    x = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    predict = lambda images, timesteps: torch.sin(images * 3 + timesteps.reshape(-1, 1, 1, 1) / 300)  # noqa: E731
    images, before = x.double(), torch.zeros(())
    for step in steps:
        clean = step.from_images * images + step.from_noise * predict(images, torch.tensor([step.timestep]))
        images, before = step.keep * images + step.towards * clean + step.before * before, clean
    found = eager_sampler(_Predictor(predict), 20)(x.numpy())
    np.testing.assert_allclose(found, images.clamp(-1, 1).numpy(), atol=2e-4)


class _Predictor(nn.Module):
    def __init__(self, predict) -> None:  # noqa: ANN001
        super().__init__()
        self.predict = predict

    def forward(self, images: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        return self.predict(images, timesteps)


def test_a_sampler_draws_what_the_eager_one_draws_from_the_same_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("diffusers")
    networks: list[TimedNetwork] = []

    def once(*arguments: Any) -> TimedNetwork:
        """Export the denoiser for the first format only; it takes seconds."""
        if not networks:
            networks.append(timed_network(*arguments))
        return networks[0]

    monkeypatch.setattr(replayfleet.export.subject, "timed_network", once)
    module = initialise(build_denoiser(SPEC, 4), torch.Generator().manual_seed(0)).eval()
    command = ["sampler", "--parameters", saved(module, tmp_path / "s.safetensors"), *SHAPE, "--width", "4"]
    command += ["--steps", "5", "--threads", "1", "--out", str(tmp_path)]
    exact = invoke(*command)
    assert "over batches 1, 2 and 5; 0.001 is accepted" in exact
    assert "agreement on pixels of 8 drawn images" in invoke(*command, "--format", "onnx-fp16", "--max-loss", "1")
    noise = np.random.default_rng(0).standard_normal((3, 1, 28, 28), dtype=np.float32)
    expected = eager_sampler(module, 5)(noise)
    assert expected.std() > 0.1
    path, half = tmp_path / "sampler.onnx", tmp_path / "sampler-fp16.onnx"
    np.testing.assert_allclose(served(path).run(noise), expected, atol=5e-4)
    np.testing.assert_allclose(served(path).run(noise[:1]), expected[:1], atol=5e-4)
    assert np.abs(served(half).run(noise) - expected).mean() < 0.01
    assert half.stat().st_size < path.stat().st_size
    assert (facts(path)["kind"], facts(path)["steps"]) == ("sampler", "5")
    assert "batch 1" in invoke(*exact.splitlines()[-1].split()[2:])
