"""``Transfers``: sends and receives between the stages of different ranks in one step.

Each rank sends values to the rank of the other stage that has the same coordinates on all other axes. No action waits for a
send. A receive fills buffers while other actions run; an action waits for the receives that it needs.

All ranks of a tp group have the same full values. Of a large one each sends its slice, and the ranks that receive gather the
slices over tp. So it is sent once, and not once by each of them (Narayanan et al., arXiv 2104.04473, section 4.1).

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
from meshwright.runtime.branches.exchange import cast, sent_dtype
from meshwright.runtime.groups import Groups, as_bytes
from meshwright.runtime.pipeline.flight import Flight
from meshwright.runtime.pipeline.program import Program
from meshwright.schedule import TRANSFERS, Action
from meshwright.spmd.comm import gather_single
from meshwright.watch.timer import CommunicationTimer

# bytes from which on a value is sent in slices: an all-gather has a time of its own, however little it moves
LARGE = 1 << 20
_WHICH = -1  # in place of the number of a value: a message that says which gradients exist


@dataclass
class Traffic:
    """Counts of a rank's communication with other stages.

    Attributes:
        waiting: measures the time of waiting for other ranks.
        sends: number of messages so far.
        bytes: size of all messages so far.
        awaited: the stages from which the rank receives now; a watchdog reads it from another thread.
    """

    waiting: CommunicationTimer
    sends: int = 0
    bytes: int = 0
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Arriving:
    """A value that is being received.

    Attributes:
        value: the tensor that will hold it.
        buffer: its bytes.
        part: the bytes that are sent to this rank: ``buffer`` itself, or a slice of their number.
    """

    number: int
    value: Tensor
    buffer: Tensor
    part: Tensor
    work: Any


class Transfers:
    """The sends and receives of one step.

    Args:
        groups: process groups and device.
        stage_rank: stage → index of its rank on the pipeline axis.
        programs: of the microbatches.
        flights: (stage, microbatch) → its tensors on this rank.
        traffic: counts, which are updated.
        casts: whether values are cast to the dtype in which others wait for them: a trial may compute in a wider one.
        wide: whether values with fractions are sent in float64.
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
        wide: bool = False,
    ) -> None:
        self._group, self._device, self._stage_rank = groups.pipeline, groups.device, stage_rank
        self._host_group = groups.hosts.get("pp")  # None: there are no other stages
        # Submeshes of branches have values on some ranks of tp only.
        self._sharers = groups.mesh.axis_size("tp") if len(groups.meshes) == 1 else 1
        self._tp = groups.tp if self._sharers > 1 else None
        self._tp_rank = groups.tp_rank
        self._programs, self._flights, self._traffic = programs, flights, traffic
        self._casts, self._wide = casts, wide
        self._timeout = None if self._host_group is None else timeout_of(self._host_group)
        self._arriving: dict[Action, list[_Arriving]] = {}
        self._sent: list[tuple[Any, Tensor]] = []

    def begin(self, action: Action) -> None:
        """Begins a send or a receive."""
        flight = self._flights[action.stage, action.microbatch]
        if action.kind == "SEND_F":
            self._send_values(action, flight)
        elif action.kind == "SEND_B":
            self._send_gradients(action, flight)
        else:
            self._receive(action)

    def wait_for(self, action: Action) -> Iterator[Action]:
        """Waits for the receives that an action needs, and yields each when it has ended."""
        if action.kind in TRANSFERS or action.kind == "W":
            return
        flight, kind = self._flights[action.stage, action.microbatch], "RECV_F" if action.kind == "F" else "RECV_B"
        for transfer in self._receives_of(action):
            if transfer.kind == kind:
                self._traffic.awaited = (transfer.other or 0,)
                flight.arrived += self._received(self._arriving[transfer])
                del self._arriving[transfer]
                yield transfer

    def end(self) -> None:
        """Call after the last action: waits until all sends have been received."""
        for work, tensor in self._sent:
            self._wait(work, tensor)
        self._traffic.awaited = ()

    def _wait(self, work: Any, t: Tensor) -> None:
        """Waits until a transfer has ended. On the CPU, with the timeout of collectives: otherwise a receive of gloo takes the
        timeout that the group was created with, torch's 30 minutes. On a device, a timeout would make the host wait."""
        if t.device.type == "cpu" and self._timeout is not None:
            work.wait(self._timeout)
        else:
            work.wait()

    def others(self, action: Action) -> list[int]:
        """The stages that an action waits for, or sends to."""
        return sorted({a.other for a in (*self._receives_of(action), action) if a.other is not None})

    def _receives_of(self, action: Action) -> list[Action]:
        """The receives that have begun for the stage and microbatch of an action."""
        return [a for a in self._arriving if (a.stage, a.microbatch) == (action.stage, action.microbatch)]

    def _numbers(self, action: Action) -> tuple[int, ...]:
        """The numbers of the values that a transfer moves."""
        program, other = self._programs[action.microbatch], action.other
        assert other is not None
        edge = (action.stage, other) if action.kind in ("SEND_F", "RECV_B") else (other, action.stage)
        if edge not in program.crossing.values:
            return ()
        return program.crossing.values[edge] if action.kind.endswith("F") else program.differentiable(edge)

    # --- sends ------------------------------------------------------------------------------------------------------

    def _group_for(self, t: Tensor) -> dist.ProcessGroup | None:
        """The process group to send a tensor over: CPU tensors go over a group of hosts."""
        return self._host_group if t.device.type == "cpu" else self._group

    def _send(self, action: Action, tensors: list[Tensor]) -> None:
        """Begins to send tensors to another stage, and releases those of earlier sends that have ended."""
        target = self._stage_rank[action.other or 0]
        for t in tensors:
            t = self._slice_of_rank(as_bytes(t))
            self._sent.append((dist.isend(t, group=self._group_for(t), group_dst=target), t))
            self._traffic.sends += 1
            self._traffic.bytes += t.numel() * t.element_size()
        self._sent = [(work, tensor) for work, tensor in self._sent if not is_done(work)]

    def _slice_of_rank(self, t: Tensor) -> Tensor:
        """The bytes of a value that this rank sends, or receives, for its tp group."""
        if self._sharers == 1 or t.numel() < LARGE or t.numel() % self._sharers:
            return t
        return t.chunk(self._sharers)[self._tp_rank]

    def _send_values(self, action: Action, flight: Flight) -> None:
        """Sends this stage's outputs. Raises PathError if one has another shape or dtype than was recorded."""
        graph, tensors = self._programs[action.microbatch].graph, []
        for n in self._numbers(action):
            value, t = graph.values[n], flight.outputs[n]
            dtype = sent_dtype(value, wide=self._wide)
            t = cast(t, dtype) if self._casts else t
            if (tuple(t.shape), t.dtype) != (value.shape, dtype):
                event = graph.events[value.position]
                raise PathError(
                    f"{event.function} of {spelled(event.path)} gave {tuple(t.shape)} {t.dtype}, but {value.shape} "
                    f"torch.{value.dtype} was recorded ({event.line}): the other stage waits for that"
                )
            # A copy, if the forward writes to its memory later: the next microbatch must not change a tensor while it is sent.
            # Of its values alone: autograd refuses a view whose base was written to, which no later code can use.
            tensors.append(t.data.clone() if value.storage in graph.written else t)
        self._send(action, tensors)

    def _send_gradients(self, action: Action, flight: Flight) -> None:
        """Sends the gradients of received values; zeros for a value without one, after a message that says which have one."""
        numbers, values = self._numbers(action), self._programs[action.microbatch].graph.values
        grads = [flight.input_grads.pop(n) for n in numbers]
        if numbers and self._may_lack(action):
            exists = [grad is not None for grad in grads]
            self._send(action, [torch.tensor(exists, dtype=torch.uint8, device="cpu")])
        self._send(
            action, [self.empty(values[n]).zero_() if g is None else g for n, g in zip(numbers, grads, strict=True)]
        )

    def _may_lack(self, action: Action) -> bool:
        """Whether a value may have no gradient at all, which is not the same as zeros. Then a message says which have one."""
        return self._programs[action.microbatch].graph.may_lack_gradients

    # --- receives ---------------------------------------------------------------------------------------------------

    def empty(self, value: Value) -> Tensor:
        """Memory for a value, not filled."""
        return torch.empty(value.shape, dtype=sent_dtype(value, wide=self._wide), device=self._device)

    def _receive(self, action: Action) -> None:
        """Begins to receive the values or gradients of a transfer into new buffers."""
        source, values = self._stage_rank[action.other or 0], self._programs[action.microbatch].graph.values
        numbers = self._numbers(action)
        buffers = [(n, self.empty(values[n])) for n in numbers]
        if action.kind == "RECV_B" and numbers and self._may_lack(action):
            exists = torch.empty(len(numbers), dtype=torch.uint8, device="cpu")
            buffers.insert(0, (_WHICH, exists))
        self._arriving[action] = [self._begin_receiving(n, buffer, source) for n, buffer in buffers]

    def _begin_receiving(self, number: int, value: Tensor, source: int) -> _Arriving:
        """Begins to receive a value, or this rank's slice of it."""
        buffer = as_bytes(value)
        local_slice = self._slice_of_rank(buffer)
        part = buffer if local_slice is buffer else torch.empty_like(local_slice)
        return _Arriving(number, value, buffer, part, dist.irecv(part, group=self._group_for(value), group_src=source))

    def _received(self, arriving: Sequence[_Arriving]) -> list[tuple[int, Tensor]]:
        """Waits for the buffers of a receive. Returns (number, tensor) of the values, or of the gradients that exist.

        The watchdog knows this function by its name (``watch/location.py``).
        """
        tensors = []
        for a in arriving:
            # A trial, whose modes are on, computes in a wider type: the value would seem to have more bytes than were received.
            with self._traffic.waiting.on(), without_modes():
                self._wait(a.work, a.part)
                if a.part is not a.buffer:
                    with without_modes():  # the mode of a trial would make these bytes float64
                        gather_single(a.buffer, a.part, group=self._tp)
            tensors.append((a.number, a.value))
        if tensors and tensors[0][0] == _WHICH:
            exists = tensors.pop(0)[1].tolist()
            tensors = [tensor for tensor, does_exist in zip(tensors, exists, strict=True) if does_exist]
        return tensors
