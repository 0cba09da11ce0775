"""``Branches``: a plain module that calls several modules with the same inputs, and joins their results.

On one device it runs them one after the other. A plan may place each on its own ranks, like any other modules:

    modules:
      tracks.branches.left: {on: "tp[0:1]"}
      tracks.branches.right: {on: "tp[1:4]"}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Join = Callable[[list[Any]], Any]


class Branches(nn.Module):
    """Calls several modules with the same arguments and joins their results.

    Args:
        branches: name → module.
        join: how the results are joined, in the order of ``branches``: ``sum``; ``mean``; ``cat`` along ``dim``; ``stack``
            along a new ``dim``; ``tuple``; ``dict``, by name; or a function that takes the list of results.
        dim: the dim for ``cat`` and ``stack``.

    Raises:
        ValueError: no branch, or a join that is none of these.

    Example:
        >>> both = Branches({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}, join="cat")
        >>> both(torch.zeros(2, 4)).shape
        torch.Size([2, 6])
    """

    def __init__(self, branches: Mapping[str, nn.Module], join: str | Join = "sum", dim: int = -1) -> None:
        super().__init__()
        if not branches:
            raise ValueError("Branches needs at least one module")
        if isinstance(join, str) and join not in _JOINS:
            raise ValueError(f"join={join!r}: one of {', '.join(_JOINS)}, or a function of the list of results")
        self.branches, self.join, self.dim = nn.ModuleDict(branches), join, dim

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        results = [branch(*args, **kwargs) for branch in self.branches.values()]
        if self.join == "dict":
            return dict(zip(self.branches, results, strict=True))
        return _JOINS[self.join](results, self.dim) if isinstance(self.join, str) else self.join(results)

    def extra_repr(self) -> str:
        return f"join={self.join if isinstance(self.join, str) else getattr(self.join, '__name__', self.join)}"


def _sum(results: list[Tensor], dim: int) -> Tensor:
    total = results[0]
    for result in results[1:]:
        total = total + result
    return total


_JOINS: dict[str, Callable[[list[Any], int], Any]] = {
    "sum": _sum,
    "mean": lambda results, dim: _sum(results, dim) / len(results),
    "cat": torch.cat,
    "stack": torch.stack,
    "tuple": lambda results, dim: tuple(results),
    "dict": lambda results, dim: results,
}
