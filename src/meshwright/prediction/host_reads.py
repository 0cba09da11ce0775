"""``check_host_reads``: values that a step reads on the host, for which a GPU waits, as findings with the model's lines."""

from __future__ import annotations

import linecache
from collections.abc import Iterable

from meshwright.errors import Findings

_REQUIRED = (
    "no value read on the host: a rehearsal has shapes and no values, and has assumed one; on a GPU the step waits here until "
    "the device has done all before"
)


def check_host_reads(reads: Iterable[tuple[str, str]], rank: int) -> None:
    """Raises PlanError with every read of a value that follows from parameters.

    A read (``.item()``, ``bool(x)``, ``x[mask]``) makes the host wait for the device: kernels cannot be asked for ahead, and
    the device is idle until the next one comes.

    Args:
        reads: (function, the model's line) of each, as ``Trace.assumed`` has them.
        rank: the rank that was rehearsed.
    """
    findings = Findings(f"the rehearsal of rank {rank}")
    for function, line in reads:
        file, _, number = line.rpartition(":")
        code = linecache.getline(file, int(number)).strip() if file else ""
        shapes = function in ("a mask as an index", "aten.nonzero.default")
        problem = f"{'a shape that follows from values' if shapes else 'a value that is read on the host'} ({function})"
        findings.add(
            where=line or "outside of the model's lines",
            given=f"{code}  # {problem}" if code else problem,
            required=_REQUIRED,
            fix="x * mask in place of x[mask]" if shapes else "torch.where(condition, a, b) in place of if",
        )
    findings.raise_if_any()
