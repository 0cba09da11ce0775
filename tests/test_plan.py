"""A plan is read whole or refused whole: with every problem, its line and column, and a fix."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import Finding, PlanError
from meshwright.mesh import AXES, Mesh
from meshwright.plan import Entry, Plan


def problems(make: Callable[[], object]) -> tuple[Finding, ...]:
    with pytest.raises(PlanError) as caught:
        make()
    assert str(caught.value)
    return caught.value.findings


def problem(make: Callable[[], object]) -> Finding:
    (finding,) = problems(make)
    return finding


# -- plans that are right ----------------------------------------------------------------------------------

entries = st.builds(
    Entry,
    dp=st.sampled_from([None, "shard", "replicate"]),
    tp=st.sampled_from([None, "column", "row", "replicate", "auto", "shard:0", "shard:3"]),
    parts=st.none() | st.integers(1, 9) | st.lists(st.integers(1, 99), min_size=1, max_size=3).map(tuple),
    units=st.none() | st.integers(1, 99),
    recompute=st.sampled_from([None, "none", "block"]),
    unit=st.sampled_from([None, True, False]),
    on=st.sampled_from([None, "pp[0]", "pp[17]", "tp[3]", "tp[2:8]", ("tp[0:2]", "tp[2:8]")]),
    mesh=st.sampled_from([None, (("tp", 2),), (("dp_replicate", 3), ("tp", 2)), (("dp_shard", 2),)]),
)
globs = st.text(min_size=1).filter(str.strip) | st.sampled_from(["*", "h.*.c_attn", "0", "no", "<<", "null", "a: b"])
one_mesh = st.dictionaries(st.sampled_from(AXES), st.integers(1, 512), min_size=1)
plans = st.builds(
    Plan,
    mesh=st.just("auto") | one_mesh | st.lists(one_mesh, min_size=1, max_size=3),
    modules=st.dictionaries(globs, entries, max_size=4),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(["none", "blocks"]),
    microbatches=st.none() | st.integers(1, 64),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "zero_bubble"]),
    stages_per_rank=st.none() | st.integers(1, 4),
    precision=st.sampled_from(["float32", "bfloat16", "float64"]),
    reshard_after_forward=st.none() | st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    nonfinite=st.sampled_from(["stop", "skip"]),
    verify=st.integers(0, 1000),
    weights=st.sampled_from(["drawn", "checkpoint", "pretrained", "none"]),
)


@given(plans)
def test_a_plan_comes_back_from_its_yaml(plan: Plan) -> None:
    back = Plan.from_yaml(plan.dump())
    assert back == plan and list(back.modules) == list(plan.modules) and hash(back) == hash(plan)
    assert Plan.from_dict(plan.settings()) == plan == pickle.loads(pickle.dumps(plan))


@given(st.text() | st.text(alphabet="{}[]:,*&!?|>-'\"% \n\tmesh=2"))
def test_any_text_is_a_plan_or_an_error_with_its_place(text: str) -> None:
    try:
        Plan.from_yaml(text, "plan.yaml")
    except PlanError as error:
        assert all(finding.where.startswith("plan.yaml:") for finding in error.findings)


def test_the_file_that_a_person_writes(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        """\
mesh: {fsdp: 2, tp: 2}
recompute: blocks
seed:                      # as good as left out
modules:
  block_a: {dp: replicate}
  block_b: {dp: shard, unit: true}
  0: {units: 4}
parameters:
  "*.c_attn": {tp: column, parts: 3}
  block_a: {recompute: block}
