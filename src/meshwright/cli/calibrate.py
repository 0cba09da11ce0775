"""``meshwright calibrate``: measures this machine, and writes a hardware profile."""

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

_DEVICES_PER_NODE = 4096  # a device is a process here, and any number of processes of one machine are one node


def calibrate(
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write; default: the place in which other commands look for cpu-local",
            show_default=False,
            dir_okay=False,
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(help="Threads of each process: as many as the ranks of your runs have", min=1)
    ] = 1,
) -> None:
    """Measure this machine, and write a profile for predict in which each device is a process.

    Times matrix products, attention, copies, the host time of a function call, and
    all-reduces between local processes. Takes about half a minute. Other work on the
    machine makes the result worse. Other commands find the profile as cpu-local.
    """
    with processes.reported_errors():
        from meshwright.hardware.local import calibrated_file, keep_profile

        file = out or calibrated_file()
        _check_out(file, out)
        profile = measured_profile(threads, _tell)
        keep_profile(profile.text(), file)
        from meshwright.draw.hardware import profile as profile_text

        console().print(profile_text(profile))
        name = "cpu-local" if out is None else str(file)
        console().print(Text(f"\nwritten to {file}; use it as --hardware {name}"), soft_wrap=True)


def measured_profile(threads: int, tell: Callable[[str], None]) -> Profile:
    """A profile of this machine: the speed of one process, and the link between one process for each core (at least 2).

    Args:
        threads: number of torch threads of each process.
        tell: called with a text before each measurement.
    """
    import torch

    from meshwright.hardware.calibrate import calibrate as measure

    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        profile = measure(devices_per_node=_DEVICES_PER_NODE, tell=tell)
    finally:
        torch.set_num_threads(threads_before)
    ranks = max(2, profile.cores)
    tell(f"all-reduces between {ranks} processes")
    return replace(profile, node=_link(ranks, threads))


def _link(ranks: int, threads: int) -> Link:
    """The link between local processes, measured by all-reduces."""
    from meshwright.hardware.exchange import measured_link
    from meshwright.workers.pool import local_workers

    with local_workers(ranks, device="cpu", threads=threads) as pool:
        links: list[Link] = pool.run(measured_link, ranks=ranks)
    return links[0]


def _tell(measurement: str) -> None:
    console(stderr=True).print(Text(f"measuring {measurement}", style="dim"))


def _check_out(file: Path, out: Path | None) -> None:
    """Raises PlanError if the folder of ``--out`` does not exist. Called before the measurement, which takes half a minute."""
    findings = Findings("this command")
    if out is not None and not file.absolute().parent.is_dir():
        findings.add(
            where="--out", given=str(out), required=f"a folder that exists: {file.absolute().parent} does not",
            fix=f"--out {file.name}",
        )  # fmt: skip
    findings.raise_if_any()
