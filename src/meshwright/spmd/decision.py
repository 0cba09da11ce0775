"""How a torch function is computed on sharded tensors: the answer of a decider, as a value.

    Decision   run a local function: which layout each operand needs, which function runs, which layout results
    Body       run a Python function; the torch functions that it calls are decided one by one
    Gather     neither is known: gather every argument, and run the function on full tensors

A decider is a pure function of a ``Call``. It reads layouts, shapes and constants, never values, and communicates nothing.
Planning reads the answer; ``Dispatcher`` executes it.
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
    """What the local function needs of an operand. (A ``Shard`` is a need as well: this rank's slice in that layout.)"""

    LOCAL = "the local tensor, in the layout that it has"
    REPLICATE = "the full tensor; every rank computes the same with it"
    PLAIN = "the full tensor, with the strides that it has on one device"
    VARYING = "the full tensor; each rank computes its part with it, so gradients are summed over the axis"
    SUMMAND = "the full tensor on the first rank, zeros on the others"
    ORIGINAL = "the tensor that the model passed"


@dataclass(frozen=True)
class Use:
    """Stands for operand number ``index`` among the arguments of the local function."""

    index: int
    need: Need | Shard


@dataclass(frozen=True)
class Choice:
    """How an undecided parameter may be sharded for this call. Planning takes one choice, and the call is decided again.

    Attributes:
        index: the number of the operand.
        column: the dim to shard if the other operands are whole.
        match: the layout that fits the other operands.
        row: the dim to shard if the plan wants the parameter sharded by row.
        table: whether the call looks up rows of the parameter (an embedding).
        follows: whether the parameter takes ``match`` whatever the plan says of weights, as a bias does.
    """

    index: int
    column: int | None = None
    match: Shard | None = None
    row: int | None = None
    table: bool = False
    follows: bool = False


@dataclass(frozen=True)
class Blocks:
    """A finding: the sharded dim of an operand consists of fused blocks of these sizes."""

    index: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Units:
    """A finding: the sharded dim of an operand consists of ``count`` pieces (heads, say) that no shard may divide."""

    index: int
    count: int


@dataclass(frozen=True)
class Gather:
    """The call falls back: its arguments are gathered. ``finding``: how the operand must be sharded to avoid this."""

    finding: Blocks | Units | None = None
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Body:
    """Call ``run`` with the arguments; Uses stand for the tensors that the model passed. ``finding``: why no local function
    computes it."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finding: Blocks | Units | None = None


Out = Layout | tuple[Layout, ...]


@dataclass(frozen=True)
class Decision:
    """Run a local function on local tensors.

    Attributes:
        run: the local function.
        args, kwargs: its arguments, with a Use for each operand.
        out: the layout of the result; a tuple if there are several results in different layouts. ``REPLICATE``: plain tensors.
        choices: how undecided parameters may be sharded.
        roles: (operand, role of its sharded dim in a product): ``column`` (a dim of the result), ``row`` (summed over)
            or ``batch``.
        itself: the operand that is returned, if the function returns one of its arguments (and may have written it).
        writes: whether the function writes to that operand.
        follows: (an undecided parameter, for each dim of the result the dim of the parameter, -1 for a new one): the result
            is still that parameter.
        cacheable: whether the decision, and the shape of the first result, hold for every call with this signature.
        axis: whether ``run`` takes the axis as its first argument, because it communicates.
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
    cacheable: bool = True
    axis: bool = False


GATHER = Gather()
Answer = Decision | Body | Gather


@dataclass(frozen=True)
class DecidedCall:
    """A call and the decider's answer. In ``args`` and ``kwargs``, Uses stand for ``tensors``.

    Attributes:
        signature: the signature of the call; empty if it is not known.
    """

    answer: Answer
    tensors: list[Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    signature: tuple[Any, ...] = ()

    def with_tensors(self, value: Any) -> Any:
        """``value`` with the tensors of the call in place of Uses."""
        return replaced(value, lambda x: self.tensors[x.index] if type(x) is Use else x)


def use_as(x: Any, need: Need | Shard) -> Any:
    """A Use of an operand with this need; ``x`` unchanged if it is no operand."""
    return Use(x.index, need) if isinstance(x, Operand) else x


def use_local(x: Any) -> Any:
    return use_as(x, Need.LOCAL)


def use_replicated(x: Any) -> Any:
    return use_as(x, Need.REPLICATE)


def use_plain(x: Any) -> Any:
    return use_as(x, Need.PLAIN)


def use_varying(x: Any) -> Any:
    return use_as(x, Need.VARYING)


def use_original(x: Any) -> Any:
    return use_as(x, Need.ORIGINAL)


def matching(x: Any, layout: Shard) -> tuple[Choice, ...]:
    """The choice that an undecided parameter takes ``layout``; nothing for another operand."""
    return (Choice(x.index, match=layout, follows=True),) if is_undecided(x) else ()


def is_sharded(x: Any) -> bool:
    return isinstance(layout_of(x), Shard)
