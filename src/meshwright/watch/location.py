"""``whereabouts``: the location of a rank's main thread, read by another thread, for the report of a hang.

main thread      train.py ─ Job.step ─ Executor ─ the model's forward ─ SPMD mode ─ torch.distributed.all_reduce
report                      step 7     action 1F2 ─ model.py:31 ───────────────────  all_reduce with ranks 0 1
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from meshwright import private
from meshwright.errors import source_place

Ranks = tuple[int, ...]

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent.parent) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_COLLECTIVES = str(Path(_TORCH, "distributed", "distributed_c10d.py"))
_DISTRIBUTED = str(Path(_TORCH, "distributed")) + os.sep
_JOB = str(Path(_OURS, "runtime", "job.py"))
_TRANSFERS = str(Path(_OURS, "runtime", "pipeline", "transfers.py"))
_PHASES = (  # (file or folder, phase); the phase is that of the first one that a frame is in
    (str(Path(_TORCH, "autograd", "graph.py")), "backward"),
    (str(Path(_TORCH, "optim")) + os.sep, "optimizer"),
    (str(Path(_TORCH, "nn", "modules", "module.py")), "forward"),
)
_DEEPEST = 40  # most frames of a stack, the innermost: a store's value stays small
_SOURCE = 80  # most characters of a source line
_SHAPES = 3  # most shapes of a collective's inputs


@dataclass(frozen=True)
class Whereabouts:
    """The location of a rank's main thread.

    Attributes:
        step: the step that it began last; 0 before the first one.
        action: of the pipeline's schedule, such as ``1F2``; empty without a pipeline.
        phase: ``forward``, ``backward``, ``optimizer``, or the method of ``Job`` that runs; empty outside of a job.
        collective: the collective that it waits in, such as ``all_reduce``; empty if it is in none.
        group: the ranks that take part in the collective, if known.
        line: the innermost line of code that is neither torch's, Python's nor this library's.
        within: the innermost line of this library; empty if there is none.
        recorded: the last collective in torch's flight recorder, with its state.
        entered: number of collectives that this rank has entered; 0 if they are not counted.
        stack: of the main thread, the outermost frame first.
    """

    step: int = 0
    action: str = ""
    phase: str = ""
    collective: str = ""
    group: Ranks = ()
    line: str = ""
    within: str = ""
    recorded: str = ""
    entered: int = 0
    stack: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> Whereabouts:
        return cls(**{**data, "group": tuple(data["group"]), "stack": tuple(data["stack"])})


class Frame(NamedTuple):
    """A frame and its line. For an error, the line that it passed through, as the frame may have moved on since.

    Attributes:
        frame: Python's frame.
        line: number of the line.
    """

    frame: FrameType
    line: int

    @property
    def file(self) -> str:
        return self.frame.f_code.co_filename

    @property
    def name(self) -> str:
        return self.frame.f_code.co_name

    @property
    def is_library(self) -> bool:
        """Whether the code is Python's, torch's or this library's."""
        return self.file.startswith((_TORCH, _OURS, "<")) or self.is_python

    @property
    def is_python(self) -> bool:
        """Whether the code is of Python's standard library."""
        return self.file.startswith(_PYTHON) and "-packages" not in self.file

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


def whereabouts(
    step: int = 0, action: str = "", waits_for: Ranks = (), error: BaseException | None = None
) -> Whereabouts:
    """The location of this process's main thread. May be called from another thread.

    Args:
        step, action: of the main thread.
        waits_for: the ranks from which the pipeline's action receives.
        error: an exception that the main thread raised. Then the location is that of the exception.
    """
    frames = _main_thread_frames() if error is None else _frames_of(error)
    collective, group = _collective(frames, waits_for)
    last = private.last_collective()
    return Whereabouts(
        step=step,
        action=action,
        phase=_phase(frames),
        collective=collective or _on_device(last),
        group=group,
        line=_line([f for f in frames if not f.is_library] or frames[:1]),
        within=_line([f for f in frames if f.file.startswith(_OURS)]),
        recorded=_recorded(last),
        entered=private.collectives_entered(),
        stack=tuple(map(_frame_text, reversed(frames[:_DEEPEST]))),
    )


def _on_device(last: dict[str, Any]) -> str:
    """The last NCCL collective, if the device has not completed it; else empty. (In a gloo collective the main thread waits.)

    The host has queued it and continued, up to a read of a value (``.tolist()``), which waits for all queued work.
    """
    kind, _, name = str(last.get("profiling_name", "")).partition(":")
    ended = last.get("retired") or last.get("state") == "completed"
    return f"{name} on the device" if kind == "nccl" and not ended else ""


