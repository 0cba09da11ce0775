"""One decider for each torch function, by family. Importing this package fills the tables of ``registry``."""

from meshwright.spmd.decide import (  # noqa: F401  (each registers its deciders)
    attention,
    contraction,
    convolution,
    gradient,
    indexing,
    loss,
    norm,
    pointwise,
    random,
    reduction,
    shape,
    table,
)
from meshwright.spmd.decide.registry import ANSWERS, DECIDERS, ELEMENTWISE, ordered

__all__ = ["ANSWERS", "DECIDERS", "ELEMENTWISE", "ordered"]
