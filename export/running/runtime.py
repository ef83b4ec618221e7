"""Serves an ONNX graph with separate parameters. Needs onnxruntime and numpy, neither torch nor onnx.

One graph per architecture stays on the device; a round brings parameters. ONNX Runtime joins them when the session is
made (2 to 6 ms), so a new round costs neither a new graph nor an export.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from replayfleet.devices.profiles import CUDA, TENSORRT
from replayfleet.devices.providers import preload_gpu_libraries, try_provider
from replayfleet.export.running.binding import BoundRuns, OwnBuffers
from replayfleet.export.running.filling import filled
from replayfleet.export.running.inspection import TensorLayout, inspect_graph
from replayfleet.export.running.provider_options import GPU_PROVIDERS, Provider, cuda_options, largest_batch
from replayfleet.federation.errors import ArtefactRejected, Reason

Array: TypeAlias = npt.NDArray[Any]
CPU: tuple[Provider, ...] = ("CPUExecutionProvider",)

UNUSED_SUFFIXES = (".num_batches_tracked", "num_samples")
"""Counters of BatchNorm and of a Gaussian: part of a state dict, and needed by no graph."""

_FLOAT32 = np.dtype(np.float32)
_ERROR, _FATAL = 3, 4
"""ONNX Runtime's log severities: warnings about unused initializers and the like are of no use to operators, and what
GPU providers print about libraries that they miss bypasses logging and is in the exception anyhow."""


class OnnxModel:
    """A graph joined with parameters, ready to run; implements ``runtimes.Runtime``. Thread-safe, frozen once made.

    Args:
        graph: an ONNX file's bytes, of which nothing is trusted: no file is ever read on its behalf.
        parameters: name -> array for exactly the tensors that the graph leaves open; extra entries are accepted only
            if their names end in ``.num_batches_tracked``. Copied, unless they are lent.
        num_threads: threads of one ``run``. They sleep between runs: training shares the cores.
        providers: execution providers, best first. The first one must run; the others take what it can't.
        arena: keep freed memory for the next run. Off suits models that run seldom, such as sub-generators.
        lent: nobody changes the arrays any more, so they aren't copied.

    Raises:
        ArtefactRejected: (load-failed) The graph is refused (see ``inspect_graph``), doesn't fit the parameters, or
            ONNX Runtime can't load it, or not with the first provider; names the library that is missing.
    """

    def __init__(
        self,
        graph: bytes,
        parameters: Mapping[str, Array],
        *,
        num_threads: int,
        providers: Sequence[Provider] = CPU,
        arena: bool = True,
        lent: bool = False,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, expected at least 1")
        summary = inspect_graph(graph)
        supplied = _fitting(summary.parameters, parameters, lent=lent)
        self.metadata: Mapping[str, str] = summary.metadata
        chosen = _with_options(providers)
        first, settings = chosen[0]
        on_gpu = first in GPU_PROVIDERS
        if first == TENSORRT:
            graph, supplied = filled(graph, supplied), {}
        # By its documentation ONNX Runtime takes these by reference: they must live as long as the session.
        self._values = [ort.OrtValue.ortvalue_from_numpy(array) for array in supplied.values()]
        options = _session_options(num_threads, arena)
        if on_gpu:
            options.log_severity_level = _FATAL
        options.add_external_initializers(list(supplied), self._values)
        self._session = _session(graph, options, chosen)
        self._input_name, self._output_name, self.input_shape = _one_of_each(self._session)
        ends = (self._input_name, self._output_name)
        self._run: Callable[[Array], Array] = OwnBuffers(self._session, ends).run
        if on_gpu:
            self._run = _in_portions(BoundRuns(self._session, ends).run, largest_batch(settings))

    @property
    def active_providers(self) -> list[str]:
        """What ONNX Runtime really uses, best first."""
        return list(self._session.get_providers())

    @property
    def runs_on(self) -> str:
        """The provider that was asked for first, which runs."""
        return self.active_providers[0]

    @property
    def input_name(self) -> str:
        """Of the graph's one input."""
        return self._input_name

    def run(self, x: Array) -> Array:
        """Run one batch: (B, *input_shape) float32 -> the graph's output, B at least 1.

        Raises:
            ValueError: ``x`` has another shape or dtype.
            ArtefactRejected: (load-failed) ONNX Runtime failed on it.
        """
        if x.dtype != _FLOAT32 or x.shape[1:] != self.input_shape or x.ndim < 1 or not x.size:
            expected = ", ".join(str(side) for side in self.input_shape)
            raise ValueError(f"input is {x.shape} {x.dtype}, expected (B, {expected}) float32 with B >= 1")
        try:
            return self._run(x)
        except Exception as error:
            raise _load_failed(f"ONNX Runtime failed on a batch of {len(x)}: {_first_line(error)}") from error


