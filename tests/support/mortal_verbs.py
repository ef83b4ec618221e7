"""Every verb on an aggregator of its own process, killed with SIGKILL before and after it commits; as JSON.

    python -m tests.support.mortal_verbs FOLDER

Processes are forked from this one, which has imported everything and has no thread. No broker is there: an aggregator
that nobody else can reach leads all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
from support.tiny_fleet import TinyExporter, tiny_spec
from support.tiny_method import TinyMethod

from replayfleet.aggregator.control.caller import LocalControl
from replayfleet.aggregator.control.verbs import (
    CloseRound,
    Drain,
    Exclude,
    ExtendRound,
    OpenRound,
    Pause,
    Readmit,
    Resume,
    RollBack,
    Verb,
    VerbRefused,
    name_of,
)
from replayfleet.aggregator.founding import Fleet
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.aggregator.records.roll import Exclusion
from replayfleet.aggregator.rounds.machine import Course, RoundRules
from replayfleet.aggregator.rounds.opening import Opening
from replayfleet.aggregator.service import AggregatorService
from replayfleet.aggregator.steps import Step
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.aggregator.trust.release import Releases
from replayfleet.federation.service.credentials.keys import KEYS
from replayfleet.federation.service.logs import configure_logging
from replayfleet.federation.wire.protocol.limits import EVERYBODY
from replayfleet.federation.wire.protocol.messages import BlobEntry, Manifest
from replayfleet.federation.wire.transport.mqtt import MqttSession
from tests.support.waiting import until

VERBS: tuple[Verb, ...] = (
    Exclude("cam-1"),
    Readmit("cam-3"),
    Pause(),
    Drain(),
    Resume(),
    RollBack("cam-1"),
    RollBack("cam-1", to=1),
    RollBack(EVERYBODY),
    RollBack(EVERYBODY, to=1),
    ExtendRound(100.0),
    CloseRound(),
    OpenRound(),
)
HALF = "half"
"""When the second client's download is written in the middle of a deed for all."""


def prepared(folder: Path, verb: Verb) -> None:
    """A store with an open round, two uploads that can't be aggregated, and three downloads of two clients."""
    Releases(folder / KEYS)
    store = AggregatorStore(folder)
    store.found(tiny_spec(), 0.0)
    for client in ("cam-1", "cam-2"):
        store.accept_upload(Manifest("up", "tiny-fleet", client, 0, 1, ()), 1, 0)
    for digest in ("aa", "bb", "cc"):
        for client in ("cam-1", "cam-2"):
            store.put_download(Manifest("down", "tiny-fleet", client, 0, 0, (BlobEntry("task", digest * 32, 1),)))
    store.put_download(Manifest("down", "tiny-fleet", "cam-3", 0, 0, ()))
    store.exclude("cam-3", Exclusion(1.0, "somebody", ""))
    if isinstance(verb, Resume):
        store.set_course(Course.PAUSED)
    store.close()


def state(folder: Path) -> dict[str, Any]:
    """All that a verb can change."""
    with contextlib.closing(AggregatorStore(folder)) as store:
        downloads, record = [store.download(client) for client in ("cam-1", "cam-2")], store.round()
        return {
            "excluded": sorted(name for name, one in store.roll.refresh().items() if one.exclusion is not None),
            "uploads": sorted(store.uploads(0)),
            "course": store.course().value,
            "extension_s": store.extension_s(0),
            "begun": store.begun(0),
            "phase": "open" if record.index == 0 and record.phase.value == "open" else "closed",
            "served": [download.blobs[0].digest[:2] for download in downloads],
            "version": [download.version for download in downloads],
        }


def aggregate(folder: Path, kill_at: str) -> None:
    """Serve until somebody ends this process."""

    def checkpoint(step: Step) -> None:
        if step.value == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    rules = RoundRules(num_clients=5, min_clients=1, deadline_s=3600, opening=Opening())
    fleet = Fleet(tiny_spec(), TinyMethod(), lambda _: None, TinyExporter(), rules)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    service = AggregatorService(
        fleet,
        folder,
        lambda name, on_message, will: MqttSession("mqtt://127.0.0.1:1", name, on_message=on_message, will=will),
        checkpoint=checkpoint,
    )
    if kill_at == HALF:
        _die_at_the_second_download(service.coordinator.control)
    service.run(stop)


def _die_at_the_second_download(desk: Any) -> None:
    store, written = desk._parts.store, []

    def put(manifest: Manifest) -> Manifest:
        if written:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(manifest.client_id)
        return AggregatorStore.put_download(store, manifest)

    store.put_download = put


def forked(folder: Path, kill_at: str) -> int:
    """Start an aggregator, and wait until it listens."""
    pid = os.fork()
    if pid == 0:
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2)
        configure_logging()
        try:
            aggregate(folder, kill_at)
        finally:
            os._exit(0)
    until(lambda: listens(folder), said=lambda: f"no aggregator on {folder}")
    return pid


def listens(folder: Path) -> bool:
    try:
        return LocalControl(folder).look().leads
    except (ConnectionError, VerbRefused):
        return False


def named(verb: Verb) -> str:
    """A verb's name; with whom and where to if it is a roll-back."""
    if not isinstance(verb, RollBack):
        return name_of(verb)
    return f"rollback {verb.client}" + ("" if verb.to is None else f" --to {verb.to}")


def times(verb: Verb) -> tuple[str, ...]:
    """When its aggregator is killed."""
    halfway = (HALF,) if isinstance(verb, RollBack) and verb.client == EVERYBODY else ()
    return (Step.DEED_BEGUN.value, *halfway, Step.DEED_DONE.value)


def tried(folder: Path, verb: Verb, kill_at: str) -> dict[str, Any]:
    prepared(folder, verb)
    before, pid, told = state(folder), forked(folder, kill_at), ""
    try:
        LocalControl(folder).do(verb)
    except VerbRefused as refused:
        told = str(refused)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    after = state(folder)
    if kill_at == Step.DEED_DONE.value:  # the next start tells of it
        again = forked(folder, "")
        os.kill(again, signal.SIGTERM)
        os.waitpid(again, 0)
    return {
        "verb": named(verb),
        "kill_at": kill_at,
        "exit": exit_code,
        "told": told,
        "changed": sorted(key for key in before if before[key] != after[key]),
        "served": after["served"],
        "deeds": [event["verb"] for event in read_journal(folder) if event["event"] == "operator"],
    }


def main(folder: Path) -> None:
    found = [
        tried(folder / f"{number}-{kill_at}", verb, kill_at)
        for number, verb in enumerate(VERBS)
        for kill_at in times(verb)
    ]
    sys.stdout.write(json.dumps(msgspec.to_builtins(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
