"""Who counts what would travel: by digest where a run can be resumed, else by comparing the tensors themselves.

Both count alike. Encoding and hashing a task model takes ten times as long as averaging it, so a run that keeps nothing
does neither.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from federation.methods.records import Artefacts, ClientId, Parameters
from federation.scenarios.ledger import DigestOnly, Ledger, Traffic
from federation.service.artefact_codec import encode_artefacts, encode_parameters

_Layout = tuple[tuple[str, torch.dtype, torch.Size], ...]


class Accounts(Protocol):
    """What the simulator asks."""

    @property
    def held(self) -> dict[ClientId, dict[str, str]]:
        """Digests to go on from, as in ``Ledger``; none where nothing can be resumed."""

    def transfer(self, client_id: ClientId, direction: str, artefacts: Artefacts) -> Traffic:
        """Count a transfer in ``direction`` (``up`` or ``down``) and remember that both ends hold it now."""


class DigestAccounts:
    """Counts by digest, so that a run can be resumed."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def held(self) -> dict[ClientId, dict[str, str]]:
        """What the ledger holds."""
        return self._ledger.held

    def transfer(self, client_id: ClientId, direction: str, artefacts: Artefacts) -> Traffic:
        """Count a transfer; see ``Ledger``."""
        return self._ledger.transfer(client_id, direction, encode_artefacts(artefacts, DigestOnly()).blobs)


class TensorAccounts:
    """Counts by comparing with the tensors that both ends hold; keeps those alive, one version of every set."""

    def __init__(self) -> None:
        self._held: dict[ClientId, dict[str, Parameters]] = {}
        self._sizes = SetSizes()

    @property
    def held(self) -> dict[ClientId, dict[str, str]]:
        """Return nothing: tensors aren't named."""
        return {}

    def transfer(self, client_id: ClientId, direction: str, artefacts: Artefacts) -> Traffic:
        """Count a transfer as ``Ledger.transfer`` does: equal sets under several names travel once, by the last."""
        held = self._held.setdefault(client_id, {})
        offered = dict(sorted(artefacts.parameter_sets.items()))
        known = list(held.values())
        sent: list[str] = []
        for name, parameters in offered.items():
            if any(equal_bits(parameters, other) for other in known):
                continue
            twin = next((place for place, other in enumerate(sent) if equal_bits(parameters, offered[other])), None)
            if twin is None:
                sent.append(name)
            else:
                sent[twin] = name
        held |= {f"{direction}/{name}": parameters for name, parameters in offered.items()}
        sizes = {name: self._sizes.of(parameters) for name, parameters in offered.items()}
        return Traffic(tuple(sent), sum(sizes[name] for name in sent), sum(sizes.values()))


class SetSizes:
    """How many bytes parameter sets take on the way, found out once per layout."""

    def __init__(self) -> None:
        self._by_layout: dict[_Layout, int] = {}

    def of(self, parameters: Parameters) -> int:
        """Return the length of ``encode_parameters(parameters)``."""
        layout = tuple((name, tensor.dtype, tensor.shape) for name, tensor in parameters.items())
        if layout not in self._by_layout:
            self._by_layout[layout] = len(encode_parameters(parameters))
        return self._by_layout[layout]


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
    # A bytearray compares itself with any buffer by memcmp; it costs the copy of one side, and less than torch.equal.
    return bytearray(_array(left).data) == _array(right).data


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.detach().cpu().contiguous().numpy()
    return array
