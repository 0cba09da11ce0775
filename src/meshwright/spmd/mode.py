"""``SpmdMode``: while it is on, the model's code sees full tensors, and each rank computes its part.

It catches calls that the class ``GlobalTensor`` alone cannot catch: those with a parameter (a DTensor at rest, or in planning a
meta tensor) and no global tensor. The parameter is replaced by its local part. All other calls pass unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    outside_transforms,
    recomputations,
    scripted_functions,
    transforming,
    transforms,
    with_changed_tensors,
)
from meshwright.spmd.decide.gradient import ENGINES
from meshwright.spmd.dispatcher import Dispatcher, engine_of_torch, full_tensor
from meshwright.spmd.signature import read_call
from meshwright.spmd.tensor import GlobalTensor, first_global_tensor, local_of
from meshwright.spmd.torch_functions import CHANGES_GRADIENT, FACTS, OF_ITSELF, SET_DATA

# Types of arguments that are neither global tensors nor parameters.
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
_PLAIN_OR_GLOBAL = _PLAIN | {GlobalTensor}
_NO_PARAMETER = frozenset([Tensor, GlobalTensor])

SPECIAL = OF_ITSELF | {SET_DATA} | ENGINES.keys()


class LocalPartLookup:
    """Returns the local part of a parameter: a global tensor if the parameter is sharded, a plain tensor if it is replicated.
    Returns None for a tensor that is no parameter.

    Args:
        lookup: a tensor → its local part, or None. If it is None itself, no tensor has a local part.

    Attributes:
        version: a token for caches. It is the same object as long as no parameter and no local part has changed. None if that
            is not known.
        requested_ids: the ids of the parameters whose local parts were requested in this forward. The dispatcher may have
            stored moves on these local parts.
        gradients_observed: whether code of a person may read gradients of parameters while a backward runs.
    """

    def __init__(self, lookup: Callable[[Tensor], Tensor | None] | None) -> None:
        self._lookup, self.requested_ids = lookup, set[int]()
        self.version: object | None = None
        self.gradients_observed = True
        self._checked_token: object | None = None
        self._current_version = object()

    def __call__(self, x: Tensor) -> Tensor | None:
        return None if self._lookup is None else self._lookup(x)

    def set_data(self, x: Tensor, part: Tensor, value: Tensor) -> None:
        """``x.data = value`` for a parameter. ``part``: its local part; ``value``: that of the value, in memory of its own."""
        local_of(part).detach().copy_(value)

    def set_type(self, x: Tensor, dtype: torch.dtype) -> None:
        """From now on, until the forward ends, a parameter computes in this type."""

    def end_forward(self) -> None:
        """Called when a forward ends, and when a backward ends, which may have recomputed parts of a forward."""

    def end_trial(self) -> None:
        """Called when a trial ends. A trial may compute in another dtype, so its local parts cannot be used in a step."""

    def around_backward(self) -> AbstractContextManager[None]:
        """A context for the backward of a step."""
        return nullcontext()

    def begin_step(self, token: object | None, *, gradients_observed: bool) -> None:
        """Called when a step begins, after all parameters were checked.

        Args:
            token: the same object as in the last step if no parameter has changed since. None: a parameter may change during
                the step.
            gradients_observed: see the attribute.
        """
        self.gradients_observed = gradients_observed or token is None
        if token is not None and token is not self._checked_token:
            self._checked_token, self._current_version = token, object()
        self.version = None if token is None else self._current_version

    def end_step(self) -> None:
        """Called when a step ends: from now on, a parameter may change at any time."""
        self.version, self.gradients_observed = None, True

    def invalidate(self) -> None:
        """Called when a parameter or a local part has changed: what was cached for the version is no longer used."""
        self._current_version, self.version = object(), None


class GlobalTensorMode(FunctionMode):
    """The model's code sees global tensors. A subclass answers the calls: ``SpmdMode`` in a run; in planning a mode that
    reads the decisions (planning/planner.py).

    Args:
        dispatcher: answers calls without a global tensor; a call with one is answered by the dispatcher of that tensor.
        local: a parameter → its local part; another tensor → None.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        local: LocalPartLookup | Callable[[Tensor], Tensor | None],
    ) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.local = local if isinstance(local, LocalPartLookup) else LocalPartLookup(local)

    def answer(self, dispatcher: Dispatcher, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers a call with a global tensor of ``dispatcher``."""
        raise NotImplementedError

    def gathered(self, dispatcher: Dispatcher, user: Any, global_tensors: list[GlobalTensor]) -> None:
        """Notes that sharded global tensors are gathered for ``user``, which is no torch function."""
        dispatcher.gathered(user)

    def _special(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers a call of a function in ``SPECIAL``, or any call within a transform of ``torch.func``."""
        if func == SET_DATA and (answer := self._set_data(*args)) is not NotImplemented:
            return answer
        if func is Tensor.backward:  # calls ``torch.autograd.backward``, which this mode is to see
            with self:
                return engine_of_torch(func)(*args, **kwargs)
        if func in OF_ITSELF:
            first = first_global_tensor(args)
            return func(*args, **kwargs) if first is None else self.answer(first._mw_dispatcher, func, args, kwargs)
        if transforming():
            return self._in_transform(func, args, kwargs)
        return self._differentiate(func, args, kwargs)

    def _set_data(self, x: Tensor, value: Tensor) -> Any:
        """``x.data = value`` of a parameter: its local part gets the value's slice. What autograd has saved of it, and aliases
        of its former memory, are then as on one device."""
        part = self.local(x)
        if _same_memory(part, value):
            return None  # a cast that changed nothing: a write would make earlier results seem stale
        if part is None or part.shape != value.shape:
            return NotImplemented
        dispatcher = part._mw_dispatcher if isinstance(part, GlobalTensor) else self.dispatcher
        with torch.no_grad():
            new = self.answer(dispatcher, Tensor.clone, (part.detach(),), {})
            self.answer(dispatcher, Tensor.copy_, (new, value), {})
            self.local.set_data(x, part, local_of(new))  # modes that were on before this one see it: a recorder refuses
        if value.is_floating_point() and value.dtype != part.dtype:
            self.local.set_type(x, value.dtype)  # the forward casts a module (``linear.float()``)
        return None

    def _differentiate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A backward within the forward. This mode, which is off while it answers, must be on for what backward recomputes."""
        if not torch.is_grad_enabled() and func is torch.autograd.grad:
            return func(*args, **kwargs)  # there is no graph: another mode answers, or torch raises
        if func is not torch.autograd.backward:  # ``backward`` adds to the parameters themselves
            _, args, kwargs = self._substitute(args, kwargs)
        with self:
            return self.answer(self.dispatcher, func, args, kwargs)

    def _in_transform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call within a transform of ``torch.func``, where all tensors are whole."""
        if func in FACTS:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, partial(self._whole, func), (args, kwargs))
        return func(*args, **kwargs)

    def _whole(self, user: Any, x: Tensor) -> Tensor:
        """A global tensor or a parameter as a full tensor; any other tensor as it is. ``user`` is counted as a fallback."""
        with outside_transforms():
            part = x if isinstance(x, GlobalTensor) else self.local(x)
            if part is None:
                return x
            if isinstance(part, GlobalTensor) and isinstance(part._mw_layout, Shard):
                self.gathered(part._mw_dispatcher, user, [part])
            plain: Tensor = full_tensor(part)
            return plain

    def _substitute(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Dispatcher | None, tuple[Any, ...], dict[str, Any]]:
        """(dispatcher of the first global tensor or None, args, kwargs), with local parts in place of parameters."""
        ours: Dispatcher | None = None
        parameters: list[tuple[Any, Tensor]] = []  # (position or keyword, local part)
        for at, x in enumerate(args) if not kwargs else (*enumerate(args), *kwargs.items()):
            kind = type(x)
            if kind in _PLAIN:
                continue
            if kind is GlobalTensor:
                ours = ours or x._mw_dispatcher
            elif kind in (tuple, list) and all(type(y) in _PLAIN_OR_GLOBAL for y in x):
                ours = ours or next((y._mw_dispatcher for y in x if type(y) is GlobalTensor), None)
            elif not isinstance(x, Tensor):
                return self._substitute_within(args, kwargs)
            elif (part := self.local(x)) is not None:
                parameters.append((at, part))
                if ours is None and isinstance(part, GlobalTensor):
                    ours = part._mw_dispatcher
        if parameters:
            replaced_args, kwargs = list(args), dict(kwargs)
            for at, part in parameters:
                if isinstance(at, int):
                    replaced_args[at] = part
                else:
                    kwargs[at] = part
            args = tuple(replaced_args)
        return ours, args, kwargs

    def _substitute_within(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Dispatcher | None, tuple[Any, ...], dict[str, Any]]:
        """``_substitute`` for nested arguments, which takes ten times as long."""
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
        """This mode and its patches, for a forward, or for a backward that recomputes parts of it."""
        try:
            with (
                self,
                custom_functions(self.custom),
                transforms(partial(self._whole, "a transform of torch.func")),
                scripted_functions(self.scripted),
                recomputations(_checkpoint_arguments, _checkpoint_results),
            ):
                yield
        finally:
            self.local.end_forward()

    def scripted(self, call: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a scripted function: it takes and returns full tensors."""
        change = partial(self._whole, "a scripted function")
        with without_modes():  # as below
            args, kwargs = pytree.tree_map_only(Tensor, change, (args, kwargs))
        return call(function, *args, **kwargs)

    def custom(self, apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``apply`` of a custom ``autograd.Function``: it takes and returns full tensors. A write to an argument reaches the
        global tensor."""
        with without_modes():  # else this mode would take a look at a parameter for a use of it
            ours, args, kwargs = self._substitute(args, kwargs)
        function = with_changed_tensors(function, full_tensor)
        if ours is None:
            return apply(function, *args, **kwargs)
        global_tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, GlobalTensor)]
        if any(isinstance(t._mw_layout, Shard) for t in global_tensors):
            self.gathered(ours, function, global_tensors)
        full_tensors = {id(t): full_tensor(t) for t in global_tensors}
        before = {i: version(t) for i, t in full_tensors.items()}
        args, kwargs = pytree.tree_map_only(GlobalTensor, lambda t: full_tensors[id(t)], (args, kwargs))
        result = apply(function, *args, **kwargs)
        for t in global_tensors:
            gathered = full_tensors[id(t)]
            if gathered is not t._mw_local and version(gathered) != before[id(t)]:
                ours.assign(t, gathered)
                result = _with_tensor_replaced(result, gathered, t)
        return result


