"""The command line, called from tests."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from meshwright import cli


def meshwright(*arguments: object, code: int = 0) -> Result:
    """What a command prints, on a terminal of 100 columns, in no run; ``code``: with which it must end."""
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), env={"COLUMNS": "100", "RANK": None})
    assert result.exit_code == code, result.output
    return result
