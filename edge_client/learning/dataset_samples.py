"""One client's share of a labelled image set: the same stream, sample by sample, as the simulator draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.cameras.uri import DatasetUri
from replayfleet.edge_client.flow import Samples, Shown
from replayfleet.edge_client.frames.views import as_rgb
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.federation.streams.labelled_images import LabelledImages, normalise
from replayfleet.federation.streams.stream import Indices, Stream, StreamSettings
from replayfleet.models.specs import TaskSpec

_MAX_SCENE = 256
"""Images that are shown, of the round that is being learned."""


class DatasetSamples:
    """Implements ``SampleSource`` over a stream; every round's samples are new to this client.

    Args:
        uri: which data set, stream and client.
        show: takes pictures of the newest round, (B, H, W, 3) uint8: test images of its classes.
        data_root: the operator's own folder of data sets.

    Raises:
        SettingsError: Unknown data set or scenario (names the nearest), data that are absent (says how to get them),
            or too few of them for the rounds asked for.
    """

    def __init__(
        self, uri: DatasetUri, show: Callable[[NDArray[np.uint8]], None], data_root: Path | None = None
    ) -> None:
        self._uri = uri
        self._show = show
        settings = StreamSettings(
            scenario=uri.scenario,
            num_clients=uri.clients,
            num_rounds=uri.rounds,
            samples_per_class=uri.samples,
            test_samples_per_class=uri.test or None,
            seed=uri.seed,
        )
        self._data = load_dataset(uri.dataset, data_root=data_root)
        task, train, test = self._data.task, self._data.train, self._data.test
        self._stream = Stream(settings, train.labels, test.labels, task.num_classes, task.class_names)
        self._show_newest(0)

    def check_task(self, task: TaskSpec) -> None:
        """Raise SettingsError unless the data set poses the fleet's task: same images, its classes the first ones."""
        own, name = self._data.task, self._uri.dataset
        if own.image_shape != task.image_shape or own.num_classes > task.num_classes:
            raise SettingsError(
                f"source {name} has {own.num_classes} classes of {own.image_shape} images, the fleet's task "
                f"{task.num_classes} classes of {task.image_shape}; choose another source"
            )
        for index, (found, expected) in enumerate(zip(own.class_names, task.class_names, strict=False)):
            if found != expected:
                raise SettingsError(
                    f"class {index} is {found!r} in source {name} and {expected!r} in the fleet's task; choose another "
                    "source"
                )

    def watch(self, shown: Shown) -> None: ...

    def round_samples(self, round_index: int) -> Samples | None:
        """The round's samples; None once the stream has ended."""
        if not 0 <= round_index < self._stream.num_rounds:
            return None
        self._show_newest(round_index)
        return _samples(self._data.train, self._stream.train_indices(self._uri.client, round_index))

    def used_up(self, round_index: int) -> None: ...

    def test_samples(self, round_index: int) -> Samples | None:
        """The cumulative test set after ``round_index``; after the stream's end that of its last round."""
        if round_index < 0:
            return None
        last = min(round_index, self._stream.num_rounds - 1)
        return _samples(self._data.test, self._stream.test_indices(self._uri.client, last))

    def measures(self) -> Mapping[str, float]:
        return {}

    def _show_newest(self, round_index: int) -> None:
        met = self._stream.test_indices(self._uri.client, round_index)
        newest = np.isin(self._data.test.labels[met], self._stream.class_ids(self._uri.client, round_index))
        self._show(as_rgb(self._data.test.images[met[newest][-_MAX_SCENE:]]))


def _samples(part: LabelledImages, indices: Indices) -> Samples:
    return Samples(normalise(part.images[indices]), part.labels[indices])
