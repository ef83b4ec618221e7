"""What an operator may ask of a live camera, and what must never reach a log."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from replayfleet.edge_client.cameras.carla.settings import CarlaSettings
from replayfleet.edge_client.cameras.kinds import CAMERAS
from replayfleet.edge_client.cameras.live.csi import CsiCameraSettings, csi_pipeline
from replayfleet.edge_client.cameras.live.device import DeviceCameraSettings
from replayfleet.edge_client.cameras.live.opencv import has_backend
from replayfleet.edge_client.cameras.live.rtsp import RtspCameraSettings, described, nvv4l2_pipeline
from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera
from replayfleet.federation.errors import SettingsError

URL = "rtsp://operator:s%40cret@10.0.0.7:8554/street/1?user=admin&token=abc"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviceCameraSettings("front"), "'front' is no camera; expected a number"),
        (lambda: DeviceCameraSettings(width=9000), "width is 9000, expected a whole number, 0 to 8192"),
        (lambda: DeviceCameraSettings(rate=float("nan")), "rate is nan"),
        (lambda: DeviceCameraSettings(pixel_format="JPEG2"), "expected four characters"),
        (lambda: DeviceCameraSettings(read_timeout_s=0.0), "read_timeout_s is 0.0, expected a number, more than 0"),
        (lambda: DeviceCameraSettings(open_timeout_s=float("inf")), "open_timeout_s is inf"),
        (lambda: CsiCameraSettings(flip=8), "flip is 8, expected a whole number, 0 to 7"),
        (lambda: CsiCameraSettings(height=0), "height is 0, expected a whole number, 1 to 8192"),
        (lambda: RtspCameraSettings("http://host/"), "no RTSP address"),
        (lambda: RtspCameraSettings("rtsp:///street"), "no RTSP address"),
        (lambda: RtspCameraSettings("rtsp://host:99999/street"), "no RTSP address"),
        (lambda: RtspCameraSettings("rtsp://u:p/w@host/street"), "%2F for /"),
        (lambda: RtspCameraSettings("rtsp://u:p?w@host/street"), "%3F for ?"),
        (lambda: RtspCameraSettings("rtsp://u:p#w@host/street"), "%23 for #"),
        (lambda: RtspCameraSettings('rtsp://host/" ! filesink location="x'), "without spaces or quotes"),
        (lambda: RtspCameraSettings(URL, transport="tpc"), "transport is 'tpc', expected tcp or udp"),
        (lambda: RtspCameraSettings(URL, decoder="cuda"), "decoder is 'cuda', expected ffmpeg or nvv4l2"),
        (lambda: RtspCameraSettings(URL, threads=0), "threads is 0, expected a whole number, 1 to 64"),
    ],
)
def test_what_can_not_work_is_refused_with_its_reason(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert message in str(caught.value)
    assert "p/w" not in str(caught.value)


def test_settings_survive_their_way_to_the_capture_process() -> None:
    some = (DeviceCameraSettings("/dev/video2", 640, 480), CsiCameraSettings(1), RtspCameraSettings(URL))
    for settings in (*some, CarlaSettings("sim", town="Town03")):
        travelled = msgspec.json.decode(msgspec.json.encode(dataclasses.asdict(settings)))
        assert msgspec.convert(travelled, CAMERAS[settings.scheme].settings()) == settings


def test_settings_of_the_wrong_type_do_not_build_a_camera() -> None:
    with pytest.raises(msgspec.ValidationError, match="sensor"):
        msgspec.convert({"sensor": "left"}, CAMERAS["csi"].settings())


def test_no_credential_is_in_what_a_stream_is_called() -> None:
    settings = RtspCameraSettings(URL)
    assert settings.describe() == "rtsp://10.0.0.7:8554/street/1?***"
    assert SupervisedCamera(settings, "front").describe() == "rtsp://10.0.0.7:8554/street/1?***"
    assert described("rtsp://h/user=admin_password=tl1_channel=1.sdp") == "rtsp://h/user=admin_password=***"
    assert "cret" not in repr(settings)


def test_devices_and_sensors_are_called_as_the_operator_wrote_them() -> None:
    assert DeviceCameraSettings("/dev/video0").describe() == "camera:///dev/video0"
    assert DeviceCameraSettings("0").describe() == "camera://0"
    assert CsiCameraSettings(1).describe() == "csi://1"


def test_a_sensor_is_read_through_argus_and_the_newest_picture_wins() -> None:
    assert csi_pipeline(CsiCameraSettings(sensor=1, width=640, height=480, rate=30, flip=2)) == (
        "nvarguscamerasrc sensor-id=1 ! video/x-raw(memory:NVMM),width=640,height=480,framerate=30/1,format=NV12 "
        "! nvvidconv flip-method=2 ! video/x-raw,format=BGRx ! videoconvert ! video/x-raw,format=BGR "
        "! appsink drop=true max-buffers=1 sync=false"
    )


def test_a_boards_decoder_is_given_the_stream_in_quotes() -> None:
    settings = RtspCameraSettings("rtsp://host/a?b=1", decoder="nvv4l2", codec="h265", latency_ms=50)
    assert nvv4l2_pipeline(settings) == (
        'rtspsrc location="rtsp://host/a?b=1" latency=50 protocols=tcp ! rtph265depay ! h265parse ! nvv4l2decoder '
        "! nvvidconv ! video/x-raw,format=BGRx ! videoconvert ! video/x-raw,format=BGR "
        "! appsink drop=true max-buffers=1 sync=false"
    )


@pytest.mark.skipif(has_backend("GSTREAMER"), reason="this OpenCV has GStreamer")
@pytest.mark.parametrize("settings", [CsiCameraSettings(), RtspCameraSettings(URL, decoder="nvv4l2")])
def test_without_gstreamer_a_board_camera_is_refused_at_the_start_and_says_what_to_install(settings: Any) -> None:
    with pytest.raises(SettingsError, match="apt install python3-opencv") as caught:
        SupervisedCamera(settings, "front")
    assert "cret" not in str(caught.value)
