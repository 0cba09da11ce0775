"""``ModelGraph``: a recorded forward: module calls, the torch functions in them, and the values between, in order.

It is recorded from the model's own forward on a sample that has only shapes (planning/capture.py). To cut a model into stages,
to balance them, and to know which values cross a cut, planning reads it. The words:

    call      one call of a module's forward. Its *path* has, for each module from the root on, its name and how often its
              parent had called it before
    event     one torch function that depends on parameters or values, or draws random numbers; the n-th in its call
    value     a tensor that an event made; other tensors follow from the batch alone, and every rank computes them
    position  the number of an event in the order of the program; a stage of a pipeline is an interval of positions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

Path = tuple[tuple[str, int], ...]
Segment = tuple[Path, int]
"""A segment that a checkpoint of the model recomputes: (path of the call in which it begins, its number in that call)."""

# Random functions for which the number of draws follows from shapes alone, not from values.
_DRAW_BY_SHAPE = frozenset(
    "rand_like randn_like randint_like bernoulli bernoulli_ normal normal_ uniform_ exponential_ geometric_ log_normal_ \
     cauchy_ random_ dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout gumbel_softmax".split()
)
# Functions that also draw the same number if their values are replaced by ones; and functions that take no values.
_DRAW_OF_ONES = _DRAW_BY_SHAPE | frozenset("multinomial rand randn randint randperm".split())

INTENSITY = 100  # floating-point operations in the time in which one byte is moved: the order of today's accelerators


@dataclass(frozen=True)
class Value:
    """A tensor between events.

    Attributes:
        position: the event that made it, or that last wrote to its memory.
        storage: equal for values that share memory on one device.
        name: equal for values that are one tensor object; a write to its memory makes a new value of it.
        is_leaf: its gradient goes no further back. (A view that was made under ``no_grad`` has a gradient if its base has.)
        strided: neither sparse nor nested. The shape of a nested tensor has 0 for sizes that are not one number.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int
    requires_grad: bool
    position: int
    storage: int
    name: int
    is_leaf: bool = False
    strided: bool = True

    @property
    def differentiable(self) -> bool:
        """Whether its gradient flows back to the inputs of the event that made it."""
        return self.requires_grad and not self.is_leaf

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Event:
    """One torch function of the forward.

    Attributes:
        path: the call in which it is.
        index: its number among the events of that call, from 0.
        function: the name of the function.
        inputs: the numbers of the values that it takes.
        outputs: for each tensor in its result the number of the value (None for a parameter itself).
        written: if it writes to an argument (the first, or ``out``), the number of the value that this has become.
        named: (index among its tensors, number) for each tensor in shared memory (calls/tracer.py) that is a value and had no
            number before; these numbers are among ``inputs``.
        renamed: (old number, new number) of the other values in the memory to which it writes.
        parameters, buffers: the names of those that it takes.
        flops: floating-point operations of the forward.
        moved: bytes read and written in the forward.
        reads: whether Python reads a value by it (``item``, ``bool``, ``tolist``), and may act on the value.
        mean_loss: whether it is a mean loss over labels (see runtime/rows/count_tracker.py).
        draws: whether it draws from torch's generator, or from one of the model's own.
        line: the model's source line.
        generators: the numbers of the model's own ``torch.Generator``s from which it draws.
    """

    path: Path
    index: int
    function: str
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    written: int | None
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    flops: int
    moved: int
    reads: bool
    mean_loss: bool
    line: str
    named: tuple[tuple[int, int], ...] = ()
    renamed: tuple[tuple[int, int], ...] = ()
    draws: bool = False
    generators: tuple[int, ...] = ()

    @property
    def draws_of_ones(self) -> bool:
        """Whether a rank without the values can draw as many numbers as a rank with them, by using ones instead."""
        return self.function in _DRAW_OF_ONES

    @property
    def draws_by_values(self) -> bool:
        """Whether the number of draws may depend on values, so that a rank without the values cannot draw as many."""
        return self.draws and self.function not in _DRAW_BY_SHAPE

    @property
    def plain(self) -> bool:
        """Whether it takes values alone, and matters by its result alone."""
        return bool(self.inputs) and not (self.reads or self.mean_loss or self.parameters or self.buffers)

    @property
    def hands_on(self) -> bool:
        """Whether it returns parameters themselves, as a cast to the dtype that they have does: each rank returns its own."""
        return not self.inputs and bool(self.parameters) and set(self.outputs) == {None}

    @property
    def work(self) -> int:
        """Its cost in operations: ``flops``, and ``INTENSITY`` for each byte moved."""
        return self.flops + INTENSITY * self.moved


