"""A model in the precisions that it wasn't exported in, to see how quickly they would serve. Needs ``onnx``.

Ranges of INT8 are measured on noise and nothing is judged: ``model-export`` makes files to be served.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from replayfleet.export.graphs.fold import fold
from replayfleet.export.graphs.join import join
from replayfleet.export.graphs.precision import to_float16, to_int8
from replayfleet.export.running.artefact import Array

_NUM_SAMPLES = 32


def rounded(graph: bytes, parameters: Mapping[str, Array], image_shape: tuple[int, ...]) -> dict[str, bytes]:
    """Return precision -> a self-contained ONNX file.

    Args:
        graph: its parameters left open.
        parameters: what it leaves open.
        image_shape: of one input.
    """
    model = onnx.load_from_string(join(graph, parameters))
    fold(model)
    noise = np.random.default_rng(0).uniform(-1, 1, (_NUM_SAMPLES, *image_shape)).astype(np.float32)
    return {
        "fp16": to_float16(model).SerializeToString(),
        "int8": to_int8(model, noise).SerializeToString(),
    }
