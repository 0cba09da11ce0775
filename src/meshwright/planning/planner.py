"""``Planner``: reads each decision of a forward before it is executed, chooses shards for the parameters in it, and learns
which shards do not fit (planning/tensor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout import REPLICATE, Shard
from meshwright.planning.meta_functions import gradients_without_values
from meshwright.planning.parameter_shards import AS_SAID, Style, shard_in_style
from meshwright.planning.units import ParameterUses
from meshwright.private import pytree, storage_of
from meshwright.spmd.autograd_functions import transforming
from meshwright.spmd.comm import PlannedAxis
from meshwright.spmd.decide import ANSWERS
from meshwright.spmd.decide.gradient import ENGINES
from meshwright.spmd.decision import Blocks, Body, Choice, DecidedCall, Decision, Gather, Need, Units, Use
from meshwright.spmd.dispatcher import Dispatcher, signature_of
from meshwright.spmd.execute import Ready
from meshwright.spmd.mode import SPECIAL, GlobalTensorMode
from meshwright.spmd.signature import NEVER, ReadsValue, with_values
from meshwright.spmd.tensor import GlobalTensor, local_of
from meshwright.spmd.torch_functions import FACTS, SET_DATA, reshaped, writes_first

_PATIENCE = 12  # how many times a family's style may change before its parameters are replicated


class StyleChanged(BaseException):
    """A style has changed: run the forward again. Not an Exception, so that a model's own ``except`` lets it through."""


