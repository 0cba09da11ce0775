"""No file imports in a circle, and no room imports one that stands above it, also within functions."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import meshwright

ROOT = Path(meshwright.__file__).parent
MODULES = {
    ".".join(("meshwright", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in ROOT.rglob("*.py")
}
# A room imports from those of its own line and of the lines before it. A file may be a room.
LADDER = (
    "meshwright",  # names, loaded when they are asked for
    "private amounts blame errors identity mesh layout names submesh plan schedule graph regions recipe hardware container "
    "callables chance code_state garbage generators described evaluation switches mismatch",
    "spmd workers",
    "calls watch replay",
    "planning",
    "deferred",
    "runtime.rows runtime.batch_caches runtime.checksum runtime.groups",
    "runtime.weights runtime.module_state",
    "runtime.coupling",
    "runtime.pipeline runtime.branches",
    "runtime",
    "watch.watchdog",
    "checkpoint",
    "train",
    "planned",
    "draw parity target prediction recording",
    "search",
    "auto",
    "api",
    "cli __main__",
)
# imports within Job.save, Job.load, Job.shard_map, Job.report and Job.observe, when they are called
FACADES = {
    ("runtime.checkpoints", "checkpoint"),
    ("runtime.job", "draw"),
    ("runtime.observed", "draw"),
}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of ours that a file imports, wherever in it, but for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for a in node.names:
                yield f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in MODULES else node.module
        elif isinstance(node, ast.Call) and (name := by_name(node)) in MODULES:
            yield str(name)
        yield from imported(node)


def by_name(call: ast.Call) -> str | None:
    """The module that a call of ``import_module`` names; None for another call."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in ("import_module", "__import__") or not call.args:
        return None
    name = call.args[0]
    return name.value if isinstance(name, ast.Constant) else ast.unparse(name)


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(file.read_text()) for name, file in MODULES.items()}


@cache
def graph() -> dict[str, set[str]]:
    return {name: set(imported(tree)) - {name} for name, tree in trees().items()}


def test_no_file_imports_in_a_circle() -> None:
    try:
        TopologicalSorter({name: of for name, of in graph().items() if name != "meshwright"}).prepare()
    except CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None


def room(module: str) -> str:
    """The room of a module: the longest name in the ladder that its own begins with."""
    parts = module.split(".")[1:]
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in names if name in HEIGHT), "meshwright")


HEIGHT = {name: height for height, names in enumerate(LADDER) for name in names.split()}


def test_no_room_imports_one_above_it() -> None:
    wrong = [
        f"{module} → {other}"
        for module, others in graph().items()
        for other in sorted(others)
        if room(module) != "meshwright" and HEIGHT[room(other)] > HEIGHT[room(module)]
        and (module.removeprefix("meshwright."), room(other)) not in FACADES
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_a_name_that_is_imported_when_asked_for_counts_as_an_import() -> None:
    source = """
def later():
    chosen = import_module("meshwright.search.choice").chosen_plan
    importlib.import_module("meshwright.auto")
    importlib.import_module(name)
    import_module("torch")
"""
    assert list(imported(ast.parse(source))) == ["meshwright.search.choice", "meshwright.auto"]


def test_only_the_package_itself_puts_names_of_modules_together() -> None:
    """Such a name (``import_module(f"meshwright.{room}")``) says nothing to the tests above."""
    calls = [
        (module, by_name(node) or "")
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]
    assert {module for module, name in calls if "meshwright" in name and name not in MODULES} == {"meshwright"}


def test_every_module_has_a_room() -> None:
    assert {m for m in MODULES if room(m) == "meshwright"} == {"meshwright"}


@pytest.mark.parametrize("folder", ["examples", "bench"])
def test_examples_and_benchmarks_import_what_there_is(folder: str) -> None:
    """Most of them run for minutes, and no test runs these: a name that moved would be missed."""
    taken = [
        (file.name, node.module, name.name)
        for file in sorted((ROOT.parents[1] / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meshwright"
        for name in node.names
    ]
    assert len(taken) > 5
    missing = [
        (file, module, name)
        for file, module, name in taken
        if f"{module}.{name}" not in MODULES and not hasattr(importlib.import_module(str(module)), name)
    ]
    assert not missing
