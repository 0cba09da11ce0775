"""The command line: what it teaches, shows, refuses; and that check and train do what they say."""

from __future__ import annotations

import atexit
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from click.testing import Result
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from typer.testing import CliRunner

from commands import meshwright, read
from meshwright import cli
from meshwright.cli import inputs, processes
from meshwright.draw.plain import from_plain
from meshwright.draw.topology import Topology, topology
from meshwright.errors import Finding, PlanError
from meshwright.mesh import Mesh
from meshwright.plan import Plan
from meshwright.workers.pool import LocalWorkers, WorkerError

FILE = """
from types import SimpleNamespace
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x), y))

def rows(count):
    return {"x": torch.linspace(-1, 1, 8 * count).view(count, 8), "y": torch.arange(count) % 4}

def model():
    return Net(), rows(4)

def learner():
    return lambda: Net(), rows(4), rows(16)

class Bare(nn.Linear):
    def forward(self, input):
        return SimpleNamespace(logits=super().forward(input))

def bare():
    return Bare(8, 4), {"input": rows(4)["x"]}

class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, y):
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.a(x) + self.b(x), y))

def beside():
    return Beside(), rows(4)

def squares(output):
    return output.logits.square().mean()

def broken():
    class Broken(Net):
        def forward(self, x, y):
            if not x.is_meta and "WORLD_SIZE" in os.environ:
                raise RuntimeError("this one breaks")
            return super().forward(x, y)
    return Broken(), rows(4)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # where training puts runs/
    path = tmp_path / "tiny.py"
    path.write_text(FILE)
    return str(path)


# --- help -------------------------------------------------------------------------------------------------------------


def examples(command: str) -> str:
    """What a command's help has below ``Examples``."""
    return meshwright(*command.split(), "--help").output.partition("\nExamples\n")[2]


