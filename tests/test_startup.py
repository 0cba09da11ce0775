"""What a person waits for before anything runs is what is imported: each wait imports what it needs, and no more."""

from __future__ import annotations

import json
import subprocess
import sys

PLANNED_WITHOUT = ("meshwright.runtime.job", "meshwright.runtime.apply", "meshwright.checkpoint", "meshwright.parity")


def imported(code: str) -> set[str]:
    """The modules that are imported once a fresh Python has run ``code``."""
    script = f"import json, sys\n{code}\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_the_package_itself_imports_neither_torch_nor_its_own_rooms() -> None:
    modules = imported("import meshwright")
    assert {m for m in modules if m.partition(".")[0] == "meshwright"} == {"meshwright"}
    assert not modules & {"torch", "transformers", "numpy", "yaml", "typer"}


MISTAKES = [
    ["show", "--mesh", "dp_shard=128,tpp=8"],
    ["show", "--mesh", "dp_shard=128,tp=0"],
    ["show", "--mesh", "tp=8", "--set", "recomput=all"],
    ["show", "--mesh", "tp=8", "--rank", "8"],
    ["show", "--plan", "no-such-file.yaml"],
    ["check", "--mesh", "tp=2", "--set", "n_layr=2"],
    ["train", "--mesh", "dp_shard=2", "--set", "microbatches=none"],
    ["predict", "--mesh", "tp=x", "--hardware", "h100"],
    ["dryrun", "--mesh", "tp=2", "--hardware", "h1000", "--rank", "0"],
]


def test_a_mistake_in_the_plan_of_a_model_of_transformers_is_told_before_torch_is_imported() -> None:
    modules = imported(f"""
from typer.testing import CliRunner
from meshwright.cli import app
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
for command, *rest in {MISTAKES!r}:
    result = CliRunner().invoke(app, [command, "hf:gpt2", *rest])
    assert result.exit_code == 2 and "problem" in result.stderr, (command, rest, result.output)
    assert "torch" not in sys.modules, (command, rest)
""")
    assert "transformers" not in modules


def test_a_recipe_is_made_without_what_runs_it() -> None:
    modules = imported("""
import torch
import meshwright as mw
build = lambda: torch.nn.Linear(8, 4)
recipe = mw.make_recipe(build, "tp=2", (torch.ones(2, 8),), lambda output: output.sum())
assert len(recipe.parameters) == 2
from meshwright.draw.facts import shard_map
shard_map(recipe)
""")
    assert not {m for m in modules if m.startswith(PLANNED_WITHOUT)}
