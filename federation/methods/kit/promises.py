"""What a method of another package promises as ``records.Method`` says, and what is said where it doesn't keep it.

Our own methods are passed over: what is asked of others here, tests hold of them.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from replayfleet.federation.errors import MethodFault, ReplayfleetError, is_out_of_memory, told
from replayfleet.federation.extensions import is_ours
from replayfleet.federation.methods.kit.records import ClientId, Parameters


def remembered_layout(method: Any) -> Callable[[str], Parameters | None]:
    """Return ``method.upload_layout``, which builds a module, with a memory: the same while one method is asked for."""
    newest = _layouts.get("newest")
    if newest is None or newest[0] is not method:
        known: dict[str, Parameters] = {}

        def layout(name: str) -> Parameters | None:
            if name not in known:
                found: Parameters | None = method.upload_layout(name)
                if found is None:
                    return None
                known[name] = found
            return known[name]

        newest = _layouts["newest"] = method, layout
    return newest[1]


_layouts: dict[str, tuple[Any, Callable[[str], Parameters | None]]] = {}


def local_result(method: Any, result: Any) -> tuple[Any, Any]:
    """Return what a client's half made, checked.

    Raises:
        MethodFault: It isn't (ClientState, Upload), or no fleet would take the upload; says of which method.
    """
    kind = type(method)
    if is_ours(kind):
        return result  # type: ignore[no-any-return]
    _expect(method, "local_round", result, kind.ClientState, kind.Upload)
    upload, layout = result[1], remembered_layout(method)
    for name, parameters in upload.pack().parameter_sets.items():
        expected = layout(name)
        if expected is None:
            raise _fault(method, f"an upload has a set {name!r}, which upload_layout doesn't know")
        _expect_layout(method, f"an upload's {name!r}", parameters, expected)
    try:
        method.check_upload(kind.Upload.unpack(upload.pack()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _fault(method, f"no fleet takes its upload: {error}") from error
    return result  # type: ignore[no-any-return]


def aggregated(
    method: Any, result: Any, initial: Callable[[], Any], clients: Mapping[ClientId, Any] | None = None
) -> tuple[Any, Mapping[ClientId, Any]]:
    """Return what the aggregator's half made, checked.

    Args:
        method: whose.
        result: of ``aggregate``.
        initial: gives round 0's download.
        clients: those of the fleet; None: nobody says.

    Raises:
        MethodFault: It isn't (AggregatorState, {client: Download}), of other clients or another layout, or the
            state says something else of a client's download.
    """
    kind = type(method)
    if is_ours(kind):
        return result  # type: ignore[no-any-return]
    _expect(method, "aggregate", result, kind.AggregatorState, Mapping)
    state, downloads = result
    begun = initial()
    sets = begun.pack().parameter_sets
    checked: dict[tuple[str, int], Parameters] = {}  # most clients get the same
    for client, download in downloads.items():
        if clients is not None and client not in clients:
            raise _fault(method, f"aggregate gave a download for {client!r}, who isn't one of {', '.join(clients)}")
        if not isinstance(download, kind.Download):
            raise _fault(method, f"aggregate gave {_name(download)} for {client}, expected {kind.Download.__name__}")
        packed = download.pack().parameter_sets
        for name in sets.keys() & packed.keys():
            if (name, id(packed[name])) not in checked:
                _expect_layout(method, f"a download's {name!r}", packed[name], sets[name])
                checked[name, id(packed[name])] = packed[name]
        kept = method.download_for(state, client, begun).pack().parameter_sets
        if kept.keys() != packed.keys() or not all(_equal(kept[name], packed[name]) for name in packed):
            raise _fault(
                method,
                f"download_for(state, {client!r}, ...) isn't the download that aggregate returned with that state; it "
                "is what a client gets after a restart",
            )
    return state, downloads


@contextlib.contextmanager
def faults_named(method: Any, half: str, *, all_of_them: bool = False) -> Iterator[None]:
    """Have what another package's method raises say whose it is; it ends no process.

    Args:
        method: whose half of a round is done in the block.
        half: its name.
        all_of_them: every error, but for those of disk and memory; otherwise ``SystemExit`` alone.

    Raises:
        MethodFault: Instead of those, which it names with the line of the method's file.
    """
    try:
        yield
    except MethodFault as error:
        if is_ours(type(method)) or str(error).startswith(_FAULT):
            raise
        raise _fault(method, str(error)) from error  # of who drives a method without knowing which
    except (ReplayfleetError, OSError):
        raise
    except (Exception, SystemExit) as error:
        if is_ours(type(method)) or is_out_of_memory(error) or not (all_of_them or isinstance(error, SystemExit)):
            raise
        file = getattr(sys.modules.get(type(method).__module__), "__file__", None)
        lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == file]
        place = f" ({file}, line {lines[-1]})" if lines else ""
        raise _fault(method, f"{half} raised {told(error)}{place}") from error


class Untouched:
    """Notices what a method changes in place, which others share.

    Args:
        method: whose.
        records: that it is handed.
    """

    def __init__(self, method: Any, *records: Any) -> None:
        self._method = method
        self._tensors = [] if is_ours(type(method)) else _tensors(records)
        self._versions = [tensor._version for tensor in self._tensors]

    def check(self, half: str) -> None:
        """Raise MethodFault if ``half`` of a round changed something."""
        if [tensor._version for tensor in self._tensors] != self._versions:
            raise _fault(self._method, f"{half} changed its arguments in place; others have the same tensors, so copy")


def _expect(method: Any, what: str, result: Any, *kinds: type[Any]) -> None:
    names = ", ".join(kind.__name__ for kind in kinds)
    if not isinstance(result, tuple) or len(result) != len(kinds):
        raise _fault(method, f"{what} returned {_name(result)}, expected ({names})")
    if not all(isinstance(one, kind) for one, kind in zip(result, kinds, strict=True)):
        raise _fault(method, f"{what} returned ({', '.join(map(_name, result))}), expected ({names})")


def _expect_layout(method: Any, what: str, parameters: Parameters, expected: Parameters) -> None:
    if not isinstance(parameters, Mapping):
        raise _fault(method, f"{what} is {_name(parameters)}, expected a mapping of names to tensors")
    if parameters.keys() != expected.keys():
        lacks, has = sorted(expected.keys() - parameters.keys()), sorted(parameters.keys() - expected.keys())
        wrong = (("lacks", lacks), ("has", has))
        raise _fault(method, f"{what} {' and '.join(f'{verb} {names[:3]}' for verb, names in wrong if names)}")
    for name, tensor in parameters.items():
        wanted = expected[name]
        if not isinstance(tensor, torch.Tensor):
            raise _fault(method, f"{what} has {_name(tensor)} as {name!r}, expected a tensor")
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            found, right = (f"{tuple(one.shape)} {one.dtype}" for one in (tensor, wanted))
            raise _fault(method, f"{what} has {name!r} as {found}, expected {right}")


def _equal(one: Parameters, other: Parameters) -> bool:
    return one is other or (
        one.keys() == other.keys() and all(one[name] is other[name] or _same(one[name], other[name]) for name in one)
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors say the same, wherever they lie."""
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.allclose(one.cpu(), other.cpu(), rtol=0, atol=0, equal_nan=True)


def _tensors(records: tuple[Any, ...]) -> list[torch.Tensor]:
    sets = [parameters for record in records for parameters in record.pack().parameter_sets.values()]
    return [tensor for parameters in sets for tensor in parameters.values() if not tensor.is_inference()]


def _name(value: object) -> str:
    return "None" if value is None else type(value).__name__


_FAULT = "method "


def _fault(method: Any, what: str) -> MethodFault:
    return MethodFault(f"{_FAULT}{method.name!r}, of an installed package: {what}")
