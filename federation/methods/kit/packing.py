"""Records: what crosses a method's boundary says once what it consists of, and all the rest reads that.

A record is a frozen dataclass, each of whose fields is annotated with what it is in ``Artefacts``::

    @dataclass(frozen=True, slots=True)
    class Download(Record):
        personalised: Annotated[Parameters, OneSet(served=True)]
        sub_generators: Annotated[Mapping[int, Parameters], SubGenerators()] = field(default_factory=dict)
        seen: Annotated[Mapping[int, int], COUNTS] = field(default_factory=dict)
        weights: Annotated[Mapping[ClientId, float], WEIGHTS] = field(default_factory=dict)

From that follow ``pack`` and ``unpack``, the checks of input that may be hostile, which set an upload's blob is
(``place_of``), what the publisher marks as served, and what operators see. A set whose field has a default may be
empty, and then isn't packed; facts always are.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Facts, Parameters

ALL_CLASSES = -1
"""The key of a generator that draws every class, where others have a class id; in names it is ``all``."""

MAX_SAMPLES = 2**40
"""More samples than any stream has: a larger count is an error or an attack."""

Place: TypeAlias = tuple[str, int]
"""A declared name, and which of the sets under it: a class id or an index; 0 where there is only one."""

R = TypeVar("R", bound="Record")


@dataclass(frozen=True, slots=True)
class Part:
    """What one field of a record is among artefacts.

    Attributes:
        name: of its set or fact, or what its sets' names begin with; the field's own name if empty.
    """

    name: str = ""

    def pack(self, value: Any, name: str) -> Artefacts:
        """Return a value as artefacts."""
        raise NotImplementedError

    def unpack(self, artefacts: Artefacts, name: str, default: Any) -> Any:
        """Return the value again; ``default`` is ``MISSING`` for a field that has none.

        Raises:
            ValueError: A set or fact is missing or impossible; says which.
        """
        raise NotImplementedError

    def place(self, _set_name: str, _name: str) -> Place | None:
        """Say which of its sets is so called; None: none of them."""
        return None

    def fact_names(self, _name: str) -> tuple[str, ...]:
        """Return the names of its facts."""
        return ()


@dataclass(frozen=True, slots=True)
class _Declared:
    field: str
    part: Part
    name: str
    default: Any


class Record:
    """Base of uploads, downloads and states that declare what they consist of."""

    __slots__ = ()

    def pack(self) -> Artefacts:
        """Return the record as parameter sets and facts."""
        sets: dict[str, Parameters] = {}
        facts: dict[str, Any] = {}
        for declared in _declared(type(self)):
            value = getattr(self, declared.field)
            if isinstance(declared.part, OneSet) and declared.default is not MISSING and not value:
                continue
            packed = declared.part.pack(value, declared.name)
            sets |= packed.parameter_sets
            facts |= packed.facts
        return Artefacts(sets, facts)

    @classmethod
    def unpack(cls: type[R], artefacts: Artefacts) -> R:
        """Return the record again.

        Raises:
            ValueError: A set or fact is missing or impossible; says which.
        """
        return cls(**{d.field: d.part.unpack(artefacts, d.name, d.default) for d in _declared(cls)})


_DECLARED: dict[type[Any], tuple[_Declared, ...]] = {}
"""What has been read so far; annotations are strings, so reading them takes a while."""


def _declared(kind: type[Any]) -> tuple[_Declared, ...]:
    """Return what the fields of a record are; nothing for a class that declares nothing."""
    if kind in _DECLARED or not issubclass(kind, Record):
        return _DECLARED.get(kind, ())
    hints = typing.get_type_hints(kind, include_extras=True)
    declared = []
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        part = next((extra for extra in getattr(hints[one.name], "__metadata__", ()) if isinstance(extra, Part)), None)
        if part is None:
            raise TypeError(f"{kind.__name__}.{one.name} is not declared, expected Annotated[..., OneSet()] or so")
        default = one.default if one.default_factory is MISSING else one.default_factory()
        declared.append(_Declared(one.name, part, part.name or one.name, default))
    _DECLARED[kind] = tuple(declared)
    return _DECLARED[kind]


@dataclass(frozen=True, slots=True)
class OneSet(Part):
    """One model's parameters.

    Attributes:
        served: they are the task model that a device with this download answers with.
        gradient: they are no model but a gradient by parameter name, which may differ from the last by any amount.
    """

    served: bool = False
    gradient: bool = False

    def pack(self, value: Any, name: str) -> Artefacts:
        return Artefacts({name: value})

    def unpack(self, artefacts: Artefacts, name: str, default: Any) -> Any:
        if name not in artefacts.parameter_sets and default is MISSING:
            present = ", ".join(sorted(artefacts.parameter_sets)) or "none"
            raise ValueError(f"parameter set {name!r} is missing; present: {present}")
        return artefacts.parameter_sets.get(name, default)

    def place(self, set_name: str, name: str) -> Place | None:
        return (name, 0) if set_name == name else None


@dataclass(frozen=True, slots=True)
class SetsByClass(Part):
    """Class id (or ``ALL_CLASSES``) -> parameters, under ``<name><class id>``; unpacked in rising order."""

    def pack(self, value: Any, name: str) -> Artefacts:
        return Artefacts({f"{name}{'all' if c == ALL_CLASSES else c}": parameters for c, parameters in value.items()})

    def unpack(self, artefacts: Artefacts, name: str, default: Any) -> Any:
        keys = {set_name: class_key(set_name, name) for set_name in artefacts.parameter_sets}
        found = {key: artefacts.parameter_sets[set_name] for set_name, key in keys.items() if key is not None}
        return dict(sorted(found.items()))

    def place(self, set_name: str, name: str) -> Place | None:
        key = class_key(set_name, name)
        return None if key is None else (name, key)


@dataclass(frozen=True, slots=True)
class SubGenerators(SetsByClass):
    """The generators of single classes (or of all), which operators see counted."""

    name: str = "sub-generator/"


@dataclass(frozen=True, slots=True)
class Inline(Part):
    """A record whose sets and facts stand among those of the outer one; None, if that is the default, is nothing."""

    kind: type[Record] = Record

    def pack(self, value: Any, name: str) -> Artefacts:
        return Artefacts() if value is None else value.pack()

    def unpack(self, artefacts: Artefacts, name: str, default: Any) -> Any:
        absent = not any(self.place(set_name, "") for set_name in artefacts.parameter_sets)
        return None if default is None and absent else self.kind.unpack(artefacts)

    def place(self, set_name: str, _name: str) -> Place | None:
        return place_of(self.kind, set_name)

    def fact_names(self, _name: str) -> tuple[str, ...]:
        return tuple(fact for d in _declared(self.kind) for fact in d.part.fact_names(d.name))


@dataclass(frozen=True, slots=True)
class ByClient(Part):
    """Client id -> the same part for each: sets under ``clients/<id>/``, facts under its id in the fact ``clients``.

    Of a part with one fact that fact's value stands there, and of one without facts the ids alone.
    """

    name: str = "clients"
    part: Part = OneSet()

    def pack(self, value: Any, name: str) -> Artefacts:
        packed = {client_id: self.part.pack(own, self.part.name) for client_id, own in value.items()}
        sets = {f"{name}/{c}/{key}": one for c, own in packed.items() for key, one in own.parameter_sets.items()}
        match self.part.fact_names(self.part.name):
            case ():
                return Artefacts(sets, {name: sorted(packed)})
            case (single,):
                return Artefacts(sets, {name: {c: own.facts[single] for c, own in packed.items()}})
        return Artefacts(sets, {name: {c: dict(own.facts) for c, own in packed.items()}})

    def unpack(self, artefacts: Artefacts, name: str, default: Any) -> Any:
        names = self.part.fact_names(self.part.name)
        listed = artefacts.facts.get(name, {})
        raw: Mapping[ClientId, Any] = listed if names else dict.fromkeys(listed)
        sets: dict[str, dict[str, Parameters]] = {str(client_id): {} for client_id in raw}
        for set_name, parameters in artefacts.parameter_sets.items():
            root, _, rest = set_name.partition("/")
            client_id, _, own_name = rest.partition("/")
            if root == name and client_id in sets:
                sets[client_id][own_name] = parameters
        found = {}
        for client_id in sorted(sets):
            facts = raw[client_id] if len(names) > 1 else dict.fromkeys(names, raw[client_id])
            found[client_id] = self.part.unpack(Artefacts(sets[client_id], facts), self.part.name, MISSING)
        return found


@dataclass(frozen=True, slots=True)
class Fact(Part):
    """A small value that stands in the manifest itself.

    Attributes:
        decoded: (raw value, name for messages) -> the value; raises ValueError if it is impossible.
        encoded: the value -> None, bool, int, float, str, or lists and str-keyed dicts of them.
        optional: whether it may be missing, as from a peer or a disk of before there was such a fact: the default then.
    """

    decoded: Callable[[Any, str], Any] = lambda raw, _name: raw
    encoded: Callable[[Any], Any] = lambda value: value
    optional: bool = False

    def pack(self, value: Any, name: str) -> Artefacts:
        return Artefacts(facts={name: self.encoded(value)})

    def unpack(self, artefacts: Artefacts, name: str, default: Any) -> Any:
        if self.optional and name not in artefacts.facts:
            return default
        return self.decoded(artefacts.facts.get(name), name)

    def fact_names(self, name: str) -> tuple[str, ...]:
        return (name,)


def _expect(raw: Any, kinds: type[Any] | tuple[type[Any], ...], name: str, what: str) -> None:
    if not isinstance(raw, kinds):
        raise ValueError(f"fact {name!r} is {type(raw).__name__}, expected {what}")


def _count(raw: Any, name: str) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw <= MAX_SAMPLES:
        raise ValueError(f"{name} is {raw!r}, expected a whole number from 0 to {MAX_SAMPLES}")
    return raw


def _flag(raw: Any, name: str) -> bool:
    if not isinstance(raw, bool):
        raise ValueError(f"{name} is {raw!r}, expected true or false")
    return raw


def _counts(raw: Any, name: str) -> dict[int, int]:
    _expect(raw, Mapping, name, "a map from class id to count")
    counts: dict[int, int] = {}
    for class_id, count in raw.items():
        if not (str(class_id).isdecimal() and len(str(class_id)) <= 6):
            raise ValueError(f"fact {name!r} has class id {class_id!r}, expected a non-negative whole number")
        counts[int(class_id)] = _count(count, f"{name}[{class_id}]")
    return counts


def _class_ids(raw: Any, name: str) -> tuple[int, ...]:
    _expect(raw, (list, tuple), name, "a list of class ids")
    class_ids = tuple(_count(class_id, f"a class id of {name!r}") for class_id in raw)
    if list(class_ids) != sorted(set(class_ids)):
        raise ValueError(f"fact {name!r} is {list(class_ids)[:8]}, expected class ids in rising order")
    return class_ids


def _client_ids(raw: Any, name: str) -> tuple[ClientId, ...]:
    _expect(raw, (list, tuple), name, "a list of client ids")
    return tuple(str(client_id) for client_id in raw)


def _weights(raw: Any, name: str) -> dict[ClientId, float]:
    _expect(raw, Mapping, name, "a map from client id to share")
    for share in raw.values():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not (math.isfinite(share) and share >= 0):
            raise ValueError(f"fact {name!r} holds the share {share!r:.40}, expected a finite number of at least 0")
    return {str(client_id): float(share) for client_id, share in raw.items()}


def _share(raw: Any, name: str) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not 0 <= raw <= 1:
        raise ValueError(f"{name} is {raw!r:.40}, expected a number from 0 to 1")
    return float(raw)


SHARE = Fact(decoded=_share, optional=True)
"""A number from 0 to 1."""

COUNT = Fact(decoded=_count)
"""A whole number from 0 to ``MAX_SAMPLES``; bool, float and NaN are not."""

OPTIONAL_COUNT = dataclasses.replace(COUNT, optional=True)

FLAG = Fact(decoded=_flag)
"""True or false."""

OPTIONAL_FLAG = dataclasses.replace(FLAG, optional=True)

COUNTS = Fact(decoded=_counts, encoded=lambda counts: {str(c): count for c, count in sorted(counts.items())})
"""Class id -> samples."""

CLASS_IDS = Fact(decoded=_class_ids, encoded=list)
"""A tuple of class ids in rising order."""

OPTIONAL_CLASS_IDS = dataclasses.replace(CLASS_IDS, optional=True)

CLIENT_IDS = Fact(decoded=_client_ids, encoded=list)
"""A tuple of client ids."""

WEIGHTS = Fact("aggregation_weights", _weights, dict)
"""Client id -> share of its model in the one that this download serves, which operators see."""


def place_of(kind: type[Any], set_name: str) -> Place | None:
    """Return which declared set of a record is so called, or None: ``sub-generator/3`` is ``("sub-generator/", 3)``."""
    places = (declared.part.place(set_name, declared.name) for declared in _declared(kind))
    return next((place for place in places if place is not None), None)


def declares(kind: type[Any], part: Part) -> bool:
    """Whether a record has this very part."""
    return any(declared.part is part for declared in _declared(kind))


def served_name(kind: type[Any]) -> str | None:
    """Return the name of the set that a device with such a download serves; None if the record declares none."""
    served = (d.name for d in _declared(kind) if isinstance(d.part, OneSet) and d.part.served)
    return next(served, None)


def model_fields(kind: type[Any]) -> Mapping[str, str]:
    """Return the fields of a record that hold one model's parameters each -> the name of its set."""
    return {d.field: d.name for d in _declared(kind) if isinstance(d.part, OneSet) and not d.part.gradient}


