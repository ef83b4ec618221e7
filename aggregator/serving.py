"""Serving artefacts of a fleet's models: ONNX graphs, and a golden vector for every served parameter set."""

from __future__ import annotations

from collections.abc import Mapping

from replayfleet.aggregator.publisher import SUB_GENERATOR_GRAPH
from replayfleet.export.golden import golden_vector
from replayfleet.export.graphs.graph import sub_generator_graph, task_graph
from replayfleet.export.parity import DETECTOR_TOLERANCE, TOLERANCE, check_parity, eager_run, load_parameters
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.methods.kit.records import Method, Parameters
from replayfleet.federation.methods.steps.memory import kind_of
from replayfleet.federation.wire.protocol.messages import TASK_GRAPH, Probe
from replayfleet.models.build import build_task_model
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec

PARITY_BATCHES = (1, 2)
"""Once for each graph; ``model-export`` and the tests compare the largest batch too."""


class OnnxExporter:
    """Exports once and compares the graph once: ONNX Runtime answers the first parameters as the trained model does.

    What comes later has other numbers in the same graph, and a golden vector of its own, which each device's runtime
    must reproduce before it serves.

    Args:
        method: decides which sub-generators the fleet has, if any.
        task: the fleet's task.
    """

    def __init__(self, method: Method, task: AnyTaskSpec) -> None:
        self._task = task
        kind = kind_of(method)
        self._sub_generator_spec = kind.graph_spec if kind is not None else None
        self._module = build_task_model(task)
        self._graphs: Mapping[str, bytes] = {}
        self._compared = False

    def graphs(self) -> Mapping[str, bytes]:
        """Blob name -> graph without parameters."""
        if not self._graphs:
            graphs = {TASK_GRAPH: task_graph(self._task)}
            if self._sub_generator_spec is not None:
                graphs[SUB_GENERATOR_GRAPH] = sub_generator_graph(self._sub_generator_spec)
            self._graphs = graphs
        return self._graphs

    def use(self, graphs: Mapping[str, bytes]) -> None:
        """Take the graphs that the fleet has, which saves the seconds of exporting them again after a restart."""
        self._graphs, self._compared = graphs, False

    def probe(self, parameters: Parameters) -> Probe:
        """Return the golden vector of a task model.

        Raises:
            ArtefactRejected: The model isn't finite or has another layout, or ONNX Runtime answers differently to the
                first one.
        """
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in parameters.items()}
        load_parameters(self._module, arrays)
        if not self._compared:
            detects = isinstance(self._task, DetectionSpec)
            check_parity(
                "task model",
                OnnxModel(self.graphs()[TASK_GRAPH], arrays, num_threads=1).run,
                eager_run(self._module),
                self._task.image_shape,
                batches=PARITY_BATCHES,
                tolerance=DETECTOR_TOLERANCE if detects else TOLERANCE,
            )
            self._compared = True
        return golden_vector(self._task, self._module)
