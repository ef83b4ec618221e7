"""From a stream's indices to the tensors that a method trains on. The only place where streams meet torch."""

from __future__ import annotations

import torch

from federation.methods.records import RoundData
from federation.streams.driving_pictures import DrivingPictures
from federation.streams.labelled_images import LabelledImages, normalise
from federation.streams.stream import Indices


def round_data(part: LabelledImages | DrivingPictures, indices: Indices) -> RoundData:
    """Return these samples, normalised, in this order. Pixels stay uint8 in ``part``; only the round's become float."""
    return RoundData(torch.from_numpy(normalise(part.images[indices])), torch.from_numpy(part.labels[indices]))
