"""Releases after The Update Framework, from an aggregator's keys to a client's decision."""

from __future__ import annotations

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tuf.ngclient import Updater

from replayfleet.aggregator.trust import release
from replayfleet.aggregator.trust.release import EXPIRES_S, FLOOR, RENEW_S, Releases, anchor, are_newer, rotate_key
from replayfleet.edge_client.sync.following import ALIVE_S
from replayfleet.edge_client.sync.trust import MAX_REFUSED, FleetTrust
from replayfleet.federation.errors import ArtefactRejected, MalformedMessage, Reason, ReplayfleetError, SettingsError
from replayfleet.federation.service.command import explained
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.messages import Announcement, BlobEntry, FleetSpec, Manifest, Release
from replayfleet.federation.wire.protocol.topics import parse_topic, topic_of
from replayfleet.federation.wire.transport.seal import CLOCKS_APART_US, Kind, Signer, unseal

ROUND = topic_of("yard", "round")
CONTROL = topic_of("yard", "control", "cam-1")
SPEC = FleetSpec("yard", "fedavg", {}, {}, 0)
DAY_US = 86_400_000_000


class Aggregator:
    """Keys in a folder, and a clock that the test sets."""

    def __init__(self, keys: Path) -> None:
        self.keys, self.now_us = keys, 1_800_000_000_000_000
        self.begin()

    def begin(self) -> None:
        self.releases = Releases(self.keys)
        self.releases.signer._clock_us = lambda: self.now_us

    def release(self, version: int, client: str = "cam-1", digest: str = "a") -> Manifest:
        blobs = (BlobEntry("task", digest * 64, 10),)
        return self.releases.signed(Manifest("down", "yard", client, 0, version, blobs))

    def announcement(self) -> bytes:
        said = Announcement("a-1", 0, "open", 1.0, SPEC, roots=self.releases.roots)
        return self.releases.signer.seal(ROUND, encode(said))


class Device:
    """A client's trust, which a restart reads again."""

    def __init__(self, folder: Path, root: bytes | None = None) -> None:
        self.folder, self.root = folder, root
        self.restart()

    def restart(self) -> None:
        self.trust = FleetTrust(self.folder, "cam-1", Signer(Ed25519PrivateKey.generate()).public_key, self.root)

    def hears(self, payload: bytes, topic: str = ROUND, now: float = 0.0) -> bool:
        return self.trust.takes(parse_topic(topic), unseal(topic, payload), now)

    def refuses(self, manifest: Manifest) -> str:
        with pytest.raises(ArtefactRejected) as refused:
            self.trust.check(manifest)
        assert refused.value.reason is Reason.UNTRUSTED
        return refused.value.detail


@pytest.fixture
def aggregator(tmp_path: Path) -> Aggregator:
    return Aggregator(tmp_path / "keys")


@pytest.fixture
def device(tmp_path: Path, aggregator: Aggregator) -> Device:
    made = Device(tmp_path / "trust")
    assert made.hears(aggregator.announcement())
    return made


def test_what_the_fleets_aggregator_releases_is_taken_also_after_restarts(
    aggregator: Aggregator, device: Device
) -> None:
    device.trust.check(aggregator.release(1))
    aggregator.begin()
    device.restart()
    device.trust.check(aggregator.release(1))
    device.trust.check(aggregator.release(2))


def test_what_a_second_device_with_this_name_says_on_the_topic_that_both_have_is_told_as_such(device: Device) -> None:
    topic = topic_of("yard", "control", "cam-1")
    with pytest.raises(MalformedMessage, match=r"root doesn't name: .*a second device with this client's id"):
        device.hears(Signer(Ed25519PrivateKey.generate()).seal(topic, b"wants"), topic)


def test_a_foreign_aggregator_is_neither_heard_nor_believed(
    aggregator: Aggregator, device: Device, tmp_path: Path
) -> None:
    foreign = Aggregator(tmp_path / "foreign")
    for _ in range(2):
        with pytest.raises(MalformedMessage, match="root doesn't name"):
            device.hears(foreign.announcement(), now=ALIVE_S)
    assert "root doesn't name; what is served stays" in device.trust.problem
    assert "was signed by 0/1 keys" in device.refuses(foreign.release(9))
    assert device.hears(aggregator.announcement(), now=ALIVE_S)
    assert not device.trust.problem
    for now in (ALIVE_S + 1, 2 * ALIVE_S):
        with pytest.raises(MalformedMessage, match="root doesn't name"):
            device.hears(foreign.announcement(), now=now)
        assert bool(device.trust.problem) == (now == 2 * ALIVE_S), (
            "not beside the one that is trusted, only in its place"
        )


