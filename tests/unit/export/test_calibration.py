"""What calibrates never judges, a seed fixes both, and too few samples are refused with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from replayfleet.export.calibration import MIN_JUDGED, NUM_JUDGED, Rounding, SampleSet, gather_samples
from replayfleet.export.formats import find_format
from replayfleet.export.running.artefact import Array
from replayfleet.export.samples import Source
from replayfleet.export.subject import Architecture
from replayfleet.federation.errors import ArtefactRejected, SettingsError
from replayfleet.models.build import build_generator, initialise
from replayfleet.models.specs import LATENT_SIZE, TaskSpec

TASK = TaskSpec(1, 28, ("shirt", "shoe"), generator_width=4)
TASK_MODEL = Architecture("task", TASK)
INT8, FP16 = find_format("onnx-int8"), find_format("onnx-fp16")


def numbered(folder: Path, count: int) -> Source:
    """Return a file of images of one grey each, all different."""
    images = np.linspace(-1, 1, count, dtype=np.float32)[:, None, None, None] * np.ones((1, 28, 28), np.float32)
    np.savez(folder / f"{count}.npz", images=images, labels=np.arange(count) % 2)
    return Source(folder / f"{count}.npz")


def generator(folder: Path, name: str, seed: int) -> Source:
    module = initialise(build_generator(TASK), torch.Generator().manual_seed(seed))
    save_file(module.state_dict(), folder / f"{name}.safetensors")
    return Source(folder / f"{name}.safetensors", name)


def gather(*sources: Source, row: Any = INT8, **changes: Any) -> SampleSet:
    rounding = Rounding(**{"max_loss_points": 1.0, "sources": sources, "num_samples": 100, **changes})
    return gather_samples(TASK_MODEL, row, TASK.image_shape, rounding)


def greys(images: Array) -> set[float]:
    return {float(image[0, 0, 0]) for image in images}


def test_no_sample_both_calibrates_and_judges(tmp_path: Path):
    found = gather(numbered(tmp_path, 160))
    assert (len(found.calibrating), len(found.judging)) == (100, 60)
    assert not greys(found.calibrating) & greys(found.judging)
    assert found.calibrating.mean() == pytest.approx(0, abs=0.2), "mixed, not the first ones"
    assert found.facts["calibration"].startswith("100 samples, seed 0, sha256 ")


def test_a_seed_fixes_which_samples_calibrate(tmp_path: Path):
    source = numbered(tmp_path, 160)
    first, same, other = (gather(source, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.calibrating, same.calibrating)
    assert first.facts == same.facts != other.facts


def test_replay_comes_from_all_sub_generators_alike_and_from_their_seeds(tmp_path: Path):
    sources = [generator(tmp_path, name, seed) for seed, name in enumerate(TASK.class_names)]
    found, again = gather(*sources), gather(*sources)
    assert (len(found.calibrating), len(found.judging)) == (100, NUM_JUDGED["task"])
    np.testing.assert_array_equal(found.judging, again.judging)
    assert len(np.unique(found.judging.reshape(len(found.judging), -1), axis=0)) == NUM_JUDGED["task"]
    assert np.abs(found.judging).max() <= 1


def test_held_data_judges_and_never_calibrates(tmp_path: Path):
    held = numbered(tmp_path, 60).path
    found = gather(numbered(tmp_path, 100), held=held)
    assert len(found.calibrating) == 100
    assert len(found.judging) == len(found.labels) == 60  # type: ignore[arg-type]
    assert not len(gather(row=FP16, held=held).calibrating)


def test_how_a_model_is_judged_does_not_change_what_it_is_calibrated_with(tmp_path: Path):
    source, held = generator(tmp_path, "shoe", 0), numbered(tmp_path, 60).path
    np.testing.assert_array_equal(gather(source).calibrating, gather(source, held=held).calibrating)


def test_too_few_samples_are_refused_with_the_numbers(tmp_path: Path):
    few = numbered(tmp_path, 100 + MIN_JUDGED - 1)
    with pytest.raises(SettingsError, match=f"gives 149 images; 100 calibrate and at least {MIN_JUDGED} others"):
        gather(few)
    with pytest.raises(SettingsError, match="gives 99 images, 100 are to calibrate with"):
        gather(numbered(tmp_path, 99), held=numbered(tmp_path, 60).path)
    with pytest.raises(SettingsError, match="give --held FILE"):
        gather(row=FP16)


def test_a_sub_generator_draws_its_own_latents():
    rounding = Rounding(1.0, num_samples=10, seed=2)
    found = gather_samples(Architecture("sub-generator", TASK), INT8, (LATENT_SIZE,), rounding)
    assert found.calibrating.shape == (10, LATENT_SIZE)
    assert found.judging.shape == (NUM_JUDGED["sub-generator"], LATENT_SIZE)
    assert found.labels is None


def test_a_file_that_is_no_sub_generator_of_this_task_is_refused(tmp_path: Path):
    save_file({"w": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(SettingsError, match=r"w\.safetensors: holds no sub-generator of 1x28x28 images"):
        gather(Source(tmp_path / "w.safetensors", "shoe"))
    colours = TaskSpec(3, 32, TASK.class_names, generator_width=4)
    save_file(build_generator(colours).state_dict(), tmp_path / "colours.safetensors")
    with pytest.raises(ArtefactRejected, match="wrong-layout"):
        gather(Source(tmp_path / "colours.safetensors", "shoe"))
