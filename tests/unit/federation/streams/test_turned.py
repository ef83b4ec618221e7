"""Each quarter turn of a class is a class of its own."""

from __future__ import annotations

import numpy as np

from replayfleet.federation.streams.datasets import task_for
from replayfleet.federation.streams.labelled_images import LabelledImages
from replayfleet.federation.streams.turned import turned


def test_a_corner_goes_round_and_the_label_says_how_far():
    images = np.zeros((3, 2, 2, 1), dtype=np.uint8)
    images[:, 0, 0, 0] = (10, 20, 30)  # in the upper left corner
    part = turned(LabelledImages(images, np.array([0, 1, 0]), ("cat", "dog")))
    assert part.class_names == ("cat", "dog", "cat-90", "dog-90", "cat-180", "dog-180", "cat-270", "dog-270")
    assert part.labels.tolist() == [0, 1, 0, 2, 3, 2, 4, 5, 4, 6, 7, 6]
    assert part.images.shape == (12, 2, 2, 1)
    shown = part.images[np.array([11, 1, 4, 6])]
    assert shown.reshape(4, 4).tolist() == [[0, 30, 0, 0], [20, 0, 0, 0], [0, 0, 20, 0], [0, 0, 0, 10]]


def test_a_fleet_learns_forty_classes_of_fashion_mnist():
    task = task_for("fashion-mnist-turned")
    assert (task.num_classes, task.class_names[0], task.class_names[33]) == (40, "t-shirt", "dress-270")
