"""Who counts what would travel: by digest where a run can be resumed, else by comparing the tensors themselves.

Both count alike. Encoding and hashing a task model takes several times as long as averaging it, so a run that keeps
nothing does neither.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Parameters
from replayfleet.federation.methods.kit.travel import Rounded
from replayfleet.federation.service.artefact_codec import encode_artefacts, encode_parameters
from replayfleet.federation.wire.protocol.messages import BlobEntry
from replayfleet.federation.wire.protocol.packed import pack
from replayfleet.federation.wire.protocol.tensors import compress, digest

_memcmp = ctypes.CDLL(None).memcmp
"""Half the time of torch.equal, which besides calls 0.0 and -0.0 equal, and NaN unlike itself."""
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_Layout = tuple[tuple[str, torch.dtype, torch.Size], ...]


class DigestOnly:
    """A blob store that keeps nothing: for naming parameter sets that need not be stored."""

    def put(self, data: bytes) -> str:
        """Return the digest of ``data``."""
        return digest(data)


@dataclass(frozen=True, slots=True)
class Traffic:
    """One transfer.

    Attributes:
        sent: names of the parameter sets that travel.
        num_bytes: of those.
        everything_bytes: of all that were offered.
    """

    sent: tuple[str, ...]
    num_bytes: int
    everything_bytes: int


class Accounts(Protocol):
    """What the simulator asks."""

    @property
    def held(self) -> dict[ClientId, dict[str, str]]:
        """Digests to go on from, as in ``DigestAccounts``; none where nothing can be resumed."""

    def transfer(
        self, client_id: ClientId, direction: str, artefacts: Artefacts, packed: Mapping[str, int] = {}
    ) -> Traffic:
        """Count a transfer in ``direction`` (``up`` or ``down``) and remember that both ends hold it now.

        Args:
            client_id: whose.
            direction: ``up`` or ``down``.
            artefacts: all that is offered.
            packed: set -> bytes that it takes on its way, for sets that don't travel as they are.
        """


class DigestAccounts:
    """Counts by digest, so that a run can be resumed: a set travels only if the other end doesn't hold its digest.

    Attributes:
        held: client id -> ``up/<name>`` or ``down/<name>`` -> digest of the latest version of every set that went
            either way, which both ends hold; plain values.
    """

    def __init__(self, held: Mapping[ClientId, Mapping[str, str]] | None = None) -> None:
        self.held: dict[ClientId, dict[str, str]] = {client: dict(sets) for client, sets in (held or {}).items()}

    def transfer(
        self, client_id: ClientId, direction: str, artefacts: Artefacts, packed: Mapping[str, int] = {}
    ) -> Traffic:
        """Count a transfer, and remember that both ends hold it now; see ``Accounts``."""
        return self.count(client_id, direction, encode_artefacts(artefacts, DigestOnly()).blobs, packed)

    def count(
        self, client_id: ClientId, direction: str, offered: Sequence[BlobEntry], packed: Mapping[str, int] = {}
    ) -> Traffic:
        """Count a transfer of sets that were named before."""
        held = self.held.setdefault(client_id, {})
        known = set(held.values())
        sent = {entry.digest: entry for entry in offered if entry.digest not in known}
        held |= {f"{direction}/{entry.name}": entry.digest for entry in offered}
        return Traffic(
            sent=tuple(entry.name for entry in sent.values()),
            num_bytes=sum(packed.get(entry.name, entry.size_bytes) for entry in sent.values()),
            everything_bytes=sum(entry.size_bytes for entry in offered),
        )


class TensorAccounts:
    """Counts by comparing with the tensors that both ends hold; keeps those alive."""

    def __init__(self) -> None:
        self._held: dict[ClientId, dict[str, Parameters]] = {}
        self._sizes = SetSizes()
        self._twins: tuple[Parameters, Parameters] | None = None

    @property
    def held(self) -> dict[ClientId, dict[str, str]]:
        """Return nothing: tensors aren't named."""
        return {}

    def transfer(
        self, client_id: ClientId, direction: str, artefacts: Artefacts, packed: Mapping[str, int] = {}
    ) -> Traffic:
        """Count a transfer as ``DigestAccounts`` does; of equal sets only one is kept."""
        held = self._held.setdefault(client_id, {})
        known = list(held.values())
        sent: list[str] = []
        offered: dict[str, Parameters] = {}
        for name, parameters in sorted(artefacts.parameter_sets.items()):
            found = self._find(parameters, known)
            if found is None:
                found = self._find(parameters, [offered[other] for other in sent])
                sent = [name if offered[other] is found else other for other in sent]
                if found is None:
                    sent.append(name)
            offered[name] = parameters if found is None else found
        held |= {f"{direction}/{name}": parameters for name, parameters in offered.items()}
        sizes = {name: self._sizes.of(parameters) for name, parameters in offered.items()}
        return Traffic(tuple(sent), sum(packed.get(name, sizes[name]) for name in sent), sum(sizes.values()))

    def _find(self, parameters: Parameters, others: Sequence[Parameters]) -> Parameters | None:
        """Return the one of ``others`` that is equal; contents are compared only if no object is known."""
        for other in others:
            if other is parameters or (self._twins and parameters is self._twins[0] and other is self._twins[1]):
                return other
        for other in others:
            if equal_bits(parameters, other):
                self._twins = (parameters, other)  # what all clients get is compared once
                return other
        return None


class SetSizes:
    """How many bytes parameter sets take on the way, found out once per layout."""

    def __init__(self) -> None:
        self._by_layout: dict[_Layout, int] = {}
        self._last: tuple[Parameters, int] = ({}, len(encode_parameters({})))

    def of(self, parameters: Parameters) -> int:
        """Return the length of ``encode_parameters(parameters)``."""
        if parameters is not self._last[0]:
            layout = tuple((name, tensor.dtype, tensor.shape) for name, tensor in parameters.items())
            if layout not in self._by_layout:
                self._by_layout[layout] = len(encode_parameters(parameters))
            self._last = (parameters, self._by_layout[layout])
        return self._last[1]


def packed_sizes(rounded: Iterable[Rounded]) -> dict[int, int]:
    """Return how many bytes rounded sets take on their way, by the identity of their parameters."""
    return {id(one.parameters): _packed_size(one) for one in rounded}


def _packed_size(one: Rounded) -> int:
    raw = encode_parameters(one.parameters)
    base = None if one.base is None else encode_parameters(one.base)
    packed = pack(raw, base, one.steps)
    return len(compress(raw)[1] if packed is None else packed)


def equal_bits(left: Parameters, right: Parameters) -> bool:
    """Whether both sets encode to the same bytes. NaN equals itself here, and 0.0 differs from -0.0."""
    if left is right:
        return True
    return left.keys() == right.keys() and all(_same(tensor, right[name]) for name, tensor in left.items())


def _same(left: Tensor, right: Tensor) -> bool:
    if left is right:
        return True
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = _plain(left), _plain(right)
    return not left.nbytes or _memcmp(left.data_ptr(), right.data_ptr(), left.nbytes) == 0


def _plain(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous()
