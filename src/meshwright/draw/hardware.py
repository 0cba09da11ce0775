"""Prints a hardware profile: the highest rates, and the share of them that small and large calls attain.

what                      at most  of it, smallest                largest    start  scatter
products, float32    101 Gflop/s  48 % at 524 kflop  83.6 % at 2.15 Gflop             8.9 %
link, gloo             2.0 GiB/s  5.7 % at 4.0 KiB    44.7 % at 16.0 MiB  140 µs      16 %
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.amounts import count_text, duration_text, size_text

if TYPE_CHECKING:
    from meshwright.hardware.profile import Curve, Link, Profile


def profile(profile: Profile) -> RenderableType:
    """A table with a line for each rate of a profile."""
    cores = f", {profile.cores} at once" if profile.cores else ""
    heading = Text.assemble((profile.name, "bold"), f": {size_text(profile.memory)}, {profile.notes.strip()}{cores}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("what", no_wrap=True)
    for title in ("at most", "of it, smallest", "largest", "start", "scatter"):
        table.add_column(title, justify="right", no_wrap=True)
    scatter = _percent(profile.scatter)
    for dtype, peak in profile.peak.items():
        for kind, curves in (("products", profile.matmul), ("attention", profile.attention)):
            if dtype in curves:
                ends = _ends(curves[dtype], "flop")
                table.add_row(f"{kind}, {dtype}", f"{count_text(peak)}flop/s", *ends, "", scatter)
    streams = f"{size_text(profile.bandwidth)}/s"
    table.add_row("memory", streams, *_ends(profile.streaming, "B"), "", scatter)
    table.add_row("host, forward", "", "", "", duration_text(profile.host), scatter)
    table.add_row("host, backward", "", "", "", duration_text(profile.host_backward), scatter)
    for name, link in (("link", profile.node), ("network", profile.network)):
        if link is not None:
            _add(table, name, link)
    return Group(heading, Text(), table)


def _add(table: Table, name: str, link: Link) -> None:
    rate, ends = f"{size_text(link.bandwidth)}/s", _ends(link.efficiency, "B")
    table.add_row(f"{name}, {link.name}", rate, *ends, duration_text(link.latency), _percent(link.scatter))


def _ends(curve: Curve, unit: str) -> tuple[str, str]:
    """The efficiency of the smallest and the largest call of a curve, with their sizes."""

    def text(point: tuple[float, float]) -> str:
        size, efficiency = point
        return f"{_percent(efficiency)} at {size_text(size) if unit == 'B' else count_text(size) + unit}"

    return text(curve.points[0]), text(curve.points[-1])


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"
