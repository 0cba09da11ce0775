"""``GlobalView``: while it is on, the model's code sees whole tensors and each rank works on its part.

It catches what the View class alone cannot: functions that are called with a parameter (a DTensor at rest, or, in
planning, a meta tensor) and no View. The parameter's local part takes its place. Everything else passes untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.layout import Cut
from meshwright.private import pytree
from meshwright.view.functions import custom_functions
from meshwright.view.tensor import View, first_view
from meshwright.view.work import Work

# What a parameter answers for itself, being a tensor of its whole shape; what moves it about keeps it a parameter.
_OWN = frozenset(
    [getattr(Tensor, name).__get__ for name in ("requires_grad", "grad", "grad_fn", "is_leaf", "_version")]
    + [getattr(Tensor, name).__set__ for name in ("requires_grad", "grad", "data")]
    + [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.untyped_storage, Tensor.data_ptr]
    + [
        Tensor.stride,
        Tensor.is_contiguous,
        Tensor.storage_offset,
        Tensor.requires_grad_,
        Tensor.__hash__,
        Tensor.__repr__,
    ]
    + [Tensor.__format__, Tensor.backward, Tensor.retain_grad, Tensor.is_shared, Tensor.share_memory_]
)


class GlobalView(TorchFunctionMode):
    """Turns on the view over one axis.

    Args:
        work: answers the functions.
        local: a parameter → its local part (a View, or a plain tensor where it is whole), or None for other tensors.
    """

    def __init__(self, work: Work, local: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.work, self.local = work, local

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OWN:
            view = first_view(args)
            return func(*args, **kwargs) if view is None else self.work.call(func, args, kwargs)
        ours, args, kwargs = self._substitute(args, kwargs)
        return self.work.call(func, args, kwargs) if ours else func(*args, **kwargs)

    def _substitute(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
        """(whether any argument is a View, the arguments with parameters' local parts)."""
        ours = changed = False
        leaves = []
        flat, spec = pytree.tree_flatten((args, kwargs))
        for leaf in flat:
            if not isinstance(leaf, View) and isinstance(leaf, Tensor) and (part := self.local(leaf)) is not None:
                changed, leaf = True, part
            ours = ours or isinstance(leaf, View)
            leaves.append(leaf)
        if changed:
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        return ours, args, kwargs

    @contextmanager
    def on(self) -> Iterator[None]:
        """The view, for the time of a forward (and of a backward that recomputes parts of it)."""
        with self, custom_functions(self._custom):
            yield

    def _custom(self, apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Custom ``autograd.Function`` s get whole tensors: on Views, their graph would silently be lost."""
        ours, args, kwargs = self._substitute(args, kwargs)
        if ours:
            views = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, View)]
            if any(isinstance(v._mw_layout, Cut) for v in views):
                self.work.gathered(function, views)
            args, kwargs = pytree.tree_map_only(View, self.work.whole, (args, kwargs))
        return apply(*args, **kwargs)
