"""``Work``: how torch functions are answered when some of their tensors are cut.

    call(func, args)
      1  facts of the wrapper (shape, dtype …)          answered at once
      2  a rule for the function (view/rules)           local work on local tensors, and the layout that comes out
      3  no rule that fits, but a Python function       its body runs, and the functions in it are answered in turn
      4  anything else                                  fallback: gather, run whole, count it

So every torch function is right; a missing rule costs speed, never correctness. ``Work`` also converts between
layouts for the rules: ``whole`` (used whole), ``varying`` (whole, used in cut work) and ``cut``.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import meshwright
from meshwright.errors import source_place
from meshwright.layout import PARTIAL, WHOLE, Cut, Layout, Partial
from meshwright.private import python_body, pytree, version, without_subclasses
from meshwright.view import moves
from meshwright.view.axis import Axis, Fallback, Ledger
from meshwright.view.rules import FACTS, RULES, aliases, ordered, writes
from meshwright.view.tensor import View


class Work:
    """The view over one axis: answers torch functions and moves tensors between layouts.

    Args:
        axis: the axis tensors are cut over.
        ledger: where collectives and fallbacks are counted.
        names: ``id(module)`` → its name in the model, to say where a fallback happened.
    """

    def __init__(self, axis: Axis, ledger: Ledger, names: dict[int, str] | None = None) -> None:
        self.axis, self.ledger, self.names = axis, ledger, names or {}
        self._running: set[Any] = set()  # functions whose Python body is being run

    # --- answering -------------------------------------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``func`` as one device would give it; cut tensors come back as Views."""
        if func in FACTS:
            with without_subclasses():
                return func(*args, **kwargs)
        args, kwargs = ordered(func, args, kwargs)
        target = args[0] if args and writes(func, args, kwargs) else None
        if isinstance(target, View) and target._mw_origin is not None:
            return self._write_through(func, target, args, kwargs)
        for x in args:
            if isinstance(x, View) and x._mw_origin is not None:
                self._refresh(x)
        if args and isinstance(args[0], View) and args[0]._mw_origin is not None and aliases(func):
            return self.fallback(func, args, kwargs)  # a slice of a slice: a write to it goes all the way
        rule = RULES.get(func)
        if rule is not None and kwargs.get("out") is None:
            out = rule(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        if (body := python_body(func)) is not None and target is None and func not in self._running:
            # A body may call the C++ function of the same name, which is answered under this one's: once is enough.
            self._running.add(func)
            try:
                return body(*args, **kwargs)
            finally:
                self._running.discard(func)
        return self.fallback(func, args, kwargs)

    def fallback(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gathers every argument and runs ``func`` whole, on every rank the same."""
        views = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, View)]
        gathered = [v for v in views if isinstance(v._mw_layout, Cut)]
        if gathered:
            self.gathered(func, gathered)
        target = args[0] if args and writes(func, args, kwargs) else None
        out = kwargs.get("out")
        plain_args, plain_kwargs = pytree.tree_map_only(View, self.whole, (args, kwargs))
        if isinstance(target, View):
            value = self.whole(target).clone()
            result = func(value, *plain_args[1:], **plain_kwargs)
            self.write(target, value)
            return None if result is None else target
        if isinstance(out, View):
            plain_kwargs["out"] = self.whole(out).clone()
            self.write(out, func(*plain_args, **plain_kwargs))
            return out
        result = func(*plain_args, **plain_kwargs)
        if aliases(func) and isinstance(args[0], View):
            # A later write to this slice (or to one of these pieces) must reach the tensor it is a slice of.
            again = functools.partial(_apply, func, plain_args[1:], plain_kwargs)
            if isinstance(result, Tensor):
                return self._alias(result, args[0], again)
            if isinstance(result, (tuple, list)):
                pieces = [self._alias(r, args[0], functools.partial(_piece, again, i)) for i, r in enumerate(result)]
                return type(result)(pieces)
        return result

    def _alias(self, local: Tensor, base: View, select: Callable[[Tensor], Tensor]) -> View:
        alias = View(local, WHOLE, self)
        alias._mw_origin = (base, select)
        alias._mw_memo["origin"] = version(base._mw_local)
        return alias

    def _refresh(self, alias: View) -> None:
        """Takes the slice that a fallback made again, where the tensor it is a slice of has been written since."""
        assert alias._mw_origin is not None
        base, select = alias._mw_origin
        if base._mw_origin is not None:
            self._refresh(base)
        written = version(base._mw_local)
        if written is None or alias._mw_memo.get("origin") != written:
            alias._mw_local, alias._mw_memo = select(self.whole(base)), {"origin": written}

    def _write_through(self, func: Any, target: View, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A write to a slice that a fallback made: to the slice, then to the tensor it was taken from."""
        assert target._mw_origin is not None
        base, select = target._mw_origin
        plain_args, plain_kwargs = pytree.tree_map_only(View, self.whole, (args[1:], kwargs))
        result = func(target._mw_local, *plain_args, **plain_kwargs)
        value = self.whole(base).clone()
        select(value).copy_(target._mw_local)
        if base._mw_origin is not None:
            self._write_through(torch.Tensor.copy_, base, (base, value), {})
        else:
            self.write(base, value)
        return None if result is None else target

    def gathered(self, func: Any, views: list[View]) -> None:
        """Counts a fallback at the model's line that caused it."""
        self.ledger.fallbacks[self.place(func)] += 1

    def place(self, func: Any) -> Fallback:
        """Which function, module and source line of the model is being run."""
        frame, line, module = sys._getframe(1), "", None
        while frame is not None and (module is None or not line):
            owner, file = frame.f_locals.get("self"), frame.f_code.co_filename
            if not line and not file.startswith(_NOT_THE_MODEL):
                line = source_place(file, frame.f_lineno)
            if module is None and isinstance(owner, nn.Module):
                module = self.names.get(id(owner), type(owner).__name__)
            frame = frame.f_back  # type: ignore[assignment]
        return Fallback(getattr(func, "__name__", str(func)), module or "", line)

    # --- layouts ---------------------------------------------------------------------------------------------------

    def view(self, local: Tensor, layout: Layout) -> Tensor:
        """The result of local work, as the model sees it."""
        return View(local, layout, self)

    def layout(self, x: Any) -> Layout:
        return x._mw_layout if isinstance(x, View) else WHOLE

    def whole(self, x: Any) -> Any:
        """``x`` on every rank, used by every rank alike."""
        if not isinstance(x, View):
            return x
        if x._mw_origin is not None:
            self._refresh(x)
        layout = x._mw_layout
        if isinstance(layout, Cut):
            return self._once(x, "whole", lambda t: moves.gather(t, self.axis, layout))
        if isinstance(layout, Partial):
            return self._once(x, "whole", lambda t: moves.reduce(t, self.axis))
        return x._mw_local

    def varying(self, x: Any) -> Any:
        """``x`` on every rank, used by each for its own part: gradients are summed over the axis."""
        if not isinstance(x, Tensor):
            return x
        if isinstance(x, View) and isinstance(layout := x._mw_layout, Cut):
            return self._once(x, "varying", lambda t: moves.gather_enter(t, self.axis, layout))
        base = self.whole(x)
        if not base.requires_grad:
            return base
        wide = getattr(base, "_mw_is_parameter", False)
        return self._once(base, f"_mw_entered_{id(self)}", lambda t: moves.enter(t, self.axis, wide=wide))

    def cut(self, x: Tensor, layout: Cut) -> Tensor:
        """This rank's slice of ``x`` under ``layout``: the local tensor."""
        if not isinstance(x, View):
            return moves.take(x, self.axis, layout)
        have, local = x._mw_layout, x._mw_local
        if have == layout:
            return local
        if isinstance(have, Partial):
            memo = x._mw_memo.get("whole")
            if memo is None or memo[0] != version(local):
                return moves.reduce_scatter(local, self.axis, layout)
        if isinstance(have, Cut):
            self.regathered(x, layout)
            if have.dim != layout.dim:
                return moves.exchange(local, self.axis, have, layout)
        return moves.take(self.whole(x), self.axis, layout)

    def regathered(self, x: View, layout: Cut) -> None:
        """A cut tensor moves to another cut: planning learns from it."""

    def write(self, target: View, value: Tensor) -> None:
        """Makes ``value`` (whole) the value of ``target``, in place, so that its aliases see it."""
        layout = target._mw_layout
        if isinstance(layout, Cut):
            target._mw_local.copy_(moves.take(value, self.axis, layout))
        elif isinstance(layout, Partial):
            target._mw_local.copy_(moves.hold(value, self.axis))
        else:
            target._mw_local.copy_(value)

    def _once(self, x: Tensor, kind: str, move: Callable[[Tensor], Tensor]) -> Tensor:
        """The result of a move of this very value, made once: q, k and v share one gradient all-reduce."""
        memos = x._mw_memo if isinstance(x, View) else x.__dict__
        local = x._mw_local if isinstance(x, View) else x
        if (written := version(local)) is None:
            return move(local)
        key = (written, torch.is_grad_enabled() and local.requires_grad)
        memo = memos.get(kind)
        if memo is None or memo[:2] != key:
            memo = memos[kind] = (*key, move(local))
        return memo[2]

    def engine(self, func: Any) -> Callable[..., Any]:
        """``torch.autograd.grad`` or ``backward`` itself, for the rules of these.

        Its body: handed over again, it would run without function modes, and what a backward makes anew needs the view.
        """
        return python_body(func) or func

    # --- decisions, which planning makes; a run finds them made ------------------------------------------------------

    def column(self, parameter: Any, dim: int) -> Any:
        """A parameter meets a whole input: planning may cut it along its output dim."""
        return parameter

    def wanted(self, parameter: Any) -> str | None:
        """``column`` or ``row`` where the plan says how to cut a parameter, whatever it meets."""
        return None

    def row(self, parameter: Any, dim: int) -> Any:
        """A parameter that the plan wants cut along its input dim."""
        return parameter

    def match(self, parameter: Any, layout: Cut) -> Any:
        """A parameter meets a cut input: planning may cut it the same way."""
        return parameter

    def table(self, parameter: Any) -> Any:
        """A parameter is looked up by rows: planning may cut the rows."""
        return parameter

    def used_as(self, x: Any, role: str) -> None:
        """The cut of ``x`` is a product's ``column`` (its own dim of the result), ``row`` (summed over) or ``batch``."""

    def blocks(self, x: Any, sizes: tuple[int, ...]) -> None:
        """The cut dim of ``x`` turns out to be fused blocks of these sizes."""

    def units(self, x: Any, count: int) -> None:
        """The cut dim of ``x`` turns out to be that many pieces which may not be broken."""


# Files in these folders are not the model's. Not just any path with "meshwright" in it: a checkout may be named so.
_NOT_THE_MODEL = tuple(os.path.dirname(p.__file__ or "") + os.sep for p in (torch, meshwright))


def whole(x: Any) -> Any:
    """A tensor of the view, whole on every rank; anything else as it is."""
    return x._mw_work.whole(x) if isinstance(x, View) else x


def _piece(select: Callable[[Tensor], Any], i: int, value: Tensor) -> Tensor:
    piece: Tensor = select(value)[i]
    return piece


def _apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor) -> Any:
    return func(value, *args, **kwargs)


__all__ = ["PARTIAL", "Work", "whole"]
