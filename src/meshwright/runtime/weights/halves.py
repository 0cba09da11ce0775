"""``Halves``: casts the parameters that FSDP2 does not gather to the half type of the plan's precision.

FSDP2 casts the parameters that it gathers. Others stay out of its units: parameters without dims, parameters of several units,
and parameters that a model also reaches outside its modules. They are cast here, once in each forward, for every torch function
that uses one. Between steps such a parameter is float32, and the cast's backward gives it a float32 gradient.

This is for plans without tp. With tp, the SPMD mode provides the local parts of parameters and casts them
(runtime/local_parameters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.private import pytree, without_modes
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.spmd.autograd_functions import FunctionMode, custom_functions, scripted_functions, transforming
from meshwright.spmd.torch_functions import OF_ITSELF


def half_type(recipe: Recipe) -> torch.dtype | None:
    """The half type in which a recipe computes; None if it computes in full precision."""
    return getattr(torch, recipe.precision) if recipe.precision in ("bfloat16", "float16") else None


def as_computed(x: Tensor, line: ParameterRecipe, low: torch.dtype | None) -> Tensor:
    """A parameter cast to ``low`` if FSDP2 does not gather, and so not cast it; else unchanged."""
    return x.to(low) if _is_cast(x, line, low) else x


def _is_cast(x: Tensor, line: ParameterRecipe, low: torch.dtype | None) -> bool:
    return low is not None and line.data == "loose" and x.is_floating_point() and low.itemsize < x.dtype.itemsize


class Halves(FunctionMode):
    """A function mode that replaces parameters among the arguments of torch functions by casts to a half type.

    Args:
        parameters: floating-point parameters that FSDP2 does not gather and that are wider than ``low``.
        low: the half type.
    """

    def __init__(self, parameters: Iterable[Tensor], low: torch.dtype) -> None:
        super().__init__()
        self._low = low
        self._wide = {id(p): p for p in parameters}
        # This forward's casts: (id of a parameter, grad mode) → its cast.
        self._casts: dict[tuple[int, bool], Tensor] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """A context for a forward, or for a backward that recomputes parts of one."""
        try:
            with self, custom_functions(self._custom), scripted_functions(self._custom):
                yield
        finally:
            self._casts.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in OF_ITSELF:
            args, kwargs = self._substitute(args, kwargs)
        return func(*args, **kwargs)

    def _custom(self, apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a custom ``autograd.Function`` or a scripted function: torch does not treat these as torch functions."""
        with without_modes():
            args, kwargs = self._substitute(args, kwargs)
        return apply(function, *args, **kwargs)

    def _substitute(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        substituted: tuple[Any, Any] = pytree.tree_map(self._half, (args, kwargs))
        return substituted

    def _half(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or self._wide.get(id(x)) is not x:
            return x
        if transforming() or torch.is_inference_mode_enabled():
            return x.to(self._low)  # not cached: the cast belongs to the transform
        key = id(x), torch.is_grad_enabled()
        half = self._casts.get(key)
        if half is None:
            half = self._casts[key] = x.to(self._low)
            half._mw_is_parameter = True  # type: ignore[attr-defined]
        return half


def halves(parameters: Iterable[tuple[str, Tensor]], recipe: Recipe) -> Halves | None:
    """The mode for a model's parameters, given as (name, parameter); None if FSDP2 casts all of them."""
    low = half_type(recipe)
    to_cast = [p for name, p in parameters if _is_cast(p, recipe.by_name[name], low)]
    return Halves(to_cast, low) if to_cast and low is not None else None
