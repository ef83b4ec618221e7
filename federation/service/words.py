"""Numbers as people read them, "·" where nothing is known yet; and text that others wrote, safe to show."""

from __future__ import annotations

UNKNOWN = "·"


def percent(share: float | None) -> str:
    """Return a share in [0, 1] as ``87.3 %``."""
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def megabytes(size_bytes: float | None) -> str:
    """Return ``2.7 MB``, or kilobytes or gigabytes where those say it in fewer digits."""
    if size_bytes is None:
        return UNKNOWN
    if size_bytes >= 1e9:
        return f"{size_bytes / 1e9:.1f} GB"
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} kB"


def milliseconds(seconds: float | None) -> str:
    """Return ``41 ms``."""
    return UNKNOWN if seconds is None else f"{1e3 * seconds:.0f} ms"


def clock(seconds: float) -> str:
    """Return ``4:07`` minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def duration(seconds: float) -> str:
    """Return ``75 s``, ``12 min``, ``3.5 h``, ``2.5 days`` or ``57 years``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f} h"
    days = seconds / 86_400
    return f"{days:.1f} days" if days < 1000 else f"{days / 365.25:.0f} years"


def visible(text: str) -> str:
    r"""Return one line in which everything can be seen: line ends, escapes and marks of direction as ``\x1b``.

    A terminal obeys such characters, wherever they came from.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 seed``, ``2 seeds``, ``3 classes``."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def short_name(client_id: str) -> str:
    """Return ``c3`` for ``client-3``, so that tables stay narrow; other names as they are."""
    prefix, _, number = client_id.rpartition("-")
    return f"c{number}" if prefix == "client" and number.isdecimal() else client_id


def spaced(number: int) -> str:
    """Return a number with its thousands apart."""
    return f"{number:,}".replace(",", " ")
