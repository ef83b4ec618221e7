"""What a service serves, and how a run begins in a data dir or is taken up again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from replayfleet.aggregator.admission import Caps
from replayfleet.aggregator.leading import Claim
from replayfleet.aggregator.precision.rules import PrecisionRules
from replayfleet.aggregator.publisher import Exporter, export_graphs
from replayfleet.aggregator.rounds.machine import RoundRules
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.errors import ArtefactRejected, SettingsError
from replayfleet.federation.methods.kit.each import Map
from replayfleet.federation.methods.kit.records import Method, Parameters, Sampler
from replayfleet.federation.service.artefact_codec import decode_parameters, encode_parameters
from replayfleet.federation.service.fleet.growth import check_seen, plain
from replayfleet.federation.service.fleet.presets import MAX_CHANGE
from replayfleet.federation.service.fleet.spec import with_later_settings
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec
from replayfleet.federation.wire.protocol.tensors import digest
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.incoming import TransferLimits

_log = EventLogger("aggregator")

_MANY = 4
"""Settings that differ; of more only the names are said."""
_OPTIONS = {"fleet": "--fleet", "method": "--method", "task": "--task or --dataset", "run_seed": "--seed"}


@dataclass(frozen=True)
class Fleet:
    """What a service serves.

    Attributes:
        spec: what all members agree on.
        method: built from it.
        sampler: draws from sub-generators.
        exporter: graphs and probes.
        rules: when rounds close.
        caps: what one upload may cost.
        max_transfers: uploads that are received at a time.
        max_change: how far a model may move in one round.
        claim: how this aggregator comes to lead it.
        torch_device: where the method computes.
        spread: does the same work for many clients; None: the method, one after the other.
        initial: the task model that everybody begins with; None: a random one.
        precision: how models are rounded for clients that want it.
    """

    spec: FleetSpec
    method: Method
    sampler: Sampler
    exporter: Exporter
    rules: RoundRules
    caps: Caps = field(default_factory=Caps)
    max_transfers: int = TransferLimits().max_open
    max_change: float = MAX_CHANGE
    claim: Claim = Claim.SOLE
    torch_device: str = "cpu"
    spread: Map | None = None
    initial: Parameters | None = None
    precision: PrecisionRules = field(default_factory=PrecisionRules)

    def __post_init__(self) -> None:
        if self.rules.late_rounds and getattr(self.method, "rounds_alternate", False):
            raise SettingsError(
                f"late_rounds is {self.rules.late_rounds}, and {self.method.name}'s rounds are of two kinds by turns: "
                "what was made for one means nothing in the other; leave out --late-rounds, or two_messages"
            )


def take_up(store: AggregatorStore, blobs: DiskBlobStore, fleet: Fleet) -> bool:
    """Begin a run in a new store (True), or check that it is the one that the store holds.

    A store may lack settings that are asked for as what was done without them. Its own spec stays the fleet's then, for
    what clients keep is bound to it. It may lack a name, and gets one.

    Raises:
        SettingsError: The store's run has another spec, began with another model, or has more rounds behind it than
            are asked for.
    """
    before, spec = store.spec(), fleet.spec
    given = None if fleet.initial is None else encode_parameters(fleet.initial)
    if before is None:
        try:
            check_seen(spec.task.get("class_names", ()))
        except SettingsError:
            store.close()
            raise
        initial = None if given is None else BlobEntry("initial", blobs.put(given), len(given))
        store.found(spec, time.time(), initial)
        return True
    behind, wanted = store.round().index, fleet.rules.num_rounds
    if wanted is not None and wanted < behind:  # it would end at once, and all devices with it
        store.close()
        raise SettingsError(
            f"--rounds {wanted}: this run has {behind} rounds behind it, and rounds are counted from its first; go on "
            f"with --rounds {behind + 1} for one more, or end it with --rounds {behind}"
        )
    began_with = store.initial()
    if given is not None and not store.added_classes() and (began_with is None or began_with.digest != digest(given)):
        store.close()
        raise SettingsError(
            "data dir: its run began with another model; start without --initial to go on with it, or in another "
            "--data-dir"
        )
    if before.method == spec.method and before.settings.keys() != spec.settings.keys():
        try:
            before, spec = with_later_settings(before), with_later_settings(spec)
        except SettingsError:  # a later version founded it
            store.close()
            raise
    if before.method == spec.method and (others := _differing(before.settings, spec.settings)):
        store.close()
        was, now = (", ".join(f"{name}={one.get(name)}" for name in others) for one in (before.settings, spec.settings))
        options = " ".join(f"--set {name}={before.settings.get(name)}" for name in others)
        if len(others) > _MANY:
            was, now = f"{len(others)} other settings ({', '.join(others)})", "what it hasn't"
            options = f"the --settings (tiny, say) and --set that it began with, or with {options}"
        raise SettingsError(
            f"data dir: its run has {was}, now {now} is asked for; go on with {options}, or in another --data-dir"
        )
    _check_equal(store, before, spec)
    if not store.home():
        store.move()
    return False


def _check_equal(store: AggregatorStore, before: FleetSpec, spec: FleetSpec) -> None:
    for name, option in _OPTIONS.items():  # settings are compared, where the method is the same
        was, asked = getattr(before, name), getattr(spec, name)
        if plain(was) != plain(asked):
            store.close()
            raise SettingsError(
                f"data dir: its run has {option} {was!r}, now {asked!r} is asked for; use the same, or another data dir"
            )


def _differing(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the names of settings that differ, sorted."""
    return [name for name in sorted({*before, *now}) if plain(before.get(name)) != plain(now.get(name))]


def graphs_of(store: AggregatorStore, blobs: DiskBlobStore, exporter: Exporter) -> tuple[BlobEntry, ...]:
    """Return the entries of the fleet's graphs, exported at the first start.

    Raises:
        ArtefactRejected: The fleet's models can't be exported.
    """
    graphs = store.graphs()
    try:
        kept = {entry.name: blobs.read(entry.digest) for entry in graphs}
    except (KeyError, ArtefactRejected):
        kept = {}
    if kept:
        exporter.use(kept)
        return graphs
    _log.info("exporting graphs")
    graphs = export_graphs(blobs, exporter)
    store.set_graphs(graphs)
    return graphs


def initial_of(store: AggregatorStore, blobs: DiskBlobStore) -> Parameters | None:
    """Return the task model that the run began with; None: random ones.

    Raises:
        ArtefactRejected: It is damaged on the disk.
    """
    entry = store.initial()
    return None if entry is None else decode_parameters(entry.name, blobs.read(entry.digest))
