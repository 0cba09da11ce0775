"""``Comparison``: the costs of the ways to run each region of branches: a table, and a verdict of one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from meshwright.amounts import duration_text, size_text
from meshwright.hardware.profile import Profile
from meshwright.hardware.quantity import spell_quantity
from meshwright.prediction.branches.ways import BEST, DATA, ONE, PLANNED, TENSOR, RegionStrategy


@dataclass(frozen=True)
class RegionWays:
    """The ways to run one region of branches. ``compared[name]`` is the way of this name.

    Attributes:
        name: names of its branches, ``a | b``.
        ranks: G, the ranks of the place around the region.
        rows: rows of a microbatch on a data rank; None: the batch has no rows.
        ways: the ways to run it; the first is on one device.
        tables: for each branch, its seconds on 1 … G ranks.
        parameter_bytes: bytes of parameters that a rank gathers and reduces over data ranks: (if it has only its branches, if
            it has all of them, as with FSDP).
    """

    name: str
    ranks: int
    rows: int | None
    ways: tuple[RegionStrategy, ...]
    tables: tuple[tuple[float, ...], ...]
    parameter_bytes: tuple[int, int]

    def __getitem__(self, name: str) -> RegionStrategy:
        return next(w for w in self.ways if w.name == name)


@dataclass(frozen=True)
class Comparison:
    """Whether it pays to run branches at the same time. ``print`` shows the ways of each region, and the verdict."""

    profile: Profile
    regions: tuple[RegionWays, ...]

    @property
    def seconds(self) -> dict[str, float]:
        """Name of a way → its seconds over all regions, with the seconds that a job adds to a step.

        Ways that some region does not have are left out.
        """
        totals = {}
        for name in (ONE, DATA, TENSOR, PLANNED, BEST):
            if all(any(way.name == name for way in region.ways) for region in self.regions):
                in_job = 0.0 if name == ONE else self.profile.job_step
                totals[name] = sum(region[name].seconds for region in self.regions) + in_job
        return totals

    @property
    def fastest(self) -> str:
        """The name of the fastest way. If several are equally fast, the simplest of them."""
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def pays(self) -> bool:
        """Whether a way with several ranks is faster than one device."""
        return self.fastest != ONE

    @property
    def verdict(self) -> str:
        """The fastest way and the reason, in one line."""
        seconds, fastest = self.seconds, self.fastest
        one_device = seconds[ONE]
        if not self.pays:
            nearest = min((n for n in seconds if n != ONE), key=seconds.__getitem__)
            calls = sum(r[nearest].traffic.calls for r in self.regions)
            moving = sum(r[nearest].seconds for r in self.regions) - self._compute(nearest)
            return (
                f"distributing does not pay: {duration_text(one_device)} of work on one device, against {_calls(calls)} of "
                f"{duration_text(max(0.0, moving))} and {duration_text(self._compute(nearest))} of work in the nearest "
                f"({nearest})"
                + (f", and {duration_text(self.profile.job_step)} that a job adds" if self.profile.job_step else "")
            )
        ways = [r[fastest] for r in self.regions]
        next_best = min((n for n in seconds if n not in (ONE, fastest, PLANNED, BEST)), key=seconds.__getitem__)
        split_texts = {"+".join(map(str, w.split)) for w in ways if w.split}
        split_text = f" {split_texts.pop()}" if len(split_texts) == 1 else ""
        speedup = one_device / seconds[fastest]
        text = f"{fastest}{split_text}: {speedup:.2f} times as fast as one device on {ways[0].ranks} ranks"
        other = next_best if fastest in (PLANNED, BEST) else PLANNED
        return (
            f"{text}, {seconds[other] / seconds[fastest]:.2f} times as fast as {other}: {self._why(fastest)} against "
            f"{self._why(other)}"
        )

    def _compute(self, name: str) -> float:
        """Seconds of a way without collectives, over all regions."""
        return sum(r[name].compute for r in self.regions)

    def _why(self, name: str) -> str:
        """The compute, the collectives and the imbalance of a way, as text."""
        ways = [r[name] for r in self.regions]
        balanced = sum(w.compute / w.imbalance for w in ways)  # seconds of compute if all ranks had equally much of it
        rho = self._compute(name) / balanced if balanced else 1.0
        return f"{duration_text(self._compute(name))} of work with {_calls(sum(w.traffic.calls for w in ways))}" + (
            f" and rho {rho:.2f}" if rho > 1.005 else ""
        )

    def __str__(self) -> str:
        profile = self.profile
        peak = ", ".join(f"{spell_quantity(rate, 'flop/s')} in {dtype}" for dtype, rate in profile.peak.items())
        host = f"the host takes {duration_text(profile.host)} for each function"
        if profile.job_call or profile.job_step:
            in_job = f"{duration_text(profile.job_call)} for each function and {duration_text(profile.job_step)} for each step"
            host += f", and a job adds {in_job}"
        lines = [
            f"{profile.name}: at most {peak}; memory {spell_quantity(profile.bandwidth, 'B/s')}, links "
            f"{spell_quantity(profile.node.bandwidth, 'B/s')}; {host}",
            "forward and backward of a microbatch on a data rank, without the optimizer; collectives overlap no compute",
        ]
        for _, group in groupby(self.regions, key=lambda r: (r.ranks, r.rows, r.ways, r.parameter_bytes)):
            equal_regions = list(group)
            lines += ["", *_table(equal_regions[0], len(equal_regions))]
        return "\n".join([*lines, "", self.verdict])


def _table(region: RegionWays, count: int) -> Iterator[str]:
    """The lines of the table of a region. ``count``: number of regions that are equal to it, itself included."""
    more = f", and {count - 1} like it" if count > 1 else ""
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