class SpmdMode(GlobalTensorMode):
    """The mode of a run: each call executes the decision for its signature."""

    def may_be_passed(self) -> bool:
        """See ``FunctionMode``."""
        return True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        if func in SPECIAL or transforming():
            if func in CHANGES_GRADIENT:
                self.local.gradients_observed = True
                if type(args[0]) not in _NO_PARAMETER:
                    self.local.invalidate()
            return self._special(func, args, kwargs)
        ours, parts, tensors = read_call(func, args, kwargs, self.local)
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


def _with_tensor_replaced(value: Any, t: Tensor, other: Tensor) -> Any:
    """``value`` with the tensor ``other`` in place of the tensor ``t``."""
    return pytree.tree_map_only(Tensor, lambda x: other if x is t else x, value)


def _same_memory(a: Tensor | None, b: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    if a is None:
        return False
    a, b = map(local_of, (a, b))
    return storage_of(a) == storage_of(b) and _address(a) == _address(b)


def _address(t: Tensor) -> tuple[Any, ...]:
    return t.storage_offset(), t.dtype, t.shape, t.stride()


def _checkpoint_arguments(function: Segment, args: tuple[Any, ...]) -> tuple[Segment, tuple[Any, ...]]:
    """(the function to checkpoint, its arguments), with local tensors in place of global ones.

    A checkpoint must keep local tensors: autograd would not keep the graph of a wrapper.
    """
    facts = [_facts_of(x) for x in args]
    if not any(facts):
        return function, args

    def again(*local_args: Any, **named: Any) -> Any:
        return function(*map(_with_facts, local_args, facts), **named)

    return again, tuple(map(local_of, args))


def _checkpoint_results(results: Any) -> tuple[Any, Callable[[Any], Any]]:
    """(results of a reentrant checkpoint's segment as local tensors, the function that makes them global tensors again)."""
    several = isinstance(results, tuple)
    pieces = results if several else (results,)
    facts, local = [_facts_of(x) for x in pieces], tuple(map(local_of, pieces))

    def to_global(outputs: Any) -> Any:
        return tuple(map(_with_facts, outputs, facts)) if several else _with_facts(outputs, facts[0])

    return local if several else local[0], to_global


def _facts_of(x: Any) -> tuple[Any, ...] | None:
    """The facts of a global tensor without its local tensor, which would keep a graph alive; None for anything else."""
    if not isinstance(x, GlobalTensor):
        return None
    return x._mw_layout, x._mw_dispatcher, x._mw_parameter, x._mw_strides, x._mw_offset


def _with_facts(local: Any, facts: tuple[Any, ...] | None) -> Any:
    """The global tensor with these facts; ``local`` itself if there are none."""
    if facts is None:
        return local
    layout, dispatcher, parameter, strides, offset = facts
    result = GlobalTensor(local, layout, dispatcher, parameter=parameter)
    result._mw_strides, result._mw_offset = strides, offset
    return result
