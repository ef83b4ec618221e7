from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from replayfleet.edge_client.flow import Answers, Boxes, Camera, Picture, Prediction, Samples, Shown, Source
from replayfleet.edge_client.frames.views import Crops, Detector
from replayfleet.edge_client.learning.camera_samples import MAX_PLACES, MAX_WAITING, CameraSamples
from replayfleet.edge_client.learning.collector import Collector, newest
from replayfleet.edge_client.learning.labels.annotated import AnnotatedLabels
from replayfleet.edge_client.learning.labels.box_feedback import BoxFeedbackDesk
from replayfleet.edge_client.learning.labels.feedback import FeedbackDesk
from replayfleet.edge_client.learning.labels.lessons import BoxLessons, ClassLessons
from replayfleet.edge_client.learning.labels.operators_word import (
    DROPPED,
    IN_A_ROUND,
    REPLACED,
    Feedback,
    FeedbackRefused,
)
from replayfleet.edge_client.learning.settings import LearningSettings
from replayfleet.edge_client.sources import cameras_with_samples
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.messages import Report
from replayfleet.models.specs import DetectionSpec, TaskSpec

TASK = TaskSpec(3, 32, ("car", "bike"), generator_width=1)


def samples(*labels: int) -> Samples:
    return Samples(np.full((len(labels), 1, 2, 2), len(labels), np.float32), np.array(labels, np.int64))


def collector(least: int = 2, most: int = 100, hold_out: int = 0) -> Collector:
    return Collector(LearningSettings(min_samples=least, max_samples=most, hold_out=hold_out))


def test_a_round_takes_what_came_since_the_last_and_each_sample_is_in_one_round_only() -> None:
    found = collector(least=3)
    found.add(samples(0, 1))
    assert found.round_samples(0) is None
    found.add(samples(1))
    first = found.round_samples(0)
    assert first.labels.tolist() == [0, 1, 1]
    again = found.round_samples(0)
    assert again.labels.tolist() == [0, 1, 1]
    found.used_up(0)
    assert found.round_samples(1) is None
    found.add(samples(0, 0, 0))
    second = found.round_samples(1)
    assert second.labels.tolist() == [0, 0, 0]


def test_labels_of_a_round_that_passed_before_it_was_trained_come_again() -> None:
    found = Collector(LearningSettings(min_samples=2, max_samples=4, min_pictures=2))
    found.add(samples(0, 1))
    found.add(samples(1))
    assert found.round_samples(0) is not None
    again = found.round_samples(1)
    assert again.labels.tolist() == [0, 1, 1]
    found.used_up(0)  # says nothing of these
    found.add(samples(0, 0))
    again = found.round_samples(2)
    assert again.labels.tolist() == [1, 1, 0, 0], "of too many the newest"
    found.used_up(2)
    assert found.round_samples(3) is None


def test_of_labels_that_come_again_the_oldest_make_room_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayfleet.edge_client.learning.collector.MAX_WAITING_BYTES", 5 * 24)
    found = collector()
    for label in range(5):
        found.add(samples(label))
    assert found.round_samples(0) is not None
    found.add(samples(5))
    again = found.round_samples(1)
    assert (again.labels.tolist(), found.num_dropped) == ([1, 2, 3, 4, 5], 1)


def test_a_label_that_was_corrected_after_its_round_began_does_not_come_again() -> None:
    found = Collector(LearningSettings(min_samples=2, max_samples=100, min_pictures=3))
    wrong = samples(1)
    for one in (samples(0), wrong, samples(0)):
        found.add(one)
    for _ in range(2):
        asked = found.round_samples(0)
        assert asked.labels.tolist() == [0, 1, 0]
        assert not found.take_back(wrong), "the round has it"
    assert found.round_samples(1) is None, "two pictures"
    found.add(samples(2))
    again = found.round_samples(2)
    assert again.labels.tolist() == [0, 0, 2]


def test_a_round_waits_for_so_many_pictures_also_where_each_shows_much_and_some_were_dropped() -> None:
    found = Collector(LearningSettings(min_samples=2, max_samples=4, min_pictures=3))
    for _ in range(2):
        found.add(samples(0, 1, 1))
    assert found.round_samples(0) is None
    found.add(samples(0, 0, 0))
    assert len(found.round_samples(0) or ()) == 4
    found.used_up(0)
    found.add(samples(0, 1, 1))
    assert found.round_samples(1) is None


