from __future__ import annotations

from dataclasses import replace

import pytest

from replayfleet.devices.profiles import PROFILES, REQUIRABLE, TENSORRT, check_device, profile
from replayfleet.devices.profiles import required_provider as required
from replayfleet.edge_client.cameras.live.csi import CsiCameraSettings, csi_pipeline
from replayfleet.edge_client.cameras.live.rtsp import RtspCameraSettings, nvv4l2_pipeline
from replayfleet.federation.errors import SettingsError

JETSONS = [board for board in PROFILES.values() if board.vendor_runtime]


def test_every_profile_ends_with_the_provider_that_always_works_and_none_begins_with_one_that_builds_engines() -> None:
    assert {"cpu", "arm-cpu", "cuda", "jetson"} < set(PROFILES)
    assert all(PROFILES[name].name == name for name in PROFILES)
    for board in PROFILES.values():
        assert board.execution_providers[-1] == "CPUExecutionProvider"
        assert TENSORRT not in board.execution_providers


def test_there_is_a_profile_for_every_jetson_that_serves_on_its_gpu() -> None:
    names = {board.name.removeprefix("jetson-") for board in JETSONS}
    assert names == {"jetson", "orin-nano", "orin-nx", "agx-orin", "thor", "xavier"}
    assert {board.execution_providers[0] for board in JETSONS} == {"CUDAExecutionProvider"}
    assert {board.precision for board in JETSONS} == {"fp16"}


def test_an_unknown_device_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match="unknown device 'jetsen'; did you mean 'jetson'"):
        profile("jetsen")
    with pytest.raises(SettingsError, match="did you mean 'auto'"):
        check_device("aut")
    check_device("auto")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"execution_providers": ("CUDAExecutionProvider",)}, "the last execution provider must be CPU"),
        ({"execution_providers": (TENSORRT, "CPUExecutionProvider")}, "can't serve at once"),
        ({"inference_threads": 0}, "inference_threads"),
    ],
)
def test_a_profile_that_could_not_serve_does_not_exist(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(profile("cpu"), **changes)  # type: ignore[arg-type]


def test_a_required_provider_has_a_short_name_and_the_old_flag_gets_a_clear_answer() -> None:
    assert {name: required(name) for name in REQUIRABLE} == REQUIRABLE
    with pytest.raises(SettingsError, match="takes one of tensorrt, cuda, cpu, not '--stay'"):
        required("--stay")


def test_a_boards_camera_elements_are_those_of_the_pipelines_that_cameras_build() -> None:
    pipelines = csi_pipeline(CsiCameraSettings()) + nvv4l2_pipeline(RtspCameraSettings("rtsp://camera/street"))
    for board in PROFILES.values():
        RtspCameraSettings("rtsp://camera/street", decoder=board.camera.decoder)  # refuses an unknown one
        assert all(element in pipelines for element in board.camera.elements)
        assert bool(board.camera.elements) == (board.camera.decoder == "nvv4l2")
