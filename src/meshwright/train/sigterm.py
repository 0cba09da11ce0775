"""SIGTERM: a scheduler takes the machine away soon, or a launcher ends a group of processes.

    signal ─► noted ─► at the step's end all ranks agree ─► saved ─► exit code 143

Python runs a handler when the main thread comes back from C, so a rank that waits in a collective notes it after that. A
launcher's own patience bounds all of it: torchrun kills 30 seconds after it has passed the signal on.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
"""As a process killed by SIGTERM has it: schedulers take codes from 128 on for what is worth starting again."""


class Preempted(SystemExit):
    """Training was told to stop, and has saved. A script that lets it pass ends with exit code 143."""

    def __init__(self, step: int, losses: list[float]) -> None:
        super().__init__(EXIT_CODE)
        self.step, self.losses = step, losses


class Notice:
    """Notes SIGTERM while it is entered; what handled the signal before does so again after.

    Only a process's main thread may handle signals: entered in another, it notes nothing.
    """

    def __init__(self) -> None:
        self.given = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.given = True

    def __enter__(self) -> Notice:
        self._here = threading.current_thread() is threading.main_thread()
        if self._here:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._here:
            signal.signal(signal.SIGTERM, self._before)
