"""The command line, called from tests."""

from __future__ import annotations

from dataclasses import replace

import typer
from click.testing import Result
from typer.testing import CliRunner

from meshwright import cli
from meshwright.hardware import calibrated_file, read_profile


def meshwright(*arguments: object, code: int = 0) -> Result:
    """What a command prints, on a terminal of 100 columns, in no run; ``code``: with which it must end."""
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), env={"COLUMNS": "100", "RANK": None})
    assert result.exit_code == code, result.output
    return result


def read(command: str, *arguments: str) -> None:
    """Reads the arguments of a command, which is not run. Raises AssertionError for no command, and for what it does not take."""
    known = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert command in known, f"no command {command}"
    try:
        known[command].make_context(command, list(arguments))
    except Exception as error:  # its class is of the copy of click that typer has within it
        raise AssertionError(f"meshwright {command}: {error}") from error


def write_profile() -> None:
    """Writes a profile of this machine, made up, as ``calibrate`` would; the caller has set ``XDG_CONFIG_HOME``."""
    calibrated_file().parent.mkdir(parents=True)
    profile = replace(read_profile("v100"), name="cpu-local", cores=2, devices_per_node=4096)
    calibrated_file().write_text(profile.text())
