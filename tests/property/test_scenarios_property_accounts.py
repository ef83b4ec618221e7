"""Comparing tensors counts what comparing digests counts, whatever travels."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.service.artefact_codec import encode_parameters
from replayfleet.federation.simulator.measures.accounts import DigestAccounts, SetSizes, TensorAccounts, equal_bits

Parameters = dict[str, torch.Tensor]
Transfer = tuple[str, str, dict[str, int], bool]

VALUES = st.sampled_from([0.0, -0.0, 1.0, float("nan")])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16])


@st.composite
def parameters(draw: st.DrawFn) -> Parameters:
    shape = draw(st.sampled_from([(), (0,), (2,), (1, 2), (2, 1)]))
    value, dtype = draw(VALUES), draw(DTYPES)
    made = {"w": torch.full(shape, value, dtype=dtype), "n": torch.tensor(draw(st.integers(0, 1)))}
    return dict(reversed(made.items())) if draw(st.booleans()) else made


POOL = st.lists(parameters(), min_size=1, max_size=4)
TRANSFERS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from(["up", "down"]),
        st.dictionaries(st.sampled_from(["task", "average", "sub-generator/1"]), st.integers(0, 3), max_size=3),
        st.booleans(),
    ),
    max_size=6,
)


ONE, TWO = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
TWICE = [("a", "up", {"average": 0, "sub-generator/1": 1, "task": 0}, True)]


@settings(deadline=None)
@given(POOL, TRANSFERS)
@example([ONE, TWO], TWICE)
def test_both_accounts_count_alike(pool: list[Parameters], transfers: list[Transfer]) -> None:
    by_digest, by_tensor = DigestAccounts(), TensorAccounts()
    for client, direction, chosen, copied in transfers:
        sets = {name: pool[index % len(pool)] for name, index in chosen.items()}
        if copied:
            sets = {name: {key: tensor.clone() for key, tensor in one.items()} for name, one in sets.items()}
        assert by_digest.transfer(client, direction, Artefacts(sets)) == by_tensor.transfer(
            client, direction, Artefacts(sets)
        )


@settings(deadline=None)
@given(parameters(), parameters())
def test_sets_are_equal_if_their_encodings_are(left: Parameters, right: Parameters) -> None:
    sizes = SetSizes()
    assert equal_bits(left, right) == (encode_parameters(left) == encode_parameters(right))
    assert sizes.of(left) == len(encode_parameters(left))
    assert sizes.of(right) == len(encode_parameters(right))
