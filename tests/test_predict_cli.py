"""The commands that predict: what they print, refuse, and write."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commands import calibrate_quickly, meshwright, write_profile
from meshwright.cli.correction import keep_correction
from meshwright.cli.run_folder import RunIdentity, write_identity
from meshwright.cli.run_steps import measured_steps
from meshwright.hardware import calibrated_file, read_profile
from meshwright.hardware.correction import Correction, corrected
from meshwright.train.metrics import Metrics
from meshwright.train.progress import Progress
from meshwright.workers.pool import LocalWorkers

FILE = """
from types import SimpleNamespace
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x), y))

class Reads(Net):
    def forward(self, x, y):
        if self.layers[0](x).sum().item() > 1e9:
            x = x / 2
        return super().forward(x, y)

class Sizes(Net):
    def forward(self, x, y):
        keep = self.layers[0](x)[:, 0] < 1e9
        return super().forward(x[keep], y[keep])

def rows(count):
    return {"x": torch.linspace(-1, 1, 8 * count).view(count, 8), "y": torch.arange(count) % 4}

def model():
    return lambda: Net(), rows(8)

def reads():
    return lambda: Reads(), rows(8)

def sizes():
    return lambda: Sizes(), rows(8)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of this machine, unless a test writes one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def calibrated(home: None) -> None:
    """A profile of this machine, as ``calibrate`` would write it."""
    write_profile()


def data(*arguments: str) -> dict[str, Any]:
    return json.loads(meshwright(*arguments, "--json").stdout)


# --- predict ----------------------------------------------------------------------------------------------------------


def test_a_pipeline_is_predicted_by_role(file: str) -> None:
    text = meshwright("predict", f"{file}:model", "--mesh", "pp=2,dp_shard=2", "--hardware", "h100").stdout
    assert "pp=2 × dp_shard=2: 4 ranks on h100-sxm, 8 rows a step" in text
    assert "stage 0 0, 1" in " ".join(text.split()) and "stage 1 2, 3" in " ".join(text.split())
    assert "fits," in text and "left" in text
    assert all(kind in text for kind in ("parameters", "optimizer", "activations", "unsharded parameters"))
    assert "tiny.py:" in text and "waiting for other stages" in text
    assert "rows a second" in text


def test_a_prediction_is_data(file: str) -> None:
    found = data("predict", f"{file}:model", "--mesh", "dp_shard=2,tp=2", "--hardware", "h100")
    assert found["mesh"] == "dp_shard=2 × tp=2" and found["fits"]
    assert found["seconds"]["low"] < found["seconds"]["mean"] < found["seconds"]["high"]
    assert sum(found["waterfall"].values()) == pytest.approx(found["seconds"]["mean"])
    (role,) = found["memory"]
    assert role["count"] == 4 and sum(role["items"].values()) == role["peak"]
    assert found["rate"] == pytest.approx(8 / found["seconds"]["mean"]) and found["unit"] == "rows"


def test_a_thousand_ranks_are_predicted(file: str) -> None:
    found = data("predict", f"{file}:model", "--mesh", "dp_shard=1024", "--hardware", "h100")
    assert [role["count"] for role in found["memory"]] == [1024] and found["amount"] == 1024


def test_the_rows_of_a_step_are_those_that_are_asked_for(file: str) -> None:
    asked = partial(data, "predict", f"{file}:model", "--mesh", "dp_shard=2", "--hardware", "h100", "--global-batch")
    few, many = asked("4"), asked("64")
    assert (few["amount"], many["amount"]) == (4, 64)
    row = 8 * 4 + 8
    assert few["memory"][0]["items"]["batch"] == 3 * row, "its own rows, and one for microbatches without rows"
    assert many["memory"][0]["items"]["batch"] == 33 * row


def test_a_model_whose_own_path_follows_from_values_of_its_batch_is_predicted() -> None:
    """transformers looks at masks; ranks then tell each other which parameters they used, outside of the rehearsal."""
    pytest.importorskip("transformers")
    example = Path(__file__).parent.parent / "examples" / "train.py"
    assert data("predict", f"{example}:model", "--mesh", "dp_shard=8", "--hardware", "h100")["unit"] == "tokens"


