"""What a round waits for before it begins: an operator, labels, a fall of accuracy, a time of day. Decisions only."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from replayfleet.federation.errors import SettingsError

BY_HAND = "by-hand"
DAY_S = 86400
_SAMPLES = re.compile(r"samples=([1-9]\d{0,8})", re.ASCII)
_ACCURACY = re.compile(r"accuracy=([1-9]\d?(?:\.\d)?)", re.ASCII)
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Signs:
    """What a round that rests may wait for, as it stands.

    Attributes:
        num_samples: labelled samples that wait at the members for whom rounds wait, by their presences.
        wall_s: Unix time now.
        since_s: Unix time at which the round before was committed, or the fleet founded; 0 before the first look.
        lowest: share of labelled things that the least accurate member's model answers rightly, of those that were
            asked about enough.
        whose: which member that is; empty if none was.
    """

    num_samples: int = 0
    wall_s: float = 0.0
    since_s: float = 0.0
    lowest: float = 1.0
    whose: str = ""


def since(before: Signs, committed_s: float, wall_s: float) -> float:
    """Return ``Signs.since_s``: where the clock was ahead then and was put right since, the first look after that.

    One that is behind now, as on a board without a clock of its own that has just begun, says nothing once it is right.
    """
    return committed_s if wall_s >= committed_s else min(wall_s, before.since_s or math.inf)


@dataclass(frozen=True, slots=True)
class Opening:
    """What a round waits for before it begins; with none of these for an operator.

    Attributes:
        num_samples: for so many labelled samples; 0 doesn't count them.
        times_s: for the first of these times of day after the round before, in seconds after midnight UTC, rising. One
            that came while the aggregator was down counts.
        accuracy: for a member whose model answers a smaller share of its labelled things rightly; 0 looks at none.
    """

    num_samples: int = 0
    times_s: tuple[int, ...] = ()
    accuracy: float = 0.0

    def left_s(self, signs: Signs) -> float:
        """Return in how many seconds a round begins: 0 if it is time, infinite where no clock says so."""
        if self.times_s:
            return max(0.0, self._due_s(signs) - signs.wall_s)
        fell, enough = signs.lowest < self.accuracy, 0 < self.num_samples <= signs.num_samples
        return 0.0 if fell or enough else math.inf

    def awaits(self, signs: Signs) -> str:
        """Return when a round begins, in words that follow "it begins"."""
        if self.times_s:
            minutes = int(self._due_s(signs) % DAY_S) // 60
            return f"at {minutes // 60:02}:{minutes % 60:02} UTC"
        if self.num_samples:
            more = max(0, self.num_samples - signs.num_samples)
            wait = "sample waits" if more == 1 else "samples wait"
            none = (
                ""
                if signs.num_samples
                else "; folder:// and dataset:// count none, there `aggregator round open` begins it"
            )
            return f"when {more} more labelled {wait} at its members ({signs.num_samples} of {self.num_samples}){none}"
        if self.accuracy:
            lowest = f"{signs.lowest:.1%} of {signs.whose} is the lowest" if signs.whose else "too few came yet to tell"
            return f"when a member's model answers less than {self.accuracy:.1%} of its labels rightly ({lowest})"
        return "when an operator opens it"

    def because(self, signs: Signs) -> str:
        """Return why a round begins now."""
        if self.times_s:
            return f"it was due {self.awaits(signs)}"
        if self.num_samples:
            return f"{signs.num_samples} labelled samples wait at its members"
        return f"the model of {signs.whose} answers {signs.lowest:.1%} of its labels rightly"

    def _due_s(self, signs: Signs) -> float:
        """Unix time of the first of the times after the round before."""
        midnight = signs.since_s // DAY_S * DAY_S
        return min(at for day in (0, DAY_S) for time in self.times_s if (at := midnight + day + time) > signs.since_s)


def parse_opening(text: str) -> Opening:
    """Return what an operator wrote: ``by-hand``, ``samples=500``, ``accuracy=80``, or times such as ``02:00,14:00``.

    Raises:
        SettingsError: It is none of these.
    """
    if text == BY_HAND:
        return Opening()
    samples, times = _SAMPLES.fullmatch(text), [_TIME.fullmatch(word.strip()) for word in text.split(",")]
    accuracy = _ACCURACY.fullmatch(text)
    if samples is not None:
        return Opening(num_samples=int(samples[1]))
    if accuracy is not None:
        return Opening(accuracy=float(accuracy[1]) / 100)
    if not all(times):
        expected = f"{BY_HAND}, samples=N, accuracy=80 (percent), or times of day in UTC such as 02:00,14:00"
        raise SettingsError(f"open_rounds is {text!r}, expected {expected}")
    return Opening(times_s=tuple(sorted({int(time[1]) * 3600 + int(time[2]) * 60 for time in times if time})))
