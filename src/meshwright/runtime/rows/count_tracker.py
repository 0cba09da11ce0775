"""``CountTracker``: finds where a forward uses counts of its batch.

A count is a number of labels, a number of elements that a mask picks, or a sum over the batch that divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.private import pytree
from meshwright.runtime.rows.name_tracker import NameTracker
from meshwright.runtime.rows.tape import Name, Tape, constant_key
from meshwright.spmd.losses import mean_target
from meshwright.spmd.torch_functions import target_of


def label_count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of a mean over labels: their number, or the sum of their class weights."""
    valid = target != ignore_index
    return valid.sum() if weight is None else (weight[torch.where(valid, target, 0)] * valid).sum()


def element_count(mask: Tensor) -> Tensor:
    """The number of elements that a mask picks."""
    return mask.sum()


_DIVIDES = frozenset("div div_ divide divide_ true_divide true_divide_ __truediv__ __itruediv__ __rtruediv__".split())
_MULTIPLIES = frozenset("mul mul_ multiply multiply_ __mul__ __imul__ __rmul__".split())
_MEAN_LOSSES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits".split()
)

# Functions that write rows into those of their first argument. The result has the rows of that argument. (There may be as many
# picked rows: in a recording a mask picks all.)
_WRITES_ROWS = frozenset(
    f"{name}{end}" for end in ("", "_") for name in (
        "index_put", "index_copy", "index_add", "index_reduce", "scatter", "scatter_add", "scatter_reduce", "masked_scatter",
        "slice_scatter", "select_scatter", "put", "copy",
    )
)  # fmt: skip


def is_quotient(function: str) -> bool:
    """Whether a torch function of this name divides."""
    return function in _DIVIDES