def gradient_names(kind: type[Any]) -> frozenset[str]:
    """Return the names of a record's sets that are gradients."""
    return frozenset(d.name for d in _declared(kind) if isinstance(d.part, OneSet) and d.part.gradient)


def sub_generators_among(kind: type[Any], set_names: Iterable[str]) -> tuple[str, ...]:
    """Return those of a packed record's sets that are sub-generators, as operators know them: ``3``, or ``all``."""
    parts = [(d.part, d.name) for d in _declared(kind) if isinstance(d.part, SubGenerators)]
    return tuple(name.removeprefix(own) for name in set_names for part, own in parts if part.place(name, own))


def weights_among(kind: type[Any], facts: Facts) -> Mapping[ClientId, float]:
    """Return whose models are mixed in what a packed download serves, and how; empty if its record doesn't say."""
    name = next((d.name for d in _declared(kind) if d.part is WEIGHTS), "")
    return _weights(facts.get(name, {}), name)


def uncounted(record: Any, samples: Callable[[], Mapping[int, int]]) -> Any:
    """Return a record whose ``COUNTS`` lack samples that they have; ``samples()`` says how many of which class."""
    for name in (declared.name for declared in _declared(type(record)) if declared.part is COUNTS):
        gone, counts = samples(), getattr(record, name)
        left = {class_id: count - gone.get(class_id, 0) for class_id, count in counts.items()}
        record = dataclasses.replace(record, **{name: {class_id: n for class_id, n in left.items() if n > 0}})
    return record


