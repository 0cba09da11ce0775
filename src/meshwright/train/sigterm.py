"""SIGTERM in training: a scheduler will take the machine away soon, or a launcher ends a group of processes.

    signal ─► flag ─► at the end of the step all ranks agree ─► checkpoint ─► exit code 143

Python runs a signal handler when the main thread returns from C code. So a rank that waits in a collective sets its flag when
the collective ends. A launcher limits the time for all of this: torchrun kills a process 30 seconds after it has forwarded
the signal.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM killed: many schedulers start a job with a code above 128 again."""


class Preempted(SystemExit):
    """Training was stopped by SIGTERM, after it has saved a checkpoint. A script that does not catch it exits with code 143.

    Attributes:
        step: the last step.
        losses: of the steps of this process.
    """

    def __init__(self, step: int, losses: list[float]) -> None:
        super().__init__(EXIT_CODE)
        self.step, self.losses = step, losses


class Notice:
    """In its block, SIGTERM sets ``received``. Afterwards the previous handler is restored.

    Only the main thread of a process may set a signal handler. In other threads it does nothing.
    """

    def __init__(self) -> None:
        self.received = False

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __enter__(self) -> Notice:
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:
            self._handler_before = signal.signal(signal.SIGTERM, self._set)
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_main_thread:
            signal.signal(signal.SIGTERM, self._handler_before)
