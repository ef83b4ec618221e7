"""The verbs, as values that travel as JSON."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from replayfleet.federation.errors import UNREADABLE, MalformedMessage, ReplayfleetError
from replayfleet.federation.wire.protocol.limits import check, check_id

MAX_VERB_BYTES = 4096
MAX_WORDS = 200


class VerbRefused(ReplayfleetError):
    """A verb that can't be done now; nothing was changed. The text says why and what would help."""


class Exclude(msgspec.Struct, frozen=True, tag="exclude", tag_field="verb", forbid_unknown_fields=True):
    """A client takes no part from now on, until it is readmitted; ``because`` is for other operators."""

    client: str
    because: str = ""


class Readmit(msgspec.Struct, frozen=True, tag="readmit", tag_field="verb", forbid_unknown_fields=True):
    """An excluded client takes part again."""

    client: str


Verb: TypeAlias = Exclude | Readmit
Name: TypeAlias = Literal["exclude", "readmit"]

_decoder: msgspec.json.Decoder[Verb] = msgspec.json.Decoder(Verb)


def name_of(verb: Verb) -> str:
    """Return what a verb is called on the command line and in the journal."""
    return str(type(verb).__struct_config__.tag)


def client_of(verb: Verb) -> str:
    """Return whom a verb is about; empty for the whole fleet."""
    return str(getattr(verb, "client", ""))


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
    """Return a verb whose fields can be used.

    Raises:
        MalformedMessage: They can't.
    """
    if client_of(verb):
        check_id(client_of(verb), "client id")
    if isinstance(verb, (Exclude, Readmit)):
        check(bool(verb.client), f"{name_of(verb)} needs a client")
    if isinstance(verb, Exclude):
        check_words(verb.because, "reason")
    return verb


def check_words(text: str, what: str) -> str:
    """Return one line of somebody's text that may stand in journal and pages.

    Raises:
        MalformedMessage: It is too long or can't be printed.
    """
    check(len(text) <= MAX_WORDS, f"{what} of {len(text)} characters, expected at most {MAX_WORDS}")
    check(text.isprintable(), f"{what} contains what can't be printed")
    return text
