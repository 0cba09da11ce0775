"""``Connections``: those between this process and other ranks, by TCP, and how they are closed.

A rank that waits for others over gloo learns of their failure only if a connection closes. gloo has no way to close one:
``ProcessGroup.abort`` does nothing there, and a group is not gone while any object still holds it. So its sockets are shut
down.

A connection of two ranks has the same two ends on both, the other way round. Each rank tells its own, so that no other socket
of the process (a debugger's, one to a server) is taken for one.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

Ends = tuple[str, str]
"""(this process's end, the other one's): ``127.0.0.1:4711``."""

_DESCRIPTORS = "/dev/fd"  # of this process, on Linux and macOS; without it nothing is closed


def connections() -> list[Ends]:
    """The TCP connections of this process."""
    found = []
    for descriptor in _descriptors():
        with _socket(descriptor) as held:
            if held is not None and (ends := _ends(held)) is not None:
                found.append(ends)
    return found


def close(others: Iterable[Ends], *, but: int | None) -> int:
    """Shuts down the connections of this process that other ranks have told of.

    Args:
        others: of other ranks, as each has them.
        but: a port on this end or the other: the store's, which ranks still ask.

    Returns:
        How many.
    """
    shared, kept, closed = {(there, here) for here, there in others}, f":{but}", 0
    for descriptor in _descriptors():
        with _socket(descriptor) as held:
            ends = None if held is None else _ends(held)
            if held is not None and ends in shared and not any(end.endswith(kept) for end in ends or ()):
                with suppress(OSError):
                    held.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS) if name.isdigit()]
    except OSError:
        return []


@contextmanager
def _socket(descriptor: int) -> Iterator[socket.socket | None]:
    """A socket of this process, for a look; None if a descriptor is none. It stays open."""
    held = None
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            held = socket.socket(fileno=descriptor)
    try:
        yield held
    finally:
        if held is not None:
            held.detach()


def _ends(held: socket.socket) -> Ends | None:
    """None if it is no connection by TCP."""
    if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
        return None
    with suppress(OSError):  # it listens, or is closed
        here, there = held.getsockname(), held.getpeername()
        return f"{here[0]}:{here[1]}", f"{there[0]}:{there[1]}"
    return None


__all__ = ["Ends", "close", "connections"]
