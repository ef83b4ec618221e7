"""Artefacts as blobs and back: parameter sets become safetensors bytes, facts become msgpack.

Torch is imported when a tensor is touched, so that a device can serve without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from replayfleet.federation.errors import ArtefactRejected, MalformedMessage, Reason
from replayfleet.federation.wire.protocol.facts import decode_facts, encode_facts
from replayfleet.federation.wire.protocol.messages import BlobEntry
from replayfleet.federation.wire.protocol.tensors import decode_arrays, encode_arrays

if TYPE_CHECKING:
    from replayfleet.federation.methods.kit.records import Artefacts, Parameters

HEADER_ALLOWANCE_BYTES = 64 << 10
"""How much larger than its tensors an encoded parameter set may be."""

Layout = Callable[[str], "Parameters | None"]
"""Name of a parameter set -> tensors (any device) whose names, shapes and dtypes it must have; None: unknown name."""


class BlobReader(Protocol):
    """The half of a blob store that decoding needs."""

    def read(self, digest: str) -> bytes:
        """Return the verified bytes."""


class BlobWriter(Protocol):
    """The half of a blob store that encoding needs."""

    def put(self, data: bytes) -> str:
        """Store bytes durably; returns their digest."""


@dataclass(frozen=True, slots=True)
class EncodedArtefacts:
    """What a manifest says about artefacts.

    Attributes:
        blobs: one per parameter set, sorted by name.
        facts: msgpack.
    """

    blobs: tuple[BlobEntry, ...]
    facts: bytes


def encode_parameters(parameters: Parameters) -> bytes:
    """Return one parameter set as safetensors bytes; equal tensors give equal bytes."""
    return encode_arrays({name: tensor.detach().cpu().contiguous().numpy() for name, tensor in parameters.items()})


def decode_parameters(
    name: str, data: bytes, layout: Parameters | None = None, *, must_be_finite: bool = True
) -> Parameters:
    """Return one parameter set, on the CPU, in the layout's order if there is one.

    Args:
        name: the set's name, for messages.
        data: safetensors bytes; not trusted.
        layout: what it must look like; None accepts any tensors.
        must_be_finite: refuse values that are NaN or infinite.

    Raises:
        ArtefactRejected: Not safetensors (malformed), other tensors than the layout's (wrong-layout), or a value that
            is NaN or infinite (not-finite); the message names set and tensor.
    """
    import torch

    try:
        arrays = decode_arrays(data)
    except MalformedMessage as error:
        raise ArtefactRejected(Reason.MALFORMED, f"{name}: {error}") from error
    parameters = {key: torch.from_numpy(array) for key, array in arrays.items()}
    if layout is not None:
        _check_layout(name, parameters, layout)
        parameters = {key: parameters[key] for key in layout}
    for key, tensor in parameters.items() if must_be_finite else ():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ArtefactRejected(Reason.NOT_FINITE, f"{name}: tensor {key!r} has values that are NaN or infinite")
    return parameters


def encode_artefacts(artefacts: Artefacts, store: BlobWriter) -> EncodedArtefacts:
    """Put every parameter set into the store and return what a manifest says about them.

    Raises:
        MalformedMessage: A dtype or a fact does not travel.
    """
    blobs = []
    for name in sorted(artefacts.parameter_sets):
        data = encode_parameters(artefacts.parameter_sets[name])
        blobs.append(BlobEntry(name, store.put(data), len(data)))
    return EncodedArtefacts(tuple(blobs), encode_facts(artefacts.facts))


def decode_own(blobs: Sequence[BlobEntry], facts: bytes, store: BlobReader) -> Artefacts:
    """Return artefacts that this program wrote itself, whatever their values: a run that diverged is resumed too.

    Raises:
        ArtefactRejected: A set or the facts are malformed.
        KeyError: A blob is not in the store.
    """
    return decode_artefacts(blobs, facts, store, must_be_finite=False)


def decode_artefacts(
    blobs: Sequence[BlobEntry],
    facts: bytes,
    store: BlobReader,
    layout: Layout | None = None,
    *,
    must_be_finite: bool = True,
) -> Artefacts:
    """Return the artefacts that a manifest lists.

    Args:
        blobs: the entries to decode; leave out those that aren't parameter sets, such as graphs.
        facts: msgpack.
        store: holds the blobs.
        layout: what every set must look like; None trusts names and shapes, as for blobs that this process wrote.
        must_be_finite: refuse values that are NaN or infinite.

    Raises:
        ArtefactRejected: A set is unknown, malformed or not finite, or the facts are malformed.
        KeyError: A blob is not in the store.
    """
    from replayfleet.federation.methods.kit.records import Artefacts

    try:
        decoded_facts = decode_facts(facts)
    except MalformedMessage as error:
        raise ArtefactRejected(Reason.MALFORMED, str(error)) from error
    parameter_sets: dict[str, Parameters] = {}
    for entry in blobs:
        expected = None
        if layout is not None:
            expected = layout(entry.name)
            if expected is None:
                raise ArtefactRejected(Reason.WRONG_LAYOUT, f"parameter set {entry.name!r} is not known to this method")
        if entry.name in parameter_sets:
            raise ArtefactRejected(Reason.MALFORMED, f"parameter set {entry.name!r} is listed twice")
        data = store.read(entry.digest)
        parameter_sets[entry.name] = decode_parameters(entry.name, data, expected, must_be_finite=must_be_finite)
    return Artefacts(parameter_sets, decoded_facts)


def largest_encoding_bytes(layout: Parameters) -> int:
    """Bytes that a parameter set of this layout can take at most."""
    return HEADER_ALLOWANCE_BYTES + sum(tensor.numel() * tensor.element_size() for tensor in layout.values())


def _check_layout(name: str, parameters: Parameters, layout: Parameters) -> None:
    missing, unexpected = sorted(layout.keys() - parameters.keys()), sorted(parameters.keys() - layout.keys())
    if missing or unexpected:
        what = f"tensor {missing[0]!r} is missing" if missing else f"tensor {unexpected[0]!r} is unexpected"
        more = len(missing) + len(unexpected) - 1
        raise ArtefactRejected(Reason.WRONG_LAYOUT, f"{name}: {what}" + (f", and {more} more differ" if more else ""))
    for key, expected in layout.items():
        tensor = parameters[key]
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise ArtefactRejected(
                Reason.WRONG_LAYOUT,
                f"{name}: tensor {key!r} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"expected {tuple(expected.shape)} {expected.dtype}",
            )
