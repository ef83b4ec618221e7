"""The verbs, as values that travel as JSON."""

from __future__ import annotations

import re
from typing import TypeAlias

import msgspec

from replayfleet.federation.errors import UNREADABLE, MalformedMessage, ReplayfleetError
from replayfleet.federation.wire.protocol.limits import ALL, EVERYBODY, MAX_COUNTER, check, check_id
from replayfleet.federation.wire.protocol.messages import COUNTER_BITS

MAX_VERB_BYTES = 4096
MAX_WORDS = 200
MAX_EXTENSION_S = 30 * 86400.0
ANSWER_S = 30.0
"""The loop answers between two messages; a full disk may hold it up for some seconds."""
_VERSION = re.compile(r"(?:(\d{1,7})/)?(\d{1,10})", re.ASCII)


class VerbRefused(ReplayfleetError):
    """A verb that can't be done now; nothing was changed. The text says why and what would help."""


class _Verb(msgspec.Struct, frozen=True, tag_field="verb", forbid_unknown_fields=True):
    """What all have in common: the tag, which is their name on the command line and in the journal."""


class Exclude(_Verb, frozen=True, tag="exclude"):
    """A client takes no part from now on, until it is readmitted; ``because`` is for other operators."""

    client: str
    because: str = ""


class Readmit(_Verb, frozen=True, tag="readmit"):
    """An excluded client takes part again."""

    client: str


class Pause(_Verb, frozen=True, tag="pause"):
    """Nobody begins to train, and the open round doesn't close."""


class Drain(_Verb, frozen=True, tag="drain"):
    """The fleet pauses when the open round is committed."""


class Resume(_Verb, frozen=True, tag="resume"):
    """Rounds go on."""


class RollBack(_Verb, frozen=True, tag="rollback"):
    """A client, or all (``*``), serve an earlier content that is still kept, as a new version.

    Attributes:
        client: whom it is about.
        to: a version that had it; None for the content before the present one.
    """

    client: str
    to: int | None = None


class CloseRound(_Verb, frozen=True, tag="round close"):
    """The open round closes with the uploads that it has."""


class ExtendRound(_Verb, frozen=True, tag="round extend"):
    """The open round's deadline comes later: by ``by_s`` seconds, or by another deadline if None."""

    by_s: float | None = None


class OpenRound(_Verb, frozen=True, tag="round open"):
    """The round that waits begins, whatever it waits for."""


Verb: TypeAlias = Exclude | Readmit | Pause | Drain | Resume | RollBack | CloseRound | ExtendRound | OpenRound

_decoder: msgspec.json.Decoder[Verb] = msgspec.json.Decoder(Verb)


def name_of(verb: Verb) -> str:
    """Return what a verb is called on the command line and in the journal."""
    return str(type(verb).__struct_config__.tag)


def client_of(verb: Verb) -> str:
    """Return whom a verb is about; empty for the whole fleet."""
    client = str(getattr(verb, "client", ""))
    return "" if client == EVERYBODY else client


def reason_of(verb: Verb) -> str:
    """Return the operator's reason as the end of what is told of a deed; empty without one."""
    because = getattr(verb, "because", "")
    return f"; because: {because}" if because else ""


def decode_verb(data: bytes) -> Verb:
    """Return the verb that somebody sent as JSON, for example ``{"verb": "exclude", "client": "cam-3"}``.

    Raises:
        MalformedMessage: It is none, too long, or names what can't be a client.
    """
    check(len(data) <= MAX_VERB_BYTES, f"a verb of {len(data)} bytes, expected at most {MAX_VERB_BYTES}")
    try:
        verb = _decoder.decode(data)
    except UNREADABLE as error:
        raise MalformedMessage(f"not a verb: {error}") from error
    return check_verb(verb)


def check_verb(verb: Verb) -> Verb:
    """Return a verb whose fields can be used; ``all`` means ``*``.

    Raises:
        MalformedMessage: They can't.
    """
    match verb:
        case RollBack(client, to):
            if client == ALL:
                verb = msgspec.structs.replace(verb, client=EVERYBODY)
            elif client != EVERYBODY:
                check_id(client, "client id")
            check(to is None or 0 < to <= MAX_COUNTER, f"version {to}, expected one that was given")
        case Exclude(client) | Readmit(client):
            check_id(client, "client id")
        case ExtendRound(by_s):
            check(
                by_s is None or 0 < by_s <= MAX_EXTENSION_S, f"{by_s} s, expected more than 0 and at most 30 days more"
            )
        case _:
            pass
    if isinstance(verb, Exclude):
        check_words(verb.because, "reason")
    return verb


def parse_version(text: str) -> int:
    """Return a version that a person wrote: ``7``, or ``2/7`` where the store's epoch was raised.

    Raises:
        MalformedMessage: It is none.
    """
    found = _VERSION.fullmatch(text)
    if found is None:
        raise MalformedMessage(f"version {text[:40]!r}, expected a number such as 7 or 2/7")
    return (int(found[1] or 0) << COUNTER_BITS) + int(found[2])


def check_words(text: str, what: str) -> str:
    """Return one line of somebody's text that may stand in journal and pages.

    Raises:
        MalformedMessage: It is too long or can't be printed.
    """
    check(len(text) <= MAX_WORDS, f"{what} of {len(text)} characters, expected at most {MAX_WORDS}")
    unseen = next((c for c in text if not c.isprintable()), "")
    check(not unseen, f"{what} contains {unseen!r}, which can't be printed")
    return text
