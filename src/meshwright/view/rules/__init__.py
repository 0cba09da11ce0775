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
from meshwright.view.rules.pointwise import ELEMENTWISE
from meshwright.view.rules.registry import FACTS, RESHAPING, RULES, ordered, writes

__all__ = ["ELEMENTWISE", "FACTS", "RESHAPING", "RULES", "ordered", "writes"]
