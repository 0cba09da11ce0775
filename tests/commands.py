"""The command line, called from tests."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from meshwright import cli
from meshwright.hardware import calibrated_file, measured_link, measured_skew, read_profile
from meshwright.workers.pool import LocalWorkers


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


class Few:
    """The workers of the session, which measure few sizes for ``calibrate``; what else they are asked is done as it stands."""

    def __init__(self, workers: LocalWorkers) -> None:
        self.workers = workers

    def __enter__(self) -> Few:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.workers, name)

    def run(self, function: Any, *args: Any, ranks: int, **more: Any) -> list[Any]:
        measures = import_module("meshwright.hardware.calibrate").calibrate
        if isinstance(function, partial) and function.func is measures:
            return [function(sides=(32, 64), lengths=(32,), sizes=(2**14, 2**20), rounds=2, budget=0.1)]
        if function in (measured_link, measured_skew):
            ranks, more = 2, more if function is measured_link else {**more, "budget": 0.05}
        return self.workers.run(function, *args, ranks=ranks, **more)


def calibrate_quickly(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """``meshwright calibrate`` measures few sizes and steps from here on, with the workers of the session."""
    costs = import_module("meshwright.prediction.job_costs")
    monkeypatch.setattr(costs, "job_costs", partial(costs.job_costs, steps=3))
    monkeypatch.setattr(import_module("meshwright.workers.pool"), "local_workers", lambda *_, **__: Few(workers))
