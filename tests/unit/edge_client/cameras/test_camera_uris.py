from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replayfleet.edge_client.cameras.uri import CameraUri, FolderUri, parse_source, parse_sources
from replayfleet.edge_client.flow import Inputs
from replayfleet.edge_client.learning.settings import LearningSettings
from replayfleet.edge_client.sources import source_opener
from replayfleet.federation.errors import SettingsError
from replayfleet.models.specs import DetectionSpec, TaskSpec


def settings(uri: str) -> object:
    found = parse_source(uri)
    assert isinstance(found, CameraUri)
    return found.settings


def test_cameras_are_named_in_their_order_unless_the_operator_names_them() -> None:
    found = parse_sources(["camera://0", "rear=camera:///dev/video2?rate=15", "carla-replay:///data/carla?town=Town01"])
    assert [(uri.name, uri.scheme) for uri in found if isinstance(uri, CameraUri)] == [
        ("camera-0", "camera"),
        ("rear", "camera"),
        ("camera-2", "carla-replay"),
    ]


def test_the_middle_of_a_uri_is_the_cameras_place_and_its_query_the_settings() -> None:
    device = settings("camera:///dev/video2?rate=15&width=640&height=480")
    assert (device.place, device.rate, device.width) == ("/dev/video2", 15.0, 640)  # type: ignore[attr-defined]
    drive = settings("carla-replay:///data/carla?towns=Town01,Town03&rate=20&loop=true")
    assert (drive.path, drive.towns, drive.loop) == (Path("/data/carla"), "Town01,Town03", True)  # type: ignore[attr-defined]
    assert settings("csi://1").sensor == 1  # type: ignore[attr-defined]
    simulator = settings("carla://sim-box:2100?town=Town03&tick=false")
    assert (simulator.host, simulator.port, simulator.tick) == ("sim-box", 2100, False)  # type: ignore[attr-defined]
    assert settings("carla://").port == 2000  # type: ignore[attr-defined]


