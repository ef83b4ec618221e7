"""Whatever bytes arrive as a graph, the answer is a summary or a refusal, never another error."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from replayfleet.export.running.inspection import GraphSummary, inspect_graph
from replayfleet.federation.errors import ArtefactRejected


def small_graph() -> bytes:
    weight = TensorProto(name="w", dims=[3, 2], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="parameters")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Softmax", ["y"], ["z"], axis=1)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 2])],
        [weight],
    )
    return helper.make_model(graph).SerializeToString()


GRAPH = small_graph()


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_crash_the_reader(data: bytes):
    with contextlib.suppress(ArtefactRejected):
        assert isinstance(inspect_graph(data), GraphSummary)


@given(st.integers(0, len(GRAPH) - 1), st.binary(min_size=1, max_size=4), st.booleans())
def test_damaged_graphs_never_crash_the_reader(position: int, patch: bytes, insert: bool):
    end = position if insert else position + len(patch)
    with contextlib.suppress(ArtefactRejected):
        inspect_graph(GRAPH[:position] + patch + GRAPH[end:])
