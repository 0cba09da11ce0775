"""``Dispatcher``: how torch functions are answered when some of their tensors are cut.

    call(func, args)
      1  a signature that is known              the decision on it is executed (spmd/execute.py)
      2  a fact of the wrapper (shape, dtype …) answered at once
      3  a write                                to all that shares the memory, as on one device
      4  a decider for the function             decides, and the decision is executed and kept; or the function's Python body
                                                runs, whose inner functions are answered in turn
      5  anything else                          fallback: gather, run whole, count it

So every torch function is right; a missing decider costs speed, never correctness. A ``Dispatcher`` is a ``Mover`` as well
(spmd/mover.py): it has tensors in the layouts that a decision asks for.
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
from meshwright.spmd.decision import GATHER, Answer, Body, Decided, Decision, Gather, Need, Use
from meshwright.spmd.execute import Prepared, Ready, fresh
from meshwright.spmd.mover import Mover, duplicate
from meshwright.spmd.signature import (
    NEVER,
    Call,
    Operand,
    ReadsValue,
    is_number,
    passed_on,
    read,
    replaced,
    with_values,
)
from meshwright.spmd.tensor import GlobalTensor, spec_of
from meshwright.spmd.torch_functions import FACTS, GET_DATA, SET_DATA, aliases, label_of, reshaped, writes_first


def engine_of_torch(func: Any) -> Callable[..., Any]:
    """``torch.autograd.grad`` or ``backward`` itself: its body, which keeps the view on for what a backward makes anew."""
    return python_body(func) or func


class Dispatcher(Mover):
    """The view over one axis: answers torch functions.

    Args:
        axis: the axis tensors are cut over.
        ledger: where collectives and fallbacks are counted.
        names: ``id(module)`` → its name in the model, to say where a fallback happened.
        engine: ``torch.autograd.grad`` or ``backward`` → what runs in its place.
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
        self.prepared: dict[tuple[Any, ...], Ready] = {}  # the decision on each signature that was met
        self._running: set[Any] = set()  # functions whose Python body is being run

    # --- answering -------------------------------------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``func`` as one device would give it; sharded tensors come back as global tensors."""
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
        """For the time of a block, calls are decided anew, and what was decided is forgotten at its end: local functions may
        give other types there (in a trial, float64), which no signature says."""
        prepared, self.prepared = self.prepared, {}
        try:
            yield
        finally:
            self.prepared = prepared

    def decide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decided:
        """What is to be done with a call that is neither a fact nor an answer. Nothing is done yet.

        Raises:
            ReadsValue: a number that decides on it is a tensor: decide on it ``with_values``.
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
            return Decided(answer, tensors, *form)  # a slice of a slice: a write to it goes all the way
        if func in DECIDERS and kwargs.get("out") is None:
            call = self._as_call(func, form, tensors)
            answer = self._known(call, DECIDERS[func](call))
        # A body may call the C++ function of the same name, which is answered under this one's: once is enough.
        body = None if func in self._running else python_body(func)
        if isinstance(answer, Gather) and body is not None and not writes_first(func, args, kwargs):
            answer = Body(body, *form, finding=answer.finding)
        return Decided(answer, tensors, *form)

    def _known(self, call: Call, answer: Answer) -> Answer:
        """The answer of a decider, if it says of each operand what that must be. A size that is a tensor it may take for a
        constant (``as_strided(x, (n, m))``): then it is asked again with the values, or the function runs whole."""
        if isinstance(answer, Gather) or not (tensors := passed_on((answer.args, answer.kwargs))):
            return answer
        if all(is_number(x) and x is not call.args[0] for x in tensors):
            raise ReadsValue
        return GATHER

    def _execute(self, func: Any, decided: Decided) -> Any:
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
        prepared = Prepared(answer)
        out = prepared.run_first(self, func, args, kwargs, tensors)
        if func == GET_DATA:
            if isinstance(out, GlobalTensor):
                out._mw_remember(silent=True)
        elif answer.kept:
            self._keep(func, asked_args, asked_kwargs, prepared)
        return out

    def _as_call(self, func: Any, form: tuple[Any, Any], tensors: Sequence[Tensor]) -> Call:
        """What a decider may know of a call."""
        operands = [Operand(i, spec_of(t)) for i, t in enumerate(tensors)]
        args, kwargs = replaced(form, lambda x: operands[x.index] if type(x) is Use else x)
        return Call(func, *ordered(func, args, kwargs), rank=self.axis.rank, ranks=self.axis.size)

    def _keep(self, func: Any, args: Any, kwargs: Any, prepared: Prepared) -> None:
        """Keeps a decision for later calls, if their signature says all that there is to know."""
        signature, _ = signature_of(func, args, kwargs)
        if NEVER in signature:
            return
        if len(self.prepared) >= _KEPT:
            self.prepared.clear()
        self.prepared[signature] = prepared.specialized()

    def _follow(self, answer: Decision, tensors: Sequence[Tensor]) -> GlobalTensor:
        """Planning only: what is still the parameter that it is made of, undecided."""
        assert answer.follows is not None
        index, dims = answer.follows
        source = tensors[index]
        assert isinstance(source, GlobalTensor) and source._mw_parameter is not None
        name, places = source._mw_parameter
        local = Prepared(answer)(self, tensors)
        return GlobalTensor(local, REPLICATE, self, parameter=(name, tuple(-1 if d < 0 else places[d] for d in dims)))

    def fallback(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gathers every argument and runs ``func`` whole, on every rank the same."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(v, GlobalTensor) and isinstance(v._mw_layout, Shard) for v in leaves):
            self.gathered(func)
        written = _written(func, args, kwargs)
        plain = [self.plain(v) if isinstance(v, GlobalTensor) else v for v in leaves]
        if written:
            fresh = {id(v): duplicate(self.plain(v)) for v in written}
            plain = [fresh.get(id(v), p) for v, p in zip(leaves, plain, strict=True)]
        plain_args, plain_kwargs = pytree.tree_unflatten(plain, spec)
        result = func(*plain_args, **plain_kwargs)
        for v in written:
            self.assign(v, fresh[id(v)])
        return self._connected(func, leaves, spec, plain, result)

    def _connected(self, func: Any, leaves: list[Any], spec: Any, plain: list[Any], result: Any) -> Any:
        """What a fallback gave, where that shares memory with what was gathered, as slices of the gathered global tensors.

        A later write to such a slice must reach the tensor that it is a slice of.
        """
        bases = {
            storage_of(p): i for i, (v, p) in enumerate(zip(leaves, plain, strict=True)) if isinstance(v, GlobalTensor)
        }
        pieces, result_spec = pytree.tree_flatten(result)
        by_plain = {id(p): v for v, p in zip(leaves, plain, strict=True) if isinstance(v, GlobalTensor)}
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
        alias = GlobalTensor(local, REPLICATE, self)
        alias._mw_memory = base._mw_memory = base._mw_memory or Memory()
        base = base._mw_twin()
        alias._mw_origin, alias._mw_silent, alias._mw_spec = (base, select), base._mw_silent, None
        alias._mw_memo["origin"] = self.state_of(base)
        return alias

    # --- writes ------------------------------------------------------------------------------------------------------

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that writes to its first argument: to all that shares the memory, as on one device."""
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
                f"{func.__name__} writes to a tensor of which two names stand for one memory on one device, and for two here"
            )
        if target._mw_origin is not None:
            return self._write_through(func, target, args, kwargs)
        return self._execute(func, decide())

    def _set_data(self, x: GlobalTensor, value: Tensor) -> None:
        """``x.data = value``: x is of the memory of value from now on; other names of its memory are not."""
        if x.shape != value.shape:
            raise NotImplementedError(f"x.data = value of another shape, where x is cut: {x.shape} and {value.shape}")
        layout, local = x._mw_layout, x._mw_local.clone()  # another tensor, of the same gradient
        with torch.no_grad():
            if isinstance(value, GlobalTensor) and value._mw_layout == layout and value._mw_origin is None:
                new = value
            elif isinstance(layout, Shard):
                new = GlobalTensor(self.cut(self.whole(value), layout).clone(), layout, self)
                self.lay(new, value.stride())
            else:
                held = (
                    redistribute.keep_first(self.plain(value), self.axis)
                    if isinstance(layout, Partial)
                    else self.plain(value)
                )
                new = GlobalTensor(held, layout, self)
        local.data = new._mw_local.data
        x._mw_become(new)
        x._mw_local, x._mw_silent, x._mw_spec = local, False, None

    def _write_through(self, func: Any, target: GlobalTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A write to a slice that a fallback made: to the slice, then to the tensor it was taken from."""
        assert target._mw_origin is not None
        base, select = target._mw_origin
        plain_args, plain_kwargs = pytree.tree_map_only(GlobalTensor, self.plain, (args[1:], kwargs))
        result = func(target._mw_local, *plain_args, **plain_kwargs)
        value = duplicate(self.plain(base))
        overwrite(select(value), target._mw_local)
        self.assign(base, value, silent=target._mw_silent)
        return None if result is None else target

    # --- where results lie --------------------------------------------------------------------------------------------

    def lay(self, piece: GlobalTensor, strides: Strides | None) -> None:
        """Lays the local tensor of fresh memory as the whole one lies on one device; the order of dims, if it is not known,
        is that of the local tensor."""
        laid_out = fresh(piece._mw_layout, piece._mw_local, strides)
        if laid_out.strides is not None:
            piece._mw_local = with_strides(piece._mw_local, laid_out.strides)
        piece._mw_strides, piece._mw_spec = laid_out.known.strides, None

    def gathered(self, func: Any) -> None:
        """Counts a fallback at the model's line that caused it."""
        self.ledger.fallbacks[self.place(func)] += 1

    def place(self, func: Any) -> Fallback:
        """Which function, module and source line of the model is being run."""
        frame, line, module = sys._getframe(1), "", None
        while frame is not None and (module is None or not line):
            owner, file = frame.f_locals.get("self"), frame.f_code.co_filename
            if not line and is_of_model(file):
                line = source_place(file, frame.f_lineno)
            if module is None and isinstance(owner, nn.Module):
                module = self.names.get(id(owner), type(owner).__name__)
            frame = frame.f_back  # type: ignore[assignment]
        return Fallback(label_of(func), module or "", line)

    def view(self, local: Tensor, layout: Layout) -> Tensor:
        """The result of local work, as the model sees it."""
        return GlobalTensor(local, layout, self)


def signature_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """(the signature of a call, its tensors). A signature is equal to none, itself included, if it does not say all."""
    _, parts, tensors = read(func, args, kwargs, None)
    if new := [t for t in tensors if type(t) is GlobalTensor and t._mw_spec is None]:
        for t in new:
            spec_of(t)
        _, parts, tensors = read(func, args, kwargs, None)
        if any(t._mw_spec is None for t in new):
            parts.append(NEVER)
    return tuple(parts), tensors


def whole(x: Any) -> Any:
    """A tensor of the view, whole on every rank; anything else as it is."""
    return x._mw_dispatcher.whole(x) if isinstance(x, GlobalTensor) else x


_KEPT = 1 << 15  # decisions, before all are forgotten: shapes may change with every batch


def _slices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[GlobalTensor]:
    """The global tensors among the arguments that are slices which a fallback made."""
    return [x for x in (*args, *kwargs.values()) if type(x) is GlobalTensor and x._mw_origin is not None]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[GlobalTensor]:
    """The global tensors that a call writes: its first argument, or what stands in that (``torch._foreach_add_``), and
    ``out=``."""
    first = args[:1] if writes_first(func, args, kwargs) else ()
    return [v for v in pytree.tree_leaves((first, kwargs.get("out"))) if isinstance(v, GlobalTensor)]


def _again(func: Any, plain: tuple[Any, ...], spec: Any, place: int, number: int, value: Tensor) -> Tensor:
    """Result ``number`` of a call whose argument number ``place``, of all leaves, is ``value``."""
    args, kwargs = pytree.tree_unflatten([*plain[:place], value, *plain[place + 1 :]], spec)
    piece: Tensor = pytree.tree_leaves(func(*args, **kwargs))[number]
    return piece


__all__ = ["PARTIAL", "Dispatcher", "whole"]
