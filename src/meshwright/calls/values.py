"""``StageValues``: the tensors that stand, on this rank, for the values of one microbatch's forward through one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from meshwright.calls.placeholder import PathError
from meshwright.calls.stage import StageProgram
from meshwright.graph import Call, spelled
from meshwright.regions import Join


class StageValues:
    """What the values of a forward are here, by their numbers in the recorded graph.

    Its tables, each with what holds of it throughout:

        _here        number → the tensor that is this value here: received, or given by an event or call of this stage. It
                     holds what one device's holds at this point of the program: a write to its memory gives the value
                     another number, under which the same tensor is entered. Never a ``RemoteTensor``.
        _kept        (number, branch) → what a branch goes on with for a value that it made itself: the tensor itself before a
                     join, or its rows of it where its data ranks have some each.
        _forked      branch → number → what it computes with for a value of the place around it. Entered by forks only.
        _arriving    number → what waits for it: values that are in ``_here`` or ``_forked``, whose memory is not filled yet.
        missing      numbers of ``program.out`` that are not there yet. Shrinks only.
        _passed      the last position that the forward has come past, here or not. Grows only.
    """

    def __init__(self, program: StageProgram) -> None:
        self._program = program
        self._here: dict[int, Tensor] = {}
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._forked: dict[int, dict[int, Tensor]] = {}
        self._arriving: dict[int, Callable[[], None]] = {}
        self.missing = set(program.out)
        self._passed = -1

    def __contains__(self, number: int) -> bool:
        return number in self._here

    def __getitem__(self, number: int) -> Tensor:
        return self._here[number]

    def __setitem__(self, number: int, t: Tensor) -> None:
        self._here[number] = t

    def get(self, number: int, default: Tensor) -> Tensor:
        return self._here.get(number, default)

    @property
    def waits(self) -> bool:
        """Whether memory of a value is still to be filled."""
        return bool(self._arriving)

    @property
    def complete(self) -> bool:
        """Whether all that others take is there, and all that lasts is changed: nothing of the forward is missed then."""
        return not self.missing and self._passed >= self._program.last_change

    def come_past(self, position: int) -> None:
        """The forward has come past a position."""
        self._passed = max(self._passed, position)

    # --- what is made -------------------------------------------------------------------------------------------------

    def enter(self, number: int, t: Tensor, place: int) -> None:
        """A value was made here, in a place."""
        if self._program.divides(place):
            self._kept[number, place] = t
        else:
            self._here[number] = t
        if number not in self._program.joined:
            self.missing.discard(number)

    def fork(self, number: int, branches: Iterable[int], tensors: Mapping[tuple[int, int], Tensor]) -> None:
        """Branches compute with what is given to each of them, for a value of the place around them."""
        for branch in branches:
            self._forked.setdefault(branch, {})[number] = tensors[number, branch]

    def join(self, move: Join, made_here: dict[int, Tensor], arriving: Iterable[int], wait: Callable[[], None]) -> None:
        """Values of branches are those of the place around, too.

        Args:
            made_here: those that this rank's branches made.
            arriving: those whose memory is filled by others, and not before ``wait`` has returned.
        """
        self._kept |= {(n, b): made_here[n] for n, b in move.values if n in made_here and n in move.kept}
        self._arriving |= dict.fromkeys(arriving, wait)
        self.missing -= {n for n, _ in move.values}

    # --- what is taken ------------------------------------------------------------------------------------------------

    def made_in(self, number: int, place: int) -> Tensor | None:
        """What a place made for a value, if this rank has it."""
        return self._kept.get((number, place), self._here.get(number))

    def of_branch(self, number: int, place: int) -> tuple[Tensor | None, bool]:
        """What a branch, or one around it, computes with for a value, and whether it made that itself; None if that is what
        all have."""
        if place and self._program.branches is not None:
            for p in reversed(self._program.branches.chain(place)):
                if number in self._forked.get(p, ()):
                    return self._forked[p][number], False
                if (number, p) in self._kept:
                    return self._kept[number, p], True
        return None, False

    def taken(self, number: int, place: int) -> Tensor | None:
        """The same, for something that takes it now: waits for it if it is on its way."""
        tensor, made_there = self.of_branch(number, place)
        if not made_there:
            self.arrived(number)
        return tensor

    def taken_by(self, call: Call, place: int) -> None:
        """Waits for all that a call takes, however it comes by it."""
        for n in list(self._arriving):
            if any(call.start <= p < call.stop for p in self._program.graph.consumers.get(n, ())):
                self.taken(n, place)

    def arrived(self, number: int) -> None:
        """Waits for a value that is on its way, and with it for those that come with it."""
        if (wait := self._arriving.get(number)) is not None:
            wait()
            self._arriving = {n: w for n, w in self._arriving.items() if w is not wait}

    def inside(self, number: int, in_branch: Tensor | None) -> Tensor:
        """What stands for a value in a place that has it; ``in_branch``: there alone. Raises PathError if there is none."""
        if in_branch is not None:
            return in_branch
        if number not in self._here:
            graph = self._program.graph
            event = graph.events[graph.values[number].position]
            raise PathError(
                f"there is no {event.function} of {spelled(event.path)} ({event.line}), "
                "which was there when the forward was recorded"
            )
        return self._here[number]
