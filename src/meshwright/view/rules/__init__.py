"""One rule per torch function, by family. Importing this package fills the table."""

from meshwright.view.rules import (  # noqa: F401  (each registers its rules)
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
from meshwright.view.rules.registry import DECIDERS, ELEMENTWISE, FACTS, RESHAPING, RULES, ordered, writes

__all__ = ["DECIDERS", "ELEMENTWISE", "FACTS", "RESHAPING", "RULES", "ordered", "writes"]