Step = tuple[bool, Any]
"""A step of a path to an object: (whether it is an attribute of an object, its name or its key in a container)"""


@dataclass(frozen=True)
class Change:
    """What a call changed in a list, dict or plain object among its arguments.

    Attributes:
        where: the path to it from (args, kwargs).
        items: key, name or index → the new item.
        removed: the keys and names that are gone.
        before: of items that were there before: key, name or index → the constant before the call, see ``calls.changes``.
        values: the number of the value of each tensor in ``items``; None for one that follows from the batch alone.
        length: of a list, before the call. Items from there on were appended.
    """

    where: tuple[Step, ...]
    items: dict[Any, Any]
    removed: tuple[Any, ...] = ()
    before: Mapping[Any, Any] = field(default_factory=dict)
    values: tuple[int | None, ...] = ()
    length: int = 0

    def with_items(self, items: dict[Any, Any], values: tuple[int | None, ...]) -> Change:
        """The change with other items, and the numbers of the values in them."""
        return replace(self, items=items, values=values)


@dataclass
class Call:
    """One call of a module. Its events are ``start <= position < stop``, including those of the calls within it.

    Attributes:
        module: the name of the module.
        inputs: the values among its arguments, without those that attributes of its modules hold as well.
        outputs: for each tensor in its result the number of the value; None for one that follows from the batch alone.
        arguments: (args, kwargs) of the call, with tensors that have only shapes.
        returned: its result, with tensors that have only shapes.
        argument_tensors: the tensors among the arguments at the time of the call; a list among them may be longer now.
            None, also in ``arguments``: an argument with values that is no part of the result
            (``calls.stub.without_values``).
        fresh: whether a tensor in its result follows from the batch and was made within the call, or a function in the result
            may keep such a tensor. Then no copy of the recorded result can stand in for it.
        stashed: values that it left on the module, or in its arguments.
        visible: whether it changes something that exists before it and is used after it, and that is not among ``changes``:
            memory that follows from the batch, an attribute; Python's or NumPy's random numbers. So it is open on every stage.
        untold: whether it changes what neither values nor ``changes`` show: the batch, by the batch alone; an object, in
            a way that cannot be repeated.
        counts: whether it is visible only for Python numbers that nothing else uses: a counter, say.
        changes: what it changed in containers and plain objects among its arguments.
        repeatable: whether these are all such changes, and can be made where the call does not run.
        acts: whether Python reads a value in it, on which its path may depend.
        leaf: whether the module has no submodules.
        draws_host: whether it drew random numbers of Python or NumPy, or may do so on another path.
        raised: whether it ended with an exception, which the model caught. So it is open on every stage, and raises there too.
    """

    module: str
    path: Path
    start: int
    stop: int = -1
    inputs: frozenset[int] = frozenset()
    outputs: tuple[int | None, ...] = ()
    arguments: Any = None
    argument_tensors: tuple[Any, ...] = ()
    returned: Any = None
    fresh: bool = False
    stashed: frozenset[int] = frozenset()
    visible: bool = False
    untold: bool = False
    counts: bool = False
    changes: tuple[Change, ...] = ()
    repeatable: bool = True
    acts: bool = False
    leaf: bool = False
    draws_host: bool = False
    raised: bool = False

    @property
    def results(self) -> frozenset[int]:
        """The values that it returns, or leaves in containers and objects among its arguments."""
        left = (n for change in self.changes for n in change.values)
        return frozenset(n for n in (*self.outputs, *left) if n is not None)


ROOT: Path = (("", 0),)
"""The call of the model itself."""


@dataclass(frozen=True)
class Span:
    """Positions between which a forward is not cut: no stage begins at ``first + 1`` to ``last``.

    ``why``: the reason, for people. ``of_batch``: the reason is that a size there belongs to this batch. If there is no other
    place for a cut, each batch is recorded.
    """

    first: int
    last: int
    why: str
    of_batch: bool = False


