"""``Transfers``: what crosses between the stages of different ranks in one step.

A value crosses from each rank to the rank of the other stage with the same place on all other axes. Nothing waits for a send; a
receive fills buffers while other actions run, and an action waits for those that it needs.

The ranks of a tp group hold one value, whole. A large one they share: each sends its slice, and the ranks that receive gather
the slices over tp. So it crosses once, and not once for each of them (Narayanan et al., arXiv 2104.04473, section 4.1).

    rank 0 ─ bytes 0 … n/2 ─► rank 2 ┐
                                     ├ all-gather over tp: both have the value
    rank 1 ─ bytes n/2 … n ─► rank 3 ┘
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.calls.placeholder import PathError
from meshwright.graph import Value, spelled
from meshwright.private import is_done, timeout_of, without_modes
from meshwright.runtime.branches.exchange import as_recorded
from meshwright.runtime.groups import Groups, as_bytes
from meshwright.runtime.pipeline.flight import Flight
from meshwright.runtime.pipeline.program import Program
from meshwright.schedule import TRANSFERS, Action
from meshwright.spmd.comm import gather_single
from meshwright.watch.timer import CommunicationTimer

LARGE = 1 << 20  # bytes from which on a value is shared: an all-gather has a time of its own, however little it moves
_WHICH = -1  # stands for the number of a value, of a message that says which gradients there are


@dataclass
class Traffic:
    """What a rank has sent to other stages so far, and what it waits for.

    Attributes:
        sends: messages; ``bytes``: of them all.
        waiting: the time that it waited for other ranks.
        awaited: the stages whose sends it waits for now; a watch reads it from another thread.
    """

    waiting: CommunicationTimer
    sends: int = 0
    bytes: int = 0
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Arriving:
    """A value on its way.

    Attributes:
        value: what it will be; ``part``: the bytes that come to this rank, of all or of a slice.
    """

    number: int
    value: Tensor
    part: Tensor
    work: Any


class Transfers:
    """The sends and receives of one step.

    Args:
        stage_rank: stage → its rank of the pipeline axis.
        flights: what each stage of this rank holds of each microbatch.
        casts: whether what is sent is cast to the type that was recorded: a trial computes in a wider one.
    """

    def __init__(
        self,
        groups: Groups,
        stage_rank: Sequence[int],
        programs: Sequence[Program],
        flights: Mapping[tuple[int, int], Flight],
        traffic: Traffic,
        *,
        casts: bool,
    ) -> None:
        self._group, self._device, self._stage_rank = groups.pipeline, groups.device, stage_rank
        self._hosts = groups.hosts.get("pp")  # None: there are no other stages
        # Branches hold values on some ranks of tp alone.
        self._sharers = groups.mesh.axis_size("tp") if len(groups.meshes) == 1 else 1
        self._tp = groups.tp if self._sharers > 1 else None
        self._tp_rank = groups.tp_rank
        self._programs, self._flights, self._traffic, self._casts = programs, flights, traffic, casts
        self._patience = None if self._hosts is None else timeout_of(self._hosts)
        self._arriving: dict[Action, list[_Arriving]] = {}
        self._sent: list[tuple[Any, Tensor]] = []

    def begin(self, action: Action) -> None:
        """Begins a transfer."""
        flight = self._flights[action.stage, action.microbatch]
        if action.kind == "SEND_F":
            self._send_values(action, flight)
        elif action.kind == "SEND_B":
            self._send_gradients(action, flight)
        else:
            self._receive(action)

    def wait_for(self, action: Action) -> Iterator[Action]:
        """Until everything is there that an action needs of other ranks; each receive, when it has come."""
        if action.kind in TRANSFERS or action.kind == "W":
            return
        flight, kind = self._flights[action.stage, action.microbatch], "RECV_F" if action.kind == "F" else "RECV_B"
        for transfer in self._of(action):
            if transfer.kind == kind:
                self._traffic.awaited = (transfer.other or 0,)
                flight.arrived += self._received(self._arriving[transfer])
                del self._arriving[transfer]
                yield transfer

    def end(self) -> None:
        """After the last action: until what was sent has been received."""
        for work, sent in self._sent:
            self._wait(work, sent)
        self._traffic.awaited = ()

    def _wait(self, work: Any, t: Tensor) -> None:
        """Until a transfer has ended; between hosts as long as a collective waits. By itself, a receive of gloo's waits as long
        as the group was made with, which is torch's own 30 minutes. On a device, to name a time would have the host wait."""
        if t.device.type == "cpu" and self._patience is not None:
            work.wait(self._patience)
        else:
            work.wait()

    def others(self, action: Action) -> list[int]:
        """The stages that an action waits for, or sends to."""
        return sorted({a.other for a in (*self._of(action), action) if a.other is not None})

    def _of(self, action: Action) -> list[Action]:
        """The receives that have begun, of an action's stage and microbatch."""
        return [a for a in self._arriving if (a.stage, a.microbatch) == (action.stage, action.microbatch)]

    def _numbers(self, action: Action) -> tuple[int, ...]:
        """The values that a transfer moves."""
        program, other = self._programs[action.microbatch], action.other
        assert other is not None
        edge = (action.stage, other) if action.kind in ("SEND_F", "RECV_B") else (other, action.stage)
        if edge not in program.crossing.values:
            return ()
        return program.crossing.values[edge] if action.kind.endswith("F") else program.differentiable(edge)

    # --- sends ------------------------------------------------------------------------------------------------------

    def _among(self, t: Tensor) -> dist.ProcessGroup | None:
        """The group over which a tensor crosses: what hosts tell each other goes between hosts."""
        return self._hosts if t.device.type == "cpu" else self._group

    def _send(self, action: Action, tensors: list[Tensor]) -> None:
        home = self._stage_rank[action.other or 0]
        for t in tensors:
            t = self._mine(as_bytes(t))
            self._sent.append((dist.isend(t, group=self._among(t), group_dst=home), t))
            self._traffic.sends += 1
            self._traffic.bytes += t.numel() * t.element_size()
        self._sent = [(w, t) for w, t in self._sent if not is_done(w)]

    def _mine(self, t: Tensor) -> Tensor:
        """The bytes of a value that this rank sends, or receives, for its tp group."""
        if self._sharers == 1 or t.numel() < LARGE or t.numel() % self._sharers:
            return t
        return t.chunk(self._sharers)[self._tp_rank]

    def _send_values(self, action: Action, flight: Flight) -> None:
        graph, tensors = self._programs[action.microbatch].graph, []
        for n in self._numbers(action):
            value, t = graph.values[n], flight.outputs[n]
            t = as_recorded(t, value) if self._casts else t
            if (tuple(t.shape), str(t.dtype)) != (value.shape, f"torch.{value.dtype}"):
                event = graph.events[value.position]
                raise PathError(
                    f"{event.function} of {spelled(event.path)} gave {tuple(t.shape)} {t.dtype}, where {value.shape} "
                    f"torch.{value.dtype} was recorded ({event.line}): the other stage waits for that"
                )
            # What is written to later, in the next microbatch perhaps, must not change on its way.
            tensors.append(t.clone() if value.storage in graph.written else t)
        self._send(action, tensors)

    def _send_gradients(self, action: Action, flight: Flight) -> None:
        numbers, values = self._numbers(action), self._programs[action.microbatch].graph.values
        grads = [flight.back.pop(n) for n in numbers]
        if numbers and self._may_lack(action):
            there = [g is not None for g in grads]
            self._send(action, [torch.tensor(there, dtype=torch.uint8, device="cpu")])
        self._send(
            action, [self._empty(values[n]).zero_() if g is None else g for n, g in zip(numbers, grads, strict=True)]
        )

    def _may_lack(self, action: Action) -> bool:
        """Whether a value may get a gradient or none (not zeros): then it is told which do."""
        return self._programs[action.microbatch].graph.may_lack_gradients

    # --- receives ---------------------------------------------------------------------------------------------------

    def _empty(self, value: Value) -> Tensor:
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device=self._device)

    def _receive(self, action: Action) -> None:
        home, values = self._stage_rank[action.other or 0], self._programs[action.microbatch].graph.values
        numbers = self._numbers(action)
        buffers = [(n, self._empty(values[n])) for n in numbers]
        if action.kind == "RECV_B" and numbers and self._may_lack(action):
            there = torch.empty(len(numbers), dtype=torch.uint8, device="cpu")
            buffers.insert(0, (_WHICH, there))
        self._arriving[action] = [self._begin_receiving(n, b, home) for n, b in buffers]

    def _begin_receiving(self, number: int, value: Tensor, home: int) -> _Arriving:
        buffer = as_bytes(value)
        mine = self._mine(buffer)
        part = buffer if mine is buffer else torch.empty_like(mine)
        return _Arriving(number, value, part, dist.irecv(part, group=self._among(value), group_src=home))

    def _received(self, arriving: Sequence[_Arriving]) -> list[tuple[int, Tensor]]:
        entries = []
        for a in arriving:
            # A trial, whose modes are on, computes in a wider type: the value would seem to have more bytes than were received.
            with self._traffic.waiting.on(), without_modes():
                self._wait(a.work, a.part)
                if a.part.numel() < (whole := as_bytes(a.value)).numel():
                    gather_single(whole, a.part, group=self._tp)
            entries.append((a.number, a.value))
        if entries and entries[0][0] == _WHICH:
            there = entries.pop(0)[1].tolist()
            entries = [entry for entry, is_there in zip(entries, there, strict=True) if is_there]
        return entries
