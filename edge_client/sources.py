"""From ``--source`` to what is served and what is learned: checked at the start, opened when the task is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from replayfleet.edge_client.cameras.held_up import held_up
from replayfleet.edge_client.cameras.kinds import ALL_CAMERAS, CAMERAS
from replayfleet.edge_client.cameras.recorded.scene import SceneCamera
from replayfleet.edge_client.cameras.uri import CameraUri, DatasetUri, FolderUri, parse_sources
from replayfleet.edge_client.flow import Camera, PictureSource, Source, View
from replayfleet.edge_client.frames.views import Crops, Detector, WholePicture
from replayfleet.edge_client.learning.camera_samples import CameraSamples
from replayfleet.edge_client.learning.collector import Collector
from replayfleet.edge_client.learning.folder_samples import FolderSamples, check_folder
from replayfleet.edge_client.learning.labels.annotated import AnnotatedLabels
from replayfleet.edge_client.learning.labels.base import Labeller
from replayfleet.edge_client.learning.labels.box_feedback import BoxFeedbackDesk
from replayfleet.edge_client.learning.labels.feedback import FeedbackDesk
from replayfleet.edge_client.learning.labels.lessons import BoxLabeller, BoxLessons, ClassLessons, Lessons
from replayfleet.edge_client.learning.labels.operators_word import Desk
from replayfleet.edge_client.learning.labels.teacher import TeacherBoxes, TeacherLabels, load_teacher
from replayfleet.edge_client.learning.settings import LearningSettings
from replayfleet.federation.errors import ReplayfleetError, SettingsError, nearest, told
from replayfleet.federation.service.fleet.growth import grown_task
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.settings import settings_of
from replayfleet.federation.service.words import count_of
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec, TaskSpec

log = EventLogger(__name__)

OpenSource: TypeAlias = Callable[[AnyTaskSpec], Source]
"""Raises SettingsError if the source doesn't fit the task."""

_LEDGER = "folder-rounds"


def source_opener(
    sources: Sequence[str],
    data_dir: Path,
    data_root: Path | None = None,
    learning: LearningSettings | None = None,
) -> OpenSource:
    """Check sources and return what opens them.

    Args:
        sources: as the operator wrote them.
        data_dir: the client's, for what a source must remember; nothing is written yet.
        data_root: where data sets lie.
        learning: what becomes of cameras' pictures; None takes the defaults.

    Raises:
        SettingsError: Unknown scheme, key, data set or scenario, data that are absent, or settings of cameras without a
            camera.
    """
    parsed = parse_sources(sources)
    first = parsed[0]
    wanted = learning or LearningSettings()
    if not isinstance(first, CameraUri):  # what would do nothing is refused
        for name, setting in settings_of(LearningSettings).items():
            if getattr(wanted, name) != setting.default:
                raise SettingsError(
                    f"{name} is for cameras; dataset:// and folder:// bring labels of their own, leave it out"
                )
    if isinstance(first, DatasetUri):
        from replayfleet.edge_client.learning.dataset_samples import DatasetSamples

        rounds = count_of(first.rounds, "round")
        own = f"{first.dataset} {first.scenario}, client {first.client} of {first.clients}, {rounds}"
        scene = SceneCamera(first.rate)
        samples = DatasetSamples(first, scene.show, data_root)

        def open_dataset(task: AnyTaskSpec) -> Source:
            classified = _classified(task, "dataset://")
            samples.check_task(classified)
            return Source(PictureSource((scene,), WholePicture(classified), own), samples)

        return open_dataset
    if isinstance(first, FolderUri):
        folder = first
        check_folder(folder)

        def open_folder(task: AnyTaskSpec) -> Source:
            own = f"folder {folder.path}, {count_of(folder.per_round, 'image')} per round, {folder.rate:g} frames/s"
            classified, scene = _classified(task, "folder://"), SceneCamera(folder.rate)
            samples = FolderSamples(folder, classified, data_dir / _LEDGER, scene.show)
            return Source(PictureSource((scene,), WholePicture(classified), own), samples)

        return open_folder
    cameras = [_opened(uri) for uri in parsed if isinstance(uri, CameraUri)]
    if wanted.view == "crops" and not any(camera.class_names for camera in cameras):
        raise SettingsError("view is 'crops', but no camera here brings boxes; expected 'whole'")
    return _CameraSource(cameras, wanted)


def _opened(uri: CameraUri) -> Camera:
    """Return a camera of which nothing is captured yet; SettingsError if it can't be used on this machine."""
    kind = ALL_CAMERAS[uri.scheme]
    if kind.supervised:
        from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera

        return SupervisedCamera(uri.settings, uri.name)
    try:
        camera: Camera = kind.camera()(uri.settings, uri.name)
        if uri.scheme not in CAMERAS:
            _check_added(camera, uri.name)
    except (Exception, SystemExit) as error:
        if uri.scheme in CAMERAS or isinstance(error, ReplayfleetError):
            raise
        raise SettingsError(
            f"source {uri.name}: {uri.scheme}://, of an installed package, failed ({told(error)})"
        ) from error
    return camera


