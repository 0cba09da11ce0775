"""``connections`` and ``close``: list the TCP connections of this process, and shut down those to other ranks.

A rank that waits for others over gloo learns of their failure only if a connection closes. gloo has no function that closes
one: ``ProcessGroup.abort`` does nothing there, and a group lives as long as any object refers to it. So ``close`` shuts down
the sockets.

Two connected ranks see the same two ends in opposite order. Each rank publishes its ends. A socket is shut down only if another
rank published its ends, so other sockets of the process (a debugger's, one to a server) stay open.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

Ends = tuple[str, str]
"""(address of this process's end, address of the other end). An address is text: ``127.0.0.1:4711``."""

# lists the open descriptors of this process, on Linux and macOS; without it, no connection is closed
_DESCRIPTORS = "/dev/fd"


def connections() -> list[Ends]:
    """The ends of every TCP connection of this process."""
    all_ends = []
    for descriptor in _descriptors():
        with _socket(descriptor) as sock:
            if sock is not None and (ends := _ends(sock)) is not None:
                all_ends.append(ends)
    return all_ends


def close(others: Iterable[Ends], *, but: int | None) -> int:
    """Shuts down the connections of this process to other ranks.

    Args:
        others: the ends that other ranks published. Each pair is as the other rank sees it.
        but: a port. Connections with this port on either end stay open. It is the store's port: ranks still use the store.

    Returns:
        The number of connections that were shut down.
    """
    shared = {(remote, local) for local, remote in others}  # in this process's order
    excluded_port, closed = f":{but}", 0
    for descriptor in _descriptors():
        with _socket(descriptor) as sock:
            ends = None if sock is None else _ends(sock)
            if sock is None or ends is None or ends not in shared:
                continue
            if any(end.endswith(excluded_port) for end in ends):
                continue
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS) if name.isdigit()]
    except OSError:
        return []


@contextmanager
def _socket(descriptor: int) -> Iterator[socket.socket | None]:
    """A socket object for an open descriptor; None if the descriptor is not a socket. The descriptor stays open afterwards."""
    sock = None
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            sock = socket.socket(fileno=descriptor)
    try:
        yield sock
    finally:
        if sock is not None:
            sock.detach()


def _ends(sock: socket.socket) -> Ends | None:
    """The ends of a socket; None if the socket is not a TCP connection."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return None
    with suppress(OSError):  # the socket listens, or is closed
        local, remote = sock.getsockname(), sock.getpeername()
        return f"{local[0]}:{local[1]}", f"{remote[0]}:{remote[1]}"
    return None


__all__ = ["Ends", "close", "connections"]
