"""``Comparison``: the ways to run each region of branches, as a table, and a verdict of one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from meshwright.amounts import duration_text, size_text
from meshwright.hardware.profile import Profile
from meshwright.hardware.quantity import spell_quantity
from meshwright.prediction.branches.ways import BEST, DATA, GIVEN, ONE, TENSOR, Way


@dataclass(frozen=True)
class Compared:
    """One region.

    Attributes:
        name: its branches, ``a | b``.
        ranks: G, of the place around it.
        rows: of a microbatch on a data rank.
        ways: one device first.
        tables: for each branch, seconds on 1 … G ranks.
        parameter_bytes: that a rank gathers and reduces: of its branches; of the whole, as by FSDP of all of them.
    """

    name: str
    ranks: int
    rows: int | None
    ways: tuple[Way, ...]
    tables: tuple[tuple[float, ...], ...]
    parameter_bytes: tuple[int, int]

    def __getitem__(self, name: str) -> Way:
        return next(w for w in self.ways if w.name == name)


@dataclass(frozen=True)
class Comparison:
    """Does it pay to run branches beside each other? ``print`` it; or look at ``regions``, ``fastest`` and ``verdict``."""

    profile: Profile
    regions: tuple[Compared, ...]

    @property
    def seconds(self) -> dict[str, float]:
        """Of each way, over all regions: of those that every region has; with what a job adds to a step."""
        added = self.profile.job_step
        return {n: sum(r[n].seconds for r in self.regions) + added * (n != ONE) for n in (ONE, DATA, TENSOR, GIVEN, BEST)
                if all(any(w.name == n for w in r.ways) for r in self.regions)}  # fmt: skip

    @property
    def fastest(self) -> str:
        """The name of the fastest way; of equals, the first, which is the plainest."""
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def pays(self) -> bool:
        """Whether some way over ranks is faster than one device."""
        return self.fastest != ONE

    @property
    def verdict(self) -> str:
        """What is fastest, and why, in one line."""
        seconds, fastest = self.seconds, self.fastest
        one = seconds[ONE]
        if not self.pays:
            near = min((n for n in seconds if n != ONE), key=seconds.__getitem__)
            calls = sum(r[near].traffic.calls for r in self.regions)
            moving = sum(r[near].seconds for r in self.regions) - self._compute(near)
            return (
                f"distributing does not pay: {duration_text(one)} of work on one device, against {_calls(calls)} of "
                f"{duration_text(max(0.0, moving))} and {duration_text(self._compute(near))} of work in the nearest "
                f"({near})"
                + (f", and {duration_text(self.profile.job_step)} that a job adds" if self.profile.job_step else "")
            )
        ways = [r[fastest] for r in self.regions]
        second = min((n for n in seconds if n not in (ONE, fastest, GIVEN, BEST)), key=seconds.__getitem__)
        splits = {"+".join(map(str, w.split)) for w in ways if w.split}
        split = f" {splits.pop()}" if len(splits) == 1 else ""
        text = f"{fastest}{split}: {one / seconds[fastest]:.2f} times as fast as one device on {ways[0].ranks} ranks"
        other = second if fastest in (GIVEN, BEST) else GIVEN
        return (
            f"{text}, {seconds[other] / seconds[fastest]:.2f} times as fast as {other}: {self._why(fastest)} against "
            f"{self._why(other)}"
        )

    def _compute(self, name: str) -> float:
        return sum(r[name].compute for r in self.regions)

    def _why(self, name: str) -> str:
        ways = [r[name] for r in self.regions]
        busy = sum(w.compute / w.imbalance for w in ways)  # if all ranks had as much to do, all the time
        rho = self._compute(name) / busy if busy else 1.0
        return f"{duration_text(self._compute(name))} of work with {_calls(sum(w.traffic.calls for w in ways))}" + (
            f" and rho {rho:.2f}" if rho > 1.005 else ""
        )

    def __str__(self) -> str:
        profile = self.profile
        peak = ", ".join(f"{spell_quantity(rate, 'flop/s')} in {dtype}" for dtype, rate in profile.peak.items())
        host = f"the host takes {duration_text(profile.host)} a function"
        if profile.job_call or profile.job_step:
            host += f", to which a job adds {duration_text(profile.job_call)}, and {duration_text(profile.job_step)} to a step"
        lines = [
            f"{profile.name}: at most {peak}; memory {spell_quantity(profile.bandwidth, 'B/s')}, links "
            f"{spell_quantity(profile.node.bandwidth, 'B/s')}; {host}",
            "forward and backward of a microbatch on a data rank, without the optimizer; what is sent hides behind nothing",
        ]
        for _, alike in groupby(self.regions, key=lambda r: (r.ranks, r.rows, r.ways, r.parameter_bytes)):
            several = list(alike)
            lines += ["", *_table(several[0], len(several))]
        return "\n".join([*lines, "", self.verdict])


def _table(region: Compared, times: int) -> Iterator[str]:
    more = f", and {times - 1} like it" if times > 1 else ""
    rows = f"{region.rows} row{'s' * (region.rows != 1)}" if region.rows is not None else "no rows"
    yield f"{region.name}{more}: {rows}, {region.ranks} ranks"
    heads = ("way", "seconds", "compute", "calls", "bytes", "rho")
    yield f"  {heads[0]:24}" + "".join(f"{h:>11}" for h in heads[1:])
    for way in region.ways:
        split = f" {'+'.join(map(str, way.split))}" if way.split else ""
        cells = (
            duration_text(way.seconds), duration_text(way.compute), str(way.traffic.calls), size_text(way.traffic.bytes),
            f"{way.imbalance:.2f}",
        )  # fmt: skip
        yield f"  {way.name + split:24}" + "".join(f"{c:>11}" for c in cells) + (f"   {way.note}" if way.note else "")
    of_branches, of_all = region.parameter_bytes
    if of_branches:
        yield (
            f"  parameters that a rank gathers and reduces over data ranks: {size_text(of_branches)}, against "
            f"{size_text(of_all)} by FSDP of the whole: {of_all / of_branches:.2f} times fewer"
        )


def _calls(count: int) -> str:
    return f"{count} collective{'s' * (count != 1)}"
