"""A channel: whole messages over a socket, between a pool and one of its workers.

    | head length, 8 bytes | body length, 8 bytes | head (a pickled tuple) | body (bytes) |

The head is small and plain; the body is a value that somebody else pickled, bytes until it is wanted. No read
and no write ever blocks: a side that has much to say takes turns, and two that talk at once never lock.
"""

from __future__ import annotations

import pickle
import selectors
import socket
import struct
import threading
import time
from collections import deque
from typing import Any

Message = tuple[tuple[Any, ...], memoryview]

_LENGTHS = struct.Struct("!QQ")
_READS_A_TURN = 256  # a peer that never stops talking must not keep its listener from looking at the clock
_SEND_SIZE = 1 << 20


class Channel:
    """One end of a connected stream socket; `closed` once the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._outgoing: deque[memoryview] = deque()
        self._lock = threading.Lock()
        self._incoming = memoryview(bytearray(_LENGTHS.size))
        self._filled = 0
        self._head_length = -1  # -1 while the lengths themselves are being read
        self.closed = False

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Is there something that the socket has not taken yet?"""
        return bool(self._outgoing)

    def post(self, head: tuple[Any, ...], body: bytes | memoryview = b"") -> None:
        """Queue one message; `flush` moves it."""
        packed = pickle.dumps(head)
        self._outgoing.append(memoryview(_LENGTHS.pack(len(packed), len(body)) + packed))
        if len(body):
            self._outgoing.append(memoryview(body))

    def flush(self) -> None:
        """Hand the socket what it takes now."""
        try:
            while self._outgoing and not self.closed:
                part = self._outgoing[0]
                sent = self._socket.send(part[:_SEND_SIZE])
                if sent == len(part):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = part[sent:]
        except BlockingIOError:
            return
        except OSError:
            self.closed = True
            self._outgoing.clear()

    def send(self, head: tuple[Any, ...], body: bytes | memoryview = b"", timeout: float = 600.0) -> None:
        """Post one message and stay until the socket has taken it. For a side that may wait; thread safe."""
        deadline = time.monotonic() + timeout
        with self._lock, selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_WRITE)
            self.post(head, body)
            self.flush()
            while self.pending:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nobody read this message within {timeout:g} s")
                selector.select(1.0)
                self.flush()

    def receive(self) -> list[Message]:
        """The messages that are complete by now, oldest first; never waits."""
        messages: list[Message] = []
        try:
            for _ in range(_READS_A_TURN):
                count = self._socket.recv_into(self._incoming[self._filled :])
                if count == 0:
                    self.closed = True
                    break
                self._filled += count
                if self._filled == len(self._incoming):
                    self._section_is_full(messages)
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        return messages

    def close(self) -> None:
        """Give up this end."""
        self.closed = True
        self._socket.close()

    def _section_is_full(self, messages: list[Message]) -> None:
        """Lengths are followed by a head and a body; these by the next lengths."""
        if self._head_length < 0:
            self._head_length, body_length = _LENGTHS.unpack(self._incoming)
            size = self._head_length + body_length
        else:
            head, body = self._incoming[: self._head_length], self._incoming[self._head_length :]
            messages.append((pickle.loads(head), body))
            self._head_length, size = -1, _LENGTHS.size
        self._incoming, self._filled = memoryview(bytearray(size)), 0