def test_what_does_not_fit_says_by_how_much(file: str, tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text(replace(read_profile("h100"), name="small", memory=2**20).text())
    text = meshwright("predict", f"{file}:model", "--mesh", "tp=2", "--hardware", str(small), code=1).stdout
    assert "does not fit:" in text and "too much" in text


@pytest.mark.usefixtures("calibrated")
def test_the_profile_of_this_machine_is_the_default(file: str) -> None:
    assert data("predict", f"{file}:model", "--mesh", "dp_shard=16")["hardware"] == "cpu-local"
    assert data("predict", f"{file}:model", "--mesh", "tp=2", "--hardware", "cpu-local")["hardware"] == "cpu-local"


@pytest.mark.usefixtures("calibrated", "pooled")
def test_what_is_predicted_is_measured_beside_it(file: str) -> None:
    found = data("predict", f"{file}:model", "--mesh", "dp_shard=2", "--measure")
    assert found["measured"]["source"] == "measured"
    assert set(found["errors"]) == {"seconds", "memory of rank 0", "memory of rank 1"}
    text = meshwright("predict", f"{file}:model", "--mesh", "dp_shard=2", "--measure").stdout
    assert "predicted and measured" in text and "predicted interval" in text


@pytest.mark.proof
@pytest.mark.usefixtures("calibrated", "pooled")
def test_auto_is_found_by_every_command(file: str, tmp_path: Path) -> None:
    """What was found is told beside the output, so that JSON stays JSON."""
    given = (f"{file}:model", "--mesh", "auto", "--ranks", "2")
    shown = meshwright("show", *given)
    assert "found by mesh: auto for 2 ranks of cpu-local and 8 rows a step" in shown.stderr
    mesh = shown.stderr.split(",")[0].removeprefix("mesh: ")
    predicted = meshwright("predict", *given, "--json")
    assert json.loads(predicted.stdout)["mesh"] == mesh and f"mesh: {mesh}" in predicted.stderr
    assert "h100-sxm" in meshwright("predict", *given, "--hardware", "h100").stderr
    assert f"PASSED  {mesh}" in meshwright("check", *given).stdout
    out = str(tmp_path / "run")
    text = meshwright("train", *given, "--steps", "1", "--out", out, "--set", "microbatches=2").output
    assert "step 1/1" in text and "microbatches" not in text.split(": found")[0]


@pytest.mark.parametrize("command", ["show", "check", "train", "predict"])
def test_auto_without_a_profile_is_told(file: str, command: str) -> None:
    assert (
        "meshwright calibrate" in meshwright(command, f"{file}:model", "--mesh", "auto", "--ranks", "2", code=2).stderr
    )


def a_run(folder: Path, target: str, starts: list[tuple[int, str]], seconds: list[float]) -> Path:
    """A run with these plans, each from its step on, in which ranks were compared after the fifth step."""
    metrics = None
    for step, took in enumerate(seconds, 1):
        for first, plan in starts:
            if first == step:
                metrics = Metrics(folder, step - 1)
                metrics.start(plan)
        assert metrics is not None
        metrics.write(Progress(step, len(seconds), 1.0, 1.0, 8 / took, "rows", 2**20, 0.0, 0, took))
    metrics.verdict(5, {"parameters": 5})
    write_identity(folder, RunIdentity(target, {}, None, 8, 3e-4, 0))
    return folder


STARTS = [(1, "mesh: {dp_shard: 2}\n"), (9, "mesh: {tp: 2}\nweights: checkpoint\n"), (13, "mesh: {dp_shard: 2}\n")]


def test_steps_of_a_run_are_those_of_each_plan_without_the_first_of_a_start_and_those_that_did_more(
    file: str, tmp_path: Path
) -> None:
    seconds = [9, 9, 9, 0.1, 7, 0.2, 0.3, 0.2, *(9, 9, 9, 0.5), *(9, 9, 9, 0.2)]
    one, other = measured_steps(a_run(tmp_path / "run", f"{file}:model", STARTS, seconds))
    assert str(one.plan.mesh) == "dp_shard=2" and one.seconds == 0.2 and 0.2 < one.scatter < 0.4
    assert str(other.plan.mesh) == "tp=2" and (other.seconds, other.scatter) == (0.5, 0)
    assert one.batch["x"].shape == (8, 8)


@pytest.mark.usefixtures("calibrated")
def test_runs_correct_a_profile(file: str, tmp_path: Path) -> None:
    said = [data("predict", f"{file}:model", "--mesh", mesh)["seconds"]["mean"] for mesh in ("dp_shard=2", "tp=2")]
    seconds = [9, 9, 9, *[1.5 * said[0]] * 5, 9, 9, 9, 1.5 * said[1]]
    run = a_run(tmp_path / "run", f"{file}:model", STARTS[:2], seconds)
    before = calibrated_file().read_text()
    text = meshwright("calibrate", "--from", run, "--out", tmp_path / "ours.yaml").stdout
    assert "run: dp_shard=2" in text and "-33 %" in text and "host × 1." in text and "off by 33% → " in text
    assert calibrated_file().read_text() == before
    ours = data("predict", f"{file}:model", "--mesh", "tp=2", "--hardware", str(tmp_path / "ours.yaml"))
    assert ours["seconds"]["mean"] == pytest.approx(1.5 * said[1], rel=0.1)
    assert "kept in" in meshwright("calibrate", "--from", run).stdout and calibrated_file().read_text() != before
    far = a_run(tmp_path / "far", f"{file}:model", STARTS[:1], [100 * said[0]] * 5)
    assert "Is this the profile of these devices?" in meshwright("calibrate", "--from", far).stdout


def test_runs_that_correct_nothing_are_told_together(file: str, tmp_path: Path) -> None:
    short = a_run(tmp_path / "short", f"{file}:model", STARTS[:1], [1, 1])
    old = a_run(tmp_path / "old", f"{file}:model", STARTS[:1], [1, 1])
    (old / "starts.jsonl").unlink()
    wrong = ("--from", short, "--from", old, "--from", tmp_path / "none", "--hardware", "h101")
    text = meshwright("calibrate", *wrong, code=2).stderr
    assert "5 problems" in text and all(name in text for name in ("short", "old", "none", "h101", "--out ours.yaml"))
    wrong = ("--from", short, "--threads", 2, "--out", tmp_path / "nowhere" / "ours.yaml")
    text = meshwright("calibrate", *wrong, code=2).stderr
    assert "leave out --threads" in text and "a folder that exists" in text
    text = meshwright("calibrate", "--hardware", "h100", "--network", "roce-100", code=2).stderr
    assert "2 problems" in text and "--from runs/gpt2" in text


# --- plan ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def plans(tmp_path: Path) -> tuple[str, str]:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("mesh: {tp: 2}\n")
    second.write_text("mesh: {pp: 2}\nmicrobatches: 2\n")
    return str(first), str(second)


def test_two_plans_are_compared(file: str, plans: tuple[str, str]) -> None:
    given = ("plan", f"{file}:model", "--compare", *plans, "--hardware", "h100", "--set", "recompute=blocks")
    found = data(*given)
    assert found["settings"] == {"mesh": [{"tp": 2}, {"pp": 2}], "microbatches": [None, 2]}, "--set is of both"
    assert found["seconds"]["waiting for other stages"]["first"] == 0
    one = data("predict", f"{file}:model", "--plan", plans[0], "--hardware", "h100", "--set", "recompute=blocks")
    assert found["predictions"][0] == {key: one[key] for key in found["predictions"][0]}
    text = meshwright(*given).stdout
    assert "communication over tp" in text and "difference" in text and "second.yaml" in text


def test_what_is_wrong_with_both_plans_and_all_else_is_told_at_once(file: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("mesh: {tpp: 2}\nrecompute: blox\n")
    auto = tmp_path / "auto.yaml"
    auto.write_text("mesh: auto\n")
    given = ("plan", f"{file}:modle", "--compare", str(bad), str(auto), "--hardware", "h10O", "--devices", "3")
    text = meshwright(*given, code=2).stderr
    assert "6 problems" in text and "Traceback" not in text
    assert all(
        said in text for said in ("bad.yaml:1:", "bad.yaml:2:", "the number of processes", "h10O", "modle", "--devices")
    )


def test_rows_that_divide_over_one_of_the_plans_alone_are_told(file: str, plans: tuple[str, str]) -> None:
    given = ("plan", f"{file}:model", "--compare", *plans, "--hardware", "h100", "--global-batch", "5")
    assert "a multiple of 2" in meshwright(*given, code=2).stderr


@pytest.mark.usefixtures("calibrated", "pooled")
def test_plans_that_are_found_are_measured_and_sorted_by_that(file: str) -> None:
    given = ("plan", f"{file}:model", "--devices", "2", "--top", "2", "--measure", "2")
    before, result = read_profile("cpu-local"), data(*given)
    found = result["plans"]
    assert len(found) == 2
    factors, error = (result["correction"][key] for key in ("factors", "error"))
    assert factors and error["after"] < error["before"]  # the profile is made up
    kept = read_profile("cpu-local")
    assert "corrected" in kept.notes
    assert kept.bandwidth == pytest.approx(before.bandwidth / factors.get("memory", 1), rel=1e-3)
    seconds = [one["measured"]["seconds"]["mean"] for one in found]
    assert seconds == sorted(seconds)
    for one in found:
        assert one["measured"]["source"] == "measured" and len(one["measured"]["memory"]) == 2
        assert one["errors"]["seconds"] == pytest.approx(
            one["prediction"]["seconds"]["mean"] / one["measured"]["seconds"]["mean"] - 1
        )


@pytest.mark.proof
@pytest.mark.usefixtures("calibrated", "pooled")
def test_plans_that_are_found_and_measured_are_shown(file: str) -> None:
    text = meshwright("plan", f"{file}:model", "--devices", "2", "--top", "2", "--measure", "2").stdout
    assert "predicted and measured" in text and "longer, measured" in text
    assert "what these runs say of cpu-local" in text and "seconds of " in text and "kept in" in text


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("edited", [False, True])
def test_a_corrected_profile_is_kept_unless_its_file_was_edited(edited: bool) -> None:
    profile = read_profile("cpu-local")
    if edited:
        calibrated_file().write_text("# of my own\n" + calibrated_file().read_text())
    before = calibrated_file().read_text()
    said = keep_correction(Correction(corrected(profile, {"host": 2.0}), {"host": 2.0}, 0.5, 0.1), profile, None)
    assert str(calibrated_file()) in said
    if edited:
        assert said.startswith("not kept") and calibrated_file().read_text() == before
    else:
        assert read_profile("cpu-local").host == pytest.approx(2 * profile.host)
    assert (
        keep_correction(Correction(profile, {}, 0.1, 0.1), profile, None) == keep_correction(None, profile, None) == ""
    )


@pytest.mark.usefixtures("calibrated")
def test_a_search_of_some_nodes_changes_no_profile_s_nodes() -> None:
    profile = read_profile("cpu-local")
    searched = corrected(replace(profile, devices_per_node=1), {"host": 2.0})
    keep_correction(Correction(searched, {"host": 2.0}, 0.5, 0.1), profile, None)
    assert read_profile("cpu-local").devices_per_node == profile.devices_per_node == 4096


@pytest.mark.usefixtures("calibrated")
def test_a_profile_that_cannot_be_written_costs_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(text: str, file: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("meshwright.cli.correction.keep_profile", full)
    profile = read_profile("cpu-local")
    said = keep_correction(Correction(profile, {"host": 2.0}, 0.5, 0.1), profile, None)
    assert said.startswith("not kept") and "No space left" in said


def test_a_search_needs_to_know_for_how_many_devices_and_measures_this_machine_alone(file: str) -> None:
    given = ("plan", f"{file}:model", "--hardware", "h100", "--measure", "2")
    assert "--devices 8" in meshwright(*given, code=2).stderr
    assert "--hardware cpu-local" in meshwright(*given, "--devices", "2", code=2).stderr


# --- dryrun -----------------------------------------------------------------------------------------------------------


def test_a_rank_is_rehearsed_beside_its_prediction(file: str) -> None:
    text = meshwright(
        "dryrun", f"{file}:model", "--rank", "3", "--mesh", "pp=2,dp_shard=2", "--hardware", "h100"
    ).stdout
    assert "rank 3 of pp=2 × dp_shard=2 on h100-sxm: stage 1, with 2 ranks alike" in text
    assert "predicted (rank 2)" in text and "+0.0 %" in text
    assert "all_gather" in text and "recv" in text and "functions in a step" in text


def test_a_rehearsed_rank_is_data_and_is_as_predicted(file: str) -> None:
    given = (f"{file}:model", "--mesh", "pp=2,dp_shard=2", "--hardware", "h100")
    run, predicted = data("dryrun", *given, "--rank", "3"), data("predict", *given)
    assert run["memory"] == run["predicted"]
    assert run["memory"]["peak"] == predicted["memory"][1]["peak"]
    assert {(c["kind"], c["axis"]) for c in run["collectives"]} >= {("all_gather", "dp_shard"), ("recv", "pp")}
    assert run["functions"] > 0 and run["flops"] > 0


def test_where_both_are_one_rehearsal_it_is_said(file: str) -> None:
    text = meshwright("dryrun", f"{file}:model", "--mesh", "tp=2", "--hardware", "h100").stdout
    assert "both are this rehearsal" in text


def test_a_rank_runs_on_a_device_without_the_others(file: str) -> None:
    given = ("dryrun", f"{file}:model", "--mesh", "tp=2", "--hardware", "h100")
    text = meshwright(*given, "--device", "cpu").stdout
    assert "on cpu, without other ranks" in text and "on h100-sxm, predicted" in text and "flop/s" in text
    problem = meshwright(*given, "--device", "tpu", code=2).stderr
    assert "1 problem" in problem and "--device cpu" in problem


@pytest.mark.parametrize(
    ("model", "code", "what"),
    [
        (
            "reads",
            "if self.layers[0](x).sum().item() > 1e9:",
            "a value that is read on the host (aten._local_scalar_dense.default)",
        ),
        ("sizes", "return super().forward(x[keep], y[keep])", "a shape that follows from values (a mask as an index)"),
    ],
)
def test_a_read_of_a_value_is_told_with_the_models_line(file: str, model: str, code: str, what: str) -> None:
    result = meshwright("dryrun", f"{file}:{model}", "--mesh", "dp_shard=2", "--hardware", "h100", code=2)
    text = result.stderr
    line = FILE.splitlines().index(next(line for line in FILE.splitlines() if code in line)) + 1
    assert f"where:    {file}:{line}" in text and code in text and what in text
    assert "1 problem" in text and "Traceback" not in text and "functions in a step" in result.stdout
    assert ("torch.where" if model == "reads" else "x * mask") in text


def test_a_prediction_notes_what_it_assumed(file: str) -> None:
    notes = data("predict", f"{file}:reads", "--mesh", "tp=2", "--hardware", "h100")["notes"]
    assert any("_local_scalar_dense" in note and "tiny.py:" in note for note in notes)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["predict", "dryrun"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mesh", "tp=2"), "meshwright calibrate"),
        (("--mesh", "tp=2", "--hardware", "cpu-local"), "meshwright calibrate"),
        (("--mesh", "tp=2", "--hardware", "h10O"), "fix:      h100"),
        (("--mesh", "tp=2", "--hardware", "h100", "--network", "roce-10"), "network: roce-100"),
        (("--mesh", "dp_shard=2", "--hardware", "h100", "--global-batch", "3"), "a multiple of 2"),
    ],
)
def test_mistakes(file: str, command: str, arguments: tuple[str, ...], said: str) -> None:
    assert said in meshwright(command, f"{file}:model", *arguments, code=2).stderr


def test_without_a_profile_those_that_ship_are_listed(file: str) -> None:
    text = meshwright("predict", f"{file}:model", "--mesh", "tp=2", code=2).stderr
    assert all(name in text for name in ("a100-80", "h100-sxm", "mi300x", "meshwright calibrate"))
    assert "1 problem" in text


def test_mistakes_of_plan_profile_and_target_are_told_together(file: str, tmp_path: Path) -> None:
    plan, profile = tmp_path / "plan.yaml", tmp_path / "lab.yaml"
    plan.write_text("mesh: {tp: 2}\nrecompute: blox\n")
    profile.write_text(read_profile("h100").text().replace("scatter:", "scater:", 1).replace("memory: ", "memory: x"))
    text = meshwright("predict", f"{file}:modle", "--plan", str(plan), "--hardware", str(profile), code=2).stderr
    assert "plan.yaml:2:12 (recompute)" in text and "memory" in text and "tiny.py:model" in text
    assert "Traceback" not in text


def test_a_rank_that_the_mesh_lacks_is_told(file: str) -> None:
    text = meshwright("dryrun", f"{file}:model", "--mesh", "tp=2", "--rank", "2", "--hardware", "h100", code=2).stderr
    assert "--rank 1" in text


def test_a_mesh_larger_than_a_node_needs_a_network(file: str, tmp_path: Path) -> None:
    alone = tmp_path / "alone.yaml"
    alone.write_text(replace(read_profile("h100"), name="alone", network=None).text())
    text = meshwright("predict", f"{file}:model", "--mesh", "dp_shard=16", "--hardware", str(alone), code=2).stderr
    assert "8 devices in a node, and no network" in text


def test_what_is_measured_is_of_this_machine(file: str) -> None:
    text = meshwright("predict", f"{file}:model", "--mesh", "dp_shard=512", "--hardware", "h100", "--measure", code=2)
    assert "2 problems" in text.stderr
    assert "--hardware cpu-local" in text.stderr and "512 local processes" in text.stderr


# --- calibrate --------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate_quickly(workers, monkeypatch)


@pytest.mark.usefixtures("quick")
def test_this_machine_is_measured_and_then_found(file: str) -> None:
    result = meshwright("calibrate")
    assert "measuring products, attention, memory and functions" in result.stderr
    assert "measuring collectives between" in result.stderr and "measuring jobs of a small model" in result.stderr
    assert "products, float32" in result.stdout and "link, gloo" in result.stdout
    assert str(calibrated_file()) in result.stdout.replace("\n", "")
    profile = read_profile("cpu-local")
    assert profile.node.name == "gloo" and profile.node.source.startswith("measured_link")
    assert profile.host_unit > 0 and profile.host_sharded > 0
    assert data("predict", f"{file}:model", "--mesh", "dp_shard=16")["hardware"] == "cpu-local"


@pytest.mark.proof  # it measures this machine once more
@pytest.mark.usefixtures("quick")
def test_a_profile_is_written_where_one_says(tmp_path: Path) -> None:
    meshwright("calibrate", "--out", str(tmp_path / "lab.yaml"))
    assert read_profile(str(tmp_path / "lab.yaml")).name == "cpu-local"
    assert not calibrated_file().exists()


def test_a_folder_that_is_not_there_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    text = meshwright("calibrate", "--out", str(tmp_path / "nowhere" / "lab.yaml"), code=2)
    assert "a folder that exists" in text.stderr and "measuring" not in text.stderr


# --- plan -------------------------------------------------------------------------------------------------------------


def test_the_best_plan_is_shown_written_and_resolves(file: str, tmp_path: Path) -> None:
    out = tmp_path / "plans" / "best.yaml"
    arguments = ("plan", f"{file}:model", "--devices", 4, "--hardware", "h100", "--global-batch", 16)
    shown = meshwright(*arguments, "--out", out).output
    assert "plans on h100-sxm" in shown
    assert "why the first" in shown
    assert f"written to {out}" in shown.replace("\n", "")
    meshwright("show", f"{file}:model", "--plan", out)


@pytest.mark.proof
def test_the_best_plan_as_data_is_the_one_that_is_written(file: str, tmp_path: Path) -> None:
    out = tmp_path / "best.yaml"
    arguments = ("plan", f"{file}:model", "--devices", 4, "--hardware", "h100", "--global-batch", 16, "--top", 2)
    meshwright(*arguments, "--out", out)
    plans = json.loads(meshwright(*arguments, "--json").output)["plans"]
    assert len(plans) == 2
    assert plans[0]["seconds"] <= plans[1]["seconds"]
    assert plans[0]["plan"] == out.read_text()


def test_mistakes_of_a_search_are_told(file: str) -> None:
    arguments = ("plan", f"{file}:model", "--hardware", "h100", "--global-batch", 16)
    assert "as many devices on each node" in meshwright(*arguments, "--devices", 4, "--nodes", 3, code=2).output
    assert "one of bfloat16" in meshwright(*arguments, "--devices", 4, "--precision", "int8", code=2).output
