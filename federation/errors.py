"""The errors an operator meets, each with a machine-readable reason.

Every message says what is wrong, what was expected and what happens next. ``docs/errors.md`` has a
heading for every reason.
"""

from __future__ import annotations

import copyreg
import difflib
import enum
import tokenize
import zipfile
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoders of JSON and msgpack raise for bytes that are none: also letters that don't decode, and deep nesting."""
NO_ARRAYS = (
    OSError, ValueError, TypeError, KeyError, EOFError, RuntimeError, MemoryError, OverflowError, SyntaxError,
    zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip
"""What NumPy raises for a file that isn't whole, whose head isn't, or that promises more than there is memory for."""


def told(error: BaseException) -> str:
    """Return an error in words, also one whose own words fail."""
    try:
        text = str(error)
    except Exception as worse:  # of whatever package
        text = f"its text can't be made: {type(worse).__name__}"
    return f"{type(error).__name__}: {text}"


_NATIVE = ("onnxruntime.", "cv2")
_OF_ONEDNN = ("could not create a primitive", "could not execute a primitive", "could not create a memory object")
_NO_MEMORY = ("allocate memory", "insufficient memory", "bad_alloc", "bad alloc", "out of memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, there or in what it was raised from.

    Torch says so in a RuntimeError, ONNX Runtime and OpenCV in errors of their own. oneDNN, which computes torch's
    convolutions, gives such an error no other words than any that has no reason. Words of other errors count for
    nothing: they may repeat what a member wrote.
    """
    while error is not None and not isinstance(error, MemoryError):
        if isinstance(error, (OSError, RuntimeError)) or type(error).__module__.startswith(_NATIVE):
            text = str(error).lower()
            if text.endswith(_OF_ONEDNN) or any(words in text for words in _NO_MEMORY):
                return True
        error = error.__cause__
    return error is not None


class Reason(str, enum.Enum):
    """Why an upload was rejected, an artefact refused or a served model rolled back; the value travels in messages."""

    WRONG_ROUND = "wrong-round"
    WRONG_FLEET = "wrong-fleet"
    WRONG_LAYOUT = "wrong-layout"
    WRONG_DIGEST = "wrong-digest"
    WRONG_COUNTS = "wrong-counts"
    NOT_FINITE = "not-finite"
    TOO_LARGE = "too-large"
    STALE_VERSION = "stale-version"
    MALFORMED = "malformed"
    PROBE_MISMATCH = "probe-mismatch"
    LOAD_FAILED = "load-failed"
    UNKNOWN_CLIENT = "unknown-client"
    EXCLUDED = "excluded"
    UNTRUSTED = "untrusted"
    BUSY = "busy"
    CRASHED = "crashed"
    HUNG = "hung"
    FAILING = "failing"
    TOO_SLOW = "too-slow"
    DRIFTED = "drifted"
    ROLLED_BACK = "rolled-back"


TRANSIENT = frozenset({Reason.BUSY.value, Reason.WRONG_DIGEST.value, Reason.EXCLUDED.value})
"""Reasons that pass: what was refused for one of them is offered again, without a limit of tries. A client that is
readmitted while its round is open still has its upload."""


class ReplayfleetError(Exception):
    """Base of every error that this project raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another process whatever ``__init__`` takes: a pool ends with the first error that it can't read."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class SettingsError(ReplayfleetError):
    """What the operator wrote can't be used; nothing was started or written."""


class NothingLearned(ReplayfleetError):
    """A run is over, and no round of it could use an upload; to begin it again changes nothing."""


class MethodFault(ReplayfleetError):
    """A method of another package doesn't keep what ``methods.kit.records.Method`` promises."""


class MalformedMessage(ReplayfleetError):
    """Bytes that don't decode as what they claim to be."""


class _Refused(ReplayfleetError):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"({reason.value}): {detail}")
        self.reason = reason
        self.detail = detail


class UploadRejected(_Refused):
    """A well-formed upload that this round won't use."""


class ArtefactRejected(_Refused):
    """A manifest or blob that must not be served."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` or, without a near name, ``"; known: a, b"``."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
