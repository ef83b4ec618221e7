import numpy as np

from replayfleet.federation.streams.labelled_images import LabelledImages
from replayfleet.scripts.experiments.real_replay import IMAGES_PER_CLASS, real_images


def test_it_draws_a_hundred_images_of_each_class_as_bytes() -> None:
    labels = np.arange(240) % 2
    pixels = np.broadcast_to(labels[:, None, None, None].astype(np.uint8) * 255, (240, 4, 4, 1))
    drawn = real_images(LabelledImages(pixels, labels, ("cat", "dog")))
    assert {class_id: each["images"].unique().tolist() for class_id, each in drawn.items()} == {0: [0], 1: [255]}
    assert {tuple(each["images"].shape) for each in drawn.values()} == {(IMAGES_PER_CLASS, 1, 4, 4)}
