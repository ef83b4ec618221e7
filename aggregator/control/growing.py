"""``aggregator add-class``: a fleet learns classes beside those that it began with, and forgets nothing for it.

All task models get a row for each new class (``with_more_classes``), in one transaction and a new epoch. Clients take
the announcement of a task that begins with theirs, serve on until their grown model comes, and keep what they remember.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replayfleet.aggregator.aggregation import restore_artefacts, store_artefacts
from replayfleet.aggregator.control.caller import LocalControl
from replayfleet.aggregator.control.verbs import VerbRefused
from replayfleet.aggregator.records.deeds import Deed
from replayfleet.aggregator.store import DATABASE, AggregatorStore, added_classes
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.beginning import first_download, with_more_classes
from replayfleet.federation.methods.kit.packing import served_name
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.service.artefact_codec import decode_parameters, encode_parameters
from replayfleet.federation.service.data_dir import claim_data_dir, fleet_of
from replayfleet.federation.service.fleet.growth import check_seen, grown_spec
from replayfleet.federation.service.fleet.spec import method_of
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.service.words import count_of
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore

GROWING = frozenset({"fedavg", "fedavg-replay", "fedprox", "pfedgrp", "pfedgrp-plus"})
"""Methods of which every network but the task model belongs to one class, or to none."""


@dataclass(frozen=True, slots=True)
class Grown:
    """What adding classes does, or did.

    Attributes:
        spec: with them.
        added: their names.
        round: that begins anew.
        num_uploads: that it had, and whose work is done again.
    """

    spec: FleetSpec
    added: tuple[str, ...]
    round: int
    num_uploads: int

    @property
    def text(self) -> str:
        """In words, for an operator."""
        number = len(task_of(self.spec).class_names)
        again = f"; {count_of(self.num_uploads, 'upload')} of it will be made again" if self.num_uploads else ""
        return (
            f"the fleet will learn {', '.join(self.added)} too, {number} classes in all, from round "
            f"{self.round}, which begins anew{again}. Devices serve on, and keep what they have learned. There is no "
            "way back"
        )


def add_classes(data_dir: Path, names: Sequence[str], who: str, at: float, *, only_plan: bool = False) -> Grown:
    """Let the fleet of a data dir, on which no aggregator runs, learn more classes.

    Args:
        data_dir: of an aggregator that is stopped.
        names: of the classes.
        who: asks for it, for the journal.
        at: Unix time.
        only_plan: change nothing.

    Raises:
        SettingsError: There is no run here, an aggregator runs, or its fleet can't take these classes. Nothing was
            changed.
    """
    if not (data_dir / DATABASE).is_file():
        raise SettingsError(f"data dir {data_dir}: no aggregator has run here; expected {DATABASE}")
    with claim_data_dir(data_dir, fleet=fleet_of(data_dir, None), role="aggregator"):
        return grow(data_dir, names, who, at, only_plan=only_plan)


def grow(data_dir: Path, names: Sequence[str], who: str, at: float, *, only_plan: bool = False) -> Grown:
    """As ``add_classes``, by whoever has claimed the data dir and closed its store."""
    with contextlib.closing(AggregatorStore(data_dir)) as store:
        grown, before = planned(store, tuple(names)), store.spec()
        if only_plan or before is None:
            return grown
        blobs = DiskBlobStore(data_dir / "blobs")
        old, new = method_of(before), method_of(grown.spec)
        began = store.initial()
        given = None if began is None else decode_parameters(began.name, blobs.read(began.digest))
        first = first_download(old, before.run_seed, given)
        name = served_name(type(first))
        more = with_more_classes(new, Artefacts({"initial": first.pack().parameter_sets[str(name)]}))
        data = encode_parameters(more.parameter_sets["initial"])
        initial = BlobEntry("initial", blobs.put(data), len(data))
        state = store.state()
        if state is not None:
            state = store_artefacts(with_more_classes(new, restore_artefacts(state, blobs)), blobs)
        with store.doing(Deed(at, who, "add-class", "", grown.text)):
            store.grow(grown.spec, grown.added, initial, state)
        return grown


def wait_until_known(data_dir: Path, names: Sequence[str], limit_s: float = 600.0) -> None:
    """Wait until the aggregator that runs on a data dir goes on with these classes.

    Raises:
        SettingsError: It doesn't; says what is known.
    """
    control, end = LocalControl(data_dir), time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            control.add_classes(tuple(names), only_plan=True)
            break  # it could learn them, and isn't about to
        except ConnectionError:
            pass  # it begins anew
        except VerbRefused:
            if set(names) <= set(added_classes(data_dir)):
                return
        time.sleep(0.2)
    raise SettingsError("the aggregator doesn't go on with these classes; its log says why")


def planned(store: AggregatorStore, names: tuple[str, ...]) -> Grown:
    """Return what adding classes would do.

    Raises:
        SettingsError: There is no run, or its fleet can't take these classes.
    """
    spec = store.spec()
    if spec is None:
        raise SettingsError("data dir: its run hasn't begun yet; name all classes in its task")
    if spec.method not in GROWING:
        raise SettingsError(
            f"method {spec.method!r} has networks that know how many classes there are; a fleet takes classes with "
            + ", ".join(sorted(GROWING))
        )
    known = task_of(spec).class_names
    check_seen(names, known)
    for index, name in enumerate(names):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise SettingsError(f"a class is named {name!a:.80}, expected Unicode") from None
        if name in known or name in names[:index]:
            raise SettingsError(f"the fleet learns {name!r} already; its classes are {', '.join(known)}")
    record, rounds = store.round(), store.num_rounds()
    if rounds is not None and record.index >= rounds:
        raise SettingsError(
            f"the run is finished after {count_of(record.index, 'round')}; start it with more --rounds first"
        )
    return Grown(grown_spec(spec, names), names, record.index, len(record.accepted))
