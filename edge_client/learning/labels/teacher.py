"""Labels from a teacher: a larger model, in an ONNX file, that is believed where it is sure.

Axes: B inputs, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Boxes, Shown, classified
from replayfleet.edge_client.learning.labels.base import UNKNOWN
from replayfleet.export.running.detections import detections
from replayfleet.export.running.facts import own_facts, task_facts
from replayfleet.federation.errors import SettingsError
from replayfleet.models.specs import AnyTaskSpec, DetectionRules, DetectionSpec

MAX_TEACHER_BYTES = 2 * 2**30

Ask = Callable[["NDArray[np.float32]"], "NDArray[np.float32]"]
"""(B, C, H, W) float32 in [-1, 1] -> logits (B, K)."""


class TeacherLabels:
    """Implements ``Labeller``.

    Args:
        ask: the teacher.
        min_confidence: softmax probability of its winner, 0 to 1, below which it isn't believed.
    """

    def __init__(self, ask: Ask, min_confidence: float) -> None:
        self._ask = ask
        self._min_confidence = min_confidence

    def labels(self, shown: Shown) -> NDArray[np.int64]:
        """Return the teacher's winners, where it is sure enough."""
        if not len(shown.inputs.images):
            return np.empty(0, np.int64)
        answers = classified(self._ask(shown.inputs.images), shown.inputs)
        return np.where(answers.confidences >= self._min_confidence, answers.class_ids, UNKNOWN)


class TeacherBoxes:
    """Implements ``BoxLabeller``: what a detector is sure to see is what is there.

    Args:
        ask: the teacher; answers (B, ...) as the task's own detector does.
        task: the fleet's.
        min_confidence: score below which a box isn't believed.
    """

    def __init__(self, ask: Ask, task: DetectionSpec, min_confidence: float) -> None:
        self._ask = ask
        self._task = task
        self._rules = DetectionRules(score_threshold=min_confidence)

    def boxes(self, shown: Shown) -> Boxes | None:
        """Return the boxes that the teacher is sure of; None if there are none, for it may just be unsure."""
        (found,) = detections(self._task, self._ask(shown.inputs.images), self._rules)
        if not len(found):
            return None
        return Boxes(found.in_pixels(*shown.picture.size), found.class_ids)


def load_teacher(path: Path, task: AnyTaskSpec, *, num_threads: int = 1) -> Ask:
    """Return the teacher in an ONNX file, asked once to see that it fits.

    Args:
        path: a file of the operator's own, trusted as such: a model from (B, C, H, W) in [-1, 1] to what the task's own
            model answers, in the task's order of classes.
        task: the fleet's.
        num_threads: of its operations.

    Raises:
        SettingsError: The file can't be read or loaded, or doesn't fit the task.
    """
    import onnxruntime as ort

    try:
        if path.stat().st_size > MAX_TEACHER_BYTES:
            raise SettingsError(f"teacher {path} is larger than {MAX_TEACHER_BYTES} bytes; nothing was started")
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # training shares the cores
        options.log_severity_level = 3
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name

        def ask(images: NDArray[np.float32]) -> NDArray[np.float32]:
            logits: NDArray[np.float32] = session.run(None, {name: images})[0]
            return logits

        logits = ask(np.zeros((2, *task.image_shape), np.float32))
        said = own_facts(session.get_modelmeta().custom_metadata_map)
    except OSError as error:
        raise SettingsError(f"teacher {path}: can't be read ({error.strerror or error})") from error
    except SettingsError:
        raise
    except Exception as error:  # ONNX Runtime raises a dozen unrelated classes
        reason = " ".join(str(error).split())[:300]
        raise SettingsError(f"teacher {path}: no model of {task.image_shape} images ({reason})") from error
    wanted = task_facts(task)
    for key in ("kind", "classes", "anchors", "stride"):  # where the file says so, as our exports do
        if key in said and said[key] != wanted.get(key):
            raise SettingsError(
                f"teacher {path} has the {key} {said[key][:200]}, and the fleet's task {wanted.get(key, 'none')[:200]};"
                " expected the same, in the same order"
            )
    if logits.shape != (2, *task.output_shape):
        raise SettingsError(f"teacher {path} answers {logits.shape[1:]} for an image, expected {task.output_shape}")
    return ask
