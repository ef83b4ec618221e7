"""Taking members in, renewing them and shutting them out, beside a running aggregator.

The table of members decides. What else a command writes is made from it, or useless without it, so a command that was
killed has happened or hasn't, and running it again ends it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import re
import secrets
import sqlite3
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

from replayfleet.aggregator.members import broker_files as files
from replayfleet.aggregator.members.authority import (
    CA_CERTIFICATE,
    CA_KEY,
    Authority,
    new_key,
    pem_of,
    private_pem,
    read_request,
)
from replayfleet.aggregator.members.table import Issued, Member, Members
from replayfleet.aggregator.store import DATABASE, AggregatorStore
from replayfleet.aggregator.trust.release import Releases
from replayfleet.federation.atomic import open_file, private_folder
from replayfleet.federation.errors import MalformedMessage, SettingsError
from replayfleet.federation.paths import read_regular
from replayfleet.federation.service.credentials import identity
from replayfleet.federation.service.credentials.keys import KEYS, NOT_PEM, ROOT, SIGNING_KEY
from replayfleet.federation.service.data_dir import aggregators, fleet_of, read_owner
from replayfleet.federation.wire.protocol.limits import check_id

LOCAL = ("localhost", "127.0.0.1", "::1")
"""What the broker's certificate names where nobody says more."""
MEMBERS, BROKER, OWN_IDENTITY = "members", "broker", "identity"
"""Folders of the data dir: the authority and who was enrolled, what the broker gets, who the aggregator itself is."""
BROKER_DAYS = 825
_NAME = re.compile(r"([A-Za-z0-9_-]{1,63}\.){0,20}(?!\d+$)[A-Za-z0-9_-]{1,63}", re.ASCII)
"""Of a machine; what ends in a number is an address, or none."""
ROLES = frozenset({files.AGGREGATOR, files.OPERATOR})
"""Members that are no clients: they sign otherwise, or not at all."""
_TAKEN = frozenset({"broker", "ca"})


@dataclass(frozen=True, slots=True)
class Terms:
    """What an operator says about a certificate.

    Attributes:
        days: that it is valid.
        key: the public half of a key that stays where it was made; None: keys are made here.
        signing_key: the public Ed25519 key with which the member signs, 32 bytes; None: one is made here, if it has
            none yet.
        out: the identity folder to write; None: one in the data dir.
    """

    days: int = 825
    key: CertificatePublicKeyTypes | None = None
    signing_key: bytes | None = None
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """What a command did.

    Attributes:
        member: as the table has it now.
        folder: identity folder that was written; None: none.
        has_keys: whether private keys are in it.
        broker: what the broker gets.
        own_identity: the aggregator's identity folder, if that was written.
        hosts: names and addresses in the broker's certificate.
        lost_hosts: those that it had before this command, and has no longer.
        strangers: clients that took part and never were enrolled.
        returns: it was revoked before.
        excluded: it takes no part, whatever keys it has.
    """

    member: Member
    folder: Path | None
    has_keys: bool
    broker: Path
    own_identity: Path | None
    hosts: tuple[str, ...]
    lost_hosts: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    returns: bool = False
    excluded: bool = False


@dataclass(frozen=True, slots=True)
class Broker:
    """What an operator says about the broker.

    Attributes:
        hosts: names and addresses by which devices reach it; empty: as before.
        place: where its folder lies on its machine; empty: as before.
    """

    hosts: tuple[str, ...] = ()
    place: str = ""