def test_a_network_streams_own_query_is_left_alone_and_our_settings_stand_behind_the_hash() -> None:
    stream = settings("rtsp://me:secret@host:554/live?channel=1&subtype=0#transport=udp&read_timeout_s=1.5")
    assert stream.url == "rtsp://me:secret@host:554/live?channel=1&subtype=0"  # type: ignore[attr-defined]
    assert (stream.transport, stream.read_timeout_s) == ("udp", 1.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no source is given"),
        (["camera:0"], "is not a URI"),
        (["street.mp4"], "'video:///path/film.mp4'"),
        (["süd=camera://0"], "camera's name 'süd': expected 1 to 64 letters"),
        (["carla://[::1"], "is not a URI: Invalid IPv6 URL"),
        (["synthetic://[?seed=3"], "is not a URI"),
        (["kamera://0"], "unknown source scheme 'kamera'; did you mean 'camera'"),
        (["camera://0?rat=15"], "unknown key 'rat'; did you mean 'rate'"),
        (["camera://0?rate=15&width=640&rate=30"], "rate is given twice"),
        (["camera://0?rate=fast"], "rate is 'fast', expected a number"),
        (["carla-replay:///data?loop=maybe"], "loop is 'maybe', expected true or false"),
        (["carla-replay://"], "names no file or folder"),
        (["synthetic://forest"], "unknown scene 'forest'"),
        (["csi://front"], "sensor is 'front', expected a whole number"),
        (["carla://box:many"], "port is 'many', expected a whole number"),
        (["a=camera://0", "a=camera://1"], "two sources are named 'a'"),
        (["camera://0", "folder:///srv/images"], "only cameras can be several"),
        (["rtsp://host/path#transport=tpc"], "transport is 'tpc', expected tcp or udp"),
    ],
)
def test_bad_sources_are_refused_in_one_line(texts: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_sources(texts)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stream", ["rtsp://me:hunter2@host/path#trasport=udp", "rtsp://me:no#hunter2@host/path"])
def test_a_password_never_stands_in_an_error(stream: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_sources([stream])
    assert "hunter2" not in str(caught.value)


def test_nor_does_that_of_an_address_with_a_slash_too_few() -> None:
    with pytest.raises(SettingsError, match="source 'host/live' is not a URI") as caught:
        parse_source("rtsp:/me:secret@host/live")
    assert "secret" not in str(caught.value)


def test_sources_without_cameras_are_read_as_ever() -> None:
    assert isinstance(parse_sources(["folder:///srv/images"])[0], FolderUri)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"view": "crop"}, "view is 'crop', expected auto, whole or crops"),
        ({"teacher_confidence": 0.0}, "teacher_confidence is 0.0"),
        ({"keep_frames_s": float("nan")}, "keep_frames_s is nan"),
    ],
)
def test_impossible_learning_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        LearningSettings(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "learning", "message"),
    [
        ("folder:///srv/images", LearningSettings(teacher=Path("teacher.onnx")), "teacher is for cameras"),
        ("dataset://mnist", LearningSettings(view="whole"), "view is for cameras"),
        ("folder:///srv/images", LearningSettings(hold_out=4), "hold_out is for cameras"),
        ("folder:///srv/images", LearningSettings(only_classes="cat"), "only_classes is for cameras"),
        ("dataset://mnist", LearningSettings(min_samples=100), "min_samples is for cameras"),
        ("rtsp://host/street", LearningSettings(view="crops"), "no camera here brings boxes; expected 'whole'"),
    ],
)
def test_what_would_do_nothing_is_refused(
    source: str, learning: LearningSettings, message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        source_opener([source], tmp_path, learning=learning)


def test_a_fleet_that_finds_boxes_refuses_crops(tmp_path: Path) -> None:
    detection = DetectionSpec(3, 64, 96, ("vehicle",), anchors=((0.25, 0.25),), stride=32)
    opener = source_opener(["synthetic://street"], tmp_path, learning=LearningSettings(view="crops"))
    with pytest.raises(SettingsError, match="the fleet learns to find boxes"):
        opener(detection)


def test_where_the_task_is_known_answers_are_among_its_classes_alone(tmp_path: Path) -> None:
    """Whole pictures and crops; a class that the fleet lacks is refused, and so is this of boxes."""
    logits = np.array([[9.0, 2.0, 1.0], [0.0, 1.0, 5.0]], np.float32)
    inputs = Inputs(np.zeros((2, 3, 32, 32), np.float32), np.zeros((2, 4), np.float32))
    task = TaskSpec(3, 32, ("vehicle", "bike", "sign"))
    for view in ("whole", "crops"):
        known = LearningSettings(view=view, only_classes="sign, bike")  # type: ignore[arg-type]
        found = source_opener(["synthetic://street"], tmp_path, learning=known)(task).pictures.view.answers(
            logits, inputs
        )
        assert found.class_ids.tolist() == [1, 2]
        assert found.confidences == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-4))])
    free = source_opener(["synthetic://street"], tmp_path)(task).pictures.view.answers(logits, inputs)
    assert free.class_ids.tolist() == [0, 2]
    wrong = source_opener(["synthetic://street"], tmp_path, learning=LearningSettings(only_classes="bikes"))
    with pytest.raises(SettingsError, match="the fleet has no class 'bikes'; did you mean 'bike'"):
        wrong(task)
    with pytest.raises(SettingsError, match="only_classes is for classification"):
        wrong(DetectionSpec(3, 64, 96, ("vehicle",), anchors=((0.25, 0.25),), stride=32))


def test_a_camera_whose_pictures_are_not_classified_for_want_of_boxes_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opener = source_opener(["gate=rtsp://host/street", "drawn=synthetic://street"], tmp_path)
    opener(TaskSpec(3, 32, ("vehicle", "bike")))
    told = [vars(record)["fields"]["camera"] for record in caplog.records if record.message == "camera brings no boxes"]
    assert told == ["gate"]
