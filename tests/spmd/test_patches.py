"""Patches of torch: what differs during a forward stands in the table, and nothing differs after it."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshwright
from doubled import Doubled
from meshwright.calls.hook import following
from meshwright.calls.tracer import Tracer
from meshwright.layout import even_shard
from meshwright.prediction.tracker import Tracker as Followed
from meshwright.prediction.tracker import followed, sharding_propagator
from meshwright.spmd import patches
from meshwright.spmd.autograd_functions import custom_functions, followed_checkpoints, no_backward_within
from meshwright.spmd.comm import Axis, Ledger
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.one_process import one_process
from meshwright.spmd.tensor import GlobalTensor

SOURCES = Path(meshwright.__file__).parent

# What ``setattr`` is used for elsewhere: on whose objects.
SETS = {
    "calls/structure.py": "buffers of the model's modules that torch.jit made",
    "checkpoint/load.py": "tensors of the model's modules",
    "parity/preparation.py": "attributes of the model's modules, and of its configs",
    "deferred/__init__.py": "hooks of the model's parameters, back on them",
    "planning/units.py": "parameters of the model's modules, back after their unit",
    "runtime/pipeline/stage_constants.py": "attributes of the model's modules",
    "runtime/pipeline/stage_buffers.py": "attributes of the model's modules",
    "runtime/coupling/trial_state.py": "tensors of the model's modules",
    "workers/pickling.py": "names of a worker's own __main__",
    "spmd/patches.py": "torch",
    "spmd/dtensor_patches.py": "torch's DTensor",
}

# a worker goes on counting its groups: it sets a number, and patches no part of torch
COUNTS = ["workers/worker.py: dist.distributed_c10d._world.group_count"]


def state_of_torch() -> dict[str, Any]:
    """Every function and class that a module or class of torch's has, by name; of functions in Python also their code."""
    found: dict[str, Any] = {}
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "torch" and m is not None]
    classes = {torch.distributed.ProcessGroup, type(os.environ)}
    for module in modules:
        for name, value in list(vars(module).items()):
            if callable(value):
                found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
                classes.add(value)
    for cls in classes:
        for name, value in list(vars(cls).items()):
            if callable(value) or isinstance(value, (classmethod, staticmethod, property)):
                found[f"{cls.__module__}.{cls.__qualname__}.{name}"] = value
    for value in list(found.values()):
        value = value.fget if isinstance(value, property) else value
        if isinstance(value, FunctionType):
            found[f"code of {value.__module__}.{value.__qualname__}"] = value.__code__
            found[f"keywords of {value.__module__}.{value.__qualname__}"] = value.__kwdefaults__
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    """What is another now; of code: of functions that are still there."""
    there = {name for name in a.keys() | b.keys() if " of " not in name} | (a.keys() & b.keys())
    return {name for name in there if a.get(name) is not b.get(name)}


