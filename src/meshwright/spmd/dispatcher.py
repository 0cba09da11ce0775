"""``Dispatcher``: answers torch functions some of whose tensors are sharded.

    call(func, args)
      1  the signature is known                   its decision is executed (spmd/execute.py)
      2  a fact of the wrapper (shape, dtype …)   is answered at once
      3  a write                                  reaches everything that shares the memory, as on one device
      4  a function with a decider                the decision is executed and kept; or the function's Python body runs, and the
                                                  functions that it calls are answered in turn
      5  anything else                            falls back: gathers, runs on full tensors, and is counted

So every torch function gives the right result. A missing decider costs speed, never correctness. A ``Dispatcher`` is a
``Mover`` too (spmd/mover.py): it redistributes operands to the layouts that a decision needs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import is_of_model
from meshwright.errors import source_place
from meshwright.layout import PARTIAL, REPLICATE, Layout, Partial, Shard
from meshwright.private import python_body, pytree, storage_of, without_subclasses
from meshwright.spmd import redistribute
from meshwright.spmd.alias import Memory, Strides, overwrite, with_strides
from meshwright.spmd.comm import Axis, Fallback, Ledger
from meshwright.spmd.decide import ANSWERS, DECIDERS, ordered
from meshwright.spmd.decision import GATHER, Answer, Body, DecidedCall, Decision, Gather, Need, Use
from meshwright.spmd.execute import PreparedDecision, Ready, in_new_memory
from meshwright.spmd.mover import Mover, duplicate
from meshwright.spmd.signature import (
    NEVER,
    Call,
    Operand,
    ReadsValue,
    is_number,
    passed_on,
    read_call,
    replaced,
    with_values,
)
from meshwright.spmd.tensor import GlobalTensor, spec_of
from meshwright.spmd.torch_functions import FACTS, GET_DATA, SET_DATA, aliases, label_of, reshaped, writes_first


def engine_of_torch(func: Any) -> Callable[..., Any]:
    """``torch.autograd.grad`` or ``backward`` itself. Its Python body runs, so that the SPMD mode stays on for what a backward
    recomputes."""
    return python_body(func) or func


class Dispatcher(Mover):
    """Answers torch functions of tensors that are sharded over one axis.

    Args:
        axis: the axis over which tensors are sharded.
        ledger: counts collectives and fallbacks.
        names: ``id(module)`` → its name in the model, to report where a fallback happened.
        engine: ``torch.autograd.grad`` or ``backward`` → the function that runs instead.
    """

    def __init__(
        self,
        axis: Axis,
        ledger: Ledger,
        names: dict[int, str] | None = None,
        engine: Callable[[Any], Callable[..., Any]] = engine_of_torch,
    ) -> None:
        super().__init__(axis)
        self.ledger, self.names, self.engine = ledger, names or {}, engine
        self.prepared: dict[tuple[Any, ...], Ready] = {}  # signature → its decision, ready to execute
        self._running: set[Any] = set()  # functions whose Python body is running

    # --- answering -------------------------------------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``func`` as on one device; a sharded result is a global tensor."""
        signature, tensors = signature_of(func, args, kwargs)
        if (prepared := self.prepared.get(signature)) is not None:
            return prepared(self, tensors)
        if func in FACTS:
            with without_subclasses():
                return func(*args, **kwargs)
        if writes_first(func, args, kwargs):
            return self._write(func, args, kwargs)
        for x in _slices(args, kwargs):
            self.refresh(x)
        if func in ANSWERS and kwargs.get("out") is None:
            return ANSWERS[func](self, func, *ordered(func, args, kwargs))
        try:
            return self._execute(func, self.decide(func, args, kwargs))
        except ReadsValue:
            return self.call(func, *with_values(args, kwargs))

    # --- decisions -----------------------------------------------------------------------------------------------------

    @contextmanager
    def deciding_anew(self) -> Iterator[None]:
        """Within the block calls are decided anew, and these decisions are dropped at its end. There, local functions may give
        other dtypes (in a trial, float64), which no signature shows."""
        prepared, self.prepared = self.prepared, {}
        try:
            yield
        finally:
            self.prepared = prepared

    def decide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DecidedCall:
        """The decision for a call that is neither a fact nor in ``ANSWERS``. Nothing runs yet.

        Raises:
            ReadsValue: the decision depends on a number that is a tensor: decide again, with ``with_values``.
        """
        tensors: list[Tensor] = []

        def numbered(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            tensors.append(x)
            return Use(len(tensors) - 1, Need.ORIGINAL)

        form = replaced(args, numbered), replaced(kwargs, numbered)
        answer: Answer = GATHER
        if _slices(args, kwargs) and aliases(func) and func != Tensor.as_strided and func != torch.as_strided:
            return DecidedCall(answer, tensors, *form)  # a slice of a slice: a write to it must reach the base of both
        if func in DECIDERS and kwargs.get("out") is None:
            call = self._as_call(func, form, tensors)
            answer = self._known(call, DECIDERS[func](call))
        # A body may call the C++ function of the same name, which has the same decider: its body must not run again.
        body = None if func in self._running else python_body(func)
        if isinstance(answer, Gather) and body is not None and not writes_first(func, args, kwargs):
            answer = Body(body, *form, finding=answer.finding)
        return DecidedCall(answer, tensors, *form)

    def _known(self, call: Call, answer: Answer) -> Answer:
        """The answer of a decider, if it has a Use for each operand.

        A decider may take a size for a constant that is a tensor (``as_strided(x, (n, m))``). Then it is asked again with
        the values, or the call falls back.
        """
        if isinstance(answer, Gather) or not (tensors := passed_on((answer.args, answer.kwargs))):
            return answer
        if all(is_number(x) and x is not call.args[0] for x in tensors):
            raise ReadsValue
        return GATHER

    def _execute(self, func: Any, decided: DecidedCall) -> Any:
        """Carries out a decision: a local function, a Python body, or a fallback."""
        answer, tensors = decided.answer, decided.tensors
        asked_args, asked_kwargs = decided.with_tensors((decided.args, decided.kwargs))
        args, kwargs = ordered(func, asked_args, asked_kwargs)
        if isinstance(answer, Gather):
            return self.fallback(func, args, kwargs)
        if isinstance(answer, Body):
            self._running.add(func)
            try:
                return answer.run(*decided.with_tensors(answer.args), **decided.with_tensors(answer.kwargs))
            finally:
                self._running.discard(func)
        if answer.follows is not None:
            return self._follow(answer, tensors)
        prepared = PreparedDecision(answer)
        out = prepared.run_first(self, func, args, kwargs, tensors)
        if func == GET_DATA:
            if isinstance(out, GlobalTensor):
                out._mw_remember(silent=True)
        elif answer.cacheable:
            self._keep(func, asked_args, asked_kwargs, prepared)
        return out

    def _as_call(self, func: Any, form: tuple[Any, Any], tensors: Sequence[Tensor]) -> Call:
        """The call as a decider sees it."""
        operands = [Operand(i, spec_of(t)) for i, t in enumerate(tensors)]
        args, kwargs = replaced(form, lambda x: operands[x.index] if type(x) is Use else x)
        return Call(func, *ordered(func, args, kwargs), rank=self.axis.rank, ranks=self.axis.size)

    def _keep(self, func: Any, args: Any, kwargs: Any, prepared: PreparedDecision) -> None:
        """Keeps a decision for later calls, if their signature contains everything that it depends on."""
        signature, _ = signature_of(func, args, kwargs)
        if NEVER in signature:
            return
        if len(self.prepared) >= _KEPT:
            self.prepared.clear()
        self.prepared[signature] = prepared.specialized()

    def _follow(self, answer: Decision, tensors: Sequence[Tensor]) -> GlobalTensor:
        """Planning only: the result of a call that is still the undecided parameter among its operands."""
        assert answer.follows is not None
        index, dims = answer.follows
        source = tensors[index]
        assert isinstance(source, GlobalTensor) and source._mw_parameter is not None
        name, parameter_dims = source._mw_parameter
        local = PreparedDecision(answer)(self, tensors)
        return GlobalTensor(
            local, REPLICATE, self, parameter=(name, tuple(-1 if d < 0 else parameter_dims[d] for d in dims))
        )

    def fallback(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gathers every argument and runs ``func`` on full tensors, alike on every rank."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, GlobalTensor) and isinstance(leaf._mw_layout, Shard) for leaf in leaves):
            self.gathered(func)
        written = _written(func, args, kwargs)
        plain = [self.plain(leaf) if isinstance(leaf, GlobalTensor) else leaf for leaf in leaves]
        if written:
            copies = {id(leaf): duplicate(self.plain(leaf)) for leaf in written}
            plain = [copies.get(id(leaf), plain_leaf) for leaf, plain_leaf in zip(leaves, plain, strict=True)]
        plain_args, plain_kwargs = pytree.tree_unflatten(plain, spec)
        result = func(*plain_args, **plain_kwargs)
        for leaf in written:
            self.assign(leaf, copies[id(leaf)])
        return self._connected(func, leaves, spec, plain, result)

    def _connected(self, func: Any, leaves: list[Any], spec: Any, plain: list[Any], result: Any) -> Any:
        """The results of a fallback. One that shares memory with a gathered argument becomes a slice of that global tensor.

        A later write to the slice must reach the global tensor.
        """
        bases: dict[int | None, int] = {}
        by_plain: dict[int, GlobalTensor] = {}
        for index, (leaf, plain_leaf) in enumerate(zip(leaves, plain, strict=True)):
            if isinstance(leaf, GlobalTensor):
                bases[storage_of(plain_leaf)] = index
                by_plain[id(plain_leaf)] = leaf
        pieces, result_spec = pytree.tree_flatten(result)
        for number, piece in enumerate(pieces):
            if not isinstance(piece, Tensor):
                continue
            if id(piece) in by_plain:
                pieces[number] = by_plain[id(piece)]
            elif piece.layout == torch.strided and (i := bases.get(storage_of(piece))) is not None:
                again = functools.partial(_again, func, tuple(plain), spec, i, number)
                pieces[number] = self._alias(piece, leaves[i], again)
                pieces[number]._mw_remember(silent=func == GET_DATA)
        return pytree.tree_unflatten(pieces, result_spec)

    def _alias(self, local: Tensor, base: GlobalTensor, select: Callable[[Tensor], Tensor]) -> GlobalTensor:
        """A slice of ``base``: ``local``, which ``select`` takes out of the gathered base."""
        alias = GlobalTensor(local, REPLICATE, self)
        alias._mw_memory = base._mw_memory = base._mw_memory or Memory()
        base = base._mw_twin()
        alias._mw_origin, alias._mw_silent, alias._mw_spec = (base, select), base._mw_silent, None
        alias._mw_memo["origin"] = self.state_of(base)
        return alias

    # --- writes ------------------------------------------------------------------------------------------------------

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that writes to its first argument. The write reaches all that shares the memory, as on one device."""
        decide = functools.partial(self.decide, func, args, kwargs)
        args, kwargs = ordered(func, args, kwargs)
        for x in args:
            if isinstance(x, GlobalTensor) and x._mw_origin is not None:
                self.refresh(x)
        target = args[0]
        if not isinstance(target, GlobalTensor):
            return self._execute(func, decide())
        if (anew := reshaped(func)) is not None:
            shaped = self.call(anew, (target._mw_twin(), *args[1:]), kwargs)
            target._mw_become(shaped if isinstance(shaped, GlobalTensor) else GlobalTensor(shaped, REPLICATE, self))
            return target
        if func == SET_DATA:
            return self._set_data(target, args[1])
        if target._mw_apart:
            raise RuntimeError(
                f"{func.__name__} writes to a tensor that shares memory with another on one device, but not on this rank"
            )
        if target._mw_origin is not None:
            return self._write_through(func, target, args, kwargs)
        return self._execute(func, decide())

    def _set_data(self, x: GlobalTensor, value: Tensor) -> None:
        """``x.data = value``: from now on x has the memory of value; other tensors of its old memory keep that."""
        if x.shape != value.shape:
            raise NotImplementedError(f"x.data = value of another shape, but x is sharded: {x.shape} and {value.shape}")
        layout, local = x._mw_layout, x._mw_local.clone()  # another tensor, of the same gradient
        with torch.no_grad():
            if isinstance(value, GlobalTensor) and value._mw_layout == layout and value._mw_origin is None:
                new = value
            elif isinstance(layout, Shard):
                new = GlobalTensor(self.shard(self.full_tensor(value), layout).clone(), layout, self)
                self.set_strides(new, value.stride())
            else:
                new_local = self.plain(value)
                if isinstance(layout, Partial):
                    new_local = redistribute.keep_first(new_local, self.axis)
                new = GlobalTensor(new_local, layout, self)
        local.data = new._mw_local.data
        x._mw_become(new)
        x._mw_local, x._mw_silent, x._mw_spec = local, False, None

    def _write_through(self, func: Any, target: GlobalTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A write to a slice that a fallback made: first to the slice, then to its base."""
        assert target._mw_origin is not None
        base, select = target._mw_origin
        plain_args, plain_kwargs = pytree.tree_map_only(GlobalTensor, self.plain, (args[1:], kwargs))
        result = func(target._mw_local, *plain_args, **plain_kwargs)
        value = duplicate(self.plain(base))
        overwrite(select(value), target._mw_local)
        self.assign(base, value, silent=target._mw_silent)
        return None if result is None else target

    # --- where results lie --------------------------------------------------------------------------------------------

    def set_strides(self, x: GlobalTensor, strides: Strides | None) -> None:
        """Gives a global tensor in new memory the strides that it has on one device, and its local tensor the same dim order.

        ``strides``: those of the full tensor; None: dense, with the dim order of the local tensor.
        """
        result = in_new_memory(x._mw_layout, x._mw_local, strides)
        if result.strides is not None:
            x._mw_local = with_strides(x._mw_local, result.strides)
        x._mw_strides, x._mw_spec = result.known.strides, None

    def gathered(self, func: Any) -> None:
        """Counts a fallback at the model's line that caused it."""
        self.ledger.fallbacks[self.fallback_at(func)] += 1

    def fallback_at(self, func: Any) -> Fallback:
        """The function, and the module and source line of the model that are running."""
        frame, line, module = sys._getframe(1), "", None
        while frame is not None and (module is None or not line):
            owner, file = frame.f_locals.get("self"), frame.f_code.co_filename
            if not line and is_of_model(file):
                line = source_place(file, frame.f_lineno)
            if module is None and isinstance(owner, nn.Module):
                module = self.names.get(id(owner), type(owner).__name__)
            frame = frame.f_back  # type: ignore[assignment]
        return Fallback(label_of(func), module or "", line)

    def global_tensor(self, local: Tensor, layout: Layout) -> Tensor:
        """The global tensor of a local tensor."""
        return GlobalTensor(local, layout, self)


def signature_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """(signature of a call, its tensors). The signature equals none, not even itself, if it lacks a fact that counts."""
    _, parts, tensors = read_call(func, args, kwargs, None)
    if new := [t for t in tensors if type(t) is GlobalTensor and t._mw_spec is None]:
        for t in new:
            spec_of(t)
        _, parts, tensors = read_call(func, args, kwargs, None)
        if any(t._mw_spec is None for t in new):
            parts.append(NEVER)
    return tuple(parts), tensors


def full_tensor(x: Any) -> Any:
    """A global tensor as a full tensor on every rank; anything else as it is."""
    return x._mw_dispatcher.full_tensor(x) if isinstance(x, GlobalTensor) else x


_KEPT = 1 << 15  # so many decisions are kept, then all are dropped: shapes may change with every batch


def _slices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[GlobalTensor]:
    """The slices that a fallback made, among the arguments."""
    return [x for x in (*args, *kwargs.values()) if type(x) is GlobalTensor and x._mw_origin is not None]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[GlobalTensor]:
    """The global tensors to which a call writes: its first argument, or those within it (``torch._foreach_add_``), and
    ``out=``."""
    first = args[:1] if writes_first(func, args, kwargs) else ()
    return [v for v in pytree.tree_leaves((first, kwargs.get("out"))) if isinstance(v, GlobalTensor)]


def _again(func: Any, plain: tuple[Any, ...], spec: Any, leaf: int, number: int, value: Tensor) -> Tensor:
    """Result number ``number`` of a call, if ``value`` stands for leaf number ``place`` of its arguments ``plain``."""
    args, kwargs = pytree.tree_unflatten([*plain[:leaf], value, *plain[leaf + 1 :]], spec)
    piece: Tensor = pytree.tree_leaves(func(*args, **kwargs))[number]
    return piece


__all__ = ["PARTIAL", "Dispatcher", "full_tensor"]
