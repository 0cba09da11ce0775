"""``Tolerance``: the largest difference between two tensors that rounding explains.

    allowed = rtol · max|e|  +  rtol · 0.01 · G  +  8 · noise        e: the expected tensor
                                                                     G: max|e| of all tensors of this kind

``rtol`` depends on the type. The second term is for tensors that are zero except for rounding, such as the bias of keys in an
attention. The noise is measured by a second recording of the same run with another order of rows, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# rtol by type: the rounding of the type, times what a deep model and sums in another order make of it.
RELATIVE = {"float64": 1e-9, "float32": 2e-4, "float16": 2e-2, "bfloat16": 5e-2}
OTHER_TYPE = 5e-2  # for any other type: as for the coarsest
_FLOOR = 0.01  # of rtol · G, allowed in any tensor: more would hide a wrong tensor that is a hundred times smaller than others
_NOISE = 8.0  # factor on the measured noise: one pair of runs is a small sample of it
FIT, HALF_FIT = 0.02, 0.1  # largest residual, relative to a tensor, with which it is k times another; for half types


@dataclass(frozen=True)
class Tolerance:
    """The effect of rounding on tensors of one kind.

    Attributes:
        relative: largest difference, relative to the largest element of a tensor.
        floor: a difference that is allowed in any tensor.
        fit: largest residual of a pattern, relative to the tensor's norm.
    """

    relative: float
    floor: float
    fit: float

    def allowed(self, expected: Tensor, noise: float = 0.0) -> float:
        """The largest difference of an element that rounding explains. ``noise``: measured for this tensor."""
        return self.relative * largest(expected) + self.floor + _NOISE * noise


def tolerance_of(dtypes: Iterable[str], scale: float, relative: float | None = None) -> Tolerance:
    """The tolerance for tensors of one kind.

    Args:
        dtypes: of the tensors. The coarsest counts.
        scale: the largest element of all of them.
        relative: chosen by a person; default: by type.
    """
    coarsest = max((RELATIVE.get(dtype, OTHER_TYPE) for dtype in dtypes), default=RELATIVE["float32"])
    relative = coarsest if relative is None else relative
    return Tolerance(relative, relative * _FLOOR * scale, FIT if coarsest < RELATIVE["float16"] else HALF_FIT)


def in_float64(t: Tensor) -> Tensor:
    """The tensor in float64 or complex128."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def largest(t: Tensor) -> float:
    """The largest absolute value; 0 for a tensor without elements."""
    return float(t.abs().max()) if t.numel() else 0.0


def norm(t: Tensor) -> float:
    """The L2 norm; 0 for a tensor without elements."""
    return float(torch.linalg.vector_norm(t)) if t.numel() else 0.0
