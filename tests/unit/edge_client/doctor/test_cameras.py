"""V4L2 devices are files of the test, GStreamer's tool is a script; OpenCV is the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.board_trees import write_tree

from replayfleet.devices.profiles import profile
from replayfleet.edge_client.cameras.live.opencv import has_backend
from replayfleet.edge_client.cameras.uri import CameraUri, parse_sources
from replayfleet.edge_client.doctor.cameras import look_at_backends, look_at_devices, look_at_elements, look_at_source
from replayfleet.edge_client.doctor.findings import Status

no_gstreamer = pytest.mark.skipif(has_backend("GSTREAMER"), reason="this OpenCV has GStreamer")


def camera(text: str) -> CameraUri:
    (uri,) = parse_sources([text])
    assert isinstance(uri, CameraUri)
    return uri


def test_devices_are_told_with_their_names_in_their_order(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "dev/video10": "",
            "dev/video2": "",
            "dev/video-encoder": "",
            "sys/class/video4linux/video2/name": "USB camera\n",
        },
    )
    (found,) = look_at_devices(tmp_path)
    assert (found.status, found.found) == (Status.OK, "/dev/video2 (USB camera), /dev/video10")
    assert look_at_devices(tmp_path / "dev")[0].found == "no V4L2 device"


def test_a_device_that_this_user_may_not_read_says_which_group_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path, {"dev/video0": ""})
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root, as whom tests may run, may read everything
    (found,) = look_at_devices(tmp_path)
    assert found.status == Status.WARNING
    assert "usermod -aG video" in found.advice


@no_gstreamer
def test_a_jetson_misses_gstreamer_and_a_pc_does_not() -> None:
    (found,) = look_at_backends(profile("jetson-orin-nx"))
    assert (found.status, found.facts["gstreamer"]) == (Status.WARNING, False)
    assert "apt install python3-opencv" in found.advice
    assert look_at_backends(profile("cpu"))[0].status == Status.OK


@pytest.mark.parametrize(
    ("has", "status", "text"),
    [
        ("nvarguscamerasrc nvvidconv nvv4l2decoder", Status.OK, "nvv4l2decoder"),
        ("nvvidconv", Status.WARNING, "lacks nvarguscamerasrc, nvv4l2decoder"),
    ],
)
def test_gstreamers_elements_are_asked_for(
    has: str, status: Status, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "gst-inspect-1.0"
    tool.write_text(f'#!/bin/sh\ncase " {has} " in *" $2 "*) exit 0;; esac\nexit 1\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (found,) = look_at_elements(profile("jetson-thor"))
    assert found.status == status
    assert text in found.found


def test_elements_that_nobody_needs_or_can_ask_for_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert look_at_elements(profile("cpu"))[0].status == Status.SKIPPED
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look_at_elements(profile("jetson"))[0].status == Status.SKIPPED


@no_gstreamer
def test_a_source_that_cannot_be_read_here_is_a_failure_and_never_shows_its_password() -> None:
    board = profile("jetson")
    (found,) = look_at_source(camera("front=csi://0"), board)
    assert (found.check, found.status) == ("source.front", Status.FAILURE)
    (found,) = look_at_source(camera("rtsp://user:secret@camera/street"), board)
    assert (found.status, found.advice) == (Status.OK, "")
    assert "secret" not in str(found)
    assert look_at_source(camera("synthetic://"), board)[0].status == Status.SKIPPED


@pytest.mark.parametrize("text", ["camera://2", "camera:///dev/video2"])
def test_a_device_that_is_not_there_is_a_failure(text: str, tmp_path: Path) -> None:
    (found,) = look_at_source(camera(text), profile("cpu"), tmp_path)
    assert (found.status, found.advice) == (Status.FAILURE, "plug it in; see cameras.devices")
    assert "there is no /dev/video2" in found.found
    write_tree(tmp_path, {"dev/video2": ""})
    assert look_at_source(camera(text), profile("cpu"), tmp_path)[0].status == Status.OK


def test_a_stream_that_hardware_could_decode_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "replayfleet.edge_client.cameras.live.rtsp.require_gstreamer", lambda what: None
    )  # an OpenCV that has it
    (found,) = look_at_source(camera("rtsp://camera/street"), profile("jetson"))
    assert found.status == Status.OK
    assert "decoder=nvv4l2" in found.advice
    assert look_at_source(camera("rtsp://camera/street"), profile("cpu"))[0].advice == ""
