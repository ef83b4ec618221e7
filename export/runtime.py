"""Serves an ONNX graph with separate parameters. Needs onnxruntime and numpy, neither torch nor onnx.

One graph per architecture stays on the device; a round brings parameters. ONNX Runtime joins them when the session is
made (2 to 6 ms), so a new round costs neither a new graph nor an export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from export.inspection import TensorLayout, inspect_graph
from federation.errors import ArtefactRejected, Reason

Array: TypeAlias = npt.NDArray[Any]
Provider: TypeAlias = str | tuple[str, Mapping[str, Any]]
"""An execution provider's name, or (name, options), as ONNX Runtime takes it."""

CPU: tuple[Provider, ...] = ("CPUExecutionProvider",)

UNUSED_SUFFIX = ".num_batches_tracked"
"""BatchNorm's counter: part of every state dict, used by no graph."""

_ERROR = 3
"""ONNX Runtime's log severity; warnings about unused initializers and the like are of no use to operators."""


class OnnxModel:
    """A graph joined with parameters, ready to run. Thread-safe; frozen once made.

    Args:
        graph: an ONNX file's bytes, of which nothing is trusted: no file is ever read on its behalf.
        parameters: name -> array for exactly the tensors that the graph leaves open; extra entries are accepted only
            if their names end in ``.num_batches_tracked``. Copied.
        num_threads: threads of one ``run``. They sleep between runs: training shares the cores.
        providers: execution providers, best first. ONNX Runtime falls back silently; see ``active_providers``.
        arena: keep freed memory for the next run. Off suits models that run seldom, such as sub-generators.

    Raises:
        ArtefactRejected: (load-failed) The graph is refused (see ``inspect_graph``), doesn't fit the parameters, or
            ONNX Runtime can't load it.
    """

    def __init__(
        self,
        graph: bytes,
        parameters: Mapping[str, Array],
        *,
        num_threads: int,
        providers: Sequence[Provider] = CPU,
        arena: bool = True,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, expected at least 1")
        summary = inspect_graph(graph)
        supplied = _fitting(summary.parameters, parameters)
        self.metadata: Mapping[str, str] = summary.metadata
        options = _session_options(num_threads, arena)
        # By its documentation ONNX Runtime takes these by reference: they must live as long as the session.
        self._values = [ort.OrtValue.ortvalue_from_numpy(array) for array in supplied.values()]
        try:
            options.add_external_initializers(list(supplied), self._values)
            self._session = ort.InferenceSession(graph, options, providers=list(providers))
        except Exception as error:  # ONNX Runtime raises a dozen unrelated classes, RuntimeError among them
            raise _load_failed(f"ONNX Runtime can't load the graph: {_first_line(error)}") from error
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1 or not inputs[0].shape:
            raise _load_failed(f"graph has {len(inputs)} inputs and {len(outputs)} outputs, expected one of each")
        self._input_name: str = inputs[0].name
        self._output_name: str = outputs[0].name
        self.input_shape: tuple[int, ...] = tuple(inputs[0].shape[1:])

    @property
    def active_providers(self) -> list[str]:
        """What ONNX Runtime really uses, best first."""
        return list(self._session.get_providers())

    def run(self, x: Array) -> Array:
        """Run one batch: (B, *input_shape) float32 -> the graph's output, B at least 1.

        Raises:
            ValueError: ``x`` has another shape or dtype.
            ArtefactRejected: (load-failed) ONNX Runtime failed on it.
        """
        if x.dtype != np.float32 or x.shape[1:] != self.input_shape or x.ndim < 1 or len(x) < 1:
            expected = ", ".join(str(side) for side in self.input_shape)
            raise ValueError(f"input is {x.shape} {x.dtype}, expected (B, {expected}) float32 with B >= 1")
        try:
            outputs = self._session.run([self._output_name], {self._input_name: np.ascontiguousarray(x)})
        except Exception as error:
            raise _load_failed(f"ONNX Runtime failed on a batch of {len(x)}: {_first_line(error)}") from error
        result: Array = outputs[0]
        return result


def _session_options(num_threads: int, arena: bool) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.use_deterministic_compute = True
    options.enable_cpu_mem_arena = arena
    options.log_severity_level = _ERROR
    return options


def _fitting(layouts: Mapping[str, TensorLayout], parameters: Mapping[str, Array]) -> dict[str, Array]:
    """Return copies of the parameters that the graph leaves open, in its order."""
    missing = [name for name in layouts if name not in parameters]
    if missing:
        raise _load_failed(f"graph needs parameter {missing[0]!r}, which is missing ({len(missing)} in all)")
    extra = [name for name in parameters if name not in layouts and not name.endswith(UNUSED_SUFFIX)]
    if extra:
        raise _load_failed(f"parameter {extra[0]!r} has no place in the graph ({len(extra)} in all)")
    supplied: dict[str, Array] = {}
    for name, layout in layouts.items():
        array = parameters[name]
        if array.shape != layout.shape or array.dtype.name != layout.dtype:
            raise _load_failed(
                f"parameter {name!r} is {array.shape} {array.dtype.name}, graph needs {layout.shape} {layout.dtype}"
            )
        supplied[name] = np.array(array, order="C", copy=True)
    return supplied


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _load_failed(detail: str) -> ArtefactRejected:
    return ArtefactRejected(Reason.LOAD_FAILED, detail)
