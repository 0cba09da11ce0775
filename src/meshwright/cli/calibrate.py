"""``meshwright calibrate``: measures this machine, or corrects a profile by training runs, and writes a hardware profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from meshwright.cli import processes
from meshwright.cli.correction import correct_by_runs
from meshwright.cli.inputs import Problems
from meshwright.cli.options import CalibratedOption, CorrectedOption, NetworkOption, RunsOption, ThreadsOption
from meshwright.draw.console import console
from meshwright.errors import Findings

if TYPE_CHECKING:
    from meshwright.hardware.profile import Curve, Link, Profile

# most processes between which collectives are measured: two for each core, as the ranks of a run share cores
_SHARING = 8
_DEVICES_PER_NODE = 4096  # a device is a process here, and any number of processes of one machine are one node


def calibrate(
    out: CalibratedOption = None,
    threads: ThreadsOption = None,
    runs: RunsOption = None,
    hardware: CorrectedOption = None,
    network: NetworkOption = None,
) -> None:
    """Measure this machine, and write a profile for predict in which each device is a process.

    Times matrix products, attention, copies and other functions, collectives between
    local processes, and the host time of jobs of a small model, for about a minute.
    Other commands find the profile as cpu-local. With --from it measures nothing: it
    corrects a profile, also one of GPUs, by the steps of training runs, and prints how
    far off its predictions of them were, and how far off they are now.
    """
    with processes.reported_errors():
        from meshwright.hardware.profile_file import calibrated_file, keep_profile

        file = out or calibrated_file()
        problems = Problems()
        problems.collect(lambda: _check_options(runs, threads, hardware, network))
        problems.collect(lambda: _check_out(file, out))
        problems.raise_if_any()
        if runs:
            correct_by_runs(runs, hardware, network, out)
            return
        profile = measured_profile(threads or 1, _tell)
        keep_profile(profile.text(), file)
        from meshwright.draw.hardware import profile as profile_text

        console().print(profile_text(profile))
        name = "cpu-local" if out is None else str(file)
        console().print(Text(f"\nwritten to {file}; use it as --hardware {name}"), soft_wrap=True)


def measured_profile(threads: int, tell: Callable[[str], None]) -> Profile:
    """A profile of this machine: one process while every core computes (at least 2), the link, and the host time of a job.

    Args:
        threads: number of torch threads of each process.
        tell: called with a text before each measurement.
    """
    from meshwright.hardware.calibrate import calibrate as measure
    from meshwright.hardware.calibrate import processes_at_once
    from meshwright.hardware.exchange import measured_link, measured_skew
    from meshwright.prediction.job_costs import job_costs
    from meshwright.workers.pool import local_workers

    ranks = max(2, processes_at_once(threads))
    sharing = max(ranks, min(2 * ranks, _SHARING))
    with local_workers(sharing, device="cpu", threads=threads) as pool:
        tell(f"products, attention, memory and functions, in {ranks} processes at once")
        profile: Profile = pool.run(partial(measure, devices_per_node=_DEVICES_PER_NODE), ranks=ranks)[0]
        tell(f"collectives between {sharing} processes")
        link: Link = pool.run(measured_link, ranks=sharing)[0]
        tell(f"how long {sharing} processes wait for each other")
        skew: Curve = pool.run(measured_skew, cores=processes_at_once(threads), ranks=sharing)[0]
        tell("jobs of a small model")
        return job_costs(replace(profile, node=link, skew=skew), pool)


def _tell(measurement: str) -> None:
    console(stderr=True).print(Text(f"measuring {measurement}", style="dim"))


def _check_options(runs: Sequence[Path] | None, threads: int | None, hardware: str | None, network: str | None) -> None:
    """Raises PlanError for options that only a measurement has, with ``--from``, and for those of a correction without it."""
    findings = Findings("this command")
    if runs and threads is not None:
        findings.add(
            where="--threads", given=f"{threads}, and --from", required="runs that are there, and no measurement",
            fix="leave out --threads",
        )  # fmt: skip
    for option, value in (("--hardware", hardware), ("--network", network)):
        if not runs and value is not None:
            findings.add(
                where=option, given=f"{value}, and no --from", required="runs to correct that profile by",
                fix="--from runs/gpt2",
            )  # fmt: skip
    findings.raise_if_any()


def _check_out(file: Path, out: Path | None) -> None:
    """Raises PlanError if the folder of ``--out`` does not exist. Called before the measurement, which takes a minute."""
    findings = Findings("this command")
    if out is not None and not file.absolute().parent.is_dir():
        findings.add(
            where="--out", given=str(out), required=f"a folder that exists: {file.absolute().parent} does not",
            fix=f"--out {file.name}",
        )  # fmt: skip
    findings.raise_if_any()