class Registry:
    """The members of one fleet. Use ``opened``; one command at a time has it.

    Attributes:
        is_new: nobody was enrolled in the folder, and no aggregator has run there.
        broker_changed: something of what the broker gets was written since this was made.
    """

    def __init__(self, folder: Path, fleet: str, asked: Broker, now: datetime) -> None:
        self.folder, self.fleet, self._hosts, self._now = folder, fleet, asked.hosts, now
        self._place = asked.place or files.place_in(folder / BROKER / files.CONFIG) or files.PLACE
        self._own_identity: Path | None = None
        self._lost_hosts: tuple[str, ...] = ()
        self.broker_changed = False
        self._store = AggregatorStore(folder)
        self._table = Members(folder)
        lost = [] if self._table.all() else sorted((folder / MEMBERS).glob(f"*/{identity.CERTIFICATE}"))
        if lost:  # each was written after the aggregator's own, which the table had by then
            self.close()
            raise SettingsError(
                f"{folder / DATABASE} was lost: it knows nobody, and {lost[0].parent} is a member's; restore a backup"
            )
        self.is_new = not self._table.all() and self._store.spec() is None
        self._authority = Authority(folder / MEMBERS, fleet, now)
        self._learn_keys()
        self._keep_up()

    def close(self) -> None:
        """Close the databases."""
        self._table.close()
        self._store.close()

    def enrol(self, client: str, terms: Terms) -> Done:
        """Take a client in.

        Raises:
            SettingsError: It is a member, or what it brings can't be used; nothing was changed.
        """
        known = self._table.get(client)
        if known is not None and known.revoked_at is None:
            raise SettingsError(f"{client} is a member already; `aggregator renew {client}` gives it a new certificate")
        if client != files.AGGREGATOR and self._table.get(files.AGGREGATOR) is None:
            self.enrol(files.AGGREGATOR, Terms())
        written, issued = self._made(client, terms)
        self._table.enrol(client, issued, self._now.timestamp())
        excluded = self._store.roll.excludes(client)
        return replace(self._done(client, written, terms), returns=known is not None, excluded=excluded)

    def renew(self, client: str, terms: Terms, overlap_days: int) -> Done:
        """Give a member a new certificate; the one before counts ``overlap_days`` longer.

        Raises:
            SettingsError: It is no member, what it brings can't be used, or it holds its key and brings no request;
                nothing was changed.
        """
        self.member(client)
        if terms.key is None and self._table.holds_its_key(client):
            raise SettingsError(
                f"{client} made its own key, which stays there; let it make a request (CSR) with that, for --request"
            )
        written, issued = self._made(client, terms, renews=True)
        self._table.renew(client, issued, (self._now + timedelta(days=overlap_days)).timestamp())
        return self._done(client, written, terms)

    def revoke(self, client: str) -> Done:
        """Shut a member out, and let nothing that it signs count.

        Raises:
            SettingsError: It is no member.
        """
        self.member(client)
        if client not in ROLES:
            self._store.pin(client, secrets.token_bytes(32))  # nobody has the private half of that
            self._store.withdraw(client)  # here too: whoever has its name next may be enrolled before the leader looks
        self._table.revoke(client, self._now.timestamp())
        return self._done(client, None, Terms())

    def member(self, client: str) -> Member:
        """One who belongs to the fleet.

        Raises:
            SettingsError: It doesn't.
        """
        found = self._table.get(client)
        if found is None or found.revoked_at is not None:
            is_what = "is no member of" if found is None else "is revoked already in"
            raise SettingsError(f"{client} {is_what} fleet {self.fleet}; `aggregator enroll {client}` takes it in")
        return found

    def members(self) -> tuple[Member, ...]:
        """Everybody who ever was enrolled."""
        return self._table.all()

    def strangers(self) -> tuple[str, ...]:
        """Clients that took part, never were enrolled, and so don't count; none while no client is enrolled."""
        known = {member.client for member in self.members()}
        if known <= ROLES:
            return ()
        return tuple(client for client in self._store.clients() if client not in known)

    def _made(self, client: str, terms: Terms, *, renews: bool = False) -> tuple[Path, Issued]:
        """Write the identity folder, and remember the key that the member signs with."""
        folder = terms.out or self._folder_of(client)
        content = {identity.CA: self._authority.pem}
        key, public = terms.key, terms.signing_key
        if client not in ROLES and not renews:
            content[ROOT] = self._root()
        if key is None:
            private = new_key()
            key = private.public_key()
            content[identity.KEY] = private_pem(private)
            if public is None and not renews and client not in ROLES:
                signs = Ed25519PrivateKey.generate()
                content[SIGNING_KEY] = private_pem(signs)
                public = signs.public_key().public_bytes_raw()
        keys = [self._own_key(client, "TLS key", key)]
        if public is not None:
            keys.append(self._own_key(client, "signing key", Ed25519PublicKey.from_public_bytes(public)))
        certificate = self._authority.sign(key, client, terms.days)
        content[identity.CERTIFICATE] = pem_of(certificate)
        identity.write_identity(folder, content)
        for name, brought in ((identity.KEY, terms.key), (SIGNING_KEY, terms.signing_key)):
            if brought is not None and terms.out is None and client != files.AGGREGATOR:
                _remove_former(folder / name, keys)
        if client == files.AGGREGATOR:
            self._own_identity = folder
        if public is not None:
            self._store.pin(client, public)
        expires_at = certificate.not_valid_after_utc.timestamp()
        now, requested = self._now.timestamp(), terms.key is not None
        return folder, Issued(certificate.serial_number, now, expires_at, expires_at, tuple(keys), requested)

    def _own_key(self, client: str, what: str, key: CertificatePublicKeyTypes) -> str:
        """Return a key's digest, unless it was revoked or is another member's: one image on many devices."""
        keeper, revoked = self._table.keeper(digest := _digest(key)) or (client, False)
        if revoked or keeper != client:
            why = f"was revoked with {keeper}" if revoked else f"is also {keeper}'s, and each could speak as the other"
            raise SettingsError(
                f"{client}'s {what} {why}; nothing was changed: make new keys on the device of {client}"
            )
        return digest

    def _learn_keys(self) -> None:
        """Note keys of members whom an earlier version took in: those that are still known."""
        for member in self._table.keyless():
            signs = self._store.signing_key(member.client)
            keys = [] if signs is None else [_digest(Ed25519PublicKey.from_public_bytes(signs))]
            with contextlib.suppress(OSError, *NOT_PEM):
                certificate = read_regular(self._folder_of(member.client) / identity.CERTIFICATE)
                keys.append(_digest(x509.load_pem_x509_certificate(certificate).public_key()))
            if keys:
                self._table.learn(member.client, keys, revoked=member.revoked_at is not None)

    def _root(self) -> bytes:
        """Whose word clients take: the aggregator's, whose keys are made here if no device can know them yet."""
        return Releases(self.folder / KEYS, may_found=not self._store.is_followed()).roots[-1]

    def _folder_of(self, client: str) -> Path:
        return self.folder / OWN_IDENTITY if client == files.AGGREGATOR else self.folder / MEMBERS / client

    def _done(self, client: str, written: Path | None, terms: Terms) -> Done:
        self._keep_up()
        member = self._table.get(client)
        assert member is not None
        broker, (certificate, _) = self.folder / BROKER, _kept(self.folder / BROKER)
        hosts = () if certificate is None else _hosts_in(certificate)
        lost = self._lost_hosts
        return Done(member, written, terms.key is None, broker, self._own_identity, hosts, lost, self.strangers())

    def _keep_up(self) -> None:
        """Write what the broker gets, if it isn't what the table says."""
        broker = self.folder / BROKER
        try:
            private_folder(broker)
            for name in (files.CONFIG, files.CONFIG_2_1):
                self._write_if_new(broker / name, files.config(name, self._place).encode())
            members = [member.client for member in self._table.all() if member.revoked_at is None]
            self._write_if_new(broker / files.RULES, files.rules(self.fleet, members).encode())
            self._write_if_new(broker / files.CA, self._authority.pem)
            ended = self._table.ended(self._now.timestamp())
            if files.revoked_in(broker / files.REVOKED, self._authority.certificate) != ended:
                self._write_if_new(broker / files.REVOKED, self._authority.revocations(ended))
            self._certify_broker(broker)
        except OSError as error:
            raise SettingsError(f"{error.filename or broker} can't be written ({error.strerror or error})") from error

    def _certify_broker(self, broker: Path) -> None:
        """Make the broker's certificate: at first, for other names, and in time before it ends."""
        kept, has_key = _kept(broker)
        hosts = self._hosts or (() if kept is None else _hosts_in(kept)) or LOCAL
        if kept is not None and has_key and self._authority.signed(kept) and _hosts_in(kept) == hosts:
            left_s = (kept.not_valid_after_utc - self._now).total_seconds()
            if left_s > identity.SOON_S and kept.not_valid_before_utc <= self._now:  # made by a clock that was ahead
                return
        self._lost_hosts = () if kept is None else tuple(host for host in _hosts_in(kept) if host not in hosts)
        key = new_key()
        self._write_if_new(broker / files.KEY, private_pem(key), private=True)
        certificate = self._authority.sign(key.public_key(), hosts[0], BROKER_DAYS, hosts)
        self._write_if_new(broker / files.CERTIFICATE, pem_of(certificate))

    def _write_if_new(self, path: Path, data: bytes, *, private: bool = False) -> None:
        self.broker_changed |= files.write_if_new(path, data, private=private)


