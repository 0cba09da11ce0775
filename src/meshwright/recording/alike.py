"""When two tensors are the same but for rounding.

    allowed   rtol · max|e|  +  rtol · 0.01 · G        G: max|e| of all tensors of this kind

``rtol`` follows from the type. The second term is for tensors that are zero but for rounding (the bias of keys in an
attention): their own size says nothing. A second recording of the same run, in another order of rows, gives the noise itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

RELATIVE = {"float64": 1e-9, "float32": 2e-4, "float16": 2e-2, "bfloat16": 5e-2}
_OTHER = 5e-2
_FLOOR = 0.01
_NOISE = 8.0  # times what two runs of one process differed by
FIT, HALF_FIT = 0.02, 0.1  # a tensor is k times another if what is left is less than this part of it


@dataclass(frozen=True)
class Tolerance:
    """What rounding may do to tensors of one kind.

    Attributes:
        relative: to the largest element of a tensor.
        floor: allowed in any tensor.
        fit: how much of a tensor a pattern may leave unexplained.
    """

    relative: float
    floor: float
    fit: float

    def allowed(self, expected: Tensor, noise: float = 0.0) -> float:
        """The largest difference of an element that rounding explains."""
        return self.relative * largest(expected) + self.floor + _NOISE * noise


def tolerance_of(dtypes: Iterable[str], scale: float, given: float | None = None) -> Tolerance:
    """The tolerance of tensors of these types, the coarsest of which counts; ``scale``: the largest element of all of them."""
    coarsest = max((RELATIVE.get(dtype, _OTHER) for dtype in dtypes), default=RELATIVE["float32"])
    relative = coarsest if given is None else given
    return Tolerance(relative, relative * _FLOOR * scale, FIT if coarsest < RELATIVE["float16"] else HALF_FIT)


def wide(t: Tensor) -> Tensor:
    """In float64, or complex128."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def largest(t: Tensor) -> float:
    """The largest absolute value; 0 of a tensor without elements."""
    return float(t.abs().max()) if t.numel() else 0.0


def norm(t: Tensor) -> float:
    """The 2-norm."""
    return float(torch.linalg.vector_norm(t)) if t.numel() else 0.0
