"""``ModelGraph``: what a forward does, in order: module calls, the torch functions in them, and the values between.

It is recorded from the model's own forward on a sample that has shapes only (planning/capture.py); cutting a model into
stages, balancing them, and knowing what crosses a cut all read it. Words used throughout:

    call      one call of a module's forward; known by its *path*: of each module on the way, its name and
              how often its parent had called it before
    event     one torch function that depends on parameters or on chance; the n-th in its call
    value     a tensor that an event gave; other tensors follow from the batch alone and are had by every rank
    position  of an event in the order of the program; a stage of a pipeline is an interval of positions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

Path = tuple[tuple[str, int], ...]
Segment = tuple[Path, int]
"""What a checkpoint of the model's own computes again in a backward: the call in which it begins, and which of that call's."""

# Random functions that draw as many numbers whatever values they are given: what they draw follows from shapes alone.
_DRAW_BY_SHAPE = frozenset(
    "rand_like randn_like randint_like bernoulli bernoulli_ normal normal_ uniform_ exponential_ geometric_ log_normal_ \
     cauchy_ random_ dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout gumbel_softmax".split()
)
# Those that do so if the values are ones, which stand for values that are elsewhere; and those that take no values.
_DRAW_OF_ONES = _DRAW_BY_SHAPE | frozenset("multinomial rand randn randint randperm".split())

INTENSITY = 100  # operations that take as long as moving a byte: an accelerator of today, in order of magnitude


@dataclass(frozen=True)
class Value:
    """A tensor between events: shape, strides and type; the position of the event that gave it, or last wrote to its memory.

    ``storage`` is the same for values that share memory on one device; ``name`` for those that are one tensor, which gets
    another number whenever something is written to its memory. ``is_leaf``: a gradient of it goes no further back (a view made
    under ``no_grad`` has one, if what it is a view of has). ``strided``: not sparse, and not nested: the sizes of a nested
    tensor are 0 here if they are not one number.
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
        """Whether a gradient of it goes back to what it was made of."""
        return self.requires_grad and not self.is_leaf

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Event:
    """One torch function of the forward.

    Attributes:
        path: the call that it stands in.
        index: which event of that call, counted from 0.
        function: its name.
        inputs: numbers of the values that it takes.
        outputs: for each tensor in what it gives, the number of its value (None for a parameter itself).
        written: the number of the value that its first argument has become, where it writes to it.
        named: (which of its tensors, number) for those that it takes in shared memory (calls/tracer.py) and that are
        met for the
            first time; their numbers are among ``inputs``.
        renamed: (number, number) of other names of the memory that it writes to: what they were, and are now.
        parameters: names of the parameters that it takes, and ``buffers``.
        flops: floating-point operations, of the forward.
        moved: bytes read and written, of the forward.
        reads: whether it takes a value out of a tensor (``item``, ``bool``, ``tolist``), for Python to act on.
        mean_loss: whether it is a mean loss over labels (runtime/rows/counted_uses.py finds those).
        draws: whether it draws from torch's generator, or from one of the model's own.
        line: the model's source line.
        generators: the ``torch.Generator``s of the model's own that it draws from, each by a number.
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
        """Whether a rank that lacks the values can draw as many numbers as one that has them: with ones in their place."""
        return self.function in _DRAW_OF_ONES

    @property
    def draws_by_values(self) -> bool:
        """Whether how many numbers it draws may follow from values: a rank that lacks the values cannot draw as many."""
        return self.draws and self.function not in _DRAW_BY_SHAPE

    @property
    def plain(self) -> bool:
        """Whether it needs nothing but values, and counts for nothing but what it gives."""
        return bool(self.inputs) and not (self.reads or self.mean_loss or self.parameters or self.buffers)

    @property
    def hands_on(self) -> bool:
        """Whether it gives parameters as they are, as a cast to the type that they have does: each rank its own."""
        return not self.inputs and bool(self.parameters) and set(self.outputs) == {None}

    @property
    def work(self) -> int:
        """Operations, and as many for each byte moved as take as long."""
        return self.flops + INTENSITY * self.moved


@dataclass(frozen=True)
class Grown:
    """What a call appended to a list that it was given: the how-manieth list, what it appended, the values in that."""

    which: int
    items: list[Any]
    values: tuple[int | None, ...]


@dataclass
class Call:
    """One call of a module: its events are ``start`` to ``stop``; those of the calls within it are among them.

    Attributes:
        module: the module's name.
        outputs: for each tensor in what it returned, the number of its value, or None where it follows from the batch.
        given: what it was called with, and ``returned``: what it gave, with tensors that have shapes only.
        taken: the tensors in what it was called with, as they were then: a list among it may have grown since. None stands for
            one that has values and is not handed on (``calls.stub.without_values``), in ``given``, too.
        fresh: whether a tensor in what it returned follows from the batch, and was made within; or a function in it may keep
            such a tensor. No copy of what was recorded can stand in for it.
        stashed: values that it left on the module, or in what it was called with.
        visible: whether it changes something that was there before and is used after it: memory that follows from the
            batch, a list that it was given, an attribute; Python's or NumPy's random numbers. So every stage looks into it.
        counts: whether it is visible for numbers of Python's alone that nothing else uses: what it has counted, say.
        grown: what it appended to lists that it was given.
        acts: whether it reads a value, on which what it does next may follow.
        leaf: whether the module has no modules within.
        draws_host: whether it drew random numbers of Python's or NumPy's, or may do so on another way.
    """

    module: str
    path: Path
    start: int
    stop: int = -1
    outputs: tuple[int | None, ...] = ()
    given: Any = None
    taken: tuple[Any, ...] = ()
    returned: Any = None
    fresh: bool = False
    stashed: frozenset[int] = frozenset()
    visible: bool = False
    counts: bool = False
    grown: tuple[Grown, ...] = ()
    acts: bool = False
    leaf: bool = False
    draws_host: bool = False


ROOT: Path = (("", 0),)
"""The call of the model itself."""


@dataclass(frozen=True)
class Span:
    """Positions between which a forward is not cut: no stage begins at ``first`` + 1 to ``last``.

    ``why``: for people. ``of_batch``: as a size there is that of this batch. If it must be cut there, each batch is recorded.
    """

    first: int
    last: int
    why: str
    of_batch: bool = False


@dataclass
class ModelGraph:
    """A forward, recorded.

    Attributes:
        carried: (module, name) of each buffer and attribute that the forward changes and that the next one begins with.
        changes: (module, name) of each that it changes → the position of the last change.
        repeated: (module, name) of each constant of Python's (a count of forwards) that it changes whatever the values are →
            the position by which it has. Each stage changes its own.
        parameter_writes: parameter that it writes → the position of the last use.
        listening: positions of what waits for the gradient of a value (``register_hook``).
        kept: (module, name) of each tensor that modules keep and that the forward changes → the positions of its uses, changes
            among them, and of its changes.
        followed: the same forward, recorded with what modules keep as values, where this one is not and it changes some.
        spans: what memory keeps together, by the rule of planning/memory.py.
        returned: the values in what the loss function gave.
        of_this_batch: whether values of the batch were read, so that another batch may take another path.
        read: the memory of the batch (or of no one knows whom) that these values follow from; None if not all follow from
            memory: random numbers were drawn.
        ways: of a read, what its call returned, which another way gives too.
        outputs: what each event gave, without values.
        rows: of the batch, where data ranks of branches can each run their own of them; else 0.
        by_rows: positions of plain functions that give, of some rows, those rows of what they give of all.
        segments: of checkpoints of the model's own → where their events begin and end.
        differentiated: position of an event in which the forward asks for gradients itself → the values by which it does; None
            if it asks by something else, too.
        own_backwards: whether functions of the model's own (``autograd.Function``) give gradients: they may give none.
        cuts: where the stages of a pipeline begin, from the second on; None if it cannot be cut so that each has what it takes.
        resized: whether values are of another length than what calls and events gave when they were recorded.
        draws: whether the forward drew random numbers of Python's or NumPy's.
        draws_held: whether it drew some from a generator that a module holds, whose numbers go on from forward to forward: then
            every stage follows the forward to its end.
    """

    events: list[Event] = field(default_factory=list)
    calls: dict[Path, Call] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    returned: tuple[int, ...] = ()
    of_this_batch: bool = False
    read: frozenset[int] | None = None
    ways: dict[int, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[tuple[Path, int], Any] = field(default_factory=dict)
    rows: int = 0
    by_rows: frozenset[int] = frozenset()
    carried: tuple[tuple[str, str], ...] = ()
    changes: dict[tuple[str, str], int] = field(default_factory=dict)
    repeated: dict[tuple[str, str], int] = field(default_factory=dict)
    parameter_writes: dict[str, int] = field(default_factory=dict)
    listening: list[int] = field(default_factory=list)
    kept: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    followed: ModelGraph | None = None
    spans: list[Span] = field(default_factory=list)
    resized: bool = False
    draws: bool = False
    draws_held: bool = False
    segments: dict[Segment, tuple[int, int]] = field(default_factory=dict)
    differentiated: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    own_backwards: bool = False
    cuts: tuple[int, ...] | None = None

    def like(self, number: int, t: Any) -> Any:
        """A tensor that stood for a value when it was recorded, of the shape that the value has: the forward may have changed
        the tensor's in place since (``unsqueeze_``)."""
        value = self.values[number]
        if tuple(t.shape) == value.shape and (not value.stride or t.stride() == value.stride):
            return t
        return t.new_empty_strided(value.shape, value.stride, device="meta").requires_grad_(value.requires_grad)

    @cached_property
    def signature(self) -> int:
        """The same for forwards that took the same path with the same shapes."""
        shapes = tuple((v.shape, v.stride, v.dtype, v.requires_grad) for v in self.values)
        return hash((tuple((e.path, e.index, e.function, e.inputs, e.outputs) for e in self.events), shapes))

    @cached_property
    def positions(self) -> Mapping[tuple[Path, int], int]:
        """(path of the call, which event in it) → position."""
        return {(e.path, e.index): i for i, e in enumerate(self.events)}

    def made(self, position: int) -> list[int]:
        """The values that an event made: not those that it gave as it took them, as a dropout does that is off."""
        event = self.events[position]
        named = [n for pair in (*event.named, *event.renamed) for n in pair[1:]]
        numbers = (n for n in (*named, *event.outputs, event.written) if n is not None)
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
        """The values that get a gradient in a backward from what was returned."""
        live = {n for n in self.returned if self.values[n].differentiable}
        shared: set[int] = set()  # memory, of which a name is met that had no number when it was written
        for position in range(len(self.events) - 1, -1, -1):
            event = self.events[position]
            # What is written to one name of a memory is had by all of them.
            now = {new for _, new in event.renamed if new in live}
            live.update(old for old, new in event.renamed if new in now and self.values[old].differentiable)
            written = event.written is not None and self.values[event.written].storage in shared
            if now or written or live.intersection((*event.outputs, event.written, *self.ways.get(position, ()))):
                live.update(n for n in event.inputs if self.values[n].differentiable)
            shared.update(self.values[n].storage for _, n in event.named if n in live)
        return frozenset(live)

    @cached_property
    def may_lack_gradients(self) -> bool:
        """Whether a backward may give no gradient to what seems to get one: a value decides which way a forward goes, or a
        function of the model's own gives gradients."""
        acts = any(event.reads and event.inputs for event in self.events)
        return self.own_backwards or acts or bool(self.ways)

    @cached_property
    def drawn_from(self) -> dict[int, list[int]]:
        """Generator of the model's own → positions of the events that draw from it."""
        positions: dict[int, list[int]] = {}
        for i, event in enumerate(self.events):
            for generator in event.generators:
                positions.setdefault(generator, []).append(i)
        return positions

    @cached_property
    def drawn_along(self) -> dict[int, list[int]]:
        """Those of them from which a rank that lacks the values draws as many numbers as one that has them: no draw depends on
        values, none is in a call that acts on values, and no checkpoint of the model's own draws again."""
        acting = [(p, e.path) for p, e in enumerate(self.events) if e.reads and e.inputs]

        def follows(position: int) -> bool:
            event = self.events[position]
            decided = any(event.path[: len(path)] == path and (path != ROOT or r < position) for r, path in acting)
            again = any(start <= position < stop for start, stop in self.segments.values())
            return decided or again or not event.draws_of_ones

        return {g: positions for g, positions in self.drawn_from.items() if not any(map(follows, positions))}

    @cached_property
    def written(self) -> frozenset[int]:
        """The memory (``Value.storage``) that events write."""
        return frozenset(self.values[n].storage for p in range(len(self.events)) for n in self.writes(p))

    @cached_property
    def outlasting(self) -> frozenset[int]:
        """The memory, of values, that was there without an event that gave it: what modules keep, and what follows from the
        batch. Every stage has its own."""
        given = {n for event in self.events for n in event.outputs if n is not None and n != event.written}
        names = {self.values[n].name for n in given}
        return frozenset(value.storage for value in self.values if value.name not in names) - {0}

    @cached_property
    def names_met(self) -> list[tuple[int, int]]:
        """(position, memory) of each tensor that is met in memory which an event before has written, or that modules keep."""
        return [(p, self.values[n].storage) for p, event in enumerate(self.events) for _, n in event.named]

    def writes(self, position: int) -> list[int]:
        """The values that an event writes: what its target has become, and other names of that memory."""
        event = self.events[position]
        return [n for n in (event.written, *(now for _, now in event.renamed)) if n is not None]

    @cached_property
    def uses(self) -> dict[str, list[int]]:
        """Parameter → positions of the events that take it."""
        uses: dict[str, list[int]] = {}
        for i, event in enumerate(self.events):
            for name in event.parameters:
                uses.setdefault(name, []).append(i)
        return uses


def spelled(path: Path) -> str:
    """A path as text: module names, with ``#n`` for a later call of the same module."""
    return " › ".join(name + (f"#{n}" if n else "") for name, n in path if name) or "the model"