@dataclass
class ModelGraph:
    """A recorded forward.

    Attributes:
        events: in the order of the program; the index of an event is its position.
        calls: path → call.
        values: by number.
        carried: (module, name) of each buffer and attribute that the forward changes and with which the next one begins.
        changed: (module, name) of each buffer and attribute that a whole forward leaves changed; empty without a pipeline.
        changes_hooks: whether it leaves other forward hooks on modules than it found.
        changes: (module, name) of each of them → the position of its last change.
        repeated: (module, name) of each Python constant that the forward changes whatever the values are (a count of forwards)
            → the position by which it is changed. Each stage changes its own copy.
        parameter_writes: parameter that the forward writes → the position of its last use.
        listening: the positions of hooks that wait for the gradient of a value (``register_hook``).
        slot_uses: (module, name) of each tensor that modules keep and the forward changes, and of whatever code within an
            event changes → (the positions of its uses, including changes; the positions of its changes).
        followed: the same forward, recorded with the tensors that modules keep as values; None if this recording has them as
            values, or the forward changes none.
        spans: parts of the forward that may not be cut, by the rule of planning/memory.py.
        returned: the values in the result of the loss function.
        of_this_batch: whether Python read values that follow from the batch, so that another batch may take another path.
        sized: the values whose sizes follow from values of the batch (a mask selects them); ``sized_by_model``: from values of
            the model.
        read: the memory, of the batch or of unknown origin, from which the values follow that Python read; None if some do not
            follow from memory alone, because random numbers were drawn.
        ways: position of a read → the values that its call returned, which another path returns too.
        held: position of the first event by which a call reads a value → the values that local variables of the running
            functions hold then.
        outputs: (path, index) of an event → its result, without values.
        rows: the number of rows of the batch, if data ranks of branches can each run their own rows; else 0.
        by_rows: positions of plain functions that work on each row alone: from some rows they make those rows of their result.
        segments: segment of a checkpoint of the model → (its first event, the end of its events).
        hiding: the calls of functions that run code of the model (``autograd.Function``, what ``torch.func`` transformed) and
            use parameters or values though none is among their arguments, or draw random numbers there.
        differentiated: position of an event in which the forward itself computes gradients → the values with respect to which
            it does; None if there are other inputs too.
        hook_nodes: (first, last position) of the events of each node that torch makes for a module with backward hooks: a
            ``view_as`` for each tensor that goes into the module, or comes out of it.
        own_backwards: whether the model's own functions (``autograd.Function``) compute gradients; they may return none.
        cuts: the positions at which stages begin, from the second on; None if there is no cut for which each stage has the
            parameters that it uses.
        resized: whether the values have other lengths than the recorded results of calls and events.
        draws: whether the forward drew random numbers of Python or NumPy.
        draws_held: whether it drew from a generator that a module holds. Its numbers continue from forward to forward, so every
            stage runs the forward to its end.
    """

    events: list[Event] = field(default_factory=list)
    calls: dict[Path, Call] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    returned: tuple[int, ...] = ()
    of_this_batch: bool = False
    sized: frozenset[int] = frozenset()
    sized_by_model: frozenset[int] = frozenset()
    read: frozenset[int] | None = None
    ways: dict[int, tuple[int, ...]] = field(default_factory=dict)
    held: dict[int, frozenset[int]] = field(default_factory=dict)
    outputs: dict[tuple[Path, int], Any] = field(default_factory=dict)
    rows: int = 0
    by_rows: frozenset[int] = frozenset()
    carried: tuple[tuple[str, str], ...] = ()
    changed: frozenset[tuple[str, str]] = frozenset()
    changes_hooks: bool = False
    changes: dict[tuple[str, str], int] = field(default_factory=dict)
    repeated: dict[tuple[str, str], int] = field(default_factory=dict)
    parameter_writes: dict[str, int] = field(default_factory=dict)
    listening: list[int] = field(default_factory=list)
    slot_uses: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    followed: ModelGraph | None = None
    spans: list[Span] = field(default_factory=list)
    resized: bool = False
    draws: bool = False
    draws_held: bool = False
    segments: dict[Segment, tuple[int, int]] = field(default_factory=dict)
    hiding: set[Segment] = field(default_factory=set)
    differentiated: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    hook_nodes: list[tuple[int, int]] = field(default_factory=list)
    own_backwards: bool = False
    cuts: tuple[int, ...] | None = None

    def like(self, number: int, t: Any) -> Any:
        """The recorded tensor ``t`` of a value, with the shape of the value: the forward may have changed the shape of the
        tensor in place later (``unsqueeze_``)."""
        value = self.values[number]
        if tuple(t.shape) == value.shape and (not value.stride or t.stride() == value.stride):
            return t
        return t.new_empty_strided(value.shape, value.stride, device="meta").requires_grad_(value.requires_grad)

    @cached_property
    def signature(self) -> int:
        """A hash, equal for forwards that took the same path with the same shapes."""
        shapes = tuple((v.shape, v.stride, v.dtype, v.requires_grad) for v in self.values)
        return hash((tuple((e.path, e.index, e.function, e.inputs, e.outputs) for e in self.events), shapes))

    @cached_property
    def positions(self) -> Mapping[tuple[Path, int], int]:
        """(path of the call, index of the event in it) → position."""
        return {(e.path, e.index): i for i, e in enumerate(self.events)}

    def values_made_by(self, position: int) -> list[int]:
        """The values that an event made, without those that it returned unchanged (as a dropout does that is off). With the
        last event of a call also those of ``decided`` that the call returns."""
        event = self.events[position]
        named = [n for pair in (*event.named, *event.renamed) for n in pair[1:]]
        decided = self._decided_at.get(position, ())
        numbers = (n for n in (*named, *event.outputs, event.written, *decided) if n is not None)
        return [n for n in dict.fromkeys(numbers) if self.values[n].position == position]

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """Value → positions of the events that take it."""
        consumers: dict[int, list[int]] = {}
        for i, event in enumerate(self.events):
            for value in event.inputs:
                consumers.setdefault(value, []).append(i)
        return consumers

    @cached_property
    def live(self) -> frozenset[int]:
        """The values that get a gradient in a backward from ``returned``."""
        live = {n for n in self.returned if self.values[n].differentiable}
        shared: set[int] = set()  # memory that is used later by a tensor without a number at the time of the write
        for position in range(len(self.events) - 1, -1, -1):
            event = self.events[position]
            # A write through one tensor reaches all values in its memory.
            now = {new for _, new in event.renamed if new in live}
            live.update(old for old, new in event.renamed if new in now and self.values[old].differentiable)
            if position in self.after_reads and (
                event.path == ROOT or live.intersection(self.calls[event.path].results)
            ):
                # Other values might take a path on which these get a gradient.
                live.update(n for n in self.after_reads[position] if self.values[n].differentiable)
            written = event.written is not None and self.values[event.written].storage in shared
            if now or written or live.intersection((*event.outputs, event.written, *self.ways.get(position, ()))):
                live.update(n for n in event.inputs if self.values[n].differentiable)
            shared.update(self.values[n].storage for _, n in event.named if n in live)
        return frozenset(live)

    @cached_property
    def decided(self) -> frozenset[int]:
        """The values that calls return in which Python read a value: on another path a call returns other tensors under these
        numbers."""
        return frozenset(n for numbers in self.ways.values() for n in numbers)

    @cached_property
    def _decided_at(self) -> dict[int, list[int]]:
        """Position → those of ``decided`` that are there from then on."""
        at: dict[int, list[int]] = {}
        for n in sorted(self.decided):
            at.setdefault(self.values[n].position, []).append(n)
        return at

    @cached_property
    def after_reads(self) -> dict[int, frozenset[int]]:
        """Position of an event in ``held`` → the values that its call may take afterwards, on whichever path: those that its
        later events take, and those that variables hold."""
        after: dict[int, frozenset[int]] = {}
        for position in self.held:
            rest = self.events[position + 1 : self.calls[self.events[position].path].stop]
            taken = {n for event in rest for n in event.inputs if self.values[n].position < position}
            after[position] = self.held[position] | taken
        return after

    @cached_property
    def takers(self) -> dict[int, list[int]]:
        """``consumers``, and the positions of reads after which Python may take the value (``after_reads``)."""
        if not self.held:
            return self.consumers
        takers = {n: [*positions] for n, positions in self.consumers.items()}
        for position, numbers in self.after_reads.items():
            for n in numbers:
                takers.setdefault(n, []).append(position)
        return takers

    def with_hook_nodes(self, call: Call) -> tuple[int, int]:
        """(first, last position) of the events of a call, and of the nodes beside it for its module's backward hooks."""
        first_of, last_of = {last: first for first, last in self.hook_nodes}, dict(self.hook_nodes)
        return first_of.get(call.start - 1, call.start), last_of.get(call.stop, call.stop - 1)

    @cached_property
    def may_lack_gradients(self) -> bool:
        """Whether a value in ``live`` may get no gradient: Python acts on values, or the model's own functions compute
        gradients."""
        acts = any(event.reads and event.inputs for event in self.events)
        return self.own_backwards or acts or bool(self.ways)

    @cached_property
    def drawn_from(self) -> dict[int, list[int]]:
        """Number of a generator of the model's own → positions of the events that draw from it."""
        positions: dict[int, list[int]] = {}
        for i, event in enumerate(self.events):
            for generator in event.generators:
                positions.setdefault(generator, []).append(i)
        return positions

    @cached_property
    def drawn_along(self) -> dict[int, list[int]]:
        """The entries of ``drawn_from`` for generators from which a rank without the values can draw as many numbers as a rank
        with them: no draw depends on values, or is in a call that acts on values, or is repeated by a checkpoint."""
        acting = [(p, e.path) for p, e in enumerate(self.events) if e.reads and e.inputs]

        def follows(position: int) -> bool:
            event = self.events[position]
            decided = any(event.path[: len(path)] == path and (path != ROOT or r < position) for r, path in acting)
            again = any(start <= position < stop for start, stop in self.segments.values())
            return decided or again or not event.draws_of_ones

        return {g: positions for g, positions in self.drawn_from.items() if not any(map(follows, positions))}

    @cached_property
    def written(self) -> frozenset[int]:
        """The memory (``Value.storage``) to which events write."""
        return frozenset(self.values[n].storage for p in range(len(self.events)) for n in self.writes(p))

    @cached_property
    def outlasting(self) -> frozenset[int]:
        """The memory of values that no event made: tensors that modules keep, and that follow from the batch. Every stage has
        its own copy."""
        results = {n for event in self.events for n in event.outputs if n is not None and n != event.written}
        names = {self.values[n].name for n in results}
        return frozenset(value.storage for value in self.values if value.name not in names) - {0}

    @cached_property
    def names_met(self) -> list[tuple[int, int]]:
        """(position, memory) of each tensor that is first used as a value because an earlier event wrote to its memory, or a
        module keeps it."""
        return [(p, self.values[n].storage) for p, event in enumerate(self.events) for _, n in event.named]

    @property
    def left_changes(self) -> tuple[Change, ...]:
        """What the model changes in containers and objects among its arguments, if all of it can be repeated."""
        root = self.calls[ROOT]
        return root.changes if root.repeatable else ()

    @property
    def left(self) -> frozenset[int]:
        """The values in ``left_changes``."""
        return frozenset(n for change in self.left_changes for n in change.values if n is not None)

    def writes(self, position: int) -> list[int]:
        """The values that an event writes: the new numbers of its target and of other values in that memory."""
        event = self.events[position]
        return [n for n in (event.written, *(now for _, now in event.renamed)) if n is not None]

    def overwritten(self, event: Event) -> int | None:
        """The number that the target of a write had before; of the first input, if it was no value; None: no write."""
        if event.written is None:
            return None
        name = self.values[event.written].name
        return next((n for n in event.inputs if self.values[n].name == name), next(iter(event.inputs), None))

    @cached_property
    def uses(self) -> dict[str, list[int]]:
        """Name of a parameter → positions of the events that take it."""
        uses: dict[str, list[int]] = {}
        for i, event in enumerate(self.events):
            for name in event.parameters:
                uses.setdefault(name, []).append(i)
        return uses


def spelled(path: Path) -> str:
    """A path as text: module names, with ``#n`` for a later call of the same module."""
    return " › ".join(name + (f"#{n}" if n else "") for name, n in path if name) or "the model"
