"""``StageValues``: this rank's tensors for the values of one microbatch's forward through one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import overload

from torch import Tensor

from meshwright.calls.placeholder import PathError
from meshwright.calls.stage import StageProgram
from meshwright.graph import Call, spelled
from meshwright.regions import Join


class StageValues:
    """This rank's tensors for values, by the number of the value in the recorded graph.

    A place is the number of a submesh; 0 is the trunk, the others are branches. The tables, with their invariants:

        _tensors     number → this rank's tensor: received, or made by an event or call of this stage. It equals the tensor of
                     one device at this point of the program: if its memory is written, the value gets another number, under
                     which the tensor is entered again. Never a ``RemoteTensor``.
        _made        (number, branch) → the tensor with which a branch computes for a value that it made: the tensor before
                     the join, or this rank's rows if data ranks of the branch have some rows each.
        _forked      branch → number → the tensor with which the branch computes for a value of the place around it. Only
                     forks enter it.
        _arriving    number → a function that waits for it, for tensors in ``_tensors`` or ``_forked`` whose memory is not
                     filled yet.
        missing      numbers in ``program.out`` that do not exist yet. It only shrinks.
        passed       the last position that the forward has passed, on this rank or as a stub. It only grows.
    """

    def __init__(self, program: StageProgram) -> None:
        self._program = program
        self._tensors: dict[int, Tensor] = {}
        self._made: dict[tuple[int, int], Tensor] = {}
        self._forked: dict[int, dict[int, Tensor]] = {}
        self._arriving: dict[int, Callable[[], None]] = {}
        self.missing = set(program.out)
        self.passed = -1

    def __contains__(self, number: int) -> bool:
        return number in self._tensors

    def __getitem__(self, number: int) -> Tensor:
        return self._tensors[number]

    def __setitem__(self, number: int, t: Tensor) -> None:
        self._tensors[number] = t

    @overload
    def get(self, number: int) -> Tensor | None: ...
    @overload
    def get(self, number: int, default: Tensor) -> Tensor: ...
    def get(self, number: int, default: Tensor | None = None) -> Tensor | None:
        return self._tensors.get(number, default)

    @property
    def waits(self) -> bool:
        """Whether the memory of some value is not filled yet."""
        return bool(self._arriving)

    @property
    def complete(self) -> bool:
        """Whether the forward may stop: all values that other stages take exist, and all lasting changes are made."""
        return not self.missing and self.passed >= self._program.last_change

    def note_passed(self, position: int) -> None:
        """Notes that the forward has passed a position."""
        self.passed = max(self.passed, position)

    # --- new values -------------------------------------------------------------------------------------------------

    def add(self, number: int, t: Tensor, place: int) -> None:
        """Adds a value that this rank made, in a place."""
        if self._program.divides(place):
            self._made[number, place] = t
        else:
            self._tensors[number] = t
        if number not in self._program.joined:
            self.missing.discard(number)

    def fork(self, number: int, branches: Iterable[int], tensors: Mapping[tuple[int, int], Tensor]) -> None:
        """Adds the tensors of a fork: ``tensors[number, branch]`` for a value of the place around each of these branches."""
        for branch in branches:
            self._forked.setdefault(branch, {})[number] = tensors[number, branch]

    def join(
        self, move: Join, branch_values: dict[int, Tensor], arriving: Iterable[int], wait: Callable[[], None]
    ) -> None:
        """Adds the values of a join, which makes values of branches values of the place around them.

        Args:
            branch_values: those that this rank's branches made.
            arriving: those that other ranks send; their memory is filled when ``wait`` has returned.
        """
        self._made |= {
            (n, b): branch_values[n] for n, b in move.values if n in branch_values and n in move.used_by_maker
        }
        self._arriving |= dict.fromkeys(arriving, wait)
        self.missing -= {n for n, _ in move.values}

    # --- uses of values -----------------------------------------------------------------------------------------------

    def branch_tensor(self, number: int, place: int) -> tuple[Tensor | None, bool]:
        """(the tensor with which a branch computes for a value, whether that branch, or one around it, made the value).

        (None, False) if the branch computes with the tensor of the trunk.
        """
        if place and self._program.branches is not None:
            for p in reversed(self._program.branches.chain(place)):
                if number in self._forked.get(p, ()):
                    return self._forked[p][number], False
                if (number, p) in self._made:
                    return self._made[number, p], True
        return None, False

    def awaited_branch_tensor(self, number: int, place: int) -> Tensor | None:
        """The tensor of ``branch_tensor``, to be used now: waits for the value if it is on its way."""
        tensor, made_in_branch = self.branch_tensor(number, place)
        if not made_in_branch:
            self.wait_for(number)
        return tensor

    def wait_for_inputs(self, call: Call, place: int) -> None:
        """Waits for all values that a call takes, as arguments or otherwise."""
        for n in list(self._arriving):
            if any(call.start <= p < call.stop for p in self._program.graph.takers.get(n, ())):
                self.awaited_branch_tensor(n, place)

    def wait_for_all(self, place: int) -> None:
        """Waits for all values that are on their way."""
        for n in list(self._arriving):
            self.awaited_branch_tensor(n, place)

    def wait_for(self, number: int) -> None:
        """Waits for a value that is on its way, and so for all that arrive together with it."""
        if (wait := self._arriving.get(number)) is not None:
            wait()
            self._arriving = {n: w for n, w in self._arriving.items() if w is not wait}

    def required(self, number: int, branch_tensor: Tensor | None) -> Tensor:
        """The tensor of a value in a place: ``branch_tensor`` if the branch has one, else this rank's.

        Raises:
            PathError: this rank has none.
        """
        if branch_tensor is not None:
            return branch_tensor
        if number not in self._tensors:
            graph = self._program.graph
            event = graph.events[graph.values[number].position]
            raise PathError(
                f"there is no {event.function} of {spelled(event.path)} ({event.line}), which the recorded forward ran"
            )
        return self._tensors[number]
