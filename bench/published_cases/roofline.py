"""The baseline: floating-point operations over the peak rate and one constant. What a predictor has to beat.

    seconds = flops / (devices · peak · efficiency)

``flops`` are those of matrix products: 6 a parameter of a matrix and token, and 12 · layers · hidden · sequence a token for
attention's scores (PaLM, arXiv 2204.02311, appendix B); what is recomputed adds a third of its own. Nothing else: no
communication, no bubble, no memory traffic, no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from published_cases.case import Case, ModelShape, Predicted
from published_cases.machines import PEAKS


@dataclass(frozen=True)
class Roofline:
    """The baseline with its one constant.

    Attributes:
        efficiency: the share of the peak that is attained.
        source: the table that it was fitted on.
        rows: how many of its rows.
    """

    efficiency: float
    source: str
    rows: int

    def __call__(self, case: Case) -> Predicted:
        return Predicted(ideal_seconds(case) / self.efficiency)

    def fitted(self, table: str) -> str:
        """Where the constant comes from, in a line of the report on ``table``."""
        warning = " THE ROWS REPORTED: no evidence" if self.source == table else ""
        return f"1 constant, {self.efficiency:.3f} of the peak, fitted on {self.rows} rows of {self.source}{warning}"


def fit(cases: Sequence[Case], source: str) -> Roofline:
    """The efficiency with the least mean absolute relative error on the timed cases of a table.

    The error of one case is |x · ideal / measured − 1|, x being 1 / efficiency: the best x is the median of
    measured / ideal, in which each case weighs ideal / measured.

    Raises:
        ValueError: no case is timed.
    """
    ratios = sorted(case.measured.seconds / ideal_seconds(case) for case in cases if case.measured.seconds is not None)
    if not ratios:
        raise ValueError(f"{source} has no row with a time")
    half, passed = sum(1 / ratio for ratio in ratios) / 2, 0.0
    for ratio in ratios:
        passed += 1 / ratio
        if passed >= half:
            break
    return Roofline(1 / ratio, source, len(ratios))


def ideal_seconds(case: Case) -> float:
    """Seconds of a step at the peak rate of all devices."""
    return flops(case) / (case.layout.devices * PEAKS[case.machine.profile])


def flops(case: Case) -> float:
    """Floating-point operations of a step, over all devices."""
    shape, layout = case.model, case.layout
    tokens = layout.global_batch * shape.sequence
    blocks = 6 * shape.layers * _block_matrices(shape) + 12 * shape.layers * shape.hidden * shape.sequence
    recomputed = layout.recomputed_blocks / shape.layers if layout.recompute == "full" else 0.0
    return tokens * (blocks * (1 + recomputed / 3) + 6 * shape.vocab * shape.hidden)


def _block_matrices(shape: ModelShape) -> int:
    """Numbers in the matrices of one block."""
    kv_width = shape.hidden // shape.heads * shape.kv_heads
    return 2 * shape.hidden * (shape.hidden + kv_width) + (3 if shape.gated else 2) * shape.hidden * shape.intermediate
