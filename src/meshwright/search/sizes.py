"""The sizes of a search's rehearsals, and lines through what is measured in them."""

from __future__ import annotations

from meshwright.search.calls import Line

DP_SHARD = 2  # ranks of dp_shard in a rehearsal: the least with which FSDP gathers parameters
FEW_ROWS, MANY_ROWS = 2, 4  # rows of a data rank in a rehearsal
# blocks of a kind in a rehearsal: FSDP prefetches parameters of the next block during the first, and none during the last
FEW_BLOCKS = 2


def line_through(few: float, many: float) -> Line:
    """The line through the values at ``FEW_ROWS`` and at ``MANY_ROWS`` rows."""
    slope = (many - few) / (MANY_ROWS - FEW_ROWS)
    return few - FEW_ROWS * slope, slope