class Reading(GlobalTensorMode):
    """The function mode of a forward that is planned: the planner reads every decision before it is executed."""

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner.dispatcher, planner.parameter)
        self.planner = planner
        self._closed = 0  # how many scripted functions are running, one within the other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._closed:
            return func(*args, **kwargs)
        if func == SET_DATA:
            self.planner.assigned(*args)
        if func in SPECIAL or transforming():
            return self._special(func, args, kwargs)
        ours, args, kwargs = self._substitute(args, kwargs)
        return self.answer(ours, func, args, kwargs) if ours is not None else func(*args, **kwargs)

    def answer(self, dispatcher: Dispatcher, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call, after the planner has chosen shards for its parameters.

        A sharded result lists the parameters from which its layout comes (``_mw_sources``).
        """
        if func in FACTS:
            return dispatcher.call(func, args, kwargs)
        sources = _sources((args, kwargs))
        again: AbstractContextManager[Any] = nullcontext()
        if func in ENGINES:
            starts = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
            self.planner.not_worth([x for x in _global_tensors(starts) if isinstance(x._mw_layout, Shard)], _AT_ONCE)
        elif func not in ANSWERS and not _changes_the_view(func, args, kwargs):
            decided = self.planner.read(func, args, kwargs)
            sources |= _sources(decided.tensors)
            if (prepared := dispatcher.prepared.get(decided.signature)) is not None:
                return _of_sources(prepared(dispatcher, decided.tensors), sources)
            args, kwargs = decided.with_tensors((decided.args, decided.kwargs))
            if isinstance(decided.answer, Body):
                again = self  # its inner calls are read as well
        with again:
            out = dispatcher.call(func, args, kwargs)
        return _of_sources(out, sources)

    def scripted(self, call: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a scripted function without reading its calls: a run does not see them either. (On meta, torch's kernels are
        Python and call torch functions with the parameters that were passed.)"""

        def unseen(*arguments: Any, **named: Any) -> Any:
            self._closed += 1
            try:
                return call(*arguments, **named)
            finally:
                self._closed -= 1

        return super().scripted(unseen, function, args, kwargs)

    def custom(self, apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a custom ``autograd.Function``. Replicates each parameter that it gets as an argument and also reads from a
        module: its backward may compute with one of the two tensors and ask for gradients of the other, and both are one tensor
        only if the parameter is replicated."""
        passed = {name for x in pytree.tree_leaves((args, kwargs)) if (name := self.planner.name_of(x)) is not None}
        read: set[str] = set()

        def applied(*arguments: Any, **named: Any) -> Any:
            with self.planner.asked_by(read):
                return apply(*arguments, **named)

        result = super().custom(applied, function, args, kwargs)
        reason = f"{function.__name__} is given it, and takes it from its module as well"
        self.planner.replicate(passed & read, reason)
        return result

    def gathered(self, dispatcher: Dispatcher, user: Any, tensors: list[GlobalTensor]) -> None:
        self.planner.gathered(user, tensors)
        super().gathered(dispatcher, user, tensors)


def _changes_the_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call changes a global tensor's shape or data in place, or writes through a slice to the tensor that it is a
    slice of. The dispatcher handles these calls itself, without a decision."""
    if reshaped(func) is not None or func == SET_DATA:
        return True
    target = args[0] if args else None
    return isinstance(target, GlobalTensor) and target._mw_origin is not None and writes_first(func, args, kwargs)


_AT_ONCE = "its shards would be gathered again at once"


@dataclass
class Decisions:
    """The decisions on calls, by signature. A decision depends on the signature only, so it holds for every pass.

    Attributes:
        read: signature → the decision, with the first call's arguments, in which ``Use`` stands for each tensor.
        prepared: see ``Dispatcher.prepared``.
    """

    read: dict[tuple[Any, ...], DecidedCall] = field(default_factory=dict)
    prepared: dict[tuple[Any, ...], Ready] = field(default_factory=dict)


class Planner:
    """Chooses shards of parameters during one run of a forward.

    Args:
        axis: the axis over which parameters are sharded.
        parameters: ``id(parameter)`` → its name.
        styles: parameter → its style by the plan or the model.
        learnt: family → the style learnt in earlier runs. This run adds to it.
        news: family → how many times its style has changed.
        large: a table (of an embedding) with at least this many elements, and at least twice as many rows as columns, is
            sharded over its rows.

    Attributes:
        dispatcher: executes the forward's calls.
        families: parameter → its family; a parameter without an entry is a family of its own.
        layouts: parameter → its layout.
        roles: parameter → the styles (``column``, ``row``) in which matrix products used it.
        refused: parameter → why it cannot be sharded as the plan says.
        memory: storage → the parameter to which it belongs.
        differentiates: whether the forward asked for gradients itself.
    """

    def __init__(
        self,
        axis: PlannedAxis,
        parameters: Mapping[int, str],
        styles: Mapping[str, Style],
        learnt: dict[str, Style],
        news: dict[str, int],
        large: int,
        model: nn.Module,
    ) -> None:
        self.dispatcher = Dispatcher(axis, axis.ledger, {id(m): n for n, m in model.named_modules()}, self._engine)
        self.parameters, self.styles, self.learnt, self.news, self.large = parameters, styles, learnt, news, large
        self.families: Mapping[str, str] = {}
        self.layouts: dict[str, Shard] = {}
        self.roles: dict[str, list[str]] = {}
        self.refused: dict[str, str] = {}
        self.memory: dict[int, str] = {}
        self.differentiates = False
        # Tensors whose storages are in ``memory``: their addresses must not be used again.
        self._alive: list[Tensor] = []
        self.uses: ParameterUses | None = None
        self._asked: set[str] | None = None
        self._known: dict[tuple[Any, ...], DecidedCall] = {}

    def take(self, decisions: Decisions) -> None:
        """Uses ``decisions`` as a cache: reads what is in it, and adds each new decision."""
        self._known, self.dispatcher.prepared = decisions.read, decisions.prepared

    # --- parameters ------------------------------------------------------------------------------------------------

    def parameter(self, x: Tensor) -> Tensor | None:
        """The global tensor that stands for a parameter of the model; None for other tensors."""
        own, name = self._own(x), self.name_of(x)
        if name is None:
            return None
        if self._asked is not None:
            self._asked.add(name)
        if self.uses is not None:
            self.uses.note(x, name)
        x = own
        style, dims = self.style(name), tuple(range(x.dim()))
        dim = style.dim if style.kind == "shard" and name not in self.layouts else None
        if dim is not None and dim < x.dim() and (layout := self.layout_for(name, x.shape[dim], dim)):
            self.layouts[name] = layout
        if name in self.layouts:
            return self._shard(x, name, dims, self.layouts[name])
        return GlobalTensor(x.detach(), REPLICATE, self.dispatcher, parameter=(name, dims))

    def _own(self, x: Tensor) -> Tensor:
        return x if self.uses is None else self.uses.own(x)

    def name_of(self, x: Any) -> str | None:
        """The name of a parameter of the model; None for anything else."""
        if not isinstance(x, Tensor) or isinstance(x, GlobalTensor):
            return None
        return self.parameters.get(id(self._own(x)))

    def assigned(self, x: Tensor, value: Tensor) -> None:
        """Called for ``x.data = value``. A module that is cast (``self.linear.to(torch.bfloat16)``) assigns its parameters
        so."""
        name = self.name_of(x)
        if name is not None and self.uses is not None:
            self.uses.assigned(name, x.dtype, value.dtype, self.memory.get(storage_of(local_of(value)), name))

    @contextmanager
    def asked_by(self, names: set[str]) -> Iterator[None]:
        """Inside the ``with``, adds to ``names`` each parameter that a function uses."""
        before, self._asked = self._asked, names
        try:
            yield
        finally:
            self._asked = before

    def replicate(self, names: Iterable[str], reason: str) -> None:
        """Replicates parameters that must not be sharded; refuses those that the plan says to shard."""
        for name in sorted(names):
            planned = self.styles.get(name, Style())
            if planned.forced and planned.kind != "replicate":
                self.refused[name] = reason
            elif not planned.forced:
                self.learn({name: replace(self.style(name), kind="replicate", reason=reason)})

    def style(self, name: str) -> Style:
        """The style of a parameter: the one learnt for its family, under the settings of the plan, which come first."""
        planned = self.styles.get(name, Style())
        learnt = self.learnt.get(self.families.get(name, name))
        if learnt is None:
            return planned
        if planned.forced and planned.kind != "auto":
            learnt = replace(learnt, kind=planned.kind, dim=planned.dim, forced=True)
        return replace(learnt, blocks=planned.blocks or learnt.blocks, units=planned.units or learnt.units)

    def layout_for(self, name: str, size: int, dim: int) -> Shard | None:
        """The layout of a parameter that is sharded over ``dim``, by its style. None if there is none: then its family is
        replicated."""
        style = self.style(name)
        layout = shard_in_style(style, dim, size, self.dispatcher.axis.size)
        # The plan says to shard: ignore blocks and pieces that the forward showed.
        if isinstance(layout, str) and style.forced:
            style = self.styles[name]
            layout = shard_in_style(style, dim, size, self.dispatcher.axis.size)
        if isinstance(layout, Shard):
            return layout
        if style.forced:
            self.refused[name] = layout
        self.learn({name: replace(style, kind="replicate", reason=layout)})
        return None

    def _shard(self, x: Tensor, name: str, dims: tuple[int, ...], layout: Shard) -> Any:
        if layout.dim not in dims:
            return GlobalTensor(x.detach(), REPLICATE, self.dispatcher, parameter=(name, dims))
        view_layout = layout.on(dims.index(layout.dim))
        shape = list(x.shape)
        shape[view_layout.dim] = view_layout.local(self.dispatcher.axis.rank)
        local = (x._mw_local if isinstance(x, GlobalTensor) else x).new_empty(shape)
        self.memory[storage_of(local)] = name
        self._alive.append(local)
        return GlobalTensor(local, view_layout, self.dispatcher, frozenset([name]), (name, dims))

    def _choose(self, p: GlobalTensor, choice: Choice) -> GlobalTensor:
        """An undecided parameter, sharded by one of the options of ``choice``; unchanged if none of them is to be used."""
        assert p._mw_parameter is not None
        style = self.style(p._mw_parameter[0])
        if choice.table:
            large = p.dim() == 2 and p.numel() >= self.large and p.shape[0] >= 2 * p.shape[1]
            by_row = p.dim() == 2 and style.kind == "row"
            return self._decide(p, 0, ("auto", "row", "column"), None) if by_row or (large and not style.forced) else p
        wanted = style.kind if style.forced and not choice.follows else None
        if wanted == "row" and choice.row is not None:
            return self._decide(p, choice.row, ("row",), None)
        if wanted != "column" and choice.match is not None:
            return self._decide(p, choice.match.dim, ("auto", "row"), choice.match)
        return p if choice.column is None else self._decide(p, choice.column, ("auto", "column"), None)

    def _decide(self, p: GlobalTensor, dim: int, kinds: tuple[str, ...], like: Shard | None) -> GlobalTensor:
        assert p._mw_parameter is not None
        name, dims = p._mw_parameter
        style = self.style(name)
        if name not in self.layouts:
            one_dim = p.dim() == 1 and style.kind != "replicate"  # a bias follows its weight
            if dims[dim] < 0 or (style.kind not in kinds and not one_dim):
                return p
            if like is None:
                layout = self.layout_for(name, p.shape[dim], dims[dim])
                if layout is None:
                    return p
            elif like.size != p.shape[dim]:
                return p
            else:
                layout = like.on(dims[dim])
            self.layouts[name] = layout
        return self._shard(p, name, dims, self.layouts[name])

    # --- reading decisions -------------------------------------------------------------------------------------------

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DecidedCall:
        """The decision on a call, after shards are chosen for its undecided parameters. Learns from the decision."""
        declined: set[int] = set()
        while True:
            try:
                decided = self._decided(func, args, kwargs)
            except ReadsValue:
                args, kwargs = with_values(args, kwargs)
                continue
            answer, tensors = decided.answer, decided.tensors
            choices = answer.choices if isinstance(answer, Decision) else ()
            choice = next((c for c in choices if c.index not in declined), None)
            if choice is None:
                break
            p = tensors[choice.index]
            assert isinstance(p, GlobalTensor)
            tensors[choice.index] = self._choose(p, choice)
            if tensors[choice.index] is p:
                declined.add(choice.index)
            args, kwargs = decided.with_tensors((decided.args, decided.kwargs))
        if isinstance(answer, Decision):
            self._learn_of_moves(answer, tensors)
        elif isinstance(answer.finding, Blocks):
            self.blocks(tensors[answer.finding.index], answer.finding.sizes)
        elif isinstance(answer.finding, Units):
            self.units(tensors[answer.finding.index], answer.finding.count)
        if isinstance(answer, Gather):
            self.gathered(func, [x for x in tensors if isinstance(x, GlobalTensor)])
        return decided

    def _decided(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DecidedCall:
        """The decision on a call, made once for each signature: the blocks of a model have equal signatures."""
        signature, tensors = signature_of(func, args, kwargs)
        if (cached := self._known.get(signature)) is not None:
            return DecidedCall(cached.answer, tensors, cached.args, cached.kwargs, signature)
        decided = replace(self.dispatcher.decide(func, args, kwargs), signature=signature)
        if isinstance(decided.answer, Decision) and decided.answer.cacheable and NEVER not in signature:
            self._known[signature] = replace(decided, tensors=[])  # without the tensors, which are this call's
        return decided

    def _learn_of_moves(self, decision: Decision, tensors: Sequence[Tensor]) -> None:
        """Learns from a decision which matrix products used which shards, and which shards it would gather or change."""
        for index, role in decision.roles:
            self._used_as(tensors[index], role)
        for use in pytree.tree_leaves((decision.args, decision.kwargs)):
            x = tensors[use.index] if isinstance(use, Use) else None
            if not isinstance(x, GlobalTensor) or not isinstance(layout := x._mw_layout, Shard):
                continue
            if isinstance(use.need, Shard):
                if use.need != layout:
                    self._regathered(x, layout, use.need)
            elif use.need not in (Need.LOCAL, Need.ORIGINAL):
                self.not_worth([x], _AT_ONCE)

    def gathered(self, user: Any, tensors: Sequence[GlobalTensor]) -> None:
        """Called if sharded global tensors are gathered for a function: their parameters are not worth sharding."""
        sharded = [x for x in tensors if isinstance(x._mw_layout, Shard)]
        if sharded:
            fallback = self.dispatcher.fallback_at(user)
            self.not_worth(sharded, f"its shards would be gathered again by {fallback.function} at {fallback.line}")

    def _regathered(self, x: GlobalTensor, layout: Shard, needed: Shard) -> None:
        """Learns from a change of layout: the indivisible pieces, if the same dim has other borders; else to replicate."""
        if layout.dim == needed.dim and needed.parts == layout.parts == 1:
            step = gcd(*needed.pieces[0])
            if step and needed.size % step == 0:
                self.units(x, needed.size // step)
        self.not_worth([x], "its shards would have to be changed at once")

    def blocks(self, x: Any, sizes: tuple[int, ...]) -> None:
        """Learns that the sharded dim of ``x`` consists of blocks of ``sizes``: each block of its parameters is sharded by
        itself."""
        total = x._mw_layout.size
        styles: dict[str, Style] = {}
        for name in sorted(x._mw_sources):
            size = self.layouts[name].size if name in self.layouts else 0
            if size % total == 0 or all(s * size % total == 0 for s in sizes):
                scaled = tuple(s * size // total for s in sizes)
                styles[name] = replace(self.style(name), blocks=scaled, units=None)
        self.learn(styles)

    def units(self, x: Any, count: int) -> None:
        """Learns that each block in the sharded dim of ``x`` has ``count`` indivisible pieces (heads)."""
        styles: dict[str, Style] = {}
        for name in sorted(x._mw_sources):
            style = self.style(name)
            units = gcd(style.units, count) if style.units else count
            blocks = self.layouts[name].blocks if name in self.layouts else ()
            if all(b % units == 0 for b in blocks):
                styles[name] = replace(style, units=units)
        self.learn(styles)

    def not_worth(self, tensors: Sequence[GlobalTensor], reason: str) -> None:
        """Learns to replicate the parameters from which the layouts of ``tensors`` come. Starts over, unless the plan names
        all of them."""
        names = sorted({n for t in tensors for n in t._mw_sources})
        replicated = {name: replace(self.style(name), kind="replicate", reason=reason) for name in names}
        self.learn(replicated, later=True)
        if any(not self.styles.get(n, Style()).forced for n in names):
            raise StyleChanged

    def learn(self, styles: Mapping[str, Style], *, later: bool = False) -> None:
        """Keeps the new styles of parameters' families. Raises ``StyleChanged`` if a style has changed, unless ``later``."""
        changed = False
        for name, style in styles.items():
            forced = self.styles.get(name, Style()).forced
            if forced and style.kind == "replicate":
                continue
            key = self.families.get(name, name)
            if self.learnt.get(key) != style:
                self.news[key] = self.news.get(key, 0) + 1
                if self.news[key] > _PATIENCE:
                    if forced:  # the plan says that it is sharded: it is gathered where the shards do not fit
                        continue
                    style = replace(style, kind="replicate", reason="no layout fits every use of it")
                self.learnt[key] = style
                changed = True
        if changed and not later:
            raise StyleChanged

    def _engine(self, func: Any) -> Callable[..., Any]:
        self.differentiates = True
        return gradients_without_values if func is torch.autograd.grad else lambda **_: None

    def _used_as(self, x: Any, role: str) -> None:
        """Records the role (``column``, ``row``) of a parameter's shards in its first matrix product; of the parameter itself,
        in every one."""
        for name in x._mw_sources:
            if x._mw_parameter is not None or name not in self.roles:
                self.roles.setdefault(name, []).append(role)

    def reasons(self) -> dict[str, str]:
        """Parameter → why it is sharded so, or replicated; "" if no reason is needed."""
        return {name: self._reason(name) for name in set(self.parameters.values())}

    def _reason(self, name: str) -> str:
        style = self.style(name)
        if name in self.layouts:
            return AS_SAID if style.forced else ""
        if style.kind == "replicate":
            return AS_SAID if style.forced else style.reason
        if style.forced:  # refused; or a vector that the plan's glob names together with weights
            return self.refused.get(name) or f"{style.kind} of the plan holds for weights; a vector follows its weight"
        return f"{style.reason}, which no product that it meets allows" if style.reason else ""


def _of_sources(out: Any, sources: set[str]) -> Any:
    """``out``, a call's result, with ``sources`` added to the parameters from which the layouts of its tensors come."""
    for x in _global_tensors(out):
        if isinstance(x._mw_layout, Shard):
            x._mw_sources = x._mw_sources | sources
    return out


def _sources(value: Any) -> set[str]:
    """Names of the parameters from which the layouts of the global tensors in ``value`` come."""
    return {name for x in _global_tensors(value) if isinstance(x._mw_layout, Shard) for name in x._mw_sources}


def _global_tensors(value: Any) -> list[GlobalTensor]:
    if isinstance(value, GlobalTensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [v for item in value for v in _global_tensors(item)]
    if isinstance(value, dict):
        return [v for item in value.values() for v in _global_tensors(item)]
    return []
