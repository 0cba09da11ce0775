"""``CountedUses``: finds where a forward uses counts of its batch: numbers of labels or of elements that a mask picks, and sums
that divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.private import pytree
from meshwright.runtime.rows.label_program import Follower, Name, Tape, token
from meshwright.spmd.losses import mean_target
from meshwright.spmd.torch_functions import target_of


def labels_counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of a mean over labels: their number, or the sum of their class weights."""
    valid = target != ignore_index
    return valid.sum() if weight is None else (weight[torch.where(valid, target, 0)] * valid).sum()


def elements_counted(mask: Tensor) -> Tensor:
    """The number of elements that a mask picks."""
    return mask.sum()


_DIVIDES = frozenset("div div_ divide divide_ true_divide true_divide_ __truediv__ __itruediv__ __rtruediv__".split())
_MULTIPLIES = frozenset("mul mul_ multiply multiply_ __mul__ __imul__ __rmul__".split())
_MEANS = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits".split()
)


# Functions that write rows into those of their first argument, whose rows the result has. (The picked ones may be as many:
# in a recording a mask picks all.)
_INTO = frozenset(
    f"{name}{end}" for end in ("", "_") for name in (
        "index_put", "index_copy", "index_add", "index_reduce", "scatter", "scatter_add", "scatter_reduce", "masked_scatter",
        "slice_scatter", "select_scatter", "put", "copy",
    )
)  # fmt: skip


def is_quotient(function: str) -> bool:
    """Whether a torch function of this name divides."""
    return function in _DIVIDES


def _is_mean_of_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "mean":
        return len(args) == 1 and not {"dim", "axis"} & kwargs.keys()
    plain = all(kwargs.get(old) is None for old in ("size_average", "reduce", "weight"))
    return name in _MEANS and kwargs.get("reduction", "mean") == "mean" and plain


class CountedUses(Follower):
    """Finds uses of counts. Subclasses decide by ``mean``, ``part``, ``term`` and ``uncounted`` what happens there."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        # id → (a tensor whose rows a mask picked, the count of these rows)
        self._picked: dict[int, tuple[Tensor, Name]] = {}

    def met(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], names: list[Name | None]
    ) -> Any:
        """See ``Follower``."""
        if mean_target(func, args, kwargs) is not None:
            return self._of_labels(func, args, kwargs)
        if (mask := self._mask(func, args)) is not None:
            result = func(*args, **kwargs)
            self._pick(result, self.counted(elements_counted, mask))
            return result
        function = getattr(func, "__name__", "")
        if function in _DIVIDES | _MULTIPLIES and len(tensors) == 2 and tensors[0] is args[0] and not all(names):
            at = 0 if names[0] is not None else 1
            name = names[at]
            if name is not None and len(args) == 2:
                return self.part(name, at, function in _DIVIDES, func, args, kwargs)
        args, kwargs = self.with_terms(func, args, kwargs)
        return self._of_picked(_called, func, args, kwargs, tensors)

    def known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """See ``Follower``. A mean over labels, or over elements that a mask picked, gets no name: it is scaled."""
        if mean_target(func, args, kwargs) is not None:
            return self._of_labels(func, args, kwargs)
        if (mask := self._mask(func, args)) is not None:
            result = super().known(func, args, kwargs, tensors)
            self._pick(result, self.counted(elements_counted, mask))
            return result
        return self._of_picked(super().known, func, args, kwargs, tensors)

    def apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """See ``Follower``."""
        if mean_target(func, args, kwargs) is not None:
            return self._of_labels(func, args, kwargs)
        return self._of_picked(_called, func, args, kwargs, tensors)

    def counted(self, count: Callable[..., Tensor], *operands: Any) -> Name | None:
        """The name of ``count(*operands)``, a step that is not in the forward. ``operands``: names and constants."""
        flat, spec = pytree.tree_flatten((operands, {}))
        step = self.step((count, tuple(map(token, flat)), spec), count, flat, spec, 1, False)
        return None if step is None else step.outputs[0]

    def _of_labels(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mean = mean_target(func, args, kwargs)
        assert mean is not None
        target, weight, ignored = mean
        names = self.name(target), None if weight is None else self.name(weight)
        if names[0] is None or (weight is not None and names[1] is None):
            return self.uncounted(target, ignored, func, args, kwargs)
        return self.mean(self.counted(labels_counted, *names, ignored), func, args, kwargs)

    def _mask(self, func: Any, args: tuple[Any, ...]) -> Name | None:
        """The name of the mask, if a call picks elements by a mask into dim 0; else None."""
        if getattr(func, "__name__", "") not in ("__getitem__", "masked_select") or len(args) != 2:
            return None
        mask = args[1]
        return self.name(mask) if isinstance(mask, Tensor) and mask.dtype == torch.bool else None

    def _pick(self, result: Any, count: Name | None) -> None:
        for t in pytree.tree_leaves(result):
            if isinstance(t, Tensor) and t.dim() and count is not None:
                self._picked[id(t)] = t, count

    def picks(self, t: Tensor) -> bool:
        """Whether a mask picked the rows of a tensor."""
        return (entry := self._picked.get(id(t))) is not None and entry[0] is t

    def _of_picked(
        self,
        call: Callable[..., Any],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """Calls a function some of whose arguments may have picked rows. ``call``: runs it."""
        picked = [self._picked[id(t)] for t in tensors if self.picks(t)]
        if not picked or len({count for _, count in picked}) > 1:
            return call(func, args, kwargs, tensors)
        argument, count = picked[0]
        if _is_mean_of_all(func, args, kwargs):
            return self.mean(count, func, args, kwargs)
        result = call(func, args, kwargs, tensors)
        first = args[0] if args else kwargs.get("input")
        if getattr(func, "__name__", "") in _INTO and not (isinstance(first, Tensor) and self.picks(first)):
            return result
        tensors_out = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self._pick([t for t in tensors_out if t.shape[:1] == argument.shape[:1]], count)
        return result

    def mean(self, count: Name | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A mean over ``count`` labels or elements."""
        raise NotImplementedError

    def part(self, name: Name, at: int, divides: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A product or quotient of a tensor without a name and of one with a name, the argument number ``at``."""
        raise NotImplementedError

    def with_terms(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a function of tensors with names and without names. ``term`` may replace a number that has a name.

        An argument to which the function writes is not replaced, as it may be used elsewhere.
        """
        written = target_of(func, args, kwargs)

        def term(x: Any) -> Any:
            name = self.name(x) if isinstance(x, Tensor) and x is not written and not x.dim() else None
            return x if name is None else self.term(name, x)

        args, kwargs = pytree.tree_map(term, (args, kwargs))
        return args, kwargs

    def term(self, name: Name, number: Tensor) -> Tensor:
        """The number to use in place of ``number``, which has a name, together with tensors without names."""
        raise NotImplementedError

    def uncounted(self, target: Tensor, ignored: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A mean over labels that do not depend on the batch alone."""
        raise NotImplementedError


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    return func(*args, **kwargs)
