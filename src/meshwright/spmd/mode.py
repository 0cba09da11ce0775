"""``SpmdMode``: while it is on, the model's code sees whole tensors and each rank works on its part.

It catches what the class ``GlobalTensor`` alone cannot: functions that are called with a parameter (a DTensor at rest, or, in
planning, a meta tensor) and no global tensor. The parameter's local part takes its place. Everything else passes untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Shard
from meshwright.private import pytree, storage_of, version, without_modes
from meshwright.spmd.autograd_functions import (
    FunctionMode,
    Segment,
    custom_functions,
    giving,
    outside_transforms,
    recomputations,
    scripted_functions,
    transforming,
    transforms,
)
from meshwright.spmd.decide.gradient import ENGINES
from meshwright.spmd.dispatcher import Dispatcher, whole
from meshwright.spmd.signature import read
from meshwright.spmd.tensor import GlobalTensor, first_global_tensor, local_of
from meshwright.spmd.torch_functions import FACTS, OF_ITSELF, SET_DATA

# Types of arguments in which there is no tensor of ours.
_PLAIN = frozenset(
    [
        int,
        float,
        bool,
        str,
        type(None),
        slice,
        type(...),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
        Tensor,
    ]
)
_PLAIN_OR_VIEW = _PLAIN | {GlobalTensor}

SPECIAL = OF_ITSELF | {SET_DATA} | ENGINES.keys()


class GlobalTensorMode(FunctionMode):
    """The model's code sees global tensors. A subclass says who answers its calls: a run (``SpmdMode``), or planning, which
    reads what is decided of them (planning/planner.py).

    Args:
        dispatcher: answers functions that no global tensor takes part in; those with one are answered by its own.
        local: a parameter → its local part (a global tensor, or a plain tensor where it is whole), or None for other tensors.
        forget: called at the end.
        renew: called after a trial: local parts that were looked at in its types are made anew.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        local: Callable[[Tensor], Tensor | None],
        forget: Callable[[], None] = lambda: None,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.dispatcher, self.local, self._forget, self.renew = dispatcher, local, forget, renew

    def answer(self, dispatcher: Dispatcher, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call in which there is a global tensor of ``dispatcher``."""
        raise NotImplementedError

    def gathered(self, dispatcher: Dispatcher, user: Any, views: list[GlobalTensor]) -> None:
        """Sharded global tensors are made whole for ``user``, which is no torch function."""
        dispatcher.gathered(user)

    def _special(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is not asked of a parameter's local part."""
        if func == SET_DATA and (answer := self._set_data(*args)) is not NotImplemented:
            return answer
        if func in OF_ITSELF:
            view = first_global_tensor(args)
            return func(*args, **kwargs) if view is None else self.answer(view._mw_dispatcher, func, args, kwargs)
        if transforming():
            return self._in_transform(func, args, kwargs)
        return self._differentiate(func, args, kwargs)

    def _set_data(self, x: Tensor, value: Tensor) -> Any:
        """``x.data = value`` of a parameter: written to where it stands."""
        part = self.local(x)
        if _same_memory(part, value):
            return None  # a cast that did nothing: as a write it would make what was computed before seem stale
        if part is None or part.shape != value.shape:
            return NotImplemented
        part = part.detach()
        with torch.no_grad():
            self.answer(
                part._mw_dispatcher if isinstance(part, GlobalTensor) else self.dispatcher,
                Tensor.copy_,
                (part, value),
                {},
            )
        return None

    def _differentiate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A backward within the forward; what it makes again needs the view, which is off while it answers."""
        if not torch.is_grad_enabled() and func is torch.autograd.grad:
            return func(*args, **kwargs)  # there is no graph: for another mode, or an error
        if func is not torch.autograd.backward:  # that adds to the parameters themselves
            _, args, kwargs = self._substitute(args, kwargs)
        with self:
            return self.answer(self.dispatcher, func, args, kwargs)

    def _in_transform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Within a transform of ``torch.func`` all tensors are whole."""
        if func in FACTS:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, partial(self._whole, func), (args, kwargs))
        return func(*args, **kwargs)

    def _whole(self, user: Any, x: Tensor) -> Tensor:
        """A global tensor or a parameter as a plain tensor, for ``user`` (which is counted); any other as it is."""
        with outside_transforms():
            part = x if isinstance(x, GlobalTensor) else self.local(x)
            if part is None:
                return x
            if isinstance(part, GlobalTensor) and isinstance(part._mw_layout, Shard):
                self.gathered(part._mw_dispatcher, user, [part])
            plain: Tensor = whole(part)
            return plain

    def _substitute(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Dispatcher | None, tuple[Any, ...], dict[str, Any]]:
        """(the work of the first global tensor among the arguments, the arguments with parameters' local parts)."""
        ours: Dispatcher | None = None
        places: list[tuple[Any, Tensor]] = []  # where there are parameters
        for at, x in enumerate(args) if not kwargs else (*enumerate(args), *kwargs.items()):
            kind = type(x)
            if kind in _PLAIN:
                continue
            if kind is GlobalTensor:
                ours = ours or x._mw_dispatcher
            elif kind in (tuple, list) and all(type(y) in _PLAIN_OR_VIEW for y in x):
                ours = ours or next((y._mw_dispatcher for y in x if type(y) is GlobalTensor), None)
            elif not isinstance(x, Tensor):
                return self._substitute_within(args, kwargs)
            elif (part := self.local(x)) is not None:
                places.append((at, part))
                if ours is None and isinstance(part, GlobalTensor):
                    ours = part._mw_dispatcher
        if places:
            replaced_args, kwargs = list(args), dict(kwargs)
            for at, part in places:
                if isinstance(at, int):
                    replaced_args[at] = part
                else:
                    kwargs[at] = part
            args = tuple(replaced_args)
        return ours, args, kwargs

    def _substitute_within(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Dispatcher | None, tuple[Any, ...], dict[str, Any]]:
        """The same where arguments nest, at ten times the cost."""
        ours: Dispatcher | None = None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        replaced_leaves = []
        for leaf in leaves:
            part = self.local(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, GlobalTensor) else None
            replaced_leaves.append(leaf if part is None else part)
            if ours is None and isinstance(replaced_leaves[-1], GlobalTensor):
                ours = replaced_leaves[-1]._mw_dispatcher
        if any(a is not b for a, b in zip(leaves, replaced_leaves, strict=True)):
            args, kwargs = pytree.tree_unflatten(replaced_leaves, spec)
        return ours, args, kwargs

    @contextmanager
    def on(self) -> Iterator[None]:
        """The view, for the time of a forward (and of a backward that recomputes parts of it)."""
        try:
            with (
                self,
                custom_functions(self.custom),
                transforms(partial(self._whole, "a transform of torch.func")),
                scripted_functions(self.scripted),
                recomputations(_kept_local, _given_local),
            ):
                yield
        finally:
            self._forget()

    def scripted(self, call: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch.jit made gets, and gives, whole tensors."""
        change = partial(self._whole, "a scripted function")
        args, kwargs = pytree.tree_map_only(Tensor, change, (args, kwargs))
        return call(function, *args, **kwargs)

    def custom(self, apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Custom ``autograd.Function`` s get, and give, whole tensors; what they write to one reaches the global tensor."""
        with without_modes():  # this mode is on here, and would take what is asked of a parameter for a use of it
            ours, args, kwargs = self._substitute(args, kwargs)
        function = giving(function, whole)
        if ours is None:
            return apply(function, *args, **kwargs)
        views = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, GlobalTensor)]
        if any(isinstance(v._mw_layout, Shard) for v in views):
            self.gathered(ours, function, views)
        wholes = {id(v): whole(v) for v in views}
        before = {i: version(t) for i, t in wholes.items()}
        args, kwargs = pytree.tree_map_only(GlobalTensor, lambda v: wholes[id(v)], (args, kwargs))
        result = apply(function, *args, **kwargs)
        for v in views:
            gathered = wholes[id(v)]
            if gathered is not v._mw_local and version(gathered) != before[id(v)]:
                ours.assign(v, gathered)
                result = _with(result, gathered, v)
        return result


