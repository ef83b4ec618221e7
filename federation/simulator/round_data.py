"""From a stream's indices to the tensors that a method trains on. The only place where streams meet torch."""

from __future__ import annotations

import torch

from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.streams.driving.pictures import DrivingPictures
from replayfleet.federation.streams.labelled_images import LabelledImages, normalise
from replayfleet.federation.streams.stream import Indices


def round_data(part: LabelledImages | DrivingPictures, indices: Indices) -> RoundData:
    """Return these samples, normalised, in this order. Pixels stay uint8 in ``part``; only the round's become float."""
    return RoundData(torch.from_numpy(normalise(part.images[indices])), torch.from_numpy(part.labels[indices]))
