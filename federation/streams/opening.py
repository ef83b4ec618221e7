"""From settings and a data set to a stream of any scenario. Needs no torch."""

from __future__ import annotations

from typing import TypeAlias

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.datasets import AnyDataset, BoxDataset
from replayfleet.federation.streams.driving.crops import DrivingCrops
from replayfleet.federation.streams.driving.stream import DrivingStream
from replayfleet.federation.streams.stream import DRIVING, TASK_BY_TASK, Stream, StreamSettings
from replayfleet.federation.streams.tasks import TaskStream, as_tasks_show_it

AnyStream: TypeAlias = Stream | DrivingStream | TaskStream
"""What a simulation runs over."""


def open_stream(settings: StreamSettings, data: AnyDataset) -> tuple[AnyStream, AnyDataset]:
    """Return the stream of a scenario over a data set, and the data set as this stream's indices mean it.

    Raises:
        SettingsError: The data don't last for the rounds asked for, or the scenario needs other data.
    """
    if isinstance(data, BoxDataset):
        if settings.scenario != DRIVING:
            raise SettingsError(
                f"scenario {settings.scenario} needs one class for every picture, and those of {data.name} have boxes; "
                f"take --scenario {DRIVING}"
            )
        return DrivingStream(settings, data.train, data.test), data
    if settings.scenario in TASK_BY_TASK:
        return TaskStream(settings, data), as_tasks_show_it(settings, data)
    if settings.scenario != DRIVING:
        return Stream(settings, data.train.labels, data.test.labels, data.task.num_classes, data.task.class_names), data
    if not (isinstance(data.train, DrivingCrops) and isinstance(data.test, DrivingCrops)):
        raise SettingsError(
            f"scenario {DRIVING} needs objects that were met while driving, which {data.name} doesn't hold; "
            "take --dataset carla-crops or carla-boxes, or another --scenario"
        )
    return DrivingStream(settings, data.train, data.test), data