def test_a_round_needs_no_more_samples_and_pictures_than_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayfleet.edge_client.learning.collector.MAX_WAITING_BYTES", 3 * 24 + 23)
    found = Collector(LearningSettings(min_samples=50, min_pictures=40))
    for label in (0, 1):
        found.add(samples(label))
    progress = found.progress()
    assert (progress.min_samples, progress.min_pictures, progress.is_enough) == (50, 40, False)
    assert found.round_samples(0) is None
    found.add(samples(2))
    progress = found.progress()
    assert (progress.num_samples, progress.min_samples, progress.min_pictures, progress.is_enough) == (3, 3, 3, True)
    taken = found.round_samples(0)
    assert taken is not None
    assert (taken.labels.tolist(), found.num_dropped) == ([0, 1, 2], 0)
    found.used_up(0)
    found.add(samples(3))
    assert found.round_samples(1) is None


def test_when_nothing_more_comes_a_round_takes_what_is_left() -> None:
    found = collector(least=50)
    found.add(samples(0, 1))
    found.end()
    assert found.round_samples(0) is not None
    found.used_up(0)
    assert found.round_samples(1) is None


def test_of_too_many_samples_the_newest_stay_and_the_rest_is_counted() -> None:
    found = collector(most=4)
    for label in range(3):
        found.add(samples(label, label))
    taken = found.round_samples(0)
    assert taken.labels.tolist() == [1, 1, 2, 2]
    found.used_up(0)
    found.add(samples(0, 1, 2, 3, 4, 5))
    taken = found.round_samples(1)
    assert taken.labels.tolist() == [2, 3, 4, 5]
    assert found.num_dropped == 4


def test_of_a_round_that_is_too_large_the_newest_stay_with_their_labels_and_the_rest_is_counted() -> None:
    labels = np.arange(10, dtype=np.int64)
    images = labels.astype(np.float32).reshape(-1, 1, 1, 1) * np.ones((1, 1, 2, 2), np.float32)
    kept, num_dropped = newest(Samples(images, labels), at_most=4)
    assert kept.images[:, 0, 0, 0].tolist() == kept.labels.tolist() == [6, 7, 8, 9]
    assert num_dropped == 6
    whole, num_dropped = newest(kept, at_most=4)
    assert (whole.labels.tolist(), num_dropped) == ([6, 7, 8, 9], 0)


def test_the_memory_of_waiting_and_held_out_samples_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "replayfleet.edge_client.learning.collector.MAX_WAITING_BYTES", 3 * 24
    )  # of a sample: 16 bytes image, 8 label
    found = collector(hold_out=2)
    for label in range(12):
        found.add(samples(label))
    taken, held = found.round_samples(0), found.held_out()
    assert taken is not None
    assert held.labels.tolist() == [1, 3, 5]
    assert taken.labels.tolist() == [9, 10, 11]
    assert found.num_dropped == 6
    found.add(samples(*range(9)))  # one picture alone is never dropped
    assert len(found.round_samples(1) or ()) == 9


def test_whole_pictures_are_held_out_never_learned_and_only_if_asked() -> None:
    found = collector(hold_out=3)
    for label in range(6):
        found.add(samples(label))
    taken, held = found.round_samples(0), found.held_out()
    assert held is not None
    assert taken.labels.tolist() == [0, 1, 3, 4]
    assert held.labels.tolist() == [2, 5]
    plain = collector()
    plain.add(samples(0, 1))
    assert plain.held_out() is None