COMMANDS = [
    "", "show", "check", "plan", "predict", "dryrun", "calibrate", "train", "compare", "report", "inspect", "export", "env",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_in_a_few_lines_and_gives_examples(command: str) -> None:
    text = meshwright(*command.split(), "--help").output
    prose = text.partition("╭")[0].strip().splitlines()[1:]
    assert 3 <= len([line for line in prose if line.strip()]) <= 6
    assert max(map(len, prose)) <= 100
    assert text.count(f"meshwright {command}".rstrip() + " ") >= 2 or command == "env"
    if command in ("show", "check", "predict", "dryrun", "train"):
        assert all(word in text for word in ("TARGET", "--mesh", "--plan", "--set", "--loss"))


@pytest.mark.parametrize("command", ["predict", "plan", "train"])
def test_help_fills_the_lines_of_a_narrow_terminal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    prose = meshwright(command, "--help").output.partition("╭")[0].splitlines()
    _usage, _first, *lines = [line.strip() for line in prose if line.strip()]
    for line, below in pairwise(lines):
        assert len(line) + len(below.split()[0]) >= 77, line  # the next word had no room


# The commands of the first help are those of the others, with more steps; to measure this machine takes a minute, and
# what these others show the tests of the commands show as well.
LONG = {"", "calibrate", "check", "plan", "inspect", "export"}


@pytest.mark.usefixtures("pooled")
@pytest.mark.timeout(900)  # calibrate's measure this machine twice: 220 s by themselves
@pytest.mark.parametrize("command", [pytest.param(c, marks=pytest.mark.proof if c in LONG else ()) for c in COMMANDS])
def test_every_example_of_the_help_runs_as_it_stands(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: LocalWorkers
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for program, *words in calls(command):
        if program == "meshwright":
            meshwright(*words)
        elif program == "python":
            script(words)
        elif "-m" not in words:  # torchrun -m meshwright: tests/watch and tests/runtime kill its ranks
            at = next(i for i, word in enumerate(words) if word.endswith(".py"))
            workers.run(script_of_a_rank, words[at:], ranks=int(words[words.index("--nproc-per-node") + 1]))


@pytest.mark.parametrize("command", sorted(LONG))
def test_every_example_of_a_help_that_takes_long_can_be_read(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = [words for program, *words in calls(command) if program == "meshwright"]
    for words in ours:
        read(*words)
    assert ours


def calls(command: str) -> list[list[str]]:
    """The programs that a command's examples call, each with its arguments. The files that they write are made."""
    stand_ins = "".join(
        f"{name}() {{ printf '%s\\n' {name} \"$@\" END >&3; }}\n" for name in ("meshwright", "torchrun", "python")
    )
    subprocess.run(["bash", "-e", "-c", f"exec 3>calls\n{stand_ins}{examples(command)}"], check=True)
    return [call.splitlines() for call in Path("calls").read_text().split("END\n") if call]


def script_of_a_rank(words: list[str]) -> None:
    """The same in a worker, which is in its process group already."""
    with mock.patch("torch.distributed.init_process_group"):
        script(words)


def script(words: list[str]) -> None:
    """Runs a script with its arguments, in this process."""
    arguments, sys.argv = sys.argv, words
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv = arguments


def test_env_says_what_is_here() -> None:
    text = meshwright("env").output
    assert all(word in text for word in ("torch", "gloo", "cores", "memory", "launcher", "transformers"))


# --- show -------------------------------------------------------------------------------------------------------------


def test_show_a_file(file: str) -> None:
    text = meshwright("show", f"{file}:model", "--mesh", "dp_shard=2,tp=2", "--rank", "3").output
    assert "dp_shard=2 × tp=2: 4 ranks" in text
    assert "layers.{0…2} ×3" in text
    assert "rows 12:16" in text  # of 16 rows: the second half by tp, its second half by dp_shard


def test_show_the_nodes_and_what_goes_between_them(file: str) -> None:
    arguments = ("show", f"{file}:model", "--mesh", "dp_shard=4,tp=2", "--nodes")
    text = meshwright(*arguments, 2).output
    assert "dp_shard=4 × tp=2: 8 ranks on 2 nodes" in text
    assert "┌ node 0 ────────────────┐  ┌ node 1 ────────────────┐" in text
    assert re.search(r"dp_shard +0 ─ 2 ═ 4 ─ 6 +between 2 nodes, 2 ranks on each", text)
    assert re.search(r"tp +0 ─ 1 +within a node", text)
    placed = from_plain(Topology, json.loads(meshwright(*arguments, 2, "--json").stdout)["topology"])
    assert placed == topology(Mesh.parse("dp_shard=4,tp=2"), 4)
    told = meshwright(*arguments, 3, "--rank", 9, code=2).stderr
    assert "2 problems" in told and "--nodes 2" in told and "--rank 7" in told


def test_show_a_picture(file: str) -> None:
    text = meshwright("show", f"{file}:model", "--mesh", "dp_shard=2,tp=2", "--parameter", "layers.*.2.weight").output
    assert "rows \\ cols" in text
    assert "layers.{0…2}.2.weight ×3" in text
    arguments = ("show", f"{file}:model", "--mesh", "dp_shard=2,tp=2", "--parameter", "*")
    assert [meshwright(*arguments, "--pictures", str(n)).output.count("┌") for n in (0, 5)] == [0, 5]


def test_show_a_model_of_transformers_on_a_thousand_ranks() -> None:
    sizes = "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=8,vocab_size=256"
    text = meshwright("show", "hf:llama", "--mesh", "dp_shard=128,tp=8", "--set", sizes, "--rank", "9").output
    assert "1024 ranks" in text
    assert "layers.{0…1} ×2" in text


BRANCHES = "mesh: {tp: 3}\nmodules:\n  a: {on: 'tp[0]'}\n  b: {on: 'tp[1:3]', mesh: {dp: 2}}\n"


def test_show_branches(file: str, tmp_path: Path) -> None:
    (plan := tmp_path / "plan.yaml").write_text(BRANCHES)
    shown = meshwright("show", f"{file}:beside", "--plan", str(plan), "--rank", "2").output
    assert "ranks 0–2 ─ fork ─┬─ 0     a ─┬─ join" in shown
    assert "dp_replicate=2   divided   b" in shown  # enough rows are made up that its data ranks can divide them
    assert re.search(r"4×8 +Replicate +0 \(tp\[0\]\) +nothing", shown)


def test_show_as_one_file(file: str, tmp_path: Path) -> None:
    out = tmp_path / "folder" / "out.html"
    options = ("--mesh", "dp_shard=64,tp=2", "--nodes", "16", "--html", str(out), "--rank", "77")
    text = meshwright("show", f"{file}:model", *options).output
    assert "out.html: dp_shard=64 × tp=2, 128 ranks" in text
    html = out.read_text(encoding="utf-8")
    assert '"rank":77' in html and '"perNode":8' in html and '"between 16 nodes, 4 ranks on each"' in html


def test_show_as_one_file_with_a_prediction_beside_another_plan(file: str, tmp_path: Path) -> None:
    out, other = tmp_path / "out.html", tmp_path / "other.yaml"
    other.write_text("mesh: {dp_shard: 4}")
    meshwright(
        "show", f"{file}:model", "--mesh", "tp=2", "--html", str(out), "--hardware", "h100", "--compare", str(other)
    )
    text = out.read_text(encoding="utf-8")
    assert '"source":"predicted"' in text and str(other) in text and '"unit":"seconds"' in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hardware", "h100"), "--html out.html"),
        (("--html", "out.html", "--json"), "one of the two"),
        (("--html", "out.html", "--hardware", "h100", "--nodes", "2"), "leave out --nodes"),
        (("--html", "out.html", "--compare", "none.yaml"), "--hardware h100"),
        (("--html", "out.html", "--hardware", "h100", "--compare", "none.yaml"), "none.yaml"),
        (("--html", "out.html", "--parameter", "layers.99"), "layers.99"),
    ],
)
def test_options_of_the_one_file_that_do_not_go_together_are_told(
    file: str, options: tuple[str, ...], said: str
) -> None:
    assert said in meshwright("show", f"{file}:model", "--mesh", "tp=2", *options, code=2).stderr
    assert not Path("out.html").exists()


def test_show_as_data(file: str) -> None:
    text = meshwright("show", f"{file}:model", "--mesh", "fsdp=2,tp=2", "--json", "--rank", "3").stdout
    data = json.loads(text)
    assert data["mesh"] == {"dp_shard": 2, "tp": 2}
    (weight,) = [line for line in data["parameters"] if line["name"] == "layers.0.0.weight"]
    assert weight["layout"] == {"dp_shard": "Shard(0)", "tp": "Shard(0)"}
    assert weight["held"] == [{"ranks": [3], "slices": [[[12, 16]], [[0, 8]]]}]


def test_settings_go_to_the_plan_or_to_the_target(file: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text('modules:\n  "head": {tp: replicate}\n')
    base = ("show", f"{file}:model", "--plan", str(plan), "--mesh", "tp=2", "--json")
    assert _layout(meshwright(*base), "head.weight") == {"tp": "Replicate"}
    assert _layout(meshwright(*base, "--set", "modules.head.tp=column"), "head.weight") == {"tp": "Shard(0)"}
    assert _layout(meshwright(*base, "--set", "mesh.tp=4"), "layers.0.0.bias") == {"tp": "Shard(0)"}


# --- how a command ends -----------------------------------------------------------------------------------------------


def test_a_command_that_ends_at_once_has_written_all_and_run_what_was_to_run_at_its_end(file: str) -> None:
    """In a pipe, where output is buffered."""
    code = "import atexit; atexit.register(print, 'the end'); from meshwright.cli import main; main()"
    command = [sys.executable, "-c", code, "show", f"{file}:model", "--mesh", "tp=2"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "head" in told and told.endswith("the end\n")


@pytest.mark.parametrize("what", ["threads", "rank", "message"])
def test_a_command_does_not_end_at_once_if_that_would_leave_something_undone(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("ended at once"))
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    if what == "rank":
        monkeypatch.setenv("RANK", "0")
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    if what == "threads":
        other.start()
    processes.end_at_once("a message" if what == "message" else 0)
    ended.set()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_torchrun_leaves_what_is_wrong_where_the_launcher_sums_it_up(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Every rank, as the first that fails may be any."""
    left = tmp_path / "error.json"
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "TORCHELASTIC_ERROR_FILE": left}
    for name, value in ranks.items():
        monkeypatch.setenv(name, str(value))
    told = _left_by(left, ("train", f"{file}:model", "--mesh", "dp_shard=2", "--global-batch", "2"), monkeypatch)
    assert "--global-batch" in told["message"] and "required:" in told["message"]
    assert "py_callstack" not in told["extraInfo"]


def test_an_error_that_no_one_foresaw_is_left_with_its_traceback(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(left))
    monkeypatch.setattr(Plan, "from_command", lambda *_: 1 / 0)
    told = _left_by(left, ("show", f"{file}:model", "--mesh", "dp_shard=2"), monkeypatch)
    assert "division by zero" in told["message"] and "from_command" in told["extraInfo"]["py_callstack"]


def _left_by(left: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a command that fails leaves for torchrun, as torchrun reads it."""
    monkeypatch.setattr(sys, "argv", ["meshwright", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # as the main program of a rank, `train` sets handlers
    with pytest.raises((SystemExit, ZeroDivisionError)):
        cli.main()
    message = ProcessFailure(0, 0, 1, str(left)).message
    assert isinstance(message, dict)
    return message


def _layout(result: Result, name: str) -> dict[str, str]:
    return next(line["layout"] for line in json.loads(result.stdout)["parameters"] if line["name"] == name)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_all_mistakes_are_told_at_once_without_a_traceback(file: str) -> None:
    text = meshwright("show", f"{file}:modle", "--mesh", "tpp=2", code=2).stderr
    assert "2 problems" in text
    assert "did you mean tp?" in text
    assert "tiny.py:model" in text
    assert "Traceback" not in text


def test_a_typo_in_a_plan_is_told_with_line_and_column(file: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("recompute: none\nmodules:\n  head: {tp: colum}\n")
    text = meshwright("show", f"{file}:model", "--plan", str(plan), "--mesh", "tp=2", code=2).stderr
    assert "plan.yaml:3:14" in text
    assert "tp: column" in text


def test_mistakes_of_mesh_settings_plan_file_and_target_are_told_together(file: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("recompute: blox\nmodules:\n  head: {tp: colum}\n")
    arguments = ("--plan", str(plan), "--mesh", "tpp=2", "--set", "seed=x,widht=3,modules.head.tp=rwo", "--set", "oops")
    text = meshwright("show", f"{file}:model", *arguments, code=2).stderr
    assert "7 problems" in text
    assert "--mesh (mesh.tpp)" in text
    assert "plan.yaml:1:12 (recompute)" in text and "plan.yaml:3:14 (modules.head.tp)" in text
    assert "--set seed=0" in text and "--set modules.head.tp=row" in text
    assert "key=value" in text and "the key widht" in text


def test_a_plan_file_that_is_not_there_hides_nothing(file: str) -> None:
    arguments = ("--plan", "nowhere.yaml", "--mesh", "tpp=2", "--set", "seed=x")
    text = meshwright("show", f"{file}:model", *arguments, code=2).stderr
    assert "3 problems" in text
    assert all(said in text for said in ("nowhere.yaml", "tpp", "seed"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--mesh dp_shard=2,tp=2"),
        (("--mesh", "tp=2", "--rank", "2"), "--rank 1"),
        (("--mesh", "tp=2", "--parameter", "haed.weight"), "head.weight"),
        (("--mesh", "tp=2", "--set", "widht=3"), "the key widht"),
        (("--mesh", "tp=2", "--set", "blocks"), "key=value"),
        (("--mesh", "tp=100"), "larger than every dim"),
        (("--plan", "nowhere.yaml"), "nowhere.yaml"),
        (("--plan", "nowhere.yaml", "--mesh", "tp=2"), "nowhere.yaml"),
    ],
)
def test_mistakes(file: str, arguments: tuple[str, ...], said: str) -> None:
    assert said in meshwright("show", f"{file}:model", *arguments, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("hf:lama", "--mesh", "tp=2"), "hf:llama"),
        (("hf:llama", "--mesh", "tpp=2", "--set", "hiden_size=8"), "2 problems"),
        (("hf:llama", "--mesh", "tp=2", "--set", "recomput=all"), "--set recompute=all"),
        (("hf:llama", "--mesh", "tp=2", "--set", "hiden_size=8"), "--set hidden_size=8"),
        (("hf:llama", "--mesh", "tp=2", "--set", "batch_size=x"), "--set batch_size=8"),
        (("hf:llama", "--mesh", "tp=2", "--rank", "2"), "--rank 1"),
        (("hf:nowhere/config.json", "--mesh", "tp=2"), "no file"),
    ],
)
def test_a_mistake_beside_a_model_of_transformers_is_told_without_importing_it(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    assert said in meshwright("show", *arguments, code=2).stderr


def test_a_batch_that_does_not_divide_is_told_before_anything_starts(file: str) -> None:
    text = meshwright("train", f"{file}:learner", "--mesh", "dp_shard=2", "--global-batch", "3", code=2).stderr
    assert "global_batch" in text
    text = meshwright("train", f"{file}:model", "--mesh", "dp_shard=2", "--global-batch", "4", code=2).stderr
    assert "without a dataset" in text


# --- check and train --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pooled")
def test_check(file: str) -> None:
    text = meshwright("check", f"{file}:model", "--mesh", "tp=2").output
    assert "PASSED" in text


@pytest.mark.usefixtures("pooled")
def test_a_report_in_a_pipe_is_not_broken(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.parity.report.Report.__str__", lambda report: "a line " * 40 + "75:100:")
    result = CliRunner().invoke(cli.app, ["check", f"{file}:model", "--mesh", "tp=2"], env={"COLUMNS": "40"})
    assert result.stdout == "a line " * 40 + "75:100:\n"


@pytest.mark.usefixtures("pooled")
def test_train_on_a_dataset(file: str) -> None:
    arguments = ("--mesh", "dp_shard=2", "--steps", "4", "--lr", "0.01", "--global-batch", "16")
    lines = meshwright("train", f"{file}:learner", *arguments).output.splitlines()
    assert lines[0].startswith("step 1/4  loss ")
    assert "rows/s" in lines[0]
    (told,) = (line for line in lines if line.startswith("loss"))
    before, after = (float(told.split()[i]) for i in (1, 3))
    assert after < before and lines[-1].startswith("report ")


@pytest.mark.usefixtures("pooled")
def test_the_same_command_goes_on_with_a_run_and_another_does_not(file: str) -> None:
    run = ("train", f"{file}:learner", "--mesh", "dp_shard=2", "--lr", "0.01", "--global-batch", "8")
    meshwright(*run, "--steps", "2")
    assert "in 2 steps, to step 4" in meshwright(*run, "--steps", "4").output
    assert "all 4 steps are done already, in runs/tiny-learner" in meshwright(*run, "--steps", "4").output
    text = meshwright(*run[:4], "--steps", "5", "--global-batch", "16", code=2).stderr
    assert "2 problems in this command" in text
    assert "0.0003, but the run in runs/tiny-learner has 0.01" in text and "--out runs/tiny-learner-2" in text
    text = meshwright(*run, "--steps", "1", "--fresh").output
    assert "runs/tiny-learner is now runs/tiny-learner.old-1" in text
    assert sorted(p.name for p in Path("runs/tiny-learner").glob("step-*")) == ["step-00000001"]
    assert sorted(p.name for p in Path("runs/tiny-learner.old-1").glob("step-*")) == ["step-00000002", "step-00000004"]


@pytest.mark.usefixtures("pooled")
def test_a_run_goes_on_over_other_ranks_with_its_own_global_batch(file: str) -> None:
    Path("plan.yaml").write_text("mesh: [{dp_shard: 4}, {dp_shard: 3}]\n")
    run = ("train", f"{file}:learner", "--plan", "plan.yaml", "--out", "here")
    meshwright(*run, "--steps", "1")  # 8 rows, which 4 ranks divide
    assert "to step 2" in meshwright(*run, "--steps", "2", "--ranks", "3").output
    assert json.loads(Path("here/run.json").read_text())["global_batch"] == 8
    starts = [json.loads(line) for line in Path("here/starts.jsonl").read_text().splitlines()]
    assert [(start["step"], Plan.from_yaml(start["plan"]).mesh.size) for start in starts] == [(1, 4), (2, 3)]
    text = meshwright(*run, "--ranks", "2", code=2).stderr
    assert "dp_shard=4 (4), dp_shard=3 (3)" in text


def test_what_training_cannot_do_is_told_before_it_starts(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.train.metrics.find_spec", lambda name: None)
    text = meshwright("train", f"{file}:model", "--mesh", "tp=2", "--tensorboard", code=2).stderr
    assert "pip install 'meshwright[tensorboard]'" in text
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    text = meshwright("train", f"{file}:model", "--mesh", "tp=2", "--fresh", code=2).stderr
    assert "--out runs/tiny-model-2" in text
    text = meshwright("train", f"{file}:model", "--mesh", "tp=2", "--ranks", "3", code=2).stderr
    assert "--ranks 2" in text


@pytest.mark.usefixtures("pooled")
def test_a_loss_of_the_output_is_named_like_a_target(file: str) -> None:
    arguments = (f"{file}:bare", "--mesh", "tp=2", "--loss", f"{file}:squares")
    assert "PASSED" in meshwright("check", *arguments).output
    assert any(line.startswith("loss") for line in meshwright("train", *arguments, "--steps", "2").output.splitlines())
    assert _layout(meshwright("show", *arguments, "--json"), "weight") == {"tp": "Shard(0)"}
    text = meshwright("train", f"{file}:bare", "--mesh", "tp=2", "--steps", "1", "--fresh", code=1).stderr
    assert "--loss file.py:function" in text


def test_a_loss_or_device_that_is_none_is_told_with_the_rest(file: str) -> None:
    arguments = (f"{file}:modle", "--mesh", "tpp=2", "--loss", f"{file}:squars", "--device", "gpu")
    text = meshwright("check", *arguments, code=2).stderr
    assert "4 problems in this command" in text
    assert f"--loss {file}:squares" in text and "--device cpu" in text
    text = meshwright("check", f"{file}:model", "--mesh", "tp=2", "--loss", "squares", code=2).stderr
    assert "problem in this loss" in text and "--loss train.py:loss" in text


@pytest.mark.parametrize(("asked", "there", "used"), [(None, True, "cuda"), (None, False, "cpu"), ("cpu", True, "cpu")])
def test_workers_are_on_the_device_that_is_asked_for(
    file: str, monkeypatch: pytest.MonkeyPatch, asked: str | None, there: bool, used: str
) -> None:
    class Found(Exception):
        pass

    def started(ranks: int, *, device: str, threads: int) -> None:
        raise Found(device)

    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    monkeypatch.setattr("meshwright.workers.pool.local_workers", started)
    arguments = ["check", f"{file}:model", "--mesh", "tp=2", *(["--device", asked] if asked else [])]
    result = CliRunner().invoke(cli.app, arguments)
    assert isinstance(result.exception, Found) and result.exception.args == (used,)


def test_a_gpu_that_is_not_there_is_told(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = meshwright("train", f"{file}:model", "--mesh", "tp=2", "--device", "cuda", code=2).stderr
    assert "no GPU" in text and "--device cpu" in text


@pytest.mark.usefixtures("pooled")
def test_a_worker_that_fails_is_told_once(file: str) -> None:
    text = meshwright("train", f"{file}:broken", "--mesh", "dp_shard=2", "--steps", "2", code=1).stderr
    assert text.count("RuntimeError: this one breaks") == 2  # the headline, and the end of its traceback


def test_a_plan_error_of_a_worker_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    error = PlanError([Finding("mesh.tpp", "tpp", "an axis", "tp: 2")])
    with pytest.raises(typer.Exit) as raised, processes.reported_errors():
        raise WorkerError(1, "rank 1 of 2 failed: PlanError", str(error), error)
    assert raised.value.exit_code == 2
    assert capsys.readouterr().err.strip() == str(error)