@contextlib.contextmanager
def opened(
    data_dir: Path,
    fleet: str | None = None,
    broker: Broker | None = None,
    *,
    new: bool = False,
    now: datetime | None = None,
) -> Iterator[Registry]:
    """Yield the members of a fleet, which another command has to wait for.

    Args:
        data_dir: of the aggregator, which may run, or with ``new`` of one that is to come.
        fleet: fleet name; None: the data dir's, else ``fleet``.
        broker: what is new about it.
        new: make what isn't there.
        now: with its time zone.

    Raises:
        SettingsError: The data dir has no members yet or is another fleet's, or something can't be written.
    """
    if not new and not any((data_dir / MEMBERS / name).is_file() for name in (CA_KEY, CA_CERTIFICATE)):
        raise SettingsError(f"data dir {data_dir}: nobody was enrolled here; `aggregator enroll` does")
    if data_dir.exists():  # somebody else's is left as it is
        read_owner(data_dir, aggregators(fleet))
    try:
        private_folder(data_dir / MEMBERS)
        handle = open_file(data_dir / MEMBERS / "lock")
    except OSError as error:
        with contextlib.suppress(OSError):
            (data_dir / MEMBERS).rmdir()  # if it is empty: nothing was made
        raise SettingsError(f"{error.filename or data_dir} can't be written ({error.strerror or error})") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        name = fleet_of(data_dir, fleet)
        registry = Registry(data_dir, name, broker or Broker(), now or datetime.now(timezone.utc))
        with contextlib.closing(registry):
            yield registry
    except sqlite3.Error as error:
        raise SettingsError(f"data dir {data_dir}: its database can't be used ({error})") from error
    finally:
        os.close(handle)


