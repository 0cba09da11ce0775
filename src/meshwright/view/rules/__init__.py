"""One decider per torch function, by family. Importing this package fills the table."""

from meshwright.view.rules import (  # noqa: F401  (each registers its deciders)
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
from meshwright.view.rules.registry import ANSWERS, DECIDERS, ELEMENTWISE, FACTS, RESHAPING, ordered, writes_first

__all__ = ["ANSWERS", "DECIDERS", "ELEMENTWISE", "FACTS", "RESHAPING", "ordered", "writes_first"]
