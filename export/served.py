"""A rounded model for devices of a fleet: made of the graph and the parameters that they would serve, and judged.

Nothing here needs PyTorch: the float32 graph itself answers as the model that the rounded one is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import onnx

from replayfleet.export.batches import batches_for
from replayfleet.export.calibration import SampleSet
from replayfleet.export.formats import Format
from replayfleet.export.gate import Verdict, check_gate, compare_answers
from replayfleet.export.graphs.graph import finished
from replayfleet.export.graphs.join import join
from replayfleet.export.job import rounding
from replayfleet.export.parity import check_rounding
from replayfleet.export.running.artefact import PICTURE_PROBE_BATCH, PROBE_BATCH, PROBE_SEED, Array, make_probe
from replayfleet.export.running.facts import own_facts
from replayfleet.export.running.inspection import MAX_SENT_GRAPH_BYTES
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.wire.protocol.messages import Probe
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec

PROBE_SPREADS: Mapping[str, float] = {"onnx-fp16": 0.1, "onnx-int8": 0.5}
"""How far another runtime may be off a golden vector, in standard deviations of its answers: one that computes in
float16 throughout, or whose sums fall on the other side of a step of INT8, isn't wrong."""


@dataclass(frozen=True, slots=True)
class RoundedModel:
    """What a device serves in place of graph and parameters.

    Attributes:
        graph: self-contained.
        probe: its own golden vector.
        verdict: of the gate that it passed.
    """

    graph: bytes
    probe: Probe
    verdict: Verdict


def rounded_model(
    spec: AnyTaskSpec,
    row: Format,
    graph: bytes,
    parameters: Mapping[str, Array],
    samples: SampleSet,
    limit_points: float,
    num_threads: int,
) -> RoundedModel:
    """Return a task model in a rounded format.

    Args:
        spec: of the task.
        row: a gated format.
        graph: float32, its parameters left open.
        parameters: of the model.
        samples: to calibrate with and to judge on.
        limit_points: how many points of agreement with the float32 model it may lose.
        num_threads: of both models.

    Raises:
        ArtefactRejected: It can't be rounded, answers differently (ParityError) or too often so (GateError).
        SettingsError: Nothing can be judged with these samples.
    """
    exact = OnnxModel(graph, parameters, num_threads=num_threads)
    model = rounding(row, samples)(onnx.load_from_string(join(graph, parameters)))
    data = finished(model, {**own_facts(exact.metadata), "format": row.name, **samples.facts})
    if len(data) > MAX_SENT_GRAPH_BYTES:
        raise ArtefactRejected(Reason.TOO_LARGE, f"it has {len(data):,} bytes, devices take {MAX_SENT_GRAPH_BYTES:,}")
    run = OnnxModel(data, {}, num_threads=num_threads).run
    if row.max_spreads is not None:
        batches = [samples.judging[:size] for size in batches_for(spec.image_shape)]
        check_rounding(row.name, run, exact.run, batches, row.max_spreads)
    verdict = check_gate(row.name, compare_answers(spec, samples.judging, exact.run, run, limit_points, drawn=False))
    batch = PICTURE_PROBE_BATCH if isinstance(spec, DetectionSpec) else PROBE_BATCH
    probe = make_probe(run, spec.image_shape, seed=PROBE_SEED, batch_size=batch)
    tolerance = max(probe.tolerance, PROBE_SPREADS[row.name] * float(np.std(probe.logits)))
    return RoundedModel(data, msgspec.structs.replace(probe, tolerance=tolerance), verdict)
