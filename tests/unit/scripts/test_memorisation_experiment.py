from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.image_sets import small_dataset

from replayfleet.federation.errors import SettingsError
from replayfleet.scripts.experiments import memorisation


@pytest.fixture(autouse=True)
def noise_as_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_dataset()
    images = np.random.default_rng(0).integers(0, 256, small.train.images[:].shape, dtype=np.uint8)
    found = dataclasses.replace(small, train=dataclasses.replace(small.train, images=images))

    def load(*_: Any, **__: Any) -> Any:
        return found

    monkeypatch.setattr(memorisation, "load_dataset", load)


def run(out: Path, *more: str) -> None:
    given = ["--settings", "tiny", "--classes", "1", "--seeds", "2", "--generated", "8", "--out", str(out), *more]
    memorisation.experiment.main(given, standalone_mode=False)


def test_it_measures_generators_with_and_without_noise_beside_both_bounds(tmp_path: Path) -> None:
    run(tmp_path / "m.json", "--samples", "3", "--noise", "0", "--noise", "2")
    written = json.loads((tmp_path / "m.json").read_text())
    told = {row["what"]: row for row in written["summary"]}
    assert list(told) == ["fresh", "copies", "noise 0", "noise 2"]
    assert all(row["runs"] == 2 for row in told.values())
    assert told["copies"]["nearer"]["mean"] == 1.0
    assert told["noise 0"]["epsilon"] is None
    assert told["noise 2"]["epsilon"] > 0
    assert len(written["rows"]) == 8


def test_a_class_without_samples_enough_to_hold_some_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="samples, 3000 are needed"):
        run(tmp_path / "m.json", "--samples", "1000")
    assert not (tmp_path / "m.json").exists()