def _is_mean_of_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call takes the mean over all elements of its argument, or of the losses of all elements."""
    name = getattr(func, "__name__", "")
    if name == "mean":
        return len(args) == 1 and not {"dim", "axis"} & kwargs.keys()
    has_no_weights = all(kwargs.get(key) is None for key in ("size_average", "reduce", "weight"))
    return name in _MEAN_LOSSES and kwargs.get("reduction", "mean") == "mean" and has_no_weights


class CountTracker(NameTracker):
    """Finds uses of counts. Subclasses override these methods, and decide there what happens:

    on_mean               a mean over labels or elements whose count has a name
    on_product            a product with a tensor that has a name, or a quotient
    number_for            a number with a name, used together with tensors without names
    on_uncounted_mean     a mean over labels that have no name
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        # id → (a tensor whose rows a mask picked, the name of the count of these rows)
        self._picked: dict[int, tuple[Tensor, Name]] = {}

    # --- calls ------------------------------------------------------------------------------------------------------

    def on_mixed_call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], names: list[Name | None]
    ) -> Any:
        """See ``NameTracker``."""
        if mean_target(func, args, kwargs) is not None:
            return self._on_label_mean(func, args, kwargs)
        if (mask := self._mask_name(func, args)) is not None:
            result = func(*args, **kwargs)
            self._note_picked(result, self.count_name(element_count, mask))
            return result
        function = getattr(func, "__name__", "")
        if function in _DIVIDES | _MULTIPLIES and len(tensors) == 2 and tensors[0] is args[0] and not all(names):
            at = 0 if names[0] is not None else 1
            name = names[at]
            if name is not None and len(args) == 2:
                return self.on_product(name, at, function in _DIVIDES, func, args, kwargs)
        args, kwargs = self.with_numbers(func, args, kwargs)
        return self._call_with_picked(_plain_call, func, args, kwargs, tensors)

    def on_named_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """See ``NameTracker``. A mean over labels, or over elements that a mask picked, gets no name: it is scaled."""
        if mean_target(func, args, kwargs) is not None:
            return self._on_label_mean(func, args, kwargs)
        if (mask := self._mask_name(func, args)) is not None:
            result = super().on_named_call(func, args, kwargs, tensors)
            self._note_picked(result, self.count_name(element_count, mask))
            return result
        return self._call_with_picked(super().on_named_call, func, args, kwargs, tensors)

    def on_unnamed_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """See ``NameTracker``."""
        if mean_target(func, args, kwargs) is not None:
            return self._on_label_mean(func, args, kwargs)
        return self._call_with_picked(_plain_call, func, args, kwargs, tensors)

    def count_name(self, count: Callable[..., Tensor], *operands: Any) -> Name | None:
        """The name of ``count(*operands)``, an operation that is not in the forward. ``operands``: names and constants."""
        flat, spec = pytree.tree_flatten((operands, {}))
        operation = self.operation_for((count, tuple(map(constant_key, flat)), spec), count, flat, spec, 1, False)
        return None if operation is None else operation.outputs[0]

    def _on_label_mean(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function that takes a mean over labels."""
        mean = mean_target(func, args, kwargs)
        assert mean is not None
        target, weight, ignore_index = mean
        names = self.name(target), None if weight is None else self.name(weight)
        if names[0] is None or (weight is not None and names[1] is None):
            return self.on_uncounted_mean(target, ignore_index, func, args, kwargs)
        return self.on_mean(self.count_name(label_count, *names, ignore_index), func, args, kwargs)

    # --- elements that a mask picks ---------------------------------------------------------------------------------

    def _mask_name(self, func: Any, args: tuple[Any, ...]) -> Name | None:
        """The name of the mask, if a call picks elements by a mask into dim 0; else None."""
        if getattr(func, "__name__", "") not in ("__getitem__", "masked_select") or len(args) != 2:
            return None
        mask = args[1]
        return self.name(mask) if isinstance(mask, Tensor) and mask.dtype == torch.bool else None

    def _note_picked(self, result: Any, count: Name | None) -> None:
        """Notes that a mask picked the rows of each tensor in ``result``, and the name of their count."""
        for t in pytree.tree_leaves(result):
            if isinstance(t, Tensor) and t.dim() and count is not None:
                self._picked[id(t)] = t, count

    def has_picked_rows(self, t: Tensor) -> bool:
        """Whether a mask picked the rows of a tensor."""
        return (entry := self._picked.get(id(t))) is not None and entry[0] is t

    def _call_with_picked(
        self,
        call: Callable[..., Any],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """Calls a function some of whose arguments may have picked rows. ``call``: runs the function."""
        picked = [self._picked[id(t)] for t in tensors if self.has_picked_rows(t)]
        if not picked or len({count for _, count in picked}) > 1:
            return call(func, args, kwargs, tensors)
        argument, count = picked[0]
        if _is_mean_of_all(func, args, kwargs):
            return self.on_mean(count, func, args, kwargs)
        result = call(func, args, kwargs, tensors)
        first = args[0] if args else kwargs.get("input")
        keeps_rows_of_first = getattr(func, "__name__", "") in _WRITES_ROWS
        if keeps_rows_of_first and not (isinstance(first, Tensor) and self.has_picked_rows(first)):
            return result
        results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self._note_picked([t for t in results if t.shape[:1] == argument.shape[:1]], count)
        return result

    def with_numbers(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a function of tensors with names and without names, after ``number_for`` has replaced the numbers
        that have a name.

        An argument to which the function writes is not replaced, as it may be used elsewhere.
        """
        written = target_of(func, args, kwargs)

        def replaced(x: Any) -> Any:
            name = self.name(x) if isinstance(x, Tensor) and x is not written and not x.dim() else None
            return x if name is None else self.number_for(name, x)

        args, kwargs = pytree.tree_map(replaced, (args, kwargs))
        return args, kwargs

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def on_mean(self, count: Name | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for a mean over ``count`` labels or elements. Returns its result."""
        raise NotImplementedError

    def on_product(
        self, name: Name, at: int, divides: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Called for a product or quotient of a tensor without a name and one with a name. Returns its result.

        Args:
            at: which argument has the name: 0 or 1.
        """
        raise NotImplementedError

    def number_for(self, name: Name, number: Tensor) -> Tensor:
        """The number to use in place of ``number``, which has a name, together with tensors without names."""
        raise NotImplementedError

    def on_uncounted_mean(
        self, target: Tensor, ignore_index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Called for a mean over labels that do not depend on the batch alone. Returns its result."""
        raise NotImplementedError


def _plain_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    return func(*args, **kwargs)