"""
    )
    plan = Plan.load(path)
    assert plan.mesh == Mesh.parse("dp_shard=2,tp=2")
    assert (plan.recompute, plan.seed, plan.microbatches, plan.pieces) == ("blocks", 0, None, 1)
    assert plan.modules == {
        "block_a": Entry(dp="replicate", recompute="block"),
        "block_b": Entry(dp="shard", unit=True),
        "0": Entry(units=4),
        "*.c_attn": Entry(tp="column", parts=3),
    }
    assert Plan.parse(path) == Plan.parse(str(path)) == Plan.parse(plan) == Plan.parse(path.read_text()) == plan
    assert plan.dump(tmp_path / "copy.yaml") == (tmp_path / "copy.yaml").read_text()
    assert Plan.load(tmp_path / "copy.yaml") == plan


def test_branches_come_back_from_yaml_and_dp_is_a_word_for_dp_replicate_in_them() -> None:
    text = "mesh: {tp: 8}\nmodules:\n  b: {on: 'tp[2:8]', mesh: {dp: 3, tp: 2}}\n  t: {on: ['tp[0:2]', 'tp[2:8]']}\n"
    plan = Plan.from_yaml(text)
    assert plan.modules["b"] == Entry(on="tp[2:8]", mesh=(("dp_replicate", 3), ("tp", 2)))
    assert plan.modules["t"].places == ("tp[0:2]", "tp[2:8]")
    assert Plan.from_yaml(plan.dump()) == plan == Plan.from_dict(plan.settings())
    assert Plan({"tp": 8}, {"b": {"on": "tp[2:8]", "mesh": "dp=3,tp=2"}}).modules["b"] == plan.modules["b"]
    assert Plan({"tp": 8}, {"b": {"on": "tp[2:8]", "mesh": (("dp", 3), ("tp", 2))}}).modules["b"] == plan.modules["b"]


def test_a_short_plan_is_written_short() -> None:
    plan = Plan(mesh={"dp_shard": 2, "tp": 2}, modules={"*.c_attn": {"tp": "column", "parts": [64, 8, 8]}})
    assert plan.dump() == (
        "mesh: {dp_shard: 2, tp: 2}\nmodules:\n  '*.c_attn':\n    tp: column\n    parts: [64, 8, 8]\n"
    )


@pytest.mark.parametrize("spec", ["dp_shard=2,tp=2", "mesh: dp_shard=2,tp=2", "mesh:\n  fsdp: 2\n  tp: 2\n"])
def test_text_stands_for_a_plan(spec: str) -> None:
    expected = Plan(mesh={"dp_shard": 2, "tp": 2})
    assert Plan.parse(spec) == expected == Plan.parse({"mesh": {"fsdp": 2, "tp": 2}})
    assert Plan.parse(Mesh.parse("dp_shard=2,tp=2")) == expected


def test_the_order_of_entries_counts_for_equality() -> None:
    a, b = {"a": Entry(dp="shard")}, {"b": Entry(dp="replicate")}
    assert Plan("tp=2", a | b) != Plan("tp=2", b | a)


def test_a_plan_cannot_be_changed_but_replaced() -> None:
    plan = Plan("tp=2", {"a": {"tp": "row"}})
    with pytest.raises(FrozenInstanceError):
        plan.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.modules["b"] = Entry()  # type: ignore[index]
    assert plan.replace(seed=1, mesh="tp=4") == Plan("tp=4", {"a": Entry(tp="row")}, seed=1)
    assert plan.replace(modules={}).modules == {}
    assert "did you mean seed" in problem(lambda: plan.replace(sede=1)).required


def test_later_entries_win_key_by_key() -> None:
    both = Entry(dp="shard", tp="column", parts=3) | Entry(tp="shard:1", unit=False)
    assert both == Entry(dp="shard", tp="shard:1", parts=3, unit=False)
    assert (both.shard_dim, Entry(tp="row").shard_dim, Entry().shard_dim) == (1, None, None)


def test_an_alias_names_an_entry_again() -> None:
    plan = Plan.from_yaml("mesh: tp=2\nmodules:\n  a: &x {parts: [2, 3]}\n  b: *x\n")
    assert plan.modules["a"] == plan.modules["b"] == Entry(parts=(2, 3))


def test_neither_plan_nor_mesh_needs_torch() -> None:
    code = "import sys, meshwright.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- settings of the command line ---------------------------------------------------------------------------


def test_settings_change_a_plan() -> None:
    plan = Plan("tp=2", {"block_a": {"dp": "shard", "unit": True}, "block_*": {"dp": "shard"}})
    changed = plan.with_settings(
        [
            "recompute=blocks",
            "modules.block_a.dp=replicate",
            "parameters.h.0.attn.*.parts=[64, 8, 8]",
            "modules.h.1={tp: shard:1}",
            "mesh.fsdp=4",
            "mesh.tp=8",
        ]
    )
    assert changed.mesh == Mesh.parse("tp=8,dp_shard=4") and changed.recompute == "blocks"
    assert list(changed.modules.items()) == [
        ("block_*", Entry(dp="shard")),
        ("block_a", Entry(dp="replicate", unit=True)),  # set: now it comes after the glob that would undo it
        ("h.0.attn.*", Entry(parts=(64, 8, 8))),
        ("h.1", Entry(tp="shard:1")),
    ]
    assert plan.with_settings(["mesh=dp_shard=2,tp=4"]).mesh == Mesh.parse("dp_shard=2,tp=4")
    assert plan.with_settings(["modules.block_a.unit=null", "seed=1", "seed=2"]).seed == 2
    assert plan.with_settings([]) == plan


@pytest.mark.parametrize(
    ("setting", "required", "fix"),
    [
        ("recompute=blox", "none or blocks; did you mean blocks?", "--set recompute=blocks"),
        ("recompute", "key=value", "--set recompute=blocks"),
        ("=3", "key=value", "--set recompute=blocks"),
        ("recompte=blocks", "did you mean recompute?", "--set recompute=blocks"),
        ("modules.h.*.dpp=shard", "did you mean dp?", "--set 'modules.h.*.dp=shard'"),
        ("modules.a=row", "the keys of an entry", "a: {dp: shard}"),
        ("seed={a", "YAML: ", """--set 'seed="{a"'"""),
        ("seed.a=1", "did you mean seed?", "--set seed=1"),
    ],
)
def test_a_bad_setting_is_quoted(setting: str, required: str, fix: str) -> None:
    found = problems(lambda: Plan("tp=2").with_settings([setting]))
    assert all(finding.where.startswith(f"--set {setting}") for finding in found)
    assert any(required in finding.required and finding.fix == fix for finding in found)


def test_all_bad_settings_are_told_at_once() -> None:
    settings = ["seed=x", "mesh=tp=2", "mesh.tp=3", "recompute=blox"]
    assert len(problems(lambda: Plan("tp=2").with_settings(settings))) == 3


def test_a_command_says_a_file_a_mesh_over_its_own_and_settings_over_both(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("mesh: {fsdp: 8}\nrecompute: blocks\nparameters:\n  a: {tp: row}\n")
    settings = ["mesh.fsdp=4", "parameters.a.tp=column", "seed=1"]
    said = Plan.from_command(str(path), "dp_shard=2,tp=2", settings)
    assert said == Plan("dp_shard=4,tp=2", {"a": {"tp": "column"}}, recompute="blocks", seed=1)
    assert Plan.from_command(str(path)) == Plan.load(path)
    assert Plan.from_command(settings=["mesh.tp=2"]) == Plan("tp=2")
    assert problem(Plan.from_command).fix == "--mesh dp_shard=2,tp=2"
    path.write_text("seed: 1\n")
    assert problem(lambda: Plan.from_command(str(path))).where == f"{path}:1:1"
    assert Plan.from_command(str(path), "tp=2") == Plan("tp=2", seed=1)


def test_a_mesh_of_the_command_hides_what_is_wrong_with_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("mesh: {tpp: 2}\nseed: x\n")
    assert len(problems(lambda: Plan.from_command(str(path)))) == 2
    assert problem(lambda: Plan.from_command(str(path), "tp=2")).where == f"{path}:2:7 (seed)"


# -- plans that are wrong -----------------------------------------------------------------------------------

BAD = """\
mesh: {dp_shrd: 2, tp: 0}
recompute: blox
recompute: blocks
sequnce_parallel: true
microbatches: "4"
modules:
  "*.c_attn": {tp: colum, parts: 0, tpp: row}
  block_a: shard
  block_b: {dp: replicate}
