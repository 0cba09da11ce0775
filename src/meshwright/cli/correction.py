"""Corrections of hardware profiles: ``calibrate --from``, by the steps of training runs; and what ``plan --measure`` keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from meshwright.cli.inputs import Problems
from meshwright.cli.run_steps import measured_steps
from meshwright.cli.subject import named_profile, without_warnings
from meshwright.draw.console import console
from meshwright.errors import Findings
from meshwright.hardware.profile_file import CPU_LOCAL, calibrated_file, keep_profile
from meshwright.plan import Plan

if TYPE_CHECKING:
    from meshwright.hardware.correction import Correction
    from meshwright.hardware.profile import Profile


def correct_by_runs(runs: Sequence[Path], hardware: str | None, network: str | None, out: Path | None) -> None:
    """Corrects a profile by the steps of training runs, prints what they say of it, and writes it.

    Args:
        runs: folders of ``train``.
        hardware, network: the profile of the devices that ran them, as ``predict`` takes it.
        out: the file to write. None: the profile of this machine is corrected where it stands.

    Raises:
        PlanError: with every problem of the runs, the profile and ``out``.
    """
    from meshwright.draw.correction import drawn
    from meshwright.prediction.learning import correct_profile

    problems = Problems()
    problems.collect(lambda: _check_out(hardware, out))
    profile = problems.collect(lambda: named_profile(hardware, network))
    with without_warnings(), console(stderr=True).status("rehearsing the steps of the runs", spinner="dots"):
        by_run = [problems.collect(lambda run=run: measured_steps(run)) or [] for run in runs]  # type: ignore[misc]
        problems.raise_if_any()
        assert profile is not None
        correction = correct_profile([step for steps in by_run for step in steps], hardware=profile)
    if out is not None:
        keep_profile(correction.profile.text(), out)
        kept = f"written to {out}; use it as --hardware {out}"
    else:
        kept = keep_correction(correction, profile, hardware)
    measured = [
        (f"{run}: {Plan.parse(step.plan).mesh}", step.seconds)
        for run, steps in zip(runs, by_run, strict=True)
        for step in steps
    ]
    console().print(drawn(correction, profile.name, measured))
    console().print(Text(kept), soft_wrap=True)


def keep_correction(correction: Correction | None, profile: Profile, hardware: str | None) -> str:
    """Writes a corrected profile over the file that it was read from. Returns a text that says what was done with it.

    A file that ``calibrate`` did not write, or that was edited since, is left as it is: its comments would be lost.

    Args:
        profile: as it was read. (A search with ``--nodes`` has its own number of devices of a node.)
        hardware: the option ``--hardware``.
    """
    if correction is None or not correction.factors:
        return ""
    from meshwright.hardware.correction import corrected

    file = calibrated_file() if hardware in (None, CPU_LOCAL) else Path(str(hardware))
    try:
        if file.read_text(encoding="utf-8") != profile.text():
            return f"not kept: {file} has been edited, and would lose that"
        keep_profile(corrected(profile, correction.factors).text(), file)
    except OSError as error:  # what the runs showed is printed in any case
        return f"not kept in {file}: {error.strerror or error}"
    return f"kept in {file}; meshwright calibrate measures anew"


def _check_out(hardware: str | None, out: Path | None) -> None:
    """Raises PlanError if a profile that ships, or a file of a person's own, would be corrected where it stands."""
    findings = Findings("this command")
    if out is None and hardware not in (None, CPU_LOCAL):
        findings.add(
            where="--out", given="nothing", required=f"the file for the corrected profile: {hardware} stays as it is",
            fix="--out ours.yaml",
        )  # fmt: skip
    findings.raise_if_any()