def recorded() -> str:
    """The last collective in torch's flight recorder, as text; empty if it has none (TORCH_FR_BUFFER_SIZE=0)."""
    return _recorded(private.last_collective())


def _recorded(last: dict[str, Any]) -> str:
    """An entry of torch's flight recorder as text: function, number, group, shapes, state."""
    if not last:
        return ""
    number = last.get("collective_seq_id") or last.get("p2p_seq_id")
    shapes = " ".join("×".join(map(str, shape)) or "no dims" for shape in last.get("input_sizes", ())[:_SHAPES])
    group = " ".join(map(str, last.get("process_group", ())))
    state = "completed" if last.get("retired") else last.get("state", "")
    return f"{last.get('profiling_name', '')} number {number} of group {group} ({shapes}): {state}"


def _main_thread_frames() -> list[Frame]:
    """The frames of the main thread, the innermost first.

    On a GPU, autograd runs a backward in another thread. If the main thread waits for such a thread, and that is in a
    collective, the frames of that thread come first.
    """
    by_thread = sys._current_frames()
    main = threading.main_thread().ident
    frames = _outward(by_thread.get(main or 0))
    waits_for_backward = any(frame.name == "_engine_run_backward" for frame in frames[:2])
    if waits_for_backward:
        this_thread = threading.get_ident()
        others = [_outward(frame) for ident, frame in by_thread.items() if ident not in (main, this_thread)]
        in_collective = [stack for stack in others if stack and stack[0].file.startswith(_DISTRIBUTED)]
        frames = (in_collective[0] if in_collective else []) + frames
    return frames


def _frames_of(error: BaseException) -> list[Frame]:
    """The frames that an exception, or its first cause, passed through, the innermost first."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(Frame(trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1]


def _outward(frame: FrameType | None) -> list[Frame]:
    """A frame and its callers, the innermost first."""
    frames = []
    while frame is not None:
        frames.append(Frame(frame, frame.f_lineno))
        frame = frame.f_back
    return frames


def _collective(frames: list[Frame], waits_for: Ranks) -> tuple[str, Ranks]:
    """(collective that the innermost frames wait in, its ranks); both are empty if they are in none.

    Args:
        waits_for: the ranks from which the pipeline's action receives.
    """
    inner = [frame for frame in frames if not frame.file.endswith("c10d_logger.py")]
    while inner and inner[0].is_python:  # locks, for example
        inner = inner[1:]
    if not inner:
        return "", ()
    if any(frame.file == _TRANSFERS and frame.name == "_received" for frame in inner[:2]):
        return "receive", waits_for  # waits by a function of its own, for the timeout
    if not inner[0].file.startswith(_DISTRIBUTED):
        return ("wait", ()) if ".wait(" in inner[0].source else ("", ())
    public = inner[0]  # the outermost public function of torch.distributed
    for frame in inner:
        if frame.file != _COLLECTIVES:
            break
        if not frame.name.startswith("_"):
            public = frame
    return public.name, _ranks_of(public)


def _ranks_of(frame: Frame) -> Ranks:
    """The ranks of the group of a running function of torch.distributed; of a send or receive, the other rank alone."""
    try:
        import torch.distributed as dist

        arguments = frame.frame.f_locals
        for peer in ("src", "dst") if frame.name in ("send", "recv", "isend", "irecv") else ():
            if isinstance(arguments.get(peer), int):
                return (arguments[peer],)
        if "group" not in arguments:
            return ()
        return tuple(dist.get_process_group_ranks(arguments["group"] or dist.group.WORLD))
    except Exception:  # a report without the ranks is better than none
        return ()


def _phase(frames: list[Frame]) -> str:
    """See ``Whereabouts.phase``."""
    files = [frame.file for frame in frames]
    for path, phase in _PHASES:
        if any(file.startswith(path) for file in files):
            return phase
    methods_of_job = [frame.name for frame in frames if frame.file == _JOB]
    return next((name for name in reversed(methods_of_job) if not name.startswith("_")), "")


def _line(frames: list[Frame]) -> str:
    """The source line of the first frame, as text; empty if there is no frame."""
    if not frames:
        return ""
    position = source_place(frames[0].file, frames[0].line)
    return f"{position} in {frames[0].name}: {frames[0].source[:_SOURCE]}".rstrip(": ")


def _frame_text(frame: Frame) -> str:
    return f"{frame.file}:{frame.line} in {frame.name}: {frame.source}".rstrip(": ")
