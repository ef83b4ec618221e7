from __future__ import annotations

from pathlib import Path

import pytest

from devices.profiles import PROFILES, DeviceProfile, board_note, default_training_threads, profile
from federation.errors import SettingsError


def test_every_profile_ends_with_the_provider_that_always_works() -> None:
    assert set(PROFILES) == {"cpu", "cuda", "jetson"}
    assert all(board.execution_providers[-1] == "CPUExecutionProvider" for board in PROFILES.values())
    assert all(PROFILES[name].name == name for name in PROFILES)


def test_an_unknown_device_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match="unknown device 'jetsen'; did you mean 'jetson'"):
        profile("jetsen")


def test_a_profile_without_the_cpu_provider_or_threads_does_not_exist() -> None:
    with pytest.raises(ValueError, match="CPUExecutionProvider"):
        DeviceProfile("x", ("CUDAExecutionProvider",), "cuda", 1)
    with pytest.raises(ValueError, match="inference_threads"):
        DeviceProfile("x", ("CPUExecutionProvider",), "cpu", 0)


def test_a_jetson_profile_off_jetpack_is_noted(tmp_path: Path) -> None:
    release = tmp_path / "nv_tegra_release"
    assert "expects JetPack" in board_note(profile("jetson"), release)
    release.write_text("# R36 (release), REVISION: 4.3\n")
    assert board_note(profile("jetson"), release) == ""
    assert board_note(profile("cpu"), tmp_path / "absent") == ""


def test_training_leaves_cores_to_the_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert default_training_threads() == 6
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert default_training_threads() == 1