parameters:
  block_b: {dp: shard}
seed: !!python/object:os.system 3
precision: 2024-99-99
"""


def test_every_problem_of_a_file_is_told_at_once_in_its_order() -> None:
    found = problems(lambda: Plan.from_yaml(BAD, "plan.yaml"))
    assert [(finding.where, finding.fix) for finding in found] == [
        ("plan.yaml:1:17 (mesh.dp_shrd)", "dp_shard: 2"),
        ("plan.yaml:1:24 (mesh.tp)", "tp: 2"),
        ("plan.yaml:2:12 (recompute)", "recompute: blocks"),
        ("plan.yaml:3:1", "leave out one of the two recompute"),
        ("plan.yaml:4:1 (sequnce_parallel)", "sequence_parallel: true"),
        ("plan.yaml:5:15 (microbatches)", "microbatches: 4"),
        ('plan.yaml:7:20 (modules."*.c_attn".tp)', "tp: column"),
        ('plan.yaml:7:34 (modules."*.c_attn".parts)', "parts: 3"),
        ('plan.yaml:7:37 (modules."*.c_attn".tpp)', "tp: row"),
        ("plan.yaml:8:12 (modules.block_a)", "block_a: {dp: shard}"),
        ("plan.yaml:11:17 (parameters.block_b.dp)", "dp: replicate"),
        ("plan.yaml:12:7", '"3"'),
        ("plan.yaml:13:12", '"2024-99-99"'),
    ]


@pytest.mark.parametrize(
    ("text", "place", "fix"),
    [
        ("mesh: tp=2\nmodules:\n  *.fc: {tp: row}\n", "3:4", '"*.fc": {tp: row}'),
        ("mesh: tp=2\nmodules:\n  *fc: {tp: row}\n", "3:3", '"*fc": {tp: row}'),
        ("mesh: {tp: 2\nseed: 3\n", "1:7", "mesh: {tp: 2}"),
        ("seed: 3\nmesh: {tp: 2", "2:13", "mesh: {tp: 2}"),
        ('mesh: "tp=2\n', "1:7", 'mesh: "tp=2"'),
        ("mesh:\n\ttp: 2\n", "2:1", "  tp: 2"),
        ("mesh: tp=2\nseed 3\nrecompute: none\n", "2:1", "seed: 3"),
        ("mesh: tp=2\nmodules:\n  a: {on: tp[0:2]}\n", "3:13", "a: {on: 'tp[0:2]'}"),
        ("mesh: tp=2\nmodules:\n  a: {on: [tp[0], 'tp[1]']}\n", "3:14", "a: {on: ['tp[0]', 'tp[1]']}"),
        ("mesh: \x01", "1:7", "mesh: {dp_shard: 2, tp: 2}"),
        ("mesh: tp=2\n---\nseed: 1\n", "2:1", "mesh: {dp_shard: 2, tp: 2}"),
        ("[" * 3000, "1:1", "mesh: {dp_shard: 2, tp: 2}"),
    ],
)
def test_text_that_is_not_yaml(text: str, place: str, fix: str) -> None:
    finding = problem(lambda: Plan.from_yaml(text, "plan.yaml"))
    assert (finding.where, finding.fix) == (f"plan.yaml:{place}", fix)


BRANCH = "mesh: {tp: 8}\nmodules:\n  b: {on: 'tp[2:8]', "


@pytest.mark.parametrize(
    ("text", "where", "required"),
    [
        ("", "plan.yaml:1:1", "a mesh"),
        ("seed: 1\n", "plan.yaml:1:1", "a mesh"),
        ("- a\n", "plan.yaml:1:1", "the keys of a plan"),
        ("mesh: 4\n", "plan.yaml:1:7 (mesh)", "axes with their sizes"),
        ("mesh: {}\n", "plan.yaml:1:7 (mesh)", "at least one axis"),
        ("mesh: dp_shrd=2\n", "plan.yaml:1:7 (mesh.dp_shrd)", "did you mean dp_shard?"),
        ("mesh: {pp: 2}\nmodules:\n  h.0: {on: 'dp[0]'}\n", 'plan.yaml:3:13 (modules."h.0".on)', "pp[<rank>]"),
        ("mesh: {pp: 2}\nschedule: zero_buble\n", "plan.yaml:2:11 (schedule)", "did you mean zero_bubble?"),
        ("mesh: &a [*a]\n", "plan.yaml:1:7 (mesh.0)", "axes with their sizes"),
        ("mesh: []\n", "plan.yaml:1:7 (mesh)", "at least one mesh"),
        ("mesh: [{pp: 2}, {tpp: 2}]\n", "plan.yaml:1:23 (mesh.1.tpp)", "did you mean"),
        ("mesh: auto\nnonfinite: halt\n", "plan.yaml:2:12 (nonfinite)", "stop or skip"),
        ("mesh: tp=2\nmodules: [a]\n", "plan.yaml:2:10 (modules)", "a glob with its entry"),
        ('mesh: tp=2\nmodules: {"": {}}\n', 'plan.yaml:2:11 (modules."")', "name of a module"),
        ("mesh: tp=2\nmodules: {a: {tp: shard:x}}\n", "plan.yaml:2:19 (modules.a.tp)", "or shard:<dim>"),
        ("mesh: tp=2\nmodules: {a: {parts: [1, 0]}}\n", "plan.yaml:2:22 (modules.a.parts)", "their sizes"),
        ("mesh: tp=2\nmodules: {a: {units: 2.5}}\n", "plan.yaml:2:22 (modules.a.units)", "at least 1"),
        ("mesh: tp=2\nsequence_parallel: 1\n", "plan.yaml:2:20 (sequence_parallel)", "true or false"),
        ("mesh: tp=2\nprecision: bf16\n", "plan.yaml:2:12 (precision)", "float32, bfloat16 or float64"),
        ("mesh: tp=2\nmodules:\n  a: {on: 'tp[0:2'}\n", "plan.yaml:3:11 (modules.a.on)", "tp[<from>:<to>]"),
        ("mesh: tp=2\nmodules: {a: {on: []}}\n", "plan.yaml:2:19 (modules.a.on)", "tp[<from>:<to>]"),
        (f"{BRANCH}mesh: {{dp: 3, ttp: 2}}}}\n", "plan.yaml:3:41 (modules.b.mesh.ttp)", "did you mean tp?"),
        (f"{BRANCH}mesh: {{dp: 3.0}}}}\n", "plan.yaml:3:33 (modules.b.mesh.dp)", "at least 1"),
        (f"{BRANCH}mesh: {{dp: 3, dp_replicate: 2}}}}\n", "plan.yaml:3:50 (modules.b.mesh.dp_replicate)", "once"),
        (f"{BRANCH}mesh: 6}}\n", "plan.yaml:3:28 (modules.b.mesh)", "axes with their sizes"),
        ("mesh: tp=2\nseed: -1\n", "plan.yaml:2:7 (seed)", "at least 0"),
        ("mesh: tp=2\n<<: {seed: 3}\n", "plan.yaml:2:1", "a name as key"),
        ("mesh: tp=2\n? [a]\n: 3\n", "plan.yaml:2:3", "a name as key"),
        ("mesh: tp=2\nmodules:\n  a: {dp: shard}\n  a: {dp: shard}\n", "plan.yaml:4:3", "each key once"),
    ],
)
def test_a_wrong_plan_is_told_with_line_and_column(text: str, where: str, required: str) -> None:
    finding = problem(lambda: Plan.from_yaml(text, "plan.yaml"))
    assert finding.where == where
    assert required in finding.required


@pytest.mark.parametrize(
    ("changes", "where", "fix"),
    [
        ({"microbatches": "4"}, "microbatches", "microbatches: 4"),
        ({"microbatches": 4.0}, "microbatches", "microbatches: 4"),
        ({"microbatches": True}, "microbatches", "microbatches: 4"),
        ({"sequence_parallel": "yes"}, "sequence_parallel", "sequence_parallel: true"),
        ({"precision": 16}, "precision", "precision: float32"),
        ({"modules": {"a.b": {"dp": "shrd"}}}, 'modules."a.b".dp', "dp: shard"),
        ({"modules": {"a": Entry(parts=())}}, "modules.a.parts", "parts: 3"),
        ({"modules": {3: {"dp": "shard"}}}, "modules.3", '"3": {dp: shard}'),
        ({"modules": {"a": {"dp": object}}}, "modules.a.dp", "dp: shard"),
        ({"modules": {"a": {"on": "tp[0:2"}}}, "modules.a.on", "on: 'tp[0:2]'"),
        ({"modules": {"a": {"on": "tp[0]", "mesh": (2, 2)}}}, "modules.a.mesh", "mesh: {tp: 2}"),
        ({"compile": True, "eager": True}, "compile", "eager: false"),
        ({"mesh": object()}, "mesh", "mesh: {dp_shard: 2, tp: 2}"),
        ({"mesh": None}, "plan", "mesh: {dp_shard: 2, tp: 2}"),
    ],
)
def test_a_wrong_plan_from_python(changes: dict[str, Any], where: str, fix: str) -> None:
    finding = problem(lambda: Plan(**{"mesh": "tp=2", **changes}))
    assert (finding.where, finding.fix) == (where, fix)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    finding = problem(lambda: Plan.load(tmp_path / "plan.yaml"))
    assert finding.where == str(tmp_path / "plan.yaml") and "No such file" in finding.given
    (tmp_path / "plan.yaml").write_bytes(b"mesh: \xff")
    assert problem(lambda: Plan.parse(tmp_path / "plan.yaml")).given == "bytes that are not UTF-8"


def test_aliases_do_not_unfold_without_end() -> None:
    rows = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 40)]
    text = "mesh: tp=2\nl0: &l0 [x]\n" + "\n".join(rows)
    assert len(problems(lambda: Plan.from_yaml(text, "plan.yaml"))) == 40


# -- several meshes ------------------------------------------------------------------------------------------


def test_the_first_mesh_with_as_many_ranks_as_processes_is_taken() -> None:
    plan = Plan([{"pp": 2, "tp": 2}, {"dp_shard": 4}, {"tp": 2}], recompute="blocks")
    assert plan.mesh == Mesh.parse("pp=2,tp=2"), "until it is known how many processes there are"
    assert plan.at(4) == Plan("pp=2,tp=2", recompute="blocks")
    assert plan.at(2) == Plan("tp=2", recompute="blocks")
    finding = problem(lambda: plan.at(3))
    assert finding.given == "3 processes"
    assert all(mesh in finding.required for mesh in ("pp=2 × tp=2 (4)", "dp_shard=4 (4)", "tp=2 (2)"))
    assert Plan.from_yaml(finding.fix).at(3) == Plan("dp_shard=3")


def test_auto_is_found_for_several_processes() -> None:
    assert Plan.from_command(mesh="auto", settings=["seed=3"]).at(1) == Plan("dp_shard=1", seed=3)
    plan = Plan.parse("auto")
    assert plan.at(6) is plan and plan.auto and not plan.at(1).auto


def test_an_auto_plan_knows_what_was_said_also_if_it_is_the_default() -> None:
    assert Plan("auto").said == frozenset()
    said = Plan("auto", recompute="none", schedule="gpipe", precision="float32")
    assert said.said == {"recompute", "schedule"} and said.precision == "float32"
    for back in (
        Plan.from_yaml(said.dump()),
        Plan.from_dict(said.settings()),
        pickle.loads(pickle.dumps(said)),
        said.replace(seed=3),
        said.with_settings(["seed=3"]),
        Plan.from_command(mesh="auto", settings=["recompute=none", "schedule=gpipe"]),
    ):
        assert back.said == said.said
    assert said == Plan("auto", schedule="gpipe"), "both mean the same once a mesh is there"


def test_a_plan_of_one_mesh_is_that_plan_at_any_size() -> None:
    plan = Plan("tp=2")
    assert plan.at(3) is plan
    assert Plan(["tp=2"]) == plan
