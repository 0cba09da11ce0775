"""What a decider says of a call: a value, which planning reads and ``Dispatcher`` executes.

    Decision   local work: what each operand must be here, the function to run, and the layout that comes out
    Body       a function in Python, whose inner functions are answered in turn
    Gather     neither: every argument is gathered, and the function runs whole

A decider is a pure function of a ``Call``; it looks at layouts, shapes and constants, never at values, and moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from meshwright.layout import REPLICATE, Layout, Shard
from meshwright.spmd.signature import Operand, is_undecided, layout_of, replaced


class Need(Enum):
    """What an operand must be where it is used. (A ``Shard`` is a need as well: this rank's slice.)"""

    HELD = "what this rank holds"
    REPLICATE = "all of it, used by every rank alike"
    PLAIN = "all of it, in memory as on one device"
    VARYING = "all of it, used by each rank for its part: gradients are summed over the axis"
    SUMMAND = "all of it on the first rank, zeros on the others"
    GIVEN = "the tensor as the model gave it"


@dataclass(frozen=True)
class Use:
    """Stands for an operand among the arguments of the local function."""

    index: int
    need: Need | Shard


@dataclass(frozen=True)
class Choice:
    """What an undecided parameter may become for this call. Planning takes one, and the call is decided again.

    Attributes:
        index: of the operand.
        column: the dim to cut where it meets whole operands.
        match: the cut that fits the other operands.
        row: the dim to cut where a person wants it sharded by row.
        table: whether it is looked up by rows.
        follows: whether it takes the match whatever a person wants of weights, as a bias does.
    """

    index: int
    column: int | None = None
    match: Shard | None = None
    row: int | None = None
    table: bool = False
    follows: bool = False


@dataclass(frozen=True)
class Blocks:
    """The sharded dim of an operand turns out to be fused blocks of these sizes."""

    index: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Units:
    """The sharded dim of an operand turns out to be that many pieces which may not be broken."""

    index: int
    count: int


@dataclass(frozen=True)
class Gather:
    """The call falls back. ``finding``: how an operand would have to be cut for the call to fit."""

    finding: Blocks | Units | None = None
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Body:
    """``run`` of the arguments, in which Uses stand for tensors as they are given. ``finding``: why it is not local work."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finding: Blocks | Units | None = None


Out = Layout | tuple[Layout, ...]


@dataclass(frozen=True)
class Decision:
    """Local work.

    Attributes:
        run: the local function.
        args, kwargs: its arguments, with a Use for each operand.
        out: the layout of what comes out; a tuple for several results that differ. ``REPLICATE``: plain tensors.
        choices: what undecided parameters may become.
        roles: (operand, in which part a product meets its cut): ``column`` (its own dim of the result), ``row`` (summed
            over) or ``batch``.
        itself: the operand that comes out, if a function gives what it is given (and may have written it).
        writes: whether that operand has been written.
        follows: (an undecided parameter, which of its dims each dim of the result is; -1 for a new one): the result is still
            that parameter.
        kept: whether the decision, and the shape of the first result, hold for every call of the signature.
        axis: whether ``run`` takes the axis first, as it communicates on the way.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Out = REPLICATE
    choices: tuple[Choice, ...] = ()
    roles: tuple[tuple[int, str], ...] = ()
    itself: int | None = None
    writes: bool = False
    follows: tuple[int, tuple[int, ...]] | None = None
    kept: bool = True
    axis: bool = False


GATHER = Gather()
Answer = Decision | Body | Gather


@dataclass(frozen=True)
class Decided:
    """A call with the decision on it; in its arguments Uses stand for tensors.

    Attributes:
        signature: of the call; empty if it is not known.
    """

    answer: Answer
    tensors: list[Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    signature: tuple[Any, ...] = ()

    def given(self, value: Any) -> Any:
        """``value`` with the tensors of the call in place of Uses."""
        return replaced(value, lambda x: self.tensors[x.index] if type(x) is Use else x)


def need(x: Any, what: Need | Shard) -> Any:
    """A Use of an operand; anything else as it is."""
    return Use(x.index, what) if isinstance(x, Operand) else x


def held(x: Any) -> Any:
    return need(x, Need.HELD)


def whole(x: Any) -> Any:
    return need(x, Need.REPLICATE)


def plain(x: Any) -> Any:
    return need(x, Need.PLAIN)


def varying(x: Any) -> Any:
    return need(x, Need.VARYING)


def given(x: Any) -> Any:
    return need(x, Need.GIVEN)


def matching(x: Any, layout: Shard) -> tuple[Choice, ...]:
    """An undecided parameter may be cut as it is needed."""
    return (Choice(x.index, match=layout, follows=True),) if is_undecided(x) else ()


def is_cut(x: Any) -> bool:
    return isinstance(layout_of(x), Shard)