class SpmdMode(GlobalTensorMode):
    """The mode of a run: each call is what was decided of its signature, executed."""

    def may_be_passed(self) -> bool:
        """See ``FunctionMode``."""
        return True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        if func in SPECIAL or transforming():
            return self._special(func, args, kwargs)
        ours, parts, tensors = read(func, args, kwargs, self.local)
        if ours is not None:
            if (prepared := ours.prepared.get(tuple(parts))) is not None:
                return prepared(ours, tensors)
        elif not kwargs and all(type(x) in _PLAIN for x in args):
            return func(*args)
        ours, args, kwargs = self._substitute(args, kwargs)
        return self.answer(ours, func, args, kwargs) if ours is not None else func(*args, **kwargs)

    def answer(self, dispatcher: Dispatcher, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``GlobalTensorMode``."""
        return dispatcher.call(func, args, kwargs)


def _with(value: Any, t: Tensor, other: Tensor) -> Any:
    """A value, in which another tensor stands for one of its tensors."""
    return pytree.tree_map_only(Tensor, lambda x: other if x is t else x, value)


def _same_memory(a: Tensor | None, b: Tensor) -> bool:
    """Whether two tensors are the same elements."""
    if a is None:
        return False
    a, b = map(local_of, (a, b))
    return storage_of(a) == storage_of(b) and _lies(a) == _lies(b)


def _lies(t: Tensor) -> tuple[Any, ...]:
    return t.storage_offset(), t.dtype, t.shape, t.stride()


def _kept_local(function: Segment, args: tuple[Any, ...]) -> tuple[Segment, tuple[Any, ...]]:
    """What a checkpoint keeps of global tensors are their local tensors: of a wrapper, autograd would not keep the graph."""
    kinds = [_kind(x) for x in args]
    if not any(kinds):
        return function, args

    def again(*given: Any, **named: Any) -> Any:
        return function(*map(_of_kind, given, kinds), **named)

    return again, tuple(map(local_of, args))


def _given_local(results: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The results of a reentrant checkpoint's segment as local tensors, and what makes global tensors of these again."""
    pieces = results if isinstance(results, tuple) else (results,)
    kinds, local, several = [_kind(x) for x in pieces], tuple(map(local_of, pieces)), isinstance(results, tuple)

    def back(found: Any) -> Any:
        return tuple(map(_of_kind, found, kinds)) if several else _of_kind(found, kinds[0])

    return local if several else local[0], back


def _kind(x: Any) -> tuple[Any, ...] | None:
    """All that a global tensor is but its local tensor, which would keep a graph alive."""
    if not isinstance(x, GlobalTensor):
        return None
    return x._mw_layout, x._mw_dispatcher, x._mw_parameter, x._mw_strides, x._mw_offset


def _of_kind(local: Any, kind: tuple[Any, ...] | None) -> Any:
    if kind is None:
        return local
    layout, dispatcher, parameter, strides, offset = kind
    made = GlobalTensor(local, layout, dispatcher, parameter=parameter)
    made._mw_strides, made._mw_offset = strides, offset
    return made
