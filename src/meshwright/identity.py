"""Which process this is, and whether another one still lives, as Linux tells it; other systems tell nothing."""

from __future__ import annotations

import os
from functools import cache


@cache
def machine() -> str:
    """This machine since its start, and this process's namespace of process numbers; empty if the system does not tell.

    Only processes of the same machine in this sense can be told apart by their numbers. A host's name does not do: two
    containers may have the same.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int) -> str:
    """When a process of this machine was started, as its kernel counts; empty if it is gone, or the kernel does not tell."""
    state = _stat(pid)
    return state[19] if state else ""


def lives(pid: int, since: str) -> bool:
    """Whether the process of this machine that was started then still runs: neither ended, nor another of its number."""
    state = _stat(pid)
    return bool(state) and state[0] not in "ZX" and state[19] == since


def _stat(pid: int) -> list[str]:
    """What Linux tells of a process, from its state on; empty if it is gone, or on another system."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