def _check_added(camera: Camera, name: str) -> None:
    """Raise unless an added camera has what every camera has: later it would be found out in the middle of a round."""
    said: dict[str, object] = {"live": camera.live, "class_names": camera.class_names, "describe()": camera.describe()}
    kinds: dict[str, type] = {"live": bool, "class_names": tuple, "describe()": str}
    for what, kind in kinds.items():
        if not isinstance(said[what], kind):
            raise TypeError(f"its {what} is {said[what]!r:.80}, expected {kind.__name__}")
    names = camera.class_names
    if not all(isinstance(each, str) for each in names) or len(set(names)) != len(names):
        raise TypeError(f"its class_names are {names!r:.80}, expected names that differ")
    if camera.name != name or not callable(camera.pictures):
        raise TypeError(f"its name is {camera.name!r:.80}, expected {name!r}")


def cameras_with_samples(
    cameras: Sequence[Camera], view: View, lessons: Lessons, desk: Desk, collector: Collector
) -> Source:
    """Return cameras, and what is learned from them; recordings wait while labelling can't keep up."""
    samples = CameraSamples({camera.name for camera in cameras if not camera.live}, lessons, desk, collector)
    description = "; ".join(f"{camera.name}: {camera.describe()}" for camera in cameras)
    return Source(PictureSource(held_up(cameras, samples.has_room, samples.end), view, description), samples)


class _CameraSource:
    """Opens cameras for a task; for one with more classes than the task before it the same source goes on."""

    def __init__(self, cameras: Sequence[Camera], learning: LearningSettings) -> None:
        self._cameras = cameras
        self._learning = learning
        self._opened: tuple[TaskSpec, Source, FeedbackDesk] | None = None

    def __call__(self, task: AnyTaskSpec) -> Source:
        learning, cameras = self._learning, self._cameras
        if isinstance(task, DetectionSpec):
            return self._finding_boxes(task)
        lessons = ClassLessons(self._labellers(task))
        if self._opened is not None:
            before, source, desk = self._opened
            if grown_task(before, task.class_names) == task and isinstance(source.samples, CameraSamples):
                desk.take_classes(task.class_names)
                source.samples.follow(lessons)
                self._opened = (task, source, desk)
                return source
        desk = FeedbackDesk(task.class_names, learning.keep_frames_s)
        annotated = any(camera.class_names for camera in cameras)
        crops = learning.view == "crops" or (learning.view == "auto" and annotated)
        among = _class_ids(learning.only_classes, task)
        view: View = Crops(task, among) if crops else WholePicture(task, among)
        for camera in cameras:
            if crops and not camera.class_names:
                log.warning("camera brings no boxes", camera=camera.name, next="nothing in its pictures is classified")
        source = cameras_with_samples(cameras, view, lessons, desk, Collector(learning))
        self._opened = (task, source, desk)
        return source

    def _finding_boxes(self, task: DetectionSpec) -> Source:
        learning = self._learning
        if learning.only_classes:
            raise SettingsError("only_classes is for classification, but the fleet learns to find boxes; leave it out")
        if learning.view == "crops":
            raise SettingsError(
                "view is 'crops', but the fleet learns to find boxes, and sees whole pictures; leave it out"
            )
        labellers: list[BoxLabeller] = [*self._annotated(task)]
        if learning.teacher is not None:
            labellers.append(TeacherBoxes(load_teacher(learning.teacher, task), task, learning.teacher_confidence))
        lessons = BoxLessons(labellers, task.max_boxes)
        desk = BoxFeedbackDesk(task, learning.keep_frames_s)
        return cameras_with_samples(self._cameras, Detector(task), lessons, desk, Collector(learning))

    def _labellers(self, task: TaskSpec) -> list[Labeller]:
        labellers: list[Labeller] = [*self._annotated(task)]
        if self._learning.teacher is not None:
            teacher = load_teacher(self._learning.teacher, task)
            labellers.append(TeacherLabels(teacher, self._learning.teacher_confidence))
        return labellers

    def _annotated(self, task: AnyTaskSpec) -> list[AnnotatedLabels]:
        annotating = {camera.name: camera.class_names for camera in self._cameras if camera.class_names}
        return [AnnotatedLabels(annotating, task.class_names)] if annotating else []


def _class_ids(names: str, task: TaskSpec) -> tuple[int, ...]:
    """Return the class ids of names with commas between them; none of no names."""
    wanted = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    for name in wanted:
        if name not in task.class_names:
            raise SettingsError(f"only_classes: the fleet has no class {name!r}{nearest(name, task.class_names)}")
    return tuple(task.class_names.index(name) for name in wanted)


def _classified(task: AnyTaskSpec, what: str) -> TaskSpec:
    """Return the task if it is one of classification, which is all that some sources have labels for."""
    if isinstance(task, TaskSpec):
        return task
    raise SettingsError(f"source {what} has one class per image, but the fleet learns to find boxes; take a camera")