def check_client(client: str) -> str:
    """Return a client id that a member can have.

    Raises:
        SettingsError: It can't.
    """
    try:
        check_id(client, "client id")
    except MalformedMessage as error:
        raise SettingsError(str(error)) from error
    if client in _TAKEN:
        raise SettingsError(f"client id {client!r} is taken")
    return client


def check_fleet(fleet: str | None) -> str | None:
    """Return a fleet's name; raises SettingsError for one that can't be."""
    try:
        return None if fleet is None else check_id(fleet, "fleet")
    except MalformedMessage as error:
        raise SettingsError(f"--fleet: {error}") from error


def check_broker(hosts: tuple[str, ...], place: Path | None) -> Broker:
    """Return what is said about a broker; raises SettingsError for what can't be."""
    hosts = tuple(map(_name_or_address, hosts))
    found = "" if place is None else str(place.absolute())
    if not found.isprintable():
        raise SettingsError(f"--broker-dir {found!r}: a configuration can't name that")
    return Broker(hosts, found)


def read_terms(
    client: str,
    days: int,
    request: Path | None,
    signing_key: Path | None,
    out: Path | None,
    *,
    enrols: bool = False,
) -> Terms:
    """Return what an operator says about a client's certificate, from files.

    Raises:
        SettingsError: The client id, the request or the key can't be used, one that ``enrols`` lacks a key, or ``out``
            holds another member's.
    """
    check_client(client)
    owner = "" if out is None else identity.owner_of(out)
    if owner not in {"", client}:
        raise SettingsError(
            f"--out {out} holds the keys of {owner!r}, and they may be nowhere else; choose another folder"
        )
    key = None if request is None else read_request(request, client)
    public = None if signing_key is None else _read_public(signing_key)
    if enrols and key is not None and public is None and client not in ROLES:
        raise SettingsError("--request needs --signing-key: without one nothing that the client says counts")
    return Terms(days, key, public, out)


def _name_or_address(host: str) -> str:
    """Return a broker's host as a certificate has it."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host.replace("%", " ")))  # one with a zone is this machine's alone
    if not _NAME.fullmatch(host):
        raise SettingsError(f"--host {host!r}: expected a name or an address, without a port")
    return host


def _digest(key: CertificatePublicKeyTypes) -> str:
    public = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public).hexdigest()


def _remove_former(path: Path, counting: Collection[str]) -> None:
    """Remove a private key unless its public half is one of these: it would be copied over what the device made."""
    with contextlib.suppress(OSError, *NOT_PEM):
        key = serialization.load_pem_private_key(read_regular(path), None)
        if _digest(key.public_key()) not in counting:  # type: ignore[arg-type]  # it is one that signs
            path.unlink()


def _read_public(path: Path) -> bytes:
    try:
        key = serialization.load_pem_public_key(path.read_bytes()[:4096])
    except (OSError, *NOT_PEM) as error:
        raise SettingsError(f"signing key {path}: expected a public key in PEM ({error})") from error
    if not isinstance(key, Ed25519PublicKey):
        raise SettingsError(f"signing key {path}: expected an Ed25519 key")
    return key.public_bytes_raw()


def _kept(broker: Path) -> tuple[x509.Certificate | None, bool]:
    """Return the broker's certificate, if there is one, and whether its key is there."""
    certificate = None
    try:
        certificate = x509.load_pem_x509_certificate(read_regular(broker / files.CERTIFICATE))
        key = serialization.load_pem_private_key(read_regular(broker / files.KEY), None)
    except (OSError, *NOT_PEM):
        return certificate, False
    return certificate, certificate.public_key() == key.public_key()


def _hosts_in(certificate: x509.Certificate) -> tuple[str, ...]:
    with contextlib.suppress(x509.ExtensionNotFound):  # somebody else's certificate, which ours replaces
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return tuple(str(name.value) for name in names)
    return ()