def _in_portions(run: Callable[[Array], Array], most: int | None) -> Callable[[Array], Array]:
    """Let ``run`` take batches of any size, where it takes no more than some at once."""
    if most is None:
        return run
    limit = most

    def in_portions(x: Array) -> Array:
        if len(x) <= limit:
            return run(x)
        return np.concatenate([run(x[first : first + limit]) for first in range(0, len(x), limit)])

    return in_portions


def _with_options(providers: Sequence[Provider]) -> list[tuple[str, Mapping[str, str]]]:
    """Return (name, options) of each; CUDA gets ours where the caller gave none."""
    chosen: list[tuple[str, Mapping[str, str]]] = []
    for provider in providers:
        name, options = (provider, {}) if isinstance(provider, str) else provider
        chosen.append((name, options or (cuda_options() if name == CUDA else {})))
    if not chosen:
        raise ValueError("providers is empty, expected at least one")
    return chosen


def _session(graph: bytes, options: Any, chosen: Sequence[tuple[str, Mapping[str, str]]]) -> Any:
    """Return a session whose first provider is the first of ``chosen``; ONNX Runtime alone would fall back silently."""
    first = chosen[0][0]
    providers = [(name, dict(settings)) for name, settings in chosen]
    try:
        if first not in ort.get_available_providers():
            raise RuntimeError(f"{first} is not built into onnxruntime {ort.__version__}")
        if first in GPU_PROVIDERS:  # each process that computes needs them; the one that proved the provider is another
            preload_gpu_libraries()
            ort.set_default_logger_severity(_FATAL)
        session = ort.InferenceSession(graph, options, providers=providers, enable_fallback=0)
        if session.get_providers()[0] != first:
            raise RuntimeError(f"ONNX Runtime fell back to {session.get_providers()[0]}")
    except Exception as error:  # ONNX Runtime raises a dozen unrelated classes, RuntimeError among them
        if first in GPU_PROVIDERS:
            raise _load_failed(f"{first} can't be used: {_why_not(first) or _first_line(error)}") from error
        raise _load_failed(f"ONNX Runtime can't load the graph: {_first_line(error)}") from error
    finally:
        ort.set_default_logger_severity(_ERROR)
    return session


def _why_not(provider: str) -> str:
    """Return what keeps a GPU provider from computing anything at all; empty if only this graph is too much for it."""
    return try_provider(provider).problem


def _one_of_each(session: Any) -> tuple[str, str, tuple[int, ...]]:
    """Return the names of the one input and output, and a sample's shape."""
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if len(inputs) != 1 or len(outputs) != 1:
        raise _load_failed(f"graph has {len(inputs)} inputs and {len(outputs)} outputs, expected one of each")
    shape = inputs[0].shape
    if not shape or not all(isinstance(side, int) for side in shape[1:]):  # a side that is free has a name, or None
        raise _load_failed(f"graph takes an input of {shape}, expected a batch of inputs of one size, all sides given")
    return inputs[0].name, outputs[0].name, tuple(shape[1:])


def _session_options(num_threads: int, arena: bool) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # By its bytes it might take an ONNX file for one of its own format, in which nothing was looked through.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.use_deterministic_compute = True
    options.enable_cpu_mem_arena = arena
    options.log_severity_level = _ERROR
    return options


def _fitting(layouts: Mapping[str, TensorLayout], parameters: Mapping[str, Array], *, lent: bool) -> dict[str, Array]:
    """Return the parameters that the graph leaves open, in its order: copies, unless they are lent."""
    missing = [name for name in layouts if name not in parameters]
    if missing:
        raise _load_failed(f"graph needs parameter {missing[0]!r}, which is missing ({len(missing)} in all)")
    extra = [name for name in parameters if name not in layouts and not name.endswith(UNUSED_SUFFIXES)]
    if extra:
        raise _load_failed(f"parameter {extra[0]!r} has no place in the graph ({len(extra)} in all)")
    supplied: dict[str, Array] = {}
    for name, layout in layouts.items():
        array = parameters[name]
        if array.shape != layout.shape or array.dtype.name != layout.dtype:
            raise _load_failed(
                f"parameter {name!r} is {array.shape} {array.dtype.name}, graph needs {layout.shape} {layout.dtype}"
            )
        supplied[name] = np.ascontiguousarray(array) if lent else np.array(array, order="C", copy=True)
    return supplied


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _load_failed(detail: str) -> ArtefactRejected:
    return ArtefactRejected(Reason.LOAD_FAILED, detail)
