"""Refuses uses of tensors that each rank would have, and train, for itself: what the constructor made from a parameter, and
trained tensors of a loss that are not in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.described import tensors_among
from meshwright.errors import Findings
from meshwright.private import DispatchMode, storage_of

Run = Callable[[nn.Module], Any]
Origin = Callable[[Tensor], str | None]
"""A tensor → what it is, if it must not be used; None for any other."""


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
    """``run``, which raises a PlanError after a forward that uses what the constructor made from a parameter.

    ``origin``: such a tensor → the name of the parameter.
    """

    @wraps(run)
    def watched(model: nn.Module) -> Any:
        findings = Findings()
        with _Uses(origin) as uses:
            result = run(model)
        for line, name in uses.lines:
            findings.add(
                where=f"the model's {line or 'forward'}",
                given=f"a tensor that the constructor made from a parameter: {name}",
                required="one that the forward makes: this one is in the memory or the graph of a parameter of which each "
                "rank holds a part",
                fix="make it in the forward; or, if it is to keep its first value, detach().clone() it in the constructor",
            )
        findings.raise_if_any()
        return result

    return watched


@contextmanager
def refusing_trained(of_batch: Iterable[Tensor]) -> Iterator[None]:
    """Inside the ``with``, a loss is computed. Raises a PlanError at its end if the loss used trained tensors of its own: each
    rank would train its own copy of them.

    ``of_batch``: tensors of the batch, which may require gradients.
    """
    known = set(map(id, of_batch))

    def trained(t: Tensor) -> str | None:
        is_own = t.is_leaf and t.requires_grad and not t.is_meta and id(t) not in known
        return f"of shape {tuple(t.shape)}" if is_own else None

    findings = Findings()
    with _Uses(trained) as uses:
        yield
    for line, shape in uses.lines:
        findings.add(
            where=f"loss, {line}" if line else "loss",
            given=f"a trained tensor {shape} that is not in the model",
            required="a function of the model's output without trained tensors: each rank would train its own copy",
            fix="a model that contains the loss as a submodule, and returns the loss",
        )
    findings.raise_if_any()


class _Uses(DispatchMode):
    """Notes where tensors with an origin are used. ``lines``: each (the model's line, what it uses) once, in order."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self._origin = origin
        self.lines: dict[tuple[str, str], None] = {}
        self._new: dict[int, Tensor] = {}  # the memory of what ops returned: it is nobody's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [
            said for t in tensors_among((*args, *kwargs.values()))
            if not self._is_new(t) and (said := self._origin(t)) is not None
        ]  # fmt: skip
        self.lines.update(dict.fromkeys((model_line(), said) for said in found))
        out = func(*args, **kwargs)
        if not found:
            results = tensors_among(out if isinstance(out, (tuple, list)) else (out,))
            self._new.update((storage_of(t), t) for t in results if t.layout is torch.strided)
        return out

    def _is_new(self, t: Tensor) -> bool:
        return t.layout is torch.strided and storage_of(t) in self._new