def layout(module: nn.Module) -> Parameters:
    """Return a module's state dict on the meta device: names, shapes and dtypes."""
    return {name: tensor.detach().to("meta") for name, tensor in module.state_dict().items()}


def check_counts(counts: Mapping[int, int], num_classes: int) -> None:
    """Raise ValueError unless every class id is below ``num_classes`` and at least one sample was met."""
    wrong = [class_id for class_id in counts if class_id >= num_classes]
    if wrong:
        raise ValueError(f"class {wrong[0]} was counted, but the task has classes 0 to {num_classes - 1}")
    if sum(counts.values()) == 0:
        raise ValueError("no samples were counted")


def class_key(name: str, prefix: str) -> int | None:
    """Return the class id in a name, or ``ALL_CLASSES``; None unless ``SetsByClass`` would spell it so."""
    text = name.removeprefix(prefix)
    if text == name:
        return None
    if text == "all":
        return ALL_CLASSES
    return int(text) if text.isdecimal() and len(text) <= 6 and str(int(text)) == text else None


def alike(left: Parameters, right: Parameters) -> bool:
    """Whether two sets have the same names, shapes and dtypes."""
    return left.keys() == right.keys() and all(
        (left[key].shape, left[key].dtype) == (right[key].shape, right[key].dtype) for key in left
    )


def same_bits(left: Parameters, right: Parameters) -> bool:
    """Whether two parameter sets are equal to the bit."""
    return left.keys() == right.keys() and all(
        tensor.dtype == right[name].dtype and bool(torch.equal(tensor, right[name])) for name, tensor in left.items()
    )
