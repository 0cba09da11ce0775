"""Refuses models that use tensors which the constructor made from a parameter, in the parameter's memory or with a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.described import tensors_among
from meshwright.errors import Findings
from meshwright.private import DispatchMode

Run = Callable[[nn.Module], Any]
Origin = Callable[[Tensor], str | None]
"""A tensor → the name of the parameter from which the constructor made it; None for any other."""


def refuse_overlaps(pairs: Iterable[tuple[str, str]]) -> None:
    """Raises a PlanError if there are ``pairs``: a trained parameter, and a parameter or buffer that overlaps it in memory."""
    findings = Findings()
    for a, b in pairs:
        findings.add(
            where=f"the model's {a} and {b}",
            given="two tensors in the same memory: what an optimizer does to one changes the other",
            required="one nn.Parameter with two names, or memory of their own: each rank holds a part of each",
            fix=f"in the constructor: self.{b} = self.{a}; or, for two tensors, self.{a}.detach().clone()",
        )
    findings.raise_if_any()


def refusing(run: Run, origin: Origin) -> Run:
    """``run``, which raises a PlanError after a forward that uses tensors that have an ``origin``."""

    @wraps(run)
    def watched(model: nn.Module) -> Any:
        uses = _Uses(origin)
        with uses:
            result = run(model)
        uses.raise_if_any()
        return result

    return watched


class _Uses(DispatchMode):
    """Notes which lines of the model use such tensors."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self._origin = origin
        self._lines: dict[tuple[str, str], None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for t in tensors_among((*args, *kwargs.values())):
            if (name := self._origin(t)) is not None:
                self._lines[model_line(), name] = None
        return func(*args, **kwargs)

    def raise_if_any(self) -> None:
        findings = Findings()
        for line, name in self._lines:
            findings.add(
                where=f"the model's {line or 'forward'}",
                given=f"a tensor that the constructor made from a parameter: {name}",
                required="a tensor that the forward makes: the constructor's has its memory or its graph, and each rank "
                "holds only a part of the parameter",
                fix=f"make it in the forward, from {name}; or, if it is to keep its first value, detach().clone() it",
            )
        findings.raise_if_any()