class Follows(Tracer):
    def entered(self, path: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward.run(*args, **kwargs)

    def event(self, func: Any, args: Any, kwargs: Any, tensors: Any, path: Any, index: int) -> Any:
        return func(*args, **kwargs)


@contextmanager
def all_on() -> Iterator[Dispatcher]:
    """All that is on in a forward over tp that is followed, and where a backward is tried."""
    ledger = Ledger()
    dispatcher = Dispatcher(Axis("tp", 2, 0, None, ledger), ledger)
    forward = one_process(), SpmdMode(dispatcher, lambda t: None).on(), following(nn.Linear(2, 2), Follows())
    with ExitStack() as stack:
        for context in (*forward, no_backward_within()):
            stack.enter_context(context)
        yield dispatcher


def test_what_is_patched_stands_in_the_table_and_is_undone() -> None:
    with all_on():  # torch imports some modules when they are used
        state_of_torch()
    before = state_of_torch()
    for _ in range(2):
        with all_on():
            during = differences(before, state_of_torch())
        assert not differences(before, state_of_torch())
        codes = {name for name in during if name.startswith(("code of ", "keywords of "))}
        places = ("torch.distributed.", "torch.nn.parallel.distributed.", "os.")
        assert codes and all(name.split(" of ")[1].startswith(places) for name in codes), codes
        methods = {name for name in during if ".ProcessGroup." in name}
        assert len(methods) > 20
        in_the_table = {line.what for line in patches.TABLE if line.until == patches.FORWARD}
        assert during - codes - methods == in_the_table and len(in_the_table) == (
            17 if isinstance(patches.CUSTOM_FUNCTION, patches.AppliedInC) else 15
        )
        assert all(line.why and line.until for line in patches.TABLE)


def test_patches_are_undone_after_an_error_and_whatever_ends_first() -> None:
    before = state_of_torch()
    with pytest.raises(ValueError, match="of the model"), all_on():
        raise ValueError("of the model")
    assert not differences(before, state_of_torch())
    first, second, told = ExitStack(), ExitStack(), list[str]()

    def tells(name: str) -> Any:
        def handler(apply: Any, function: Any, args: Any, kwargs: Any) -> Any:
            told.append(name)
            return apply(function, *args, **kwargs)

        return handler

    first.enter_context(custom_functions(tells("first")))
    second.enter_context(custom_functions(tells("second")))
    Doubled.apply(torch.ones(2))
    first.close()  # a thread that ends before another
    Doubled.apply(torch.ones(2))
    second.close()
    Doubled.apply(torch.ones(2))
    assert told == ["second", "first", "second"]
    assert not differences(before, state_of_torch())


def test_what_a_trace_is_told_by_is_undone_whatever_ends_first() -> None:
    names = "resize_", "_propagate_tensor_meta_non_cached"
    owners = torch.UntypedStorage, sharding_propagator()
    with followed(Followed(nn.Identity(), lambda: None)):
        pass  # torch imports what this needs once
    before = state_of_torch()
    with pytest.raises(ValueError, match="of a step"), followed(Followed(nn.Identity(), lambda: None)):
        with followed(Followed(nn.Identity(), lambda: None)):
            assert {f"torch.storage.UntypedStorage.{names[0]}"} == differences(before, state_of_torch())
        assert all(name in vars(owner) for owner, name in zip(owners, names, strict=True))
        raise ValueError("of a step")
    assert not any(name in vars(owner) for owner, name in zip(owners, names, strict=True))
    assert not differences(before, state_of_torch())
    assert [line.what for line in patches.TABLE if line.until == patches.FOLLOWED] == [
        "torch.storage.UntypedStorage.resize_",
        "torch.nn.functional.scaled_dot_product_attention",
        "what knows how DTensor's functions shard: _propagate_tensor_meta_non_cached",
    ]


def test_a_checkpoint_s_signature_is_not_read_in_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    work_of = Ledger()
    dispatcher = Dispatcher(Axis("tp", 2, 0, None, work_of), work_of)
    view = SpmdMode(dispatcher, lambda t: None)
    x = torch.ones(2, 3, requires_grad=True)

    def step() -> None:
        with view.on():
            checkpoint(
                lambda t: t * 2, GlobalTensor(x, even_shard(0, 4, 2), dispatcher), use_reentrant=False
            )._mw_local.sum().backward()

    step()
    monkeypatch.setattr(patches, "signature", None)
    step()
    assert x.grad is not None and x.grad.tolist() == [[4.0] * 3] * 2


def test_checkpoints_are_told_of_by_whoever_was_asked_last() -> None:
    told: list[str] = []

    class Told:
        def __init__(self, name: str) -> None:
            self.name = name

        def checkpoint_begins(self, *, reentrant: bool) -> bool:
            told.append(self.name)
            return True

        def checkpoint_runs(self, before: Any, now: Any) -> None:
            pass

        def checkpoint_returns(self) -> None:
            pass

        def checkpoint_ends(self, before: Any = None, now: Any = None) -> None:
            told.append(f"end of {self.name}")

    with followed_checkpoints(Told("outer")), followed_checkpoints(Told("inner")):
        checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert told == ["inner", "outer", "end of outer", "end of inner"]


def test_no_other_file_replaces_a_part_of_torch() -> None:
    wrong, uses = [], set()
    for file in SOURCES.rglob("*.py"):
        name = str(file.relative_to(SOURCES))
        tree = ast.parse(file.read_text(encoding="utf-8"))
        of_torch = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))
            and (getattr(node, "module", None) or node.names[0].name).split(".")[0] == "torch"
            for alias in node.names
        }  # fmt: skip
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id="setattr" | "delattr")):
                    uses.add(name)
                case ast.Assign(targets=targets):
                    wrong += [f"{name}: {ast.unparse(t)}" for t in targets if _replaces(t, of_torch, name)]
                case ast.AugAssign(target=target):
                    wrong += [f"{name}: {ast.unparse(target)}"] if _replaces(target, of_torch, name) else []
    assert wrong == COUNTS, "patches of torch stand in spmd/patches.py"
    assert uses == SETS.keys()


def _replaces(target: ast.expr, of_torch: set[str], file: str) -> bool:
    """Whether an assignment is to an attribute of a name that comes from torch, or to a function's code."""
    if isinstance(target, ast.Tuple):
        return any(_replaces(t, of_torch, file) for t in target.elts)
    if not isinstance(target, ast.Attribute) or file == "spmd/patches.py":
        return False
    root: ast.expr = target
    while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
        root = root.func if isinstance(root, ast.Call) else root.value
    return target.attr == "__code__" or (isinstance(root, ast.Name) and root.id in of_torch)