def test_strangers_write_nothing_to_a_device_and_turn_no_time_back(
    aggregator: Aggregator, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregator.now_us += DAY_US
    assert device.hears(aggregator.announcement())
    aggregator.now_us += 500_000_000  # too soon to be written down
    assert device.hears(aggregator.announcement())
    monkeypatch.setattr(FleetTrust, "_updater", lambda *_: pytest.fail("it writes files"))
    for number in range(3):
        foreign = Aggregator(tmp_path / f"foreign-{number}")
        if number:  # its second root is none that follows ours
            rotate_key(foreign.keys)
            foreign.begin()
        with pytest.raises(MalformedMessage, match="root doesn't name"):
            device.hears(foreign.announcement())
    said = encode(Announcement("a-1", 0, "open", 1.0, SPEC))
    for _ in range(MAX_REFUSED):
        with pytest.raises(MalformedMessage, match="root doesn't name"):
            device.hears(Signer(Ed25519PrivateKey.generate()).seal(ROUND, said))
    assert len(device.trust._refused) == MAX_REFUSED
    assert device.trust.heard_us == aggregator.now_us


def test_a_device_that_was_given_a_root_trusts_nobody_else_at_first_sight(
    aggregator: Aggregator, tmp_path: Path
) -> None:
    device = Device(tmp_path / "given", anchor(aggregator.keys))
    with pytest.raises(MalformedMessage, match="root doesn't name"):
        device.hears(Aggregator(tmp_path / "foreign").announcement())
    assert device.hears(aggregator.announcement())


@pytest.mark.parametrize("public", [None, "no digits", 7])
def test_a_strangers_root_with_keys_that_are_none_introduces_nobody_and_harms_nothing(
    public: Any, aggregator: Aggregator, tmp_path: Path
) -> None:
    device, foreign = Device(tmp_path / "new"), Aggregator(tmp_path / "foreign")
    root = json.loads(foreign.releases.roots[0])
    for key_id in root["signed"]["roles"]["timestamp"]["keyids"]:
        if public is None:
            del root["signed"]["keys"][key_id]
        else:
            root["signed"]["keys"][key_id]["keyval"]["public"] = public
    foreign.releases.roots = (json.dumps(root).encode(),)
    with pytest.raises(MalformedMessage):
        device.hears(foreign.announcement())
    assert device.hears(aggregator.announcement())


def test_a_root_that_doesnt_name_who_announces_it_is_trusted_by_nobody(aggregator: Aggregator, tmp_path: Path) -> None:
    """Else a stranger who has recorded one binds a new device to that fleet, for good."""
    device, stranger = Device(tmp_path / "new"), Aggregator(tmp_path / "stranger")
    stranger.releases.roots = Aggregator(tmp_path / "another fleet").releases.roots
    with pytest.raises(MalformedMessage, match="root doesn't name"):
        device.hears(stranger.announcement())
    assert device.hears(aggregator.announcement())


def test_nothing_but_an_announcement_introduces_an_aggregator(aggregator: Aggregator, tmp_path: Path) -> None:
    device = Device(tmp_path / "new")
    with pytest.raises(MalformedMessage, match="root doesn't name"):
        device.hears(aggregator.releases.signer.seal(CONTROL, b"\x01"), CONTROL)


def parts_of(manifest: Manifest) -> dict[str, Any]:
    return msgspec.structs.asdict(manifest.release)


def test_a_manifest_that_nobody_signed_or_that_was_changed_is_refused(aggregator: Aggregator, device: Device) -> None:
    signed = aggregator.release(1)
    assert device.refuses(signed.plain) == "nobody signed for it"
    changed = msgspec.structs.replace(signed, round=7)
    assert "does not match" in device.refuses(changed)
    device.trust.check(signed)


def test_an_older_release_is_refused(aggregator: Aggregator, device: Device) -> None:
    old, new = aggregator.release(1), aggregator.release(2)
    device.trust.check(new)
    assert "version" in device.refuses(old)


def test_parts_of_two_releases_dont_mix(aggregator: Aggregator, device: Device) -> None:
    first, second = aggregator.release(1), aggregator.release(2)
    mixed = Release(**{**parts_of(second), "targets": parts_of(first)["targets"]})
    device.refuses(msgspec.structs.replace(first, release=mixed))
    mixed = Release(**{**parts_of(second), "snapshot": parts_of(first)["snapshot"]})
    device.refuses(msgspec.structs.replace(first, release=mixed))


def test_another_clients_release_is_refused(aggregator: Aggregator, device: Device) -> None:
    assert "isn't for 'cam-1'" in device.refuses(aggregator.release(1, client="cam-2"))


def test_a_release_that_nobody_renewed_is_refused_by_the_fleets_own_time(
    aggregator: Aggregator, device: Device
) -> None:
    frozen = aggregator.release(1)
    aggregator.now_us += (EXPIRES_S + 60) * 1_000_000
    device.trust.check(frozen)  # nobody told the device how late it is, and its clock isn't asked
    assert device.hears(aggregator.announcement())
    newer = Device(device.folder)
    newer.hears(aggregator.announcement())
    assert "expired" in newer.refuses(frozen)
    newer.trust.check(aggregator.release(1))  # renewed, for it is old


def test_a_release_is_the_same_until_it_gets_old(aggregator: Aggregator) -> None:
    first = aggregator.release(1)
    assert aggregator.release(1) == first
    aggregator.now_us += (RENEW_S + 1) * 1_000_000
    assert aggregator.release(1) != first
    assert aggregator.release(1).plain == first.plain


def test_data_without_end_or_sense_is_refused(aggregator: Aggregator, device: Device) -> None:
    signed = aggregator.release(1)
    for data in (b"{" * (16 << 10), b"[" * 9999, b"\xff", b"{}", b"null", b'{"signed": 1, "signatures": []}'):
        device.refuses(msgspec.structs.replace(signed, release=Release(**{**parts_of(signed), "timestamp": data})))
    device.trust.check(signed)


def test_what_was_recorded_long_ago_is_passed_over_also_by_a_restarted_device(
    aggregator: Aggregator, device: Device
) -> None:
    will, recorded = aggregator.releases.signer.seal(ROUND, b"\x01", Kind.WILL), aggregator.announcement()
    aggregator.now_us += DAY_US
    assert device.hears(aggregator.announcement())
    device.restart()
    with pytest.raises(MalformedMessage, match="long ago"):
        device.hears(recorded)
    assert "86400 s older than what it said before" in device.trust.problem
    assert device.hears(will), "a will is as old as its process"
    assert device.trust.heard_us == aggregator.now_us


def test_two_aggregators_whose_clocks_differ_a_little_are_both_heard(aggregator: Aggregator, device: Device) -> None:
    (aggregator.keys / FLOOR).unlink()
    other, heard_us = Aggregator(aggregator.keys), device.trust.heard_us
    other.now_us = heard_us - CLOCKS_APART_US + 1_000_000
    assert device.hears(other.announcement())
    assert device.trust.heard_us == heard_us, "or a little and a little more would be long ago"


def test_who_takes_over_with_a_clock_that_is_a_little_behind_is_believed(
    aggregator: Aggregator, device: Device
) -> None:
    device.trust.check(aggregator.release(1))
    (aggregator.keys / FLOOR).unlink()
    other = Aggregator(aggregator.keys)
    other.now_us = aggregator.now_us - CLOCKS_APART_US + 1_000_000
    assert "must be >=" in device.refuses(other.release(2))
    other.releases.outlive_rival()
    assert device.hears(other.announcement())
    device.trust.check(other.release(3))


def test_a_rotated_key_is_followed_and_the_former_one_counts_for_nothing(
    aggregator: Aggregator, device: Device
) -> None:
    stolen = Aggregator(aggregator.keys)
    held = aggregator.release(1)
    assert device.trust.vouches_for(held.release)
    assert rotate_key(aggregator.keys) == 2
    aggregator.begin()
    assert device.hears(aggregator.announcement())
    with pytest.raises(MalformedMessage, match="root doesn't name"):
        device.hears(stolen.announcement())
    assert not device.trust.vouches_for(held.release)
    device.refuses(stolen.release(2))
    device.restart()
    device.trust.check(aggregator.release(2))


def test_a_rotated_key_is_followed_once_the_disk_takes_its_root(
    aggregator: Aggregator, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused until the device's next start."""

    rotate_key(aggregator.keys)
    aggregator.begin()
    with monkeypatch.context() as disk:
        disk.setattr(Updater, "_persist_root", Mock(side_effect=OSError(errno.ENOSPC, "no space left on device")))
        for now in (0.0, ALIVE_S):
            with pytest.raises(MalformedMessage, match="root doesn't name"):
                device.hears(aggregator.announcement(), now=now)
    assert device.hears(aggregator.announcement(), now=ALIVE_S)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_while_the_root_cannot_be_read_nobody_else_is_trusted(
    given: bool, restarts: bool, aggregator: Aggregator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who announced themselves next were trusted at first sight; with a root that was given, rotated keys were not."""
    device = Device(tmp_path / "device", anchor(aggregator.keys) if given else None)
    rotate_key(aggregator.keys)
    aggregator.begin()
    assert device.hears(aggregator.announcement())

    def unreadable(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    foreign = Aggregator(tmp_path / "foreign")
    with monkeypatch.context() as disk:
        disk.setattr(FleetTrust, "_newest", unreadable)
        disk.setattr(Updater, "_persist_root", unreadable)
        if restarts:
            device.restart()
        why = "can't be read .*Input/output error" if restarts and not given else "root doesn't name"
        with pytest.raises(MalformedMessage, match=why):
            device.hears(foreign.announcement())
    with pytest.raises(MalformedMessage, match="root doesn't name"):
        device.hears(foreign.announcement())
    assert device.hears(aggregator.announcement())


def test_a_device_that_was_killed_between_two_links_to_its_root_trusts_nobody_else(
    aggregator: Aggregator, device: Device, tmp_path: Path
) -> None:
    for _ in range(10):  # of two digits, too
        rotate_key(aggregator.keys)
        aggregator.begin()
        assert device.hears(aggregator.announcement())
    device.trust.check(aggregator.release(1))
    (device.folder / "root.json").unlink()
    device.trust.check(aggregator.release(2))
    (device.folder / "root.json").unlink()
    device.restart()
    with pytest.raises(MalformedMessage, match="root doesn't name"):
        device.hears(Aggregator(tmp_path / "foreign").announcement())
    assert device.hears(aggregator.announcement())
    device.trust.check(aggregator.release(3))


def test_the_first_root_is_on_the_disk_before_it_is_written_down_who_signed(
    aggregator: Aggregator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut in between left an empty root and nobody to make it good: the device was deaf to its fleet."""
    flush, flushed = os.fsync, list[str]()

    def noted(handle: int) -> None:
        flush(handle)
        flushed.append(os.readlink(f"/proc/self/fd/{handle}"))  # noqa: PTH115

    device, said = Device(tmp_path / "trust"), aggregator.announcement()
    monkeypatch.setattr(os, "fsync", noted)
    assert device.hears(said)
    assert flushed[0] == str(device.folder / "root_history" / "1.root.json")
    assert "heard.json" in flushed[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", ["zeros", "gone", "folder", "pipe", "circle", "file for folder", "all gone"])
def test_a_device_whose_root_is_damaged_trusts_nobody_but_who_signed_before(
    damage: str, aggregator: Aggregator, device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who announced themselves next were trusted, as at first sight."""
    (kept,) = device.folder.glob("root_history/*.root.json")
    root = kept.read_bytes()
    kept.unlink()
    if damage == "zeros":
        kept.write_bytes(bytes(len(root)))
    elif damage == "folder":
        (kept / "x").mkdir(parents=True)
    elif damage == "pipe":
        os.mkfifo(kept)
    elif damage == "circle":
        kept.symlink_to(kept.name)
    elif damage == "file for folder":
        kept.parent.rmdir()
        kept.parent.write_bytes(root)
    elif damage == "all gone":
        kept.parent.rmdir()
        (device.folder / "root.json").unlink()
    device.restart()
    with pytest.raises(MalformedMessage, match="the root that this device trusts can't be read"):
        device.hears(Aggregator(tmp_path / "foreign").announcement())
    assert "remove the folder trust" in device.trust.problem
    caplog.set_level("INFO")
    assert device.hears(aggregator.announcement())
    assert "root made good by a key that it named" in caplog.text
    assert device.trust.problem == ""
    assert kept.read_bytes() == root
    device.restart()
    device.trust.check(aggregator.release(1))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", ["zeros", "folder", "pipe"])
def test_an_aggregator_whose_root_is_damaged_says_where_another_is(damage: str, aggregator: Aggregator) -> None:
    root = aggregator.keys / "1.root.json"
    root.unlink()
    if damage == "zeros":
        root.write_bytes(bytes(100))
    else:
        root.mkdir() if damage == "folder" else os.mkfifo(root)
    with pytest.raises((SettingsError, OSError)) as caught:
        aggregator.begin()
    text, code = explained("aggregator", caught.value)
    assert code == 2
    assert str(root) in text
    assert "put it back, from a backup" in text or "put back what a backup has there" in text


def test_a_device_whose_disk_turns_a_bit_of_the_time_that_it_heard_hears_its_fleet(
    aggregator: Aggregator, device: Device
) -> None:
    """A year of 2280 made all that its aggregator said recorded, for good."""
    heard = device.folder / "heard.json"
    before = heard.read_bytes()
    assert b":18" in before
    heard.write_bytes(before.replace(b":18", b":98"))
    device.restart()
    assert device.hears(aggregator.announcement())
    heard.write_bytes(before)
    device.restart()
    assert device.trust.heard_us == aggregator.now_us


@pytest.mark.parametrize("damaged", [bytes(100), b"", b"{}", b"timestamp"])
def test_a_device_that_was_given_what_is_no_root_goes_on_with_its_own_or_says_so(
    damaged: bytes, aggregator: Aggregator, device: Device, tmp_path: Path
) -> None:
    """It ended with a traceback; without that it must not take the first aggregator that comes."""
    release = aggregator.release(1).release
    assert release is not None
    device.root = release.timestamp if damaged == b"timestamp" else damaged
    device.restart()
    assert device.hears(aggregator.announcement())
    with pytest.raises(MalformedMessage, match="root doesn't name"):
        device.hears(Aggregator(tmp_path / "foreign").announcement())
    with pytest.raises(SettingsError, match="is no root; put the fleet's there"):
        Device(tmp_path / "new", device.root)


def test_a_device_that_is_given_another_fleets_root_follows_that_however_often_the_former_had_new_keys(
    aggregator: Aggregator, device: Device, tmp_path: Path
) -> None:
    rotate_key(aggregator.keys)
    aggregator.begin()
    assert device.hears(aggregator.announcement())
    other = Aggregator(tmp_path / "other")
    for root in (anchor(other.keys), None):
        device.root = root
        device.restart()
        assert device.hears(other.announcement())
        with pytest.raises(MalformedMessage, match="root doesn't name"):
            device.hears(aggregator.announcement())


def test_a_device_whose_newest_root_is_damaged_goes_on_from_the_one_before(
    aggregator: Aggregator, device: Device, tmp_path: Path
) -> None:
    rotate_key(aggregator.keys)
    aggregator.begin()
    assert device.hears(aggregator.announcement())
    newest = max(device.folder.glob("root_history/*.root.json"))
    newest.write_bytes(b"")
    device.restart()
    with pytest.raises(MalformedMessage, match="root doesn't name"):
        device.hears(Aggregator(tmp_path / "foreign").announcement())
    assert device.hears(aggregator.announcement())
    assert newest.read_bytes()


@pytest.mark.parametrize("name", ["root.json", "timestamp.json", "snapshot.json", "targets.json", "heard.json"])
def test_a_folder_where_a_releases_file_was_keeps_no_download_away(
    name: str, aggregator: Aggregator, device: Device
) -> None:
    device.trust.check(aggregator.release(1))
    (device.folder / name).unlink()
    (device.folder / name / "x").mkdir(parents=True)
    device.restart()
    assert device.hears(aggregator.announcement())
    device.trust.check(aggregator.release(2))
    device.restart()
    assert device.hears(aggregator.announcement())
    device.trust.check(aggregator.release(3))


def test_after_a_thief_ran_ahead_a_rotated_key_brings_the_fleet_back(aggregator: Aggregator, device: Device) -> None:
    thief = Aggregator(aggregator.keys)
    thief.now_us += 100 * 365 * DAY_US
    assert device.hears(thief.announcement())
    device.trust.check(thief.release((1 << 53) - 1))
    with pytest.raises(MalformedMessage, match="long ago"):
        device.hears(aggregator.announcement())
    rotate_key(aggregator.keys)
    (aggregator.keys / "clock").unlink(missing_ok=True)
    aggregator.begin()
    device.restart()
    assert device.hears(aggregator.announcement())
    device.trust.check(aggregator.release(2))


def test_a_device_that_was_off_for_many_rotations_follows_the_chain_of_roots(
    aggregator: Aggregator, device: Device
) -> None:
    for number in range(5):
        rotate_key(aggregator.keys, new_root_key=number % 2 == 1)
    aggregator.begin()
    device.restart()
    assert device.hears(aggregator.announcement())
    device.trust.check(aggregator.release(3))


def test_a_root_that_the_former_root_key_didnt_sign_leads_nowhere(
    aggregator: Aggregator, device: Device, tmp_path: Path
) -> None:
    foreign = Aggregator(tmp_path / "foreign")
    rotate_key(foreign.keys)
    foreign.begin()
    device.trust.learn(foreign.releases.roots)
    with pytest.raises(MalformedMessage, match="root doesn't name"):
        device.hears(foreign.announcement())
    assert device.hears(aggregator.announcement())


def test_the_root_key_may_lie_elsewhere_and_the_aggregator_serves_without_it(
    aggregator: Aggregator, tmp_path: Path
) -> None:
    safe = tmp_path / "safe.key"
    (aggregator.keys / "root.key").rename(safe)
    aggregator.begin()
    with pytest.raises(SettingsError, match=r"root\.key can.t be read"):
        rotate_key(aggregator.keys)
    assert rotate_key(aggregator.keys, safe, new_root_key=True) == 2
    assert rotate_key(aggregator.keys, safe) == 3
    foreign = Aggregator(tmp_path / "foreign")
    with pytest.raises(SettingsError, match="isn't the root key of this fleet"):
        rotate_key(aggregator.keys, foreign.keys / "root.key")


@pytest.mark.parametrize("new_root_key", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["beside", "elsewhere"])
def test_a_rotation_that_was_interrupted_is_done_or_not_done(
    aggregator: Aggregator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, elsewhere: bool, new_root_key: bool
) -> None:
    safe = tmp_path / "safe.key" if elsewhere else aggregator.keys / "root.key"
    (aggregator.keys / "root.key").rename(safe)
    writes = release._write_root

    def writes_and_dies(*args: Any) -> None:
        writes(*args)
        raise KeyboardInterrupt

    for number, step in ((1, Mock(side_effect=KeyboardInterrupt)), (2, writes_and_dies)):
        monkeypatch.setattr(release, "_write_root", step)
        with pytest.raises(KeyboardInterrupt):
            rotate_key(aggregator.keys, safe, new_root_key=new_root_key)
        aggregator.begin()
        assert len(aggregator.releases.roots) == number
    monkeypatch.setattr(release, "_write_root", writes)
    assert rotate_key(aggregator.keys, safe) == 3
    assert not safe.with_name(f"{safe.name}.next").exists()


def test_another_fleets_signing_key_is_refused_at_the_start(aggregator: Aggregator, tmp_path: Path) -> None:
    foreign = Aggregator(tmp_path / "foreign")
    (aggregator.keys / "signing.key").write_bytes((foreign.keys / "signing.key").read_bytes())
    with pytest.raises(SettingsError, match="isn't the one that root 1 of this fleet names"):
        aggregator.begin()


def test_a_signing_key_whose_roots_are_gone_gets_no_others(aggregator: Aggregator) -> None:
    """A new root would name the same online key, and strand every device at the next rotation."""
    (aggregator.keys / "1.root.json").unlink()
    with pytest.raises(SettingsError, match=r"put N\.root\.json back, from a backup, or from a device's trust/"):
        aggregator.begin()
    assert not list(aggregator.keys.glob("*.root.json"))


def test_the_first_root_is_there_before_the_key_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(release, "_write_root", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(ReplayfleetError, match="No space left"):
            Releases(tmp_path / "keys")
    assert not (tmp_path / "keys/signing.key").exists()
    assert len(Releases(tmp_path / "keys").roots) == 1


def test_two_rotations_at_once_come_one_after_the_other(aggregator: Aggregator) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = sorted(pool.map(lambda _: rotate_key(aggregator.keys), range(4)))
    assert made == [2, 3, 4, 5]
    aggregator.begin()


def test_only_a_chain_of_signatures_leads_to_newer_keys(aggregator: Aggregator, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    shutil.copytree(aggregator.keys, earlier)
    assert not are_newer(aggregator.keys, earlier), "the same"
    rotate_key(aggregator.keys, new_root_key=True)
    assert are_newer(aggregator.keys, earlier)
    rotate_key(aggregator.keys)
    assert are_newer(aggregator.keys, earlier)
    assert not are_newer(earlier, aggregator.keys)
    foreign = Aggregator(tmp_path / "foreign")
    rotate_key(foreign.keys)
    assert not are_newer(foreign.keys, earlier)
    (aggregator.keys / "signing.key").unlink()
    assert not are_newer(aggregator.keys, earlier), "nobody can sign with them"