def test_of_each_camera_one_picture_of_so_many_is_held_out() -> None:
    """Cameras take turns: of two, every second picture was one camera's, which taught nothing."""
    pictures = [dataclasses.replace(picture(index // 2, 0), camera=("front", "rear")[index % 2]) for index in range(8)]
    lessons = ClassLessons([AnnotatedLabels({"front": ("car", "bike"), "rear": ("bike", "car")}, ("car", "bike"))])
    held_in = collector(hold_out=2)
    found = CameraSamples(("front", "rear"), lessons, FeedbackDesk(TASK.class_names, 60.0), held_in)
    for one in pictures:
        found.watch(Shown(one, Crops(TASK).inputs(one), None))
    assert found.settle()
    held, taken = held_in.held_out(), found.round_samples(0)
    assert held.labels.tolist() == taken.labels.tolist() == [0, 1, 0, 1]


def test_stream_accuracy_counts_answers_before_they_are_learned_place_by_place() -> None:
    found = collector()
    found.add(samples(0, 1, 1), place="Town01", num_right=2, num_answered=3)
    found.add(samples(1), place="Town01")  # no model had answered
    found.add(samples(1), place="Town02", num_right=1, num_answered=1)
    found.add(samples(1), place="Town03")
    assert (found.progress().num_answered, found.progress().num_right) == (4, 3)
    assert found.stream_accuracy() == {"Town01": (2, 3), "Town02": (1, 1)}
    assert found.stream_accuracy() == {}
    assert (found.progress().num_answered, found.progress().num_right) == (0, 0)


def test_after_weeks_that_went_well_a_fall_shows_within_some_hundred_answers() -> None:
    found = collector()
    for right in (2,) * 5000 + (0,) * 200:
        found.add(samples(0, 1), num_right=right, num_answered=2)
    assert (found.progress().num_answered, found.progress().num_right) == (500, 100)
    assert found.stream_accuracy() == {"": (10000, 10400)}


@pytest.mark.parametrize(("least", "most", "hold_out"), [(1, 9, 0), (5, 4, 0), (2, 9, 1), (2, 9, -1)])
def test_impossible_sizes_are_refused(least: int, most: int, hold_out: int) -> None:
    with pytest.raises(SettingsError, match="expected"):
        LearningSettings(min_samples=least, max_samples=most, hold_out=hold_out)
    with pytest.raises(SettingsError, match="min_pictures is 0"):
        LearningSettings(min_pictures=0)


class Recording:
    live = False
    class_names = TASK.class_names

    def __init__(self, name: str, pictures: list[Picture]) -> None:
        self.name = name
        self._pictures = pictures

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        yield from self._pictures

    def describe(self) -> str:
        return "a recording"


def picture(frame_id: int, *class_ids: int) -> Picture:
    corners = np.array([[8 * i, 4, 8 * i + 6, 20] for i in range(len(class_ids))], np.float32).reshape(-1, 4)
    pixels = np.full((24, 32, 3), frame_id, np.uint8)
    return Picture("front", frame_id, pixels, 0.0, Boxes(corners, np.array(class_ids, np.int64)), "Town01")


def source(pictures: list[Picture], least: int = 2, most: int = 100) -> Source:
    return cameras_with_samples(
        [Recording("front", pictures)],
        Crops(TASK),
        ClassLessons([AnnotatedLabels({"front": TASK.class_names}, TASK.class_names)]),
        FeedbackDesk(TASK.class_names, 60.0),
        collector(least, most),
    )


def serve(source: Source, class_id: int) -> CameraSamples:
    """Show every picture to the source, as the serving loop would, with the same answer to everything."""
    found = source.samples
    assert isinstance(found, CameraSamples)
    for one in source.pictures.cameras[0].pictures(threading.Event()):
        inputs = source.pictures.view.inputs(one)
        count = len(inputs.images)
        answers = Answers(np.full(count, class_id, np.int64), np.ones(count, np.float32), inputs.corners)
        found.watch(Shown(one, inputs, Prediction("front", one.frame_id, answers, 3, 0.0, 0.1)))
    assert found.settle()
    return found


def test_annotated_objects_of_a_recording_become_round_data_and_the_models_accuracy_on_them() -> None:
    found = serve(source([picture(0, 0, 1), picture(1), picture(2, 1)]), 1)
    taken = found.round_samples(0)
    assert taken.labels.tolist() == [0, 1, 1]
    assert taken.images.shape == (3, 3, 32, 32)
    assert found.measures() == {
        "stream_accuracy": pytest.approx(2 / 3),
        "num_stream": 3.0,
        "stream_accuracy/Town01": pytest.approx(2 / 3),
    }
    assert found.measures() == {}


def test_what_learning_left_out_stands_in_the_next_report() -> None:
    found = source([picture(0, 0, 1)]).samples
    assert isinstance(found, CameraSamples)
    found._collector.num_dropped, found.num_unlabelled = 7, 2
    assert found.measures() == {"num_samples_dropped": 7.0, "num_unlabelled": 2.0}


def test_the_last_pictures_of_a_recording_are_a_round_however_few() -> None:
    found = serve(source([picture(0, 0, 1)], least=50), 0)
    assert found.round_samples(0) is not None


def test_an_operators_label_becomes_round_data_too() -> None:
    found = serve(source([picture(4, 0)]), 0)
    assert found.round_samples(0) is None
    found.feedback(Feedback("front", 4, "bike", 0))
    taken = found.round_samples(0)
    assert taken.labels.tolist() == [0, 1]


def test_an_operator_who_says_it_again_corrects_what_was_said_and_no_round_has_learned() -> None:
    found = serve(source([picture(4, 0, 0)]), 0)
    for class_name, thing in (("car", 0), ("bike", 0), ("bike", 0), ("bike", 1)):
        found.feedback(Feedback("front", 4, class_name, thing))
    taken = found.round_samples(0)
    assert taken.labels.tolist() == [0, 0, 1, 1]
    found.feedback(Feedback("front", 4, "car", 0))
    assert found.progress().num_samples == 1
    taken = found.round_samples(1)
    assert taken.labels.tolist() == [0, 0, 1, 0]
    found.used_up(1)
    for thing in (0, 1):
        found.feedback(Feedback("front", 4, "car", thing))
    assert found.round_samples(2) is not None
    assert len(found._said) == 2, "nothing is kept of a round before the newest"


@pytest.mark.parametrize("again", [Feedback("", 4, "bike", 0), Feedback("front", 4, "bike"), Feedback("", 4, "bike")])
def test_however_a_thing_is_named_it_is_the_same_thing(again: Feedback) -> None:
    found = serve(source([picture(4, 0)]), 0)
    found.feedback(Feedback("front", 4, "car", 0))
    found.feedback(again)
    taken = found.round_samples(0)
    assert taken.labels.tolist() == [0, 1], "what its recording says, and the operator's newest word"


def test_what_became_of_a_word_that_can_not_be_taken_back_is_said() -> None:
    found = serve(source([picture(4, 0)], most=2), 0)
    replaced, newest = (found.feedback(Feedback("front", 4, name, 0)) for name in ("car", "bike"))
    assert (replaced(), newest()) == (REPLACED, "")
    dropped = found.feedback(Feedback("front", 4, "bike", 0))
    for thing in picture(5, 0, 0, 0), picture(6, 0, 0):
        shown = Shown(thing, Crops(TASK).inputs(thing), None)
        found.watch(shown)
    assert found.settle()
    assert dropped() == DROPPED
    in_a_round = found.feedback(Feedback("front", 6, "bike", 0))
    assert found.round_samples(0) is not None
    assert in_a_round() == IN_A_ROUND
    assert replaced() == REPLACED


def test_a_frame_that_is_at_hand_can_be_labelled_though_it_is_kept_no_more() -> None:
    found, one = serve(source([picture(4, 0)]), 0), picture(99, 0)
    with pytest.raises(FeedbackRefused, match="not kept"):
        found.feedback(Feedback("front", 99, "bike", 0))
    before = found.progress().num_samples
    found.feedback(Feedback("front", 99, "bike", 0), Shown(one, Crops(TASK).inputs(one), None))
    assert found.progress().num_samples == before + 1


def test_pictures_nobody_labels_are_served_and_not_learned() -> None:
    found = CameraSamples((), ClassLessons([]), FeedbackDesk(TASK.class_names, 60.0), collector())
    one = picture(0, 0, 1)
    found.watch(Shown(one, Crops(TASK).inputs(one), None))
    assert found.settle()
    assert found.round_samples(0) is None


def test_labelling_that_fails_costs_its_picture_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        def labels(self, shown: Shown) -> np.ndarray:
            if shown.picture.frame_id < 2:
                raise RuntimeError("teacher gone")
            return np.zeros(len(shown.inputs.images), np.int64)

    found = CameraSamples((), ClassLessons([Fails()]), FeedbackDesk(TASK.class_names, 60.0), collector())
    for frame_id in range(3):
        one = picture(frame_id, 0, 1)
        found.watch(Shown(one, Crops(TASK).inputs(one), None))
    assert found.settle()
    taken = found.round_samples(0)
    assert taken is not None
    assert len(taken) == 2
    assert sum("picture not labelled" in message for message in caplog.messages) == 1


def test_labelling_that_cant_keep_up_holds_up_a_recording_and_never_serving() -> None:
    going_on = threading.Event()

    class Slow:
        def labels(self, shown: Shown) -> np.ndarray:
            assert going_on.wait(60)
            return np.zeros(len(shown.inputs.images), np.int64)

    live = Recording("street", [picture(index, 0) for index in range(50)])
    live.live = True
    drive = Recording("front", [picture(index, 0) for index in range(50)])
    desk = FeedbackDesk(TASK.class_names, 60.0)
    served_from = cameras_with_samples([drive, live], Crops(TASK), ClassLessons([Slow()]), desk, collector())
    found = served_from.samples
    assert isinstance(found, CameraSamples)
    longest_s, served = 0.0, {"front": 0, "street": 0}

    def serve_all(camera: Camera) -> None:
        nonlocal longest_s
        for one in camera.pictures(threading.Event()):
            shown = Shown(dataclasses.replace(one, camera=camera.name), Crops(TASK).inputs(one), None)
            began = time.monotonic()
            found.watch(shown)
            longest_s = max(longest_s, time.monotonic() - began)
            served[camera.name] += 1

    recorded, street = served_from.pictures.cameras
    driving = threading.Thread(target=serve_all, args=(recorded,))
    driving.start()
    while served["front"] <= MAX_WAITING:
        time.sleep(0.01)
    serve_all(street)
    assert served == {"front": MAX_WAITING + 1, "street": 50}
    assert found.num_unlabelled == 50
    assert longest_s < 5
    going_on.set()
    driving.join(timeout=60)
    assert served["front"] == 50
    assert found.settle()
    assert len(found.round_samples(0) or ()) == 50, "of a recording every picture is labelled"


def test_of_large_pictures_fewer_wait_for_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    going_on = threading.Event()

    class Slow:
        def labels(self, shown: Shown) -> np.ndarray:
            going_on.wait(60)
            return np.zeros(len(shown.inputs.images), np.int64)

    monkeypatch.setattr("replayfleet.edge_client.learning.camera_samples.MAX_WAITING_BYTES", 24 * 32 * 3 * 2)
    found = CameraSamples((), ClassLessons([Slow()]), FeedbackDesk(TASK.class_names, 60.0), collector())
    for index in range(6):
        one = picture(index, 0)
        found.watch(Shown(one, Crops(TASK).inputs(one), None))
        while index == 0 and found._waiting.qsize():
            time.sleep(0.01)
    assert found.num_unlabelled == 3  # one is being labelled, two wait
    going_on.set()
    assert found.settle()
    assert found.has_room()


def test_a_picture_that_is_too_full_is_said_once_per_camera_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    task = DetectionSpec(3, 32, 64, ("car", "bike"), anchors=((0.25, 0.25),), stride=32, max_boxes=2)
    lessons = BoxLessons([AnnotatedLabels({"front": task.class_names}, task.class_names)], task.max_boxes)
    view, found = Detector(task), CameraSamples((), lessons, BoxFeedbackDesk(task, 60.0), collector())
    for frame_id in range(3):
        one = dataclasses.replace(picture(frame_id, 0, 1, 0, 1, 1), pixels=np.zeros((24, 40, 3), np.uint8))
        answers = Answers(np.zeros(1, np.int64), np.ones(1, np.float32), np.zeros((1, 4), np.float32), num_left_out=4)
        found.watch(Shown(one, view.inputs(one), Prediction("front", frame_id, answers, 1, 0.0, 0.1)))
    assert found.settle()
    measures = found.measures()
    assert (measures["num_objects_left_out"], measures["num_boxes_left_out"]) == (12.0, 9.0)
    assert caplog.messages.count("picture is too full") == 2  # of answers and of labels


def test_a_report_names_the_places_with_most_answers_and_counts_all() -> None:
    found = collector()
    for number in range(300):
        found.add(samples(0), place=f"clip-{number:03}", num_right=1, num_answered=1 + (number in {7, 299}))
    cameras = CameraSamples((), cast("Any", None), cast("Any", None), found)
    measured = cameras.measures()
    assert measured["num_stream"] == 302.0
    assert len([name for name in measured if "/" in name]) == MAX_PLACES
    assert measured["stream_accuracy/clip-299"] == 0.5
    encode(Report("cam-1", 0, 1, dict(measured)))
