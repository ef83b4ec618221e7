"""Labels from the annotation that came with a picture: a simulator's, or a recording's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Boxes, Shown
from replayfleet.edge_client.learning.labels.base import UNKNOWN, unknown
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)


class AnnotatedLabels:
    """Implements ``Labeller`` and ``BoxLabeller``: an input takes the class of its box, a whole picture that of all.

    A picture whose boxes disagree says nothing about the picture as a whole. Class names that the task doesn't have are
    reported once each and left unlabelled; a detector learns what bears them as background. Where a camera has none but
    those, nothing is known about its pictures.

    Args:
        class_names: camera -> the names that its boxes' class ids stand for.
        task_class_names: names of the task's classes.
    """

    def __init__(self, class_names: Mapping[str, tuple[str, ...]], task_class_names: tuple[str, ...]) -> None:
        ids = {name: index for index, name in enumerate(task_class_names)}
        self._ids = {
            camera: np.array([ids.get(name, UNKNOWN) for name in names], np.int64)
            for camera, names in class_names.items()
        }
        self._strange = {camera for camera, known in self._ids.items() if (known == UNKNOWN).all()}
        for camera in sorted(self._strange):
            said, wanted = (", ".join(names)[:200] for names in (class_names[camera], task_class_names))
            event = "no annotated class is the fleet's"
            log.warning(event, camera=camera, annotated=said, fleet=wanted, next="served, not trained on")
        named = {name for camera in class_names.keys() - self._strange for name in class_names[camera]}
        for name in sorted(named - ids.keys()):
            next_ = "served, not trained on; a detector learns it as background"
            log.warning("annotated class is not the fleet's", class_name=name, next=next_)

    def labels(self, shown: Shown) -> NDArray[np.int64]:
        """Return the annotated classes, ``UNKNOWN`` where there is no annotation."""
        classes = self._classes(shown)
        if classes is None or not len(classes):
            return unknown(shown)
        if shown.inputs.box_indices is not None:
            return classes[shown.inputs.box_indices]
        return np.full(len(shown.inputs.images), classes[0] if len(set(classes.tolist())) == 1 else UNKNOWN, np.int64)

    def boxes(self, shown: Shown) -> Boxes | None:
        """Return the annotated boxes of the task's classes; None if the picture isn't annotated, or in others alone."""
        boxes, classes = shown.picture.boxes, self._classes(shown)
        if boxes is None or classes is None or shown.picture.camera in self._strange:
            return None
        known = classes != UNKNOWN
        return Boxes(boxes.corners[known], classes[known])

    def _classes(self, shown: Shown) -> NDArray[np.int64] | None:
        boxes, ids = shown.picture.boxes, self._ids.get(shown.picture.camera)
        if boxes is None or ids is None:
            return None
        if len(boxes) and not 0 <= boxes.class_ids.min() <= boxes.class_ids.max() < len(ids):
            found = f"{boxes.class_ids.min()} to {boxes.class_ids.max()}"
            raise ValueError(f"boxes have class ids {found}, the camera names {len(ids)} classes")
        classes: NDArray[np.int64] = ids[boxes.class_ids]
        return classes
