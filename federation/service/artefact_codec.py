"""Artefacts as blobs and back: parameter sets become safetensors bytes, facts become msgpack.

Torch is imported when a tensor is touched, so that a device can serve without it.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from replayfleet.federation.errors import ArtefactRejected, MalformedMessage, Reason
from replayfleet.federation.wire.protocol.facts import decode_facts, encode_facts
from replayfleet.federation.wire.protocol.messages import BlobEntry
from replayfleet.federation.wire.protocol.tensors import TORCH_NAMES, Table, encode_arrays, table_of

if TYPE_CHECKING:
    from torch import Tensor

    from replayfleet.federation.methods.kit.records import Artefacts, Parameters

HEADER_ALLOWANCE_BYTES = 64 << 10
"""How much larger than its tensors an encoded parameter set may be."""

_SMALL_BYTES = 32 << 10
_Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"

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


class BlobFiles(BlobReader, Protocol):
    """A blob store whose blobs are files."""

    def mapped(self, digest: str) -> mmap.mmap:
        """Return the verified bytes, mapped into memory: private, so that writing changes no file."""


class Blobs(BlobFiles, BlobWriter, Protocol):
    """Both halves of a blob store whose blobs are files."""


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

    table = _table(name, data, layout)
    copied = np.frombuffer(data, np.uint8, offset=table.start).copy()
    if must_be_finite:
        _check_finite(name, table, copied)
    return {key: torch.from_numpy(table.view(key, copied)) for key in layout or table.places}


class StoredParameters(Mapping[str, "Tensor"]):
    """A parameter set that stays in its blob's file, mapped into memory only while one of its tensors is in use.

    A small one stays in memory: to map it for each tensor would cost more than it takes.

    So a thousand uploads take no more memory than those that are looked at, and whoever stores one again finds its
    digest here in place of encoding it.

    Args:
        entry: the blob, and the set's name for messages.
        store: holds it.
        layout: as in ``decode_parameters``; None for what was checked before.
        must_be_finite: refuse values that are NaN or infinite.

    Raises:
        ArtefactRejected: As ``decode_parameters``; malformed too if there is a layout and the blob has another size
            than its entry says.
        KeyError: The blob is not in the store.
    """

    __slots__ = ("_data", "_held", "_names", "_store", "_table", "entry")

    def __init__(
        self, entry: BlobEntry, store: BlobFiles, layout: Parameters | None = None, *, must_be_finite: bool = False
    ) -> None:
        self.entry, self._store = entry, store
        self._data: weakref.ref[_Bytes] | None = None
        data = store.mapped(entry.digest)
        # A blob that was here before has passed no other check of its size, and what it is said to have goes to others.
        if layout is not None and len(data) != entry.size_bytes:
            raise ArtefactRejected(
                Reason.MALFORMED, f"{entry.name}: its blob has {len(data)} bytes, declared were {entry.size_bytes}"
            )
        self._table = _table(entry.name, memoryview(data), layout)
        self._held: _Bytes | None = None
        if len(data) <= _SMALL_BYTES:
            self._held = np.frombuffer(bytearray(data), np.uint8, offset=self._table.start)
        self._names: Mapping[str, object] = self._table.places if layout is None else layout
        if must_be_finite:
            _check_finite(entry.name, self._table, np.frombuffer(data, np.uint8, offset=self._table.start))

    def __getitem__(self, name: str) -> Tensor:
        import torch

        return torch.from_numpy(self._table.view(name, self._bytes()))

    @property
    def in_order(self) -> tuple[str, ...]:
        """As ``OnePiece`` says."""
        return self._table.in_order

    def floats(self) -> Tensor:
        """As ``OnePiece`` says."""
        import torch

        return torch.from_numpy(self._table.side_by_side(self._bytes()))

    def _bytes(self) -> _Bytes:
        data = self._held if self._held is not None or self._data is None else self._data()
        if data is None:
            # A tensor holds this array, and the array the mapping.
            data = np.frombuffer(self._store.mapped(self.entry.digest), np.uint8, offset=self._table.start)
            self._data = weakref.ref(data)
        return data

    def __iter__(self) -> Iterator[str]:
        mapped = self._bytes()  # once for all tensors of a pass, though each may be dropped before the next
        yield from self._names
        del mapped

    def __len__(self) -> int:
        return len(self._names)

    def __reduce__(self) -> tuple[type[dict[str, Tensor]], tuple[dict[str, Tensor]]]:
        # To another process, perhaps of another machine without these files, the tensors go themselves.
        return dict, (dict(self),)


class EncodedOnce:
    """Puts parameter sets into a store, each once however often it is asked for; one that came from there not again.

    Sets are told apart by identity, so it holds them.

    Args:
        store: where they go.
    """

    def __init__(self, store: BlobWriter) -> None:
        self._store = store
        self._known: dict[int, tuple[Parameters, BlobEntry]] = {}

    def entry(self, name: str, parameters: Parameters) -> BlobEntry:
        """Return what a manifest says of a set that is on disk now.

        Raises:
            MalformedMessage: A dtype does not travel.
        """
        if isinstance(parameters, StoredParameters):
            return BlobEntry(name, parameters.entry.digest, parameters.entry.size_bytes)
        if id(parameters) not in self._known:
            data = encode_parameters(parameters)
            self._known[id(parameters)] = (parameters, BlobEntry(name, self._store.put(data), len(data)))
        _, entry = self._known[id(parameters)]
        return BlobEntry(name, entry.digest, entry.size_bytes)


def encode_artefacts(artefacts: Artefacts, store: BlobWriter | EncodedOnce) -> EncodedArtefacts:
    """Put every parameter set into the store and return what a manifest says about them.

    Raises:
        MalformedMessage: A dtype or a fact does not travel.
    """
    once, sets = store if isinstance(store, EncodedOnce) else EncodedOnce(store), artefacts.parameter_sets
    return EncodedArtefacts(tuple(once.entry(name, sets[name]) for name in sorted(sets)), encode_facts(artefacts.facts))


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

    def read(entry: BlobEntry, expected: Parameters | None) -> Parameters:
        return decode_parameters(entry.name, store.read(entry.digest), expected, must_be_finite=must_be_finite)

    return _decoded(blobs, facts, layout, read)


def open_artefacts(
    blobs: Sequence[BlobEntry],
    facts: bytes,
    store: BlobFiles,
    layout: Layout | None = None,
    *,
    must_be_finite: bool = True,
) -> Artefacts:
    """Return as ``decode_artefacts`` what a manifest lists, its sets left on disk: ``StoredParameters``."""

    def read(entry: BlobEntry, expected: Parameters | None) -> Parameters:
        return StoredParameters(entry, store, expected, must_be_finite=must_be_finite)

    return _decoded(blobs, facts, layout, read)


def _decoded(
    blobs: Sequence[BlobEntry],
    facts: bytes,
    layout: Layout | None,
    read: Callable[[BlobEntry, Parameters | None], Parameters],
) -> Artefacts:
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
        parameter_sets[entry.name] = read(entry, expected)
    return Artefacts(parameter_sets, decoded_facts)


def largest_encoding_bytes(layout: Parameters) -> int:
    """Bytes that a parameter set of this layout can take at most."""
    return HEADER_ALLOWANCE_BYTES + sum(tensor.numel() * tensor.element_size() for tensor in layout.values())


def _check_finite(name: str, table: Table, data: _Bytes) -> None:
    key = table.not_finite(data)
    if key is not None:
        raise ArtefactRejected(Reason.NOT_FINITE, f"{name}: tensor {key!r} has values that are NaN or infinite")


def _table(name: str, data: bytes | memoryview, layout: Parameters | None) -> Table:
    """Return where a set's tensors lie, which are those of the layout if there is one."""
    try:
        table = table_of(data)
    except MalformedMessage as error:
        raise ArtefactRejected(Reason.MALFORMED, f"{name}: {error}") from error
    if layout is None:
        return table
    missing, unexpected = sorted(layout.keys() - table.places.keys()), sorted(table.places.keys() - layout.keys())
    if missing or unexpected:
        what = f"tensor {missing[0]!r} is missing" if missing else f"tensor {unexpected[0]!r} is unexpected"
        more = len(missing) + len(unexpected) - 1
        raise ArtefactRejected(Reason.WRONG_LAYOUT, f"{name}: {what}" + (f", and {more} more differ" if more else ""))
    for key, expected in layout.items():
        dtype, shape, *_ = table.places[key]
        if shape != expected.shape or TORCH_NAMES[dtype] != str(expected.dtype):
            raise ArtefactRejected(
                Reason.WRONG_LAYOUT,
                f"{name}: tensor {key!r} is {shape} torch.{dtype.name}, "
                f"expected {tuple(expected.shape)} {expected.dtype}",
            )
    return table
