"""Who may do what in the console: tokens from a file, and the sessions of those who showed one."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from replayfleet.federation.atomic import open_file, write_atomic
from replayfleet.federation.errors import MalformedMessage, SettingsError
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.quotas import Limiter
from replayfleet.federation.service.settings import read_toml
from replayfleet.federation.wire.protocol.limits import check_id

log = EventLogger(__name__)

Role: TypeAlias = Literal["viewer", "operator"]
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 1000
TRIES_PER_S, TRIES_AT_ONCE = 0.1, 5.0
"""Of one address; a token has 256 bits, so this only keeps logs and processor quiet."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One token: whose file has only its digest, can't use it."""

    role: Role
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class Somebody:
    """Who asks. ``name`` is empty for one who showed no token; ``secret`` is what forms of its session carry."""

    name: str
    role: Role | None
    secret: str = ""

    @property
    def may_operate(self) -> bool:
        return self.role == "operator"


NOBODY = Somebody("", None)


class Access:
    """Tokens and sessions; called on one thread.

    Args:
        path: of the tokens; None if nobody has one. Read again when it changes.
        reading_needs_token: False where everybody who gets here may look.

    Raises:
        SettingsError: The file can't be used.
    """

    def __init__(self, path: Path | None, *, reading_needs_token: bool) -> None:
        self._path = path
        self._read_at: tuple[int, ...] | None = None
        self._tokens: Mapping[str, Entry] = {}
        self._unread = ""  # why they couldn't be read
        self._sessions: OrderedDict[str, tuple[Somebody, str, float]] = OrderedDict()
        self._tries = Limiter(TRIES_PER_S, TRIES_AT_ONCE)
        self.reading_needs_token = reading_needs_token
        self._refresh(strict=True)

    @property
    def has_tokens(self) -> bool:
        return self._path is not None

    def by_token(self, token: str) -> Somebody | None:
        """Return whose token this is; None if it is nobody's."""
        self._refresh()
        digest = hashlib.sha256(token.encode(errors="replace")).hexdigest()
        matching = [name for name, entry in self._tokens.items() if hmac.compare_digest(entry.sha256, digest)]
        return Somebody(matching[0], self._tokens[matching[0]].role) if matching else None

    def may_try(self, address: str, now: float) -> bool:
        """Whether an address may show another token."""
        return self._tries.admit(address, now)

    def begin(self, somebody: Somebody, now: float) -> str:
        """Begin a session; returns what its cookie holds."""
        cookie = secrets.token_urlsafe(32)
        known = Somebody(somebody.name, somebody.role, secrets.token_urlsafe(32))
        self._sessions[cookie] = known, self._tokens[somebody.name].sha256, now + SESSION_S
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return cookie

    def by_cookie(self, cookie: str, now: float) -> Somebody:
        """Return whose session this is, with its present role; ``NOBODY`` if it is over or its token is gone."""
        if cookie not in self._sessions:
            return NOBODY
        self._refresh()
        somebody, digest, until = self._sessions[cookie]
        entry = self._tokens.get(somebody.name)
        if entry is None or entry.sha256 != digest or now >= until:
            self.end(cookie)
            return NOBODY
        return Somebody(somebody.name, entry.role, somebody.secret)

    def end(self, cookie: str) -> None:
        """End a session. Idempotent."""
        self._sessions.pop(cookie, None)

    def _refresh(self, *, strict: bool = False) -> None:
        if self._path is None:
            return
        try:
            found = self._path.stat()
            if self._read_at != (read_at := (found.st_mtime_ns, found.st_ctime_ns, found.st_ino)):
                self._tokens, self._read_at = read_tokens(self._path), read_at
                if self._unread:
                    log.info("tokens read again", file=self._path)
                self._unread = ""
        except (OSError, SettingsError) as error:
            if strict:
                raise SettingsError(f"tokens: {error}") from error
            self._tokens, self._read_at = {}, None
            if self._unread != str(error):
                log.warning("tokens not read", reason=error, next="nobody gets in with one")
            self._unread = str(error)


def read_tokens(path: Path) -> dict[str, Entry]:
    """Return name -> token.

    Raises:
        SettingsError: The file is missing, is no such TOML, or others than its owner may write it.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}; `aggregator token` makes it") from error
    if not stat.S_ISREG(mode):  # a pipe would be waited for
        raise SettingsError(f"{path} is no file; expected the TOML that `aggregator token` writes")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SettingsError(f"{path} can be written by others, who could let themselves in; chmod go-w {path}")
    try:
        found = msgspec.convert(read_toml(path), dict[str, Entry])
        for name in found:
            check_id(name, "name")
        names = {entry.sha256: name for name, entry in found.items()}
        for name, entry in found.items():
            if names[entry.sha256] != name:
                raise SettingsError(f"{path}: {name} and {names[entry.sha256]} have the same token; remove one")
    except (msgspec.ValidationError, MalformedMessage) as error:
        raise SettingsError(f"{path}: {error}; `aggregator token` writes it") from error
    return found


def add_token(path: Path, name: str, role: Role) -> str:
    """Give somebody a token, in place of a former one; returns it, for only its digest is kept.

    Raises:
        SettingsError: The file or the name can't be used.
    """
    try:
        check_id(name, "name")
    except MalformedMessage as error:
        raise SettingsError(str(error)) from error
    token = secrets.token_urlsafe(32)
    with _changing(path) as tokens:
        tokens[name] = Entry(role, hashlib.sha256(token.encode()).hexdigest())
    return token


def remove_token(path: Path, name: str) -> None:
    """Take somebody's token away; a running console notices.

    Raises:
        SettingsError: The file can't be used, or has no such name.
    """
    read_tokens(path)
    with _changing(path) as tokens:
        if name not in tokens:
            raise SettingsError(f"{path} has no token of {name!r}")
        del tokens[name]


@contextmanager
def _changing(path: Path) -> Iterator[dict[str, Entry]]:
    """Write what the block makes of the tokens; who changes them at the same time waits. A link stays one."""
    path = path.resolve()
    try:
        handle = open_file(path.with_name(f".{path.name}.lock"))
    except OSError as error:
        raise SettingsError(f"{path} can't be written ({error.strerror or error})") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        tokens = read_tokens(path) if path.exists() else {}
        yield tokens
        lines = [
            f'["{name}"]\nrole = "{entry.role}"\nsha256 = "{entry.sha256}"\n' for name, entry in sorted(tokens.items())
        ]
        write_atomic(path, "\n".join(lines).encode(), private=True)
    finally:
        os.close(handle)
