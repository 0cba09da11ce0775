"""``check_host_reads``: an error that lists every line of the model that reads a value on the host, where a GPU would wait."""

from __future__ import annotations

import linecache
from collections.abc import Iterable

from meshwright.errors import Findings

_REQUIRED = (
    "no value read on the host: a rehearsal has shapes and no values, and has assumed one; on a GPU the step waits here until "
    "the device has done all before"
)


def check_host_reads(reads: Iterable[tuple[str, str]], rank: int) -> None:
    """Raises an error if a step reads, on the host, values that follow from parameters.

    At a read (``.item()``, ``bool(x)``, ``x[mask]``) the host waits for the device. Meanwhile it cannot launch kernels
    ahead, so the device is idle until the next kernel comes.

    Args:
        reads: (function, line of the model) of each read: ``Trace.assumed``.
        rank: the rank that was rehearsed.

    Raises:
        PlanError: with a finding for each read.
    """
    findings = Findings(f"the rehearsal of rank {rank}")
    for function, line in reads:
        file, _, number = line.rpartition(":")
        code = linecache.getline(file, int(number)).strip() if file else ""
        is_shape = function in ("a mask as an index", "aten.nonzero.default")
        problem = (
            f"{'a shape that follows from values' if is_shape else 'a value that is read on the host'} ({function})"
        )
        findings.add(
            where=line or "outside of the model's lines",
            given=f"{code}  # {problem}" if code else problem,
            required=_REQUIRED,
            fix="x * mask in place of x[mask]" if is_shape else "torch.where(condition, a, b) in place of if",
        )
    findings.raise_if_any()
