"""The identity of processes on Linux: which machine this is, when a process started, whether it still runs. Empty elsewhere."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache


@cache
def machine() -> str:
    """The boot of this machine and the PID namespace of this process; empty if the system does not say.

    Only processes with an equal text can be told apart by their PIDs. The name of the host does not suffice: two containers
    may have the same.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int) -> str:
    """The start time of a process on this machine, as the kernel counts; empty if it has ended, or the kernel does not say."""
    state = _stat(pid)
    return state[19] if state else ""


def lives(pid: int, since: str) -> bool:
    """Whether the process with this PID and start time still runs: it has not ended, and no other has its PID."""
    state = _stat(pid)
    return bool(state) and state[0] not in "ZX" and state[19] == since


def threads_named(pid: int, name: str) -> int:
    """How many threads of a process on this machine have this name; 0 if it has ended, or the kernel does not say.

    Args:
        pid: of the process.
        name: as the kernel keeps it: its first 15 characters.
    """
    count = 0
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/comm", encoding="utf-8", errors="replace") as file:
                count += file.read().rstrip("\n") == name
    return count


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` from the state on; empty if the process has ended, or on another system."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
