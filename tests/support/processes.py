"""What still runs."""

from __future__ import annotations

from pathlib import Path


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of running processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text and "pytest" not in text:
            found.append(text)
    return found


def state_of(pid: int) -> str:
    """Return the process's state as the kernel shows it, T for stopped; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_gone(pid: int) -> bool:
    """Whether the process is no more, or waits for somebody to ask how it ended."""
    return state_of(pid) in {"", "Z"}
