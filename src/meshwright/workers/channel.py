"""``Channel``: sends and receives complete messages over a socket, between a pool and one of its workers.

    | head length, 8 bytes | body length, 8 bytes | head (a pickled tuple) | body (bytes) |

The head is small and made of builtin types. The body is a pickled value; the receiver unpickles it when needed. No read and
no write blocks, so two ends that send large messages at once do not deadlock: each writes a part, then reads.
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
# most reads of one call: the caller must get to check its timeout even if the peer never stops sending
_READS_A_TURN = 256
_SEND_SIZE = 1 << 20


class Channel:
    """One end of a connected stream socket. `closed` is True once this end is closed, or the other end is gone."""

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
        """Whether a posted message has not been written to the socket completely."""
        return bool(self._outgoing)

    def post(self, head: tuple[Any, ...], body: bytes | memoryview = b"") -> None:
        """Queues one message. `flush` writes it to the socket."""
        packed = pickle.dumps(head)
        self._outgoing.append(memoryview(_LENGTHS.pack(len(packed), len(body)) + packed))
        if len(body):
            self._outgoing.append(memoryview(body))

    def flush(self) -> None:
        """Writes as much of the queue to the socket as it accepts without blocking."""
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
        """Posts one message, and waits until the socket has accepted all of it. Thread-safe.

        Raises:
            TimeoutError: the socket did not accept the message within ``timeout`` seconds.
        """
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
        """Returns the messages that have arrived completely, oldest first. Does not wait."""
        messages: list[Message] = []
        try:
            for _ in range(_READS_A_TURN):
                count = self._socket.recv_into(self._incoming[self._filled :])
                if count == 0:
                    self.closed = True
                    break
                self._filled += count
                if self._filled == len(self._incoming):
                    self._finish_section(messages)
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        return messages

    def close(self) -> None:
        """Closes this end."""
        self.closed = True
        self._socket.close()

    def _finish_section(self, messages: list[Message]) -> None:
        """Handles a full buffer, and makes the next one.

        After the lengths come the head and the body in one buffer, which complete a message; after these, the next lengths.
        """
        if self._head_length < 0:
            self._head_length, body_length = _LENGTHS.unpack(self._incoming)
            size = self._head_length + body_length
        else:
            head, body = self._incoming[: self._head_length], self._incoming[self._head_length :]
            messages.append((pickle.loads(head), body))
            self._head_length, size = -1, _LENGTHS.size
        self._incoming, self._filled = memoryview(bytearray(size)), 0
