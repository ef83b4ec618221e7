"""The golden vector of a task model, from the eager model: what each device's runtime must reproduce."""

from __future__ import annotations

from torch import nn

from replayfleet.export.parity import eager_run
from replayfleet.export.running.artefact import (
    DETECTOR_PROBE_TOLERANCE,
    PICTURE_PROBE_BATCH,
    PROBE_BATCH,
    PROBE_SEED,
    PROBE_TOLERANCE,
    make_probe,
)
from replayfleet.federation.wire.protocol.messages import Probe
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec


def golden_vector(task: AnyTaskSpec, module: nn.Module) -> Probe:
    """Return the golden vector of a task's model.

    Raises:
        ArtefactRejected: The model answers with NaN or infinity.
    """
    detects = isinstance(task, DetectionSpec)
    return make_probe(
        eager_run(module),
        task.image_shape,
        seed=PROBE_SEED,
        batch_size=PICTURE_PROBE_BATCH if detects else PROBE_BATCH,
        tolerance=DETECTOR_PROBE_TOLERANCE if detects else PROBE_TOLERANCE,
    )
