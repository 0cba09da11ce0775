"""Where a rank's main thread is, seen from another of its threads: what the report of a hang is made of.

main thread      train.py ─ Job.step ─ Executor ─ the model's forward ─ view ─ torch.distributed.all_reduce
told of it                  step 7     action 1F2 ─ model.py:31 ──────────────  all_reduce over ranks 0 1
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
_PHASES = (  # the first that some frame is in
    (str(Path(_TORCH, "autograd", "graph.py")), "backward"),
    (str(Path(_TORCH, "optim")) + os.sep, "optimizer"),
    (str(Path(_TORCH, "nn", "modules", "module.py")), "forward"),
)
_DEEPEST = 40  # frames of a stack that are kept


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is.

    Attributes:
        step: the step that it began last; 0: none yet.
        action: of the pipeline's schedule, ``1F2``; empty without a pipeline.
        phase: forward, backward, optimizer; else the method of ``Job`` that runs; empty outside of a job.
        collective: what it waits in: ``all_reduce``; empty where it is in none.
        group: the ranks that take part, where that is known.
        line: the innermost line that is neither torch's, Python's nor this library's.
        within: the innermost line of this library; empty where there is none.
        recorded: the last collective that torch's flight recorder has, and what became of it.
        entered: collectives that this rank has entered in all; 0 where nobody counts.
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
    """A call and the line it is at: where an error passed through, not where its frame has come to since."""

    of: FrameType
    line: int

    @property
    def file(self) -> str:
        return self.of.f_code.co_filename

    @property
    def name(self) -> str:
        return self.of.f_code.co_name

    @property
    def plumbing(self) -> bool:
        """Whether it is Python's, torch's or this library's."""
        return self.file.startswith((_TORCH, _OURS, "<")) or self.of_python

    @property
    def of_python(self) -> bool:
        return self.file.startswith(_PYTHON) and "-packages" not in self.file

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


def whereabouts(
    step: int = 0, action: str = "", waits_for: Ranks = (), error: BaseException | None = None
) -> Whereabouts:
    """Where the main thread of this process is now; called from another thread.

    Args:
        waits_for: the ranks whose sends the pipeline's action needs.
        error: what it raised: then, where it was raised.
    """
    frames = _frames() if error is None else _raised(error)
    collective, group = _collective(frames, waits_for)
    last = private.last_collective()
    return Whereabouts(
        step=step,
        action=action,
        phase=_phase(frames),
        collective=collective or _on_device(last),
        group=group,
        line=_line([f for f in frames if not f.plumbing] or frames[:1]),
        within=_line([f for f in frames if f.file.startswith(_OURS)]),
        recorded=_recorded(last),
        entered=private.collectives_entered(),
        stack=tuple(map(_spelled, reversed(frames[:_DEEPEST]))),
    )


def _on_device(last: dict[str, Any]) -> str:
    """The collective that a device is in; empty if it is in none, or in one of gloo's, which the main thread itself is in.

    The host goes on then, until it reads a value (``.tolist()``): it waits there for all that the device has to do before.
    """
    kind, _, name = str(last.get("profiling_name", "")).partition(":")
    ended = last.get("retired") or last.get("state") == "completed"
    return f"{name} on the device" if kind == "nccl" and not ended else ""


def recorded() -> str:
    """The last collective in torch's flight recorder, in words; empty where it has none (TORCH_FR_BUFFER_SIZE=0)."""
    return _recorded(private.last_collective())


def _recorded(last: dict[str, Any]) -> str:
    if not last:
        return ""
    number = last.get("collective_seq_id") or last.get("p2p_seq_id")
    shapes = " ".join("×".join(map(str, s)) or "no dims" for s in last.get("input_sizes", ())[:3])
    group = " ".join(map(str, last.get("process_group", ())))
    state = "completed" if last.get("retired") else last.get("state", "")
    return f"{last.get('profiling_name', '')} number {number} of group {group} ({shapes}): {state}"


def _frames() -> list[Frame]:
    """Of the main thread, the innermost first. On a GPU a backward runs in a thread of its own: if the main thread waits for
    one that is in a collective, the frames of that one come first."""
    of_thread = sys._current_frames()
    main = threading.main_thread().ident
    frames = _outward(of_thread.get(main or 0))
    if any(f.name == "_engine_run_backward" for f in frames[:2]):
        watcher = threading.get_ident()
        others = [_outward(f) for ident, f in of_thread.items() if ident not in (main, watcher)]
        frames = next((o for o in others if o and o[0].file.startswith(_DISTRIBUTED)), []) + frames
    return frames


def _raised(error: BaseException) -> list[Frame]:
    """Where an error, or the first cause of it, comes from; the innermost frame first."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(Frame(trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1]


def _outward(frame: FrameType | None) -> list[Frame]:
    frames = []
    while frame is not None:
        frames.append(Frame(frame, frame.f_lineno))
        frame = frame.f_back
    return frames


def _collective(frames: list[Frame], waits_for: Ranks) -> tuple[str, Ranks]:
    """What the innermost frames wait in, and with whom."""
    inner = [f for f in frames if not f.file.endswith("c10d_logger.py")]
    while inner and inner[0].of_python:  # locks and the like
        inner = inner[1:]
    if not inner:
        return "", ()
    if inner[0].file == _TRANSFERS and inner[0].name == "_received":
        return "receive", waits_for
    if not inner[0].file.startswith(_DISTRIBUTED):
        return ("wait", ()) if ".wait(" in inner[0].source else ("", ())
    named = inner[0]
    for frame in inner:
        if frame.file != _COLLECTIVES:
            break
        named = frame if not frame.name.startswith("_") else named
    return named.name, _ranks_of(named)


def _ranks_of(frame: Frame) -> Ranks:
    """The ranks of the group that a function of torch.distributed was given; the peer alone of a send or a receive."""
    try:
        import torch.distributed as dist

        arguments = frame.of.f_locals
        for peer in ("src", "dst") if frame.name in ("send", "recv", "isend", "irecv") else ():
            if isinstance(arguments.get(peer), int):
                return (arguments[peer],)
        if "group" not in arguments:
            return ()
        return tuple(dist.get_process_group_ranks(arguments["group"] or dist.group.WORLD))
    except Exception:  # a report without the ranks is better than none
        return ()


def _phase(frames: list[Frame]) -> str:
    job = [f.name for f in frames if f.file == _JOB]
    files = [f.file for f in frames]
    for place, phase in _PHASES:
        if any(file.startswith(place) for file in files):
            return phase
    return next((name for name in reversed(job) if not name.startswith("_")), "")


def _line(frames: list[Frame]) -> str:
    if not frames:
        return ""
    place = source_place(frames[0].file, frames[0].line)
    return f"{place} in {frames[0].name}: {frames[0].source[:80]}".rstrip(": ")


def _spelled(frame: Frame) -> str:
    return f"{frame.file}:{frame.line} in {frame.name}: {frame.source}".rstrip(": ")
