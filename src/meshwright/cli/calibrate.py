"""``meshwright calibrate``: this machine, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from meshwright.cli import processes
from meshwright.draw.console import console
from meshwright.errors import Findings

if TYPE_CHECKING:
    from meshwright.hardware.profile import Link, Profile

_PROCESSES = 4096  # of a machine: all of them are within one node


def calibrate(
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write; default: where predict finds it as cpu-local", show_default=False, dir_okay=False
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(help="Threads of each process: as many as the ranks of your runs have", min=1)
    ] = 1,
) -> None:
    """Measure this machine, for predict: a profile in which each device is a process.

    Times products of matrices, attention, copies, what Python takes for a function, and
    all-reduces between local processes. Takes about half a minute; what else the
    machine does meanwhile counts. Other commands find the profile as cpu-local.
    """
    with processes.told():
        from meshwright.hardware.local import calibrated_file, keep_profile

        file = out or calibrated_file()
        _check_out(file, out)
        measured = measured_profile(threads, _tell)
        keep_profile(measured.text(), file)
        from meshwright.draw.hardware import profile as drawn

        console().print(drawn(measured))
        name = "cpu-local" if out is None else str(file)
        console().print(Text(f"\nwritten to {file}; use it as --hardware {name}"), soft_wrap=True)


def measured_profile(threads: int, tell: Callable[[str], None]) -> Profile:
    """This machine: what a process does by itself, and the link between as many processes as have a core, at least 2.

    Args:
        threads: of each process.
        tell: is told what is measured next.
    """
    import torch

    from meshwright.hardware.calibrate import calibrate as measure

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        profile = measure(devices_per_node=_PROCESSES, tell=tell)
    finally:
        torch.set_num_threads(before)
    ranks = max(2, profile.cores)
    tell(f"all-reduces between {ranks} processes")
    return replace(profile, node=_link(ranks, threads))


def _link(ranks: int, threads: int) -> Link:
    from meshwright.hardware.exchange import measured_link
    from meshwright.workers.pool import local_workers

    with local_workers(ranks, device="cpu", threads=threads) as pool:
        links: list[Link] = pool.run(measured_link, ranks=ranks)
    return links[0]


def _tell(doing: str) -> None:
    console(stderr=True).print(Text(f"measuring {doing}", style="dim"))


def _check_out(file: Path, out: Path | None) -> None:
    """Raises PlanError if the file of ``--out`` cannot be written, before half a minute is spent."""
    findings = Findings("this command")
    if out is not None and not file.absolute().parent.is_dir():
        findings.add(
            where="--out", given=str(out), required=f"a folder that exists: {file.absolute().parent} does not",
            fix=f"--out {file.name}",
        )  # fmt: skip
    findings.raise_if_any()
