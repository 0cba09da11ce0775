"""Torch's private parts, one test each: what of ours rests on it is in the name, what it must do in the body.

Where a new torch fails one of these, the function of ours that uses the part is to be changed; the table below says where
it stands. A private part that is in no line of the table fails the first test.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import time
import weakref
from collections import namedtuple
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import meshwright
from doubled import Doubled
from meshwright import deferred
from meshwright.identity import threads_named
from meshwright.planning.meta_functions import MetaFunctions
from meshwright.planning.module_state import StateSnapshot
from meshwright.planning.shadow import Shadow
from meshwright.prediction.trace import Allocated, Freed, Resized
from meshwright.prediction.tracker import Tracker, followed, sharding_propagator
from meshwright.prediction.world import rehearsed_world
from meshwright.private import (
    DEVICE,
    HOOK_TABLES,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    any_backward_hooks,
    any_hooked,
    autocast_is_on,
    autograd_local,
    awaits_gradient,
    backward_hooks,
    collectives_entered,
    compiles,
    copy_all,
    dtensor_placements,
    dtensor_redistribution,
    function_mode_at,
    function_modes,
    has_gradient,
    has_hooks,
    hooked,
    in_backward,
    in_conversion,
    is_done,
    job_store,
    last_collective,
    memory_facts,
    modes_are_asked,
    norms_of,
    python_body,
    pytree,
    raw_local,
    raw_locals,
    replace_tensors,
    saved_tensors_are_hooked,
    scale_all,
    schema_of,
    schemas,
    set_autograd_local,
    set_raw_local,
    set_version,
    storage_of,
    take_backward_hooks,
    tensor_to_hook,
    timeout_of,
    unprofiled,
    version,
    without_any_mode,
    without_dispatch,
    without_modes,
    without_subclasses,
    wrapper,
    wrapping,
)
from meshwright.runtime import groups
from meshwright.runtime.rows.microbatches import BACKWARD
from meshwright.runtime.weights import fsdp
from meshwright.spmd import patches
from meshwright.spmd.autograd_functions import (
    FunctionMode,
    followed_checkpoints,
    outside_transforms,
    recomputations,
    scripted_functions,
    transformed_functions,
    transforming,
    transforms,
    with_changed_tensors,
)
from meshwright.spmd.decide import ANSWERS
from meshwright.spmd.one_process import one_process
from meshwright.spmd.torch_functions import FACTS, aliases, functions, op_facts, written_by
from meshwright.spmd.uncompiled import AS_PYTHON, UNCOMPILED
from meshwright.workers import worker
from meshwright.workers.process import GROUP_THREAD

SOURCES = Path(meshwright.__file__).parent
aten = torch.ops.aten

USES = {
    "private.py": "_C _DisableTorchDispatch _apply _getframe _backward_hooks _backward_pre_hooks _base _cdata _compiled_call_impl _current_graph_task_id _disable_current_modes _modules _distributed_c10d _functorch \
        _get_backend _get_default_store _custom_op_handlers _api _dispatch _dtensor_spec _redistribute _StridedShard _c10d_functional _get_obj_in_tls _op_dispatcher _is_any_autocast_enabled _is_key_in_tls _forward_hooks _forward_pre_hooks _get_function_stack_at _timeout _is_torch_function_mode_enabled _jit_get_schemas_for_operator \
        _len_torch_function_stack _local_tensor _make_wrapper_subclass \
        _post_accumulate_grad_hooks _autograd _python_dispatch _pytree _subclasses _schema _spec _stash_obj_in_tls _top_saved_tensors_default_hooks _torchdynamo_orig_callable \
        _foreach_copy_ _foreach_mul_ _foreach_norm _has_any_global_hook _enable_record_function _profiler_enabled \
        _unsafe_set_version_counter _version",
    "calls/structure.py": "_buffers",
    "cli/processes.py": "_exit _run_exitfuncs",  # of os and atexit
    "checkpoint/pretrained.py": "_keys_to_ignore_on_load_missing _keys_to_ignore_on_load_unexpected",  # of transformers
    "blame.py": "_getframe",  # of sys
    "planning/passes/styles.py": "_tp_plan",  # of transformers
    "planning/guards.py": "_getframe",  # of sys
    "planning/loops.py": "_getframe",  # of sys
    "planning/shadow.py": "_to_copy",
    "planning/assumed.py": "_ctc_loss _local_scalar_dense _pack_padded_sequence _unique2 _unsafe_index",
    "prediction/accumulation.py": "_C _cdata _engine_run_backward _getframe _storage_Use_Count _use_count",
    "prediction/attention.py": "_scaled_dot_product_efficient_attention",
    "prediction/allocations.py": "_C _select_conv_backend",
    "prediction/world.py": "_internal",
    "prediction/values.py": "_getframe",  # of sys
    "prediction/tracker.py": "_cdata _op_dispatcher _propagate_tensor_meta_non_cached _schema",
    "runtime/weights/fsdp.py": "_forward_hooks _forward_pre_hooks _fsdp_param_group _fsdp_param_groups _get_fsdp_state \
        _root_post_backward_final_callback _set_unsharded_grad_dtypes _unsharded_param _load_state_dict_pre_hooks \
        _module_to_pre_load_state_dict_hook_handle _module_to_pre_save_state_dict_hook_handle _register_state_dict_hooks \
        _sharded_param_data _state_ctx _state_dict_pre_hooks _training_state",
    "replay/overlap.py": "_is_view",
    "runtime/groups.py": "_set_pg_timeout",
    "runtime/weights/running_optimizer.py": "_getframe",  # of sys
    "draw/plain.py": "_fields",  # of named tuples
    "deferred/__init__.py": "_C _backward_hooks _post_accumulate_grad_hooks _swap_tensor_impl",
    "deferred/log.py": "_neg_view",
    "runtime/module_state.py": "_fields",  # of named tuples
    "replay/program.py": "_buffers _parameters",
    "replay/recording.py": "_buffers _parameters",
    "replay/replayed.py": "_buffers _parameters",
    "replay/state.py": "_has_any_global_hook",
    "runtime/weights/parameters.py": "_parameters",
    "runtime/weights/placed_model.py": "_modules _parameters",
    "runtime/coupling/paths.py": "_getframe",  # of sys
    "workers/worker.py": "_clear_sharding_prop_cache _lru_cache_wrapper _redistribute _world",
    "watch/watchdog.py": "_exit",  # of os
    "watch/location.py": "_current_frames",  # of sys
    "spmd/autograd_functions.py": "_functorch",
    "spmd/patches.py": "_C _SingleLevelFunction _add_batch_dim _are_functorch_transforms_active _bind_default_args _call_custom_function_call _functorch \
        _gather_flat_grad _get_total_norm _grad_decrement_nesting _grad_increment_nesting _jvp_with_argnums _ops _vjp_with_argnums _wrap_tensor_for_grad _unscale_grads_",
    "spmd/dtensor_patches.py": "_local_scalar_dense _make_shard_tensor _unsafe_view",
    "spmd/one_process.py": "_getframe",  # of sys
    "spmd/torch_functions.py": "_C _VF _nn",
    "spmd/dispatcher.py": "_getframe",  # of sys
}


def test_every_private_part_that_is_used_stands_in_the_table_above() -> None:
    found = {
        str(file.relative_to(SOURCES)): names for file in SOURCES.rglob("*.py") if (names := _private_names_in(file))
    }
    assert found == {file: set(names.split()) for file, names in USES.items()}


def _private_names_in(file: Path) -> set[str]:
    """Names with one underscore in front that are not the file's own: of another object's attributes, and of imports."""
    names: set[str] = set()
    imported: set[str] = set()
    own: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                own.add(name)
            case ast.Attribute(attr=name):
                names.add(name)
            case ast.ImportFrom(module=str(module)) if module.startswith("torch"):
                imported.update(module.split("."), (alias.name for alias in node.names))
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "Patch" | "changed_on"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                names.add(name)
    return {n for n in (names - own) | imported if n.startswith("_") and not n.startswith(("__", "_mw_"))}


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_function_modes_that_are_on_are_known_outermost_first() -> None:
    assert function_modes() == 0
    with Passing() as outer, Passing() as inner:
        assert [function_mode_at(i) for i in range(function_modes())] == [outer, inner]
        assert modes_are_asked()
        with without_modes():
            assert not modes_are_asked()


def test_a_module_tells_its_hooks() -> None:
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        module = nn.Linear(2, 2)
        assert not has_hooks(module)
        handle = getattr(module, f"register_{register}")(lambda *_: None)
        assert has_hooks(module)
        handle.remove()
        assert not has_hooks(module)


def test_hooks_of_all_modules_are_told() -> None:
    modules = nn.modules.module
    assert not modules._has_any_global_hook()
    handle = modules.register_module_forward_hook(lambda *_: None)
    assert modules._has_any_global_hook()
    handle.remove()


def test_a_function_is_applied_past_what_stands_around_it() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g

    def refuse(apply: Any) -> Any:
        return lambda *_: pytest.fail("what is put around it was asked")

    x = torch.ones(2, requires_grad=True)
    with patches.CUSTOM_FUNCTION.on(refuse):
        y = patches.apply_of(Twice)(x)
    y.sum().backward()
    assert y.tolist() == [2, 2] and x.grad is not None and x.grad.tolist() == [2, 2]


def test_schemas_say_what_can_share_memory_with_an_argument() -> None:
    def named(name: str) -> Any:
        return SimpleNamespace(__name__=name)

    views = "view reshape transpose contiguous to flatten chunk tensor_split mH numpy_T".split()
    assert all(map(schemas, views)) and not schemas("no_such_operator")
    assert all(aliases(named(name)) for name in views)
    assert not any(aliases(named(n)) for n in "add add_ clone linear cat index_select no_such_operator".split())


def test_a_hook_on_what_a_tensor_is_a_view_of_outlives_a_write_to_the_view() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    made = x * 3
    view, called = made.view(6), list[str]()
    plain = torch.ones(2).view(2)
    assert tensor_to_hook(view) is made and all(tensor_to_hook(t) is t for t in (made, plain, x))
    view.register_hook(lambda g: called.append("view"))
    tensor_to_hook(view).register_hook(lambda g: called.append("base"))
    view.mul_(2)
    view.sum().backward()
    assert called == ["base"]


def test_what_is_asked_on_the_side_is_seen_by_no_mode() -> None:
    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Counts() as counts, Seen() as seen:
        with without_any_mode():
            torch.ones(2).add(1)
        assert counts.seen == 0 and not seen.functions
        torch.ones(2).add(1)
        assert counts.seen > 0 and seen.functions


class Seen(TorchFunctionMode):
    """Notes every torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


DISPATCHED = torch.tensor(7.0)  # what a Wrapper answers below torch functions


class Wrapper(Tensor):
    """As the view's: a shape without data, whose functions are answered in Python."""

    calls: list[Any] = []  # noqa: RUF012  (of this class alone)

    @staticmethod
    def __new__(cls, *shape: int) -> Wrapper:
        return wrapper(cls, torch.empty(0, dtype=torch.float64), shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func)
        return "answered"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DISPATCHED


# --- functions and modes ----------------------------------------------------------------------------------------------


def test_a_view_rests_on_wrappers_that_have_a_shape_and_no_memory() -> None:
    with without_subclasses():
        wrapper = Wrapper(10**6, 10**6)  # 8 TB, were it real
        assert (wrapper.shape, wrapper.dtype, wrapper.device.type) == ((10**6, 10**6), torch.float64, "cpu")
        assert wrapper.numel() == 10**12 and not wrapper.requires_grad
        assert wrapper + 1 is DISPATCHED
    wrapper._mw_anything = 3
    assert wrapper._mw_anything == 3, "attributes of our own"


def test_facts_of_a_view_rest_on_getters_that_are_the_same_object_each_time() -> None:
    wrapper = Wrapper(2, 3)
    for name in ("shape", "dtype", "requires_grad", "grad", "grad_fn", "is_leaf", "_version", "T", "data"):
        Wrapper.calls.clear()
        assert getattr(wrapper, name) == "answered"
        assert Wrapper.calls == [getattr(Tensor, name).__get__], name
        assert hash(Wrapper.calls[0]) == hash(getattr(Tensor, name).__get__)
    assert Tensor.shape.__get__ in FACTS and Tensor.requires_grad.__get__ in ANSWERS


def test_rules_and_fsdp_rest_on_the_two_ways_to_turn_torch_functions_off() -> None:
    wrapper, x = Wrapper(2), torch.ones(2)
    with Seen() as mode:
        with without_subclasses():
            torch.neg(x)
            assert torch.neg(wrapper) is DISPATCHED, "a subclass is not asked"
        assert mode.functions == [torch.neg, torch.neg], "a mode is"
        with without_modes():
            torch.neg(x)
            assert torch.neg(wrapper) is DISPATCHED
        assert len(mode.functions) == 2, "neither is"
        torch.neg(x)
        assert len(mode.functions) == 3


class DoubledWithContext(Doubled):
    """The same of the kind whose context is set up apart, which takes arguments by name and has defaults."""

    @staticmethod
    def forward(x: Tensor, times: int = 2) -> Tensor:  # type: ignore[override]
        return times * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.times = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.times * g, None


@pytest.mark.parametrize("function", [Doubled, DoubledWithContext])
def test_custom_functions_get_whole_tensors_wherever_apply_was_looked_up(function: Any) -> None:
    kept, seen = function.apply, list[Any]()

    def noting(plain: Any) -> Any:
        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((function, args))
            return plain(function, *args, **kwargs)

        return apply

    def shifted(plain: Any) -> Any:
        return lambda function, *args: plain(function, args[0] + 1, *args[1:]) + 10

    x = torch.ones(2, requires_grad=True)
    looked_up = function.setup_context
    with patches.CUSTOM_FUNCTION.on(noting):
        for call in (function.apply, kept):
            call(x).sum().backward()
        if function is DoubledWithContext:
            if torch.__version__ >= (2, 13):  # before, torch itself takes no argument by name
                assert kept(x, times=5).tolist() == [5, 5]
            gradient = torch.func.grad(lambda y: kept(y, 3).sum())(torch.ones(2))
            assert gradient.tolist() == [3, 3] and seen[-1][0] is function, "also within a transform"
        given = len(seen)
        with patches.CUSTOM_FUNCTION.on(shifted):
            assert kept(x).tolist() == [14, 14] and len(seen) == given + 1, "what it gives is what is given"
            with pytest.raises((IndexError, TypeError)):
                kept()  # an error of what stands around it
    assert [function for function, _ in seen[:2]] == [function, function] and seen[0][1][0] is x
    assert x.grad is not None and x.grad.tolist() == [4.0, 4.0]
    given = len(seen)
    assert kept(x).tolist() == function.apply(x).tolist() == [2, 2]
    assert len(seen) == given and function.setup_context is looked_up, "as it was"
    assert not torch._C._are_functorch_transforms_active()


def test_functions_of_torch_and_of_our_own_are_told_by_the_name_of_their_module() -> None:
    base: Any = torch.autograd.function._SingleLevelFunction
    functions_of_torch = [c for c in base.__subclasses__()[0].__subclasses__() if "fsdp" in c.__module__]
    assert all(c.__module__.startswith("torch.distributed.") for c in functions_of_torch)


def test_what_a_custom_function_gives_rests_on_a_subclass_of_it_being_the_same_function() -> None:
    given: list[Any] = []

    def noted(x: Any) -> Any:
        given.append(x)
        return x

    x = torch.ones(2, requires_grad=True)
    made = with_changed_tensors(Doubled, noted)
    assert (
        made is with_changed_tensors(Doubled, noted)
        and made.__name__ == "Doubled"
        and made.__module__ == Doubled.__module__
    )
    made.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0] and [g.tolist() for g in given] == [[2.0, 2.0], [2.0, 2.0]]


def test_a_model_sees_one_process_by_what_a_thread_keeps_for_autograd_and_by_functions_whose_code_can_be_another() -> (
    None
):
    seen: list[Any] = []
    assert autograd_local("a test") is None
    set_autograd_local("a test", seen)
    thread = Thread(target=lambda: seen.append(autograd_local("a test")))
    thread.start()
    thread.join()
    assert autograd_local("a test") is seen and seen == [None]
    kept = sys.getrefcount(seen)
    set_autograd_local("a test", seen)
    again = sys.getrefcount(seen)
    set_autograd_local("a test", None)
    assert (again, sys.getrefcount(seen)) == (kept, kept - 1), "a reference for what is kept, while it is kept"
    assert autograd_local("a test") is None
    functions = [f for f in map(vars(distributed_c10d).get, distributed_c10d.__all__) if type(f) is FunctionType]
    assert {len(f.__code__.co_freevars) for f in functions} == {0, 1} and len(functions) > 40
    before = [(f.__code__, f.__kwdefaults__) for f in functions]
    with one_process():
        assert all(f.__code__ is not code for f, (code, _) in zip(functions, before, strict=True) if not _harmless(f))
        assert not dist.is_initialized() and distributed_c10d.get_world_size() == 1 and dist.is_gloo_available()
    assert before == [(f.__code__, f.__kwdefaults__) for f in functions]


def _harmless(f: FunctionType) -> bool:
    return "available" in f.__name__ or f.__name__ in (
        "get_node_local_rank",
        "get_default_backend_for_device",
        "supports_complex",
    )


def test_transforms_get_whole_tensors_by_the_functions_that_wrap_what_they_are_given() -> None:
    seen: list[Tensor] = []

    def noted(t: Tensor) -> Tensor:
        with outside_transforms():
            assert not transforming()
            seen.append(t)
            return t * 2 if t is x else t  # of the outermost level, whatever runs

    x = torch.ones(3, requires_grad=True)
    square = lambda t: (t * t).sum()  # noqa: E731
    calls = {
        "vmap": lambda: torch.vmap(torch.sin)(x),
        "grad": lambda: torch.func.grad(square)(x),
        "vjp": lambda: torch.func.vjp(square, x)[0],
        "jvp": lambda: torch.func.jvp(square, (x,), (torch.ones(3),))[0],
        "jacrev": lambda: torch.func.jacrev(square)(x),
        "jacfwd": lambda: torch.func.jacfwd(square)(x),
        "hessian": lambda: torch.func.hessian(square)(x),
    }
    expected = {"vmap": torch.full((3,), 2.0).sin(), "grad": torch.full((3,), 4.0), "vjp": torch.tensor(12.0)}
    for name, call in calls.items():
        seen.clear()
        with transforms(noted):
            result = call()
        assert any(t is x for t in seen), name
        if name in expected:
            torch.testing.assert_close(result, expected[name])
    assert torch.func.grad(square)(x).tolist() == [2.0] * 3 and not transforming(), "as it was"
    with transforms(noted):
        torch.vmap(torch.sin)(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.full((3,), 2.0).cos(), msg="the graph goes on outside")


def test_what_torch_func_made_is_called_through_functions_of_its_modules() -> None:
    seen: list[tuple[str, bool]] = []

    def noted(call: Any, name: str, args: Any, kwargs: Any) -> Any:
        seen.append((name, any(t is x for t in pytree.tree_leaves((args, kwargs)))))
        return call(*args, **kwargs)

    x = torch.ones(3, requires_grad=True)
    square = lambda t: (t * t).sum()  # noqa: E731
    calls = {
        "vmap": lambda: torch.func.vmap(torch.sin)(x),
        "grad": lambda: torch.func.grad(square)(x),
        "jvp": lambda: torch.func.jvp(square, (x,), (torch.ones(3),))[0],
        "vjp": lambda: torch.func.vjp(square, x)[0],
    }
    for name, call in calls.items():
        seen.clear()
        expected = call()
        with transformed_functions(noted):
            torch.testing.assert_close(call(), expected)
        assert seen[0] == (name, True), name
    seen.clear()
    with transformed_functions(noted):
        torch.func.jacrev(square)(x), torch.func.grad_and_value(square)(x)
    assert [name for name, given in seen if given] == ["vjp", "grad"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_keeps_and_runs_again_can_be_other_than_what_it_ran(reentrant: bool) -> None:
    runs: list[str] = []

    def segment(x: Tensor, factor: float) -> Tensor:
        runs.append("first")
        return torch.sin(x) * factor

    def handler(function: Any, args: Any) -> Any:
        assert function is segment and args[1] == 3.0

        def again(y: Tensor, factor: float) -> Tensor:
            runs.append("again")
            return torch.sin(y if reentrant else y / 2) * factor

        return again, (args[0] * 2, args[1])

    x = torch.ones(2, requires_grad=True)
    with recomputations(handler):
        loss = checkpoint(segment, x, 3.0, use_reentrant=reentrant).sum()
    assert runs == ["first"]
    loss.backward()
    assert runs == ["first", "again"]
    torch.testing.assert_close(x.grad, 3 * torch.ones(2).cos())
    checkpoint(segment, x, 3.0, use_reentrant=reentrant).sum().backward()
    assert runs == ["first", "again", "first", "first"], "as it was"


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_stage_decides_of_checkpoints_by_what_they_keep_and_run_again(reentrant: bool) -> None:
    runs: list[str] = []

    def segment(x: Tensor) -> Tensor:
        runs.append("run")
        return x.sin()

    class Told:
        def __init__(self, is_one: bool) -> None:
            self.is_one = is_one

        def checkpoint_begins(self, *, reentrant: bool) -> bool:
            runs.append("begins")
            return self.is_one

        def checkpoint_runs(self, before: Any, now: Any) -> None:
            assert all(old is new for old, new in zip(before, now, strict=True))

        def checkpoint_returns(self) -> None:
            runs.append("returns")

        def checkpoint_ends(self, before: Any = None, now: Any = None) -> None:
            runs.append("ends")

    for is_one in (True, False):
        runs.clear()
        x = torch.ones(2, requires_grad=True)
        with followed_checkpoints(Told(is_one)):
            loss = checkpoint(segment, x, use_reentrant=reentrant).sum()
        first = ["begins", "run", *(["returns"] if reentrant and is_one else []), "ends"]
        assert runs == first
        loss.backward()
        assert runs == first + ["run"] * is_one
        torch.testing.assert_close(x.grad, torch.ones(2).cos())


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_a_recording_under_autocast_has_the_types_of_a_device(device: str) -> None:
    """Autocast has nothing for tensors on meta; a device's types are asked of torch itself."""
    linear, conv = nn.Linear(4, 4, device="meta"), nn.Conv1d(4, 4, 3, groups=4, device="meta")
    x = torch.randn(2, 4, 5)

    def types(linear: nn.Module, conv: nn.Module, x: Tensor) -> list[torch.dtype]:
        h = linear(x.mT)
        given = (
            h,
            conv(x),
            h.softmax(-1),
            functional.layer_norm(h, (4,)),
            h + x.mT,
            functional.mse_loss(h, x.mT),
            h.prod(-1),
        )
        return [t.dtype for t in given]

    with torch.autocast(device, dtype=torch.bfloat16):
        expected = types(nn.Linear(4, 4, device=device), nn.Conv1d(4, 4, 3, groups=4, device=device), x.to(device))
        with Shadow(), MetaFunctions():
            found = types(linear, conv, x.to("meta"))
    assert found == expected and torch.bfloat16 in found and torch.float32 in found


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x + 1


def test_scripted_functions_get_whole_tensors_by_the_class_that_calls_them() -> None:
    with scripted_functions(lambda call, function, args, kwargs: call(function, *(x * 10 for x in args), **kwargs)):
        assert scripted(torch.ones(1)).item() == 11.0
    assert scripted(torch.ones(1)).item() == 2.0


def test_functions_without_a_rule_rest_on_bodies_whose_hand_over_can_be_answered_with_no() -> None:
    x, body = torch.ones(2, 3), python_body(functional.layer_norm)
    with Seen() as mode:
        functional.layer_norm(x, [3])
        body(x, [3])
    assert mode.functions == [functional.layer_norm, torch.layer_norm], (
        "handed over as one; the body hands over its own"
    )
    places = (functional, torch.functional, torch.autograd, Tensor)
    written = {f for place in places for f in vars(place).values() if isinstance(f, FunctionType)}
    handing = [f for f in written if f.__module__ != "torch" and "handle_torch_function" in f.__code__.co_names]
    asked = {f: [n for n in f.__code__.co_names if n.startswith("has_torch_function")] for f in handing}
    assert len(asked) >= 100 and sum(not names for names in asked.values()) <= 2, "two of `unique` have no body"
    for f, names in asked.items():
        body = python_body(f)
        assert body is not None and not any(body.__globals__[name](Wrapper(1)) for name in names), f


def test_recompute_under_the_view_rests_on_the_body_of_backward() -> None:
    assert BACKWARD is not torch.autograd.backward
    x = torch.ones(2, requires_grad=True)
    for backward, again in ((BACKWARD, True), (Tensor.backward, False)):
        with Seen() as mode:
            loss = checkpoint(lambda t: torch.sin(t) * 2, x, use_reentrant=False).sum()
            mode.functions.clear()
            backward(loss)
        assert (torch.sin in mode.functions) == again


def test_rules_rest_on_the_places_where_builtin_functions_live() -> None:
    lstm, x = nn.LSTM(2, 2), torch.ones(1, 2)
    calls = {
        "gelu": lambda: functional.gelu(x),
        "scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(x, x, x),
        "linear": lambda: functional.linear(x, x),
        "lstm": lambda: lstm(x),
        "erfc": lambda: torch.special.erfc(x),
        "vector_norm": lambda: torch.linalg.vector_norm(x),
        "avg_pool2d": lambda: functional.avg_pool2d(torch.ones(1, 1, 4, 4), 2),
    }
    for name, call in calls.items():
        with Seen() as mode:
            call()
        assert any(f in set(functions(name)) for f in mode.functions), name


def test_the_rule_of_softmax_rests_on_where_its_arguments_stand() -> None:
    x = torch.rand(2, 3)
    for name in ("softmax", "log_softmax"):
        in_python, builtin = getattr(functional, name), getattr(torch, name)
        assert list(inspect.signature(in_python).parameters)[:4] == ["input", "dim", "_stacklevel", "dtype"]
        assert in_python(x, -1, 3, torch.float64).dtype == builtin(x, -1, torch.float64).dtype == torch.float64
        torch.testing.assert_close(getattr(torch, f"_{name}")(x, 1, False), builtin(x, 1))


def test_notes_on_compiled_parts_rest_on_what_compile_leaves_at_them() -> None:
    plain, called, holding = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    called.compile(backend="eager")
    holding.function = torch.compile(torch.sin, backend="eager")
    assert not compiles(plain)
    assert compiles(called) and compiles(holding) and compiles(torch.compile(plain, backend="eager"))


def test_nothing_is_compiled_under_a_mode_of_ours_by_the_compilers_stance() -> None:
    compilations: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x.sin() + 1, backend=backend)

    class Passing(FunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    first, second = Passing(), Passing()
    with first, second:
        function(torch.ones(2))
    assert not compilations
    UNCOMPILED.enter()  # in a thread, whose modes begin and end in any order with those of another
    with Passing():
        UNCOMPILED.leave()
        function(torch.ones(2))
    assert not compilations
    function(torch.ones(2))
    assert len(compilations) == 1


def test_torchs_control_flow_calls_operators_of_these_names() -> None:
    operators = {
        "cond": ("pred", "true_fn", "false_fn", "operands"),
        "while_loop": ("cond_fn", "body_fn", "carried_inputs", "additional_inputs"),
        "scan": ("combine_fn", "init", "xs", "additional_inputs"),
        "associative_scan": ("combine_fn", "xs", "additional_inputs"),
    }
    assert AS_PYTHON.keys() == {*operators, "map_impl"}
    for name in AS_PYTHON:
        operator = getattr(torch.ops.higher_order, name)
        assert isinstance(operator, torch._ops.HigherOrderOperator) and operator.name() == name
        if name != "map_impl":  # which takes whatever comes
            _, *parameters = inspect.signature(type(operator).__call__).parameters
            assert tuple(parameters[: len(operators[name])]) == operators[name]
            assert len(inspect.signature(AS_PYTHON[name]).parameters) == len(operators[name])


def test_whether_a_gradient_goes_through_a_tensor_is_known_within_transforms() -> None:
    x, seen = torch.ones(2, 3, requires_grad=True) * 2, list[bool]()

    def look(t: Tensor) -> Tensor:
        seen.extend(map(has_gradient, (t, t.detach(), x, x.detach())))
        return t.sum()

    torch.vmap(look)(x)
    torch.vmap(torch.func.grad(look))(x.detach())
    assert seen == [True, False, True, False] * 2 and has_gradient(x)


def test_a_tensor_with_hooks_is_known() -> None:
    p = nn.Parameter(torch.ones(2))
    several = [nn.Parameter(torch.ones(2)), p]
    assert not hooked(p) and not any_hooked(several)
    hooks = [register(lambda g: None) for register in (p.register_hook, p.register_post_accumulate_grad_hook)]
    assert hooked(p) and any_hooked(several)
    hooks[0].remove()
    assert hooked(p) and any_hooked(several)
    hooks[1].remove()
    assert not hooked(p) and not any_hooked(several)


class Instead(TorchFunctionMode):
    """Another tensor stands for the first argument, as in a forward over tp for a parameter."""

    def __init__(self, other: torch.Tensor) -> None:
        super().__init__()
        self.other = other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(self.other, *args[1:], **(kwargs or {}))


def test_a_tensor_is_asked_for_hooks_itself() -> None:
    p, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    other.register_post_accumulate_grad_hook(lambda p: None)
    with Instead(other):
        assert p._post_accumulate_grad_hooks and not hooked(p)


def test_the_hooks_of_a_parameter_can_be_taken_and_their_handles_remove_them() -> None:
    p = nn.Parameter(torch.ones(2))
    handle = p.register_hook(lambda g: 2 * g)
    assert not awaits_gradient(p)
    hooks = take_backward_hooks(p)
    p.sum().backward()
    assert p.grad is not None and p.grad.tolist() == [1, 1]
    assert [hook(p.grad).tolist() for hook in hooks.values()] == [[2, 2]]  # type: ignore[union-attr]
    handle.remove()
    assert not hooks and not take_backward_hooks(p)
    p.register_post_accumulate_grad_hook(lambda p: None)
    assert awaits_gradient(p)


def test_the_hooks_of_a_modules_backward_are_known() -> None:
    module = nn.Linear(2, 2)
    several = [nn.Linear(2, 2), module]
    assert backward_hooks(module) == ([], []) and not any_backward_hooks(several)
    before, after = (lambda m, outputs: None), (lambda m, inputs, outputs: None)
    module.register_full_backward_pre_hook(before)
    module.register_full_backward_hook(after)
    assert backward_hooks(module) == ([before], [after]) and any_backward_hooks(several)
    assert not any_backward_hooks(several[:1])


def test_a_backward_knows_that_it_runs() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append(in_backward()))
    x.sum().backward()
    assert seen == [True] and not in_backward()


def test_hooks_of_what_autograd_saves_are_seen() -> None:
    seen: list[bool] = []

    def noted(x: Tensor) -> Tensor:
        seen.append(saved_tensors_are_hooked())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    noted(x)
    checkpoint(noted, x, use_reentrant=False).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        noted(x)
    assert seen == [False, True, True, True], (
        "outside, in a checkpoint's forward, in its recompute, in hooks of one's own"
    )


def test_moves_made_once_rest_on_versions_that_count_every_write() -> None:
    x = torch.zeros(4)
    for write in (
        lambda: x.add_(1),
        lambda: x[:2].mul_(2),
        lambda: x.detach().fill_(3),
        lambda: x.copy_(torch.ones(4)),
    ):
        before = version(x)
        write()
        assert before is not None and version(x) == before + 1
    assert version(x + 0) == 0, "another tensor counts its own"
    with torch.inference_mode():
        assert version(torch.zeros(1)) is None
        with pytest.raises(RuntimeError):
            _ = torch.zeros(1)._version


def test_a_value_that_is_put_back_is_what_autograd_saved() -> None:
    w, x = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    saved = w * x
    held, before = w.detach().clone(), version(w)
    with torch.no_grad():
        w.mul_(3)
        w.data.copy_(held)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward(retain_graph=True)
    set_version(w, before)
    saved.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1]


# --- modules and parameters -------------------------------------------------------------------------------------------


def test_ties_rest_on_the_table_of_a_modules_parameters() -> None:
    module = nn.Linear(2, 2)
    assert list(module._parameters) == ["weight", "bias"] and module._parameters["weight"] is module.weight
    other = nn.Parameter(torch.zeros(2, 2))
    module.weight = other
    assert module._parameters["weight"] is other
    assert nn.Linear(2, 2, bias=False)._parameters["bias"] is None


def test_what_a_forward_changed_is_put_back_by_the_table_of_a_modules_buffers() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("later", None)
    snapshot, before = StateSnapshot(module), module.running_mean
    module.running_mean, module.later = torch.ones(2), torch.ones(1)
    assert set(snapshot.changed(())) == {("", "running_mean"), ("", "later")}
    snapshot.put_back()
    assert module.running_mean is before and module._buffers["later"] is None


def test_what_changes_of_a_tensor_that_stays_the_same_object_is_seen() -> None:
    x = torch.zeros(4)
    for change in (
        lambda: x.add_(1),
        lambda: x[:2].mul_(2),
        lambda: x.requires_grad_(),
        lambda: setattr(x, "data", torch.zeros(4)),
        lambda: setattr(x, "data", x.data[:2]),
        lambda: setattr(x, "data", x.data.view(2, 1)),
        lambda: setattr(x, "data", x.data.t()),
        lambda: x.requires_grad_(False),
        lambda: setattr(x, "data", x.data.view(torch.int32)),
    ):
        before = memory_facts(x)
        assert before is not None and memory_facts(x) == before
        change()
        assert memory_facts(x) != before
    complex_, wrapped = torch.zeros(2, dtype=torch.complex64), []
    torch.vmap(lambda t: (wrapped.append(memory_facts(t)), t)[1])(torch.zeros(2, 2))
    with torch.inference_mode():
        inference = torch.zeros(1)
    unknown = (complex_, complex_.conj().imag, complex_.to_sparse(), inference)
    assert [*map(memory_facts, unknown), *wrapped] == [None] * 5


def test_a_conversion_of_a_module_is_told_by_who_calls() -> None:
    said: list[bool] = []
    nn.Linear(2, 2)._apply(lambda t: (said.append(in_conversion()), t)[1])
    assert said == [True, True]
    assert not in_conversion()


def test_casting_and_filling_rest_on_replacing_tensors_in_place_but_not_across_devices() -> None:
    module = nn.BatchNorm1d(2)
    module.weight.grad = torch.ones(2)
    weight = module.weight
    replace_tensors(module, lambda t: t.double() if t.is_floating_point() else t)
    assert module.weight is weight and weight.dtype == weight.grad.dtype == torch.float64
    assert module.running_mean.dtype == torch.float64 and module.num_batches_tracked.dtype == torch.int64
    meta = nn.Linear(2, 2, device="meta")
    meta.tied = meta.weight
    replace_tensors(meta, lambda t: torch.empty_like(t, device="cpu"))
    assert meta.tied is not meta.weight, "each place anew: `fill` ties plain parameters itself"


def test_fsdp_without_the_view_rests_on_hooks_that_appear_in_the_modules_tables(workers: Any) -> None:
    assert workers.run(_hooks_of_fsdp, ranks=2) == [["args: 1, kwargs: ['scale']", "output: Tensor"]] * 2


class Scaled(nn.Linear):
    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return super().forward(x) * scale


def _hooks_of_fsdp() -> list[str]:
    module, seen = Scaled(4, 4), []
    module.register_forward_hook(lambda *_: None)
    before = set(module._forward_pre_hooks), set(module._forward_hooks)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    (pre,), (post,) = (
        set(table) - known
        for table, known in zip((module._forward_pre_hooks, module._forward_hooks), before, strict=True)
    )
    pre_hook, post_hook = module._forward_pre_hooks[pre], module._forward_hooks[post]

    def before_forward(given: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append(f"args: {len(args)}, kwargs: {list(kwargs)}")
        (new,), rest = pre_hook(given, ([args[0]],), {})  # a flat list instead, as `_locally` gives
        assert rest == {} and isinstance(new, list)
        return (new[0], *args[1:]), kwargs

    def after_forward(given: nn.Module, args: Any, output: Any) -> Any:
        seen.append(f"output: {type(output).__name__}")
        (new,) = post_hook(given, (), [output])
        return new

    module._forward_pre_hooks[pre], module._forward_hooks[post] = before_forward, after_forward
    module(torch.ones(1, 4), scale=2.0).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    return seen


def test_a_state_within_a_forward_rests_on_hooks_that_fsdp_registers_when_it_first_runs(workers: Any) -> None:
    assert workers.run(_state_within_a_forward, ranks=2) == [(True, False, ["Parameter", "DTensor"])] * 2


class Asks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.state_dict()
        self.kinds = [type(self.weight).__name__]
        return super().forward(x)


def _state_within_a_forward() -> tuple[bool, bool, list[str]]:
    """Whether it has hooks before its first forward; whether it fails with FSDP2's own hooks, and with ours."""
    errors = []
    for ours in (False, True):
        module = Asks(4, 4)
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        assert isinstance(module, FSDPModule) and not module._state_dict_pre_hooks
        for group in fsdp.parameter_groups(module) if ours else ():
            fsdp._keep_gathered_in_forward(group)
        try:
            module(torch.ones(1, 4))
        except RuntimeError as error:
            errors.append("mixed torch.Tensor and DTensor" in str(error))
    (after,) = {type(value).__name__ for value in module.state_dict().values()}
    return errors[0], len(errors) > 1, [*module.kinds, after]


def test_routed_gradients_rest_on_fsdps_groups_and_on_when_they_reduce(workers: Any) -> None:
    for told in workers.run(_groups_of_fsdp, ranks=2):
        assert told == {
            "not the last": [],  # microbatch: nothing is reduced
            "the last": [("weight", "has one"), ("bias", "has one"), ("unused", "has none")],
            "after": [True, True, True],  # zeros were filled in and reduced
        }


class Unused(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.unused = nn.Parameter(torch.ones(4))


def _groups_of_fsdp() -> dict[str, Any]:
    module = Unused()
    names = {id(p): n for n, p in module.named_parameters()}
    order = [n for n in names.values() if n != "unused"] + ["unused"]
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    assert isinstance(module, FSDPModule)
    (group,) = fsdp.parameter_groups(module)
    assert len(group.fsdp_params) == 3 and all(isinstance(p.sharded_param, DTensor) for p in group.fsdp_params)
    seen: list[Any] = []

    def act(fsdp_param: Any) -> None:
        name = next(n for n, p in module.named_parameters() if p is fsdp_param._unsharded_param)
        missing = fsdp.without_gradient(fsdp_param)
        seen.append((name, "has one" if missing is None else "has none"))
        if missing is not None:
            missing.grad = torch.zeros_like(missing)

    fsdp.before_reduction(group, act)
    told = {}
    for last in (False, True):
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        module(torch.ones(1, 4)).sum().backward()
        told["the last" if last else "not the last"] = sorted(seen, key=lambda s: order.index(s[0]))
        seen.clear()
    told["after"] = [fsdp_param.sharded_param.grad is not None for fsdp_param in group.fsdp_params]
    return told


def test_parameters_are_gathered_from_memory_that_they_got_between_steps(workers: Any) -> None:
    for told in workers.run(_gathered_from_other_memory, ranks=2):
        assert told == ["the former", "the new", "written since"]


def _gathered_from_other_memory() -> list[str]:
    """Three rows over two ranks: the memory of the second rank's row has no room for FSDP2's padding."""
    module, told = nn.Linear(2, 3, bias=False), []
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    weight: Any = module.weight
    module(torch.ones(1, 2))
    module.reshard()  # type: ignore[operator]
    local = torch.full_like(weight.to_local(), 5.0)
    set_raw_local(weight, local.detach())

    def gathers(value: float) -> bool:
        result = module(torch.ones(1, 2))
        module.reshard()  # type: ignore[operator]
        return bool((result == 2 * value).all())

    told.append("the new" if gathers(5.0) else "the former")
    fsdp.follow_memory(module)
    told.append("the new" if gathers(5.0) else "the former")
    local.fill_(7.0)
    told.append("written since" if gathers(7.0) and (weight.full_tensor() == 7.0).all() else "apart")
    return told


def test_the_end_of_a_pipelines_step_rests_on_reducing_what_backwards_have_added_up(workers: Any) -> None:
    for rank, gradient in enumerate(workers.run(_reduced_at_the_end, ranks=2)):
        assert gradient == [[3.0 * 2 * 2] * 4] * 2, f"two backwards on two ranks, mean of none: rank {rank}"


def _reduced_at_the_end() -> list[list[float]]:
    module = nn.Linear(4, 4, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_requires_gradient_sync(False)
    module.set_is_last_backward(False)
    for _ in range(2):
        module(torch.full((3, 4), 1.0)).sum().backward()
    assert module.weight.grad is None, "nothing is reduced yet"
    module.set_requires_gradient_sync(True)
    module.set_is_last_backward(True)
    fsdp.reduce_gradients(module)
    assert isinstance(module.weight, DTensor) and module.weight.device_mesh.ndim == 1
    return module.weight.grad.to_local().tolist()


def test_a_hang_is_told_in_time_because_a_groups_timeout_can_be_set(workers: Any) -> None:
    assert workers.run(_timeout_of_a_group, ranks=2, timeout=50) == [True] * 2


def _timeout_of_a_group() -> bool:
    group = dist.new_group()
    groups._set_timeout(group, 1.0)
    if dist.get_rank() == 1:
        return True
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):  # within the run's own timeout, not in half an hour
        dist.all_reduce(torch.ones(1), group=group)
    return True


def test_what_a_rank_holds_rests_on_fsdp_cutting_what_tp_left_and_gathering_to_the_tp_mesh(workers: Any) -> None:
    for rank, (held, dims, gathered, placements) in enumerate(workers.run(_held_under_fsdp_and_tp, ranks=4)):
        shard, tp = divmod(rank, 2)
        mine = torch.arange(12.0).chunk(2)[tp].chunk(2)[shard]
        assert held == mine.tolist(), "tp cuts first, FSDP what is left: Recipe.held"
        assert dims == (2, 1), "at rest on (dp_shard, tp), gathered on tp alone: LocalParameters tells them apart so"
        assert gathered == torch.arange(12.0).chunk(2)[tp].tolist()
        assert placements == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"


def _held_under_fsdp_and_tp() -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    module = nn.Module()
    local = torch.arange(12.0).chunk(2)[mesh["tp"].get_local_rank()]
    module.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False))
    fully_shard(module, mesh=mesh["dp_shard"])
    at_rest = module.weight
    held, placements = at_rest.to_local().tolist(), str(at_rest.placements)
    assert at_rest.full_tensor().tolist() == list(range(12))
    module.unshard()
    gathered = module.weight
    return held, (at_rest.device_mesh.ndim, gathered.device_mesh.ndim), gathered.to_local().tolist(), placements


def test_ops_pass_dispatch_modes_by_for_a_while() -> None:
    seen: list[Any] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing():
        with without_dispatch():
            made = torch.empty_strided((2, 3), (1, 2), device="meta")
        assert not seen and made.is_meta and made.stride() == (1, 2)
        torch.empty(2)
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_clipping_rests_on_calls_for_all_tensors_at_once(dtype: torch.dtype) -> None:
    tensors = [torch.full((300,), 3.0, dtype=dtype), torch.tensor(4.0, dtype=dtype), torch.zeros(0, dtype=dtype)]
    wide = torch.promote_types(dtype, torch.float32)
    norms = norms_of(tensors, wide)
    assert [n.dtype for n in norms] == [wide] * 3
    assert [round(n.item() ** 2) for n in norms] == [2700, 16, 0]  # in a half type, 2700 would be another number
    scale_all(tensors, torch.tensor(0.5, dtype=dtype))
    copies = [torch.empty_like(t) for t in tensors]
    copy_all(copies, tensors)
    assert all(map(torch.equal, copies, tensors))
    assert tensors[0].eq(1.5).all() and tensors[1] == 2


def test_decisions_are_kept_apart_by_whether_autocast_is_on_for_any_device() -> None:
    assert not autocast_is_on()
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        with torch.autocast(device, dtype=torch.bfloat16):
            assert autocast_is_on()
    assert not autocast_is_on()


def test_a_parameters_local_part_shares_its_memory_and_its_gradient_is_a_dtensor(workers: Any) -> None:
    assert workers.run(_local_part, ranks=2) == [(True, [2], True)] * 2


def _local_part() -> tuple[bool, list[int], bool]:
    p = nn.Parameter(distribute_tensor(torch.zeros(3), init_device_mesh("cpu", (2,)), [Replicate()]))
    whole, values = DTensor.from_local(torch.ones(3), p.device_mesh, p.placements), torch.ones(3)
    wrapped = wrapping(p)(values)
    assert (
        isinstance(p.data, DTensor)
        and isinstance(wrapped, DTensor)
        and storage_of(wrapped.to_local()) == storage_of(values)
    )
    assert (wrapped.shape, wrapped.stride(), wrapped.placements, wrapped.device_mesh, wrapped.requires_grad) == (
        whole.shape, whole.stride(), whole.placements, whole.device_mesh, False
    )  # fmt: skip
    assert storage_of(raw_local(p)) == storage_of(p.to_local()) and not raw_local(p).requires_grad
    assert raw_locals([p])[0] is raw_local(p)
    p.grad = torch.zeros_like(p)
    p.grad.to_local().detach().add_(1)  # what the job does to reduce parameters without dims
    uneven = DTensor.from_local(
        torch.zeros(2 - dist.get_rank()), p.device_mesh, [Shard(0)], run_check=False, shape=torch.Size([3]), stride=(1,)
    )
    return p.grad.to_local().tolist() == [1.0] * 3, [p.dim() + 1], tuple(uneven.shape) == (3,)


def test_watches_rest_on_a_store_of_their_own_and_on_what_the_flight_recorder_has(workers: Any) -> None:
    for counted, last, waited, posted_meanwhile in workers.run(_recorded, ranks=2):
        assert counted == 3, "each collective counts once, in whatever group"
        assert last == ("gloo:broadcast", 2, [[3, 5]])
        assert waited and posted_meanwhile, "a connection that waits for a key does not hold up the other"


def _recorded() -> tuple[int, tuple[Any, ...], bool, float]:
    before, group = collectives_entered(), dist.new_group([0, 1])
    begun = collectives_entered()  # a new group may meet once itself
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2), group=group)
    dist.broadcast(torch.ones(3, 5), 0, group=group)
    last = last_collective()
    told = tuple(last[key] for key in ("profiling_name", "collective_seq_id", "input_sizes"))
    assert begun >= before and {"p2p_seq_id", "process_group", "retired", "state"} <= set(last)
    store, other = job_store(), job_store()
    found: list[bool] = []

    def waiting() -> None:
        with pytest.raises(RuntimeError):
            store.wait([f"never-{dist.get_rank()}"], timedelta(seconds=3))
        found.append(True)

    thread = Thread(target=waiting)
    thread.start()
    other.set(f"rank-{dist.get_rank()}", "here")
    assert other.get(f"rank-{dist.get_rank()}") == b"here"
    still_waiting = not found
    thread.join()
    return collectives_entered() - begun, told, bool(found), still_waiting


# --- recording and planning -------------------------------------------------------------------------------------------


def test_deferred_parameters_rest_on_swapping_what_a_tensor_is() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    weak, tied = weakref.ref(parameter), [parameter]
    parameter.mark = "kept"
    calls: list[Any] = []
    parameter.register_hook(calls.append)
    deferred._to_meta(parameter)
    assert tied[0] is parameter and weak() is parameter and parameter.mark == "kept"
    assert parameter.is_meta and parameter.shape == (2, 3) and parameter.requires_grad and parameter.is_leaf
    (parameter * 2).sum().backward()
    assert len(calls) == 1 and calls[0].shape == (2, 3), "its hooks came along"


def test_a_job_is_made_under_a_profiler_as_recording_can_be_switched_off() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        with unprofiled():
            unseen = nn.Parameter(torch.ones(2).mul(3))
            deferred._to_meta(unseen)  # torch refuses this for a parameter that the profiler has recorded
        seen = torch.ones(2).add(3)
    assert unseen.is_meta and not seen.is_meta
    names = {event.name for event in profiler.events()}
    assert "aten::add" in names and "aten::mul" not in names


def test_recorded_views_rest_on_negative_and_conjugate_views() -> None:
    z = torch.complex(torch.tensor([1.0]), torch.tensor([2.0]))
    imaginary = z.conj().imag
    assert imaginary.is_neg() and not imaginary.is_conj() and imaginary.tolist() == [-2.0]
    again = torch._neg_view(torch.tensor([2.0]))
    assert again.is_neg() and again.tolist() == [-2.0]


def test_what_an_op_writes_rests_on_its_schema() -> None:
    x = torch.zeros(2)
    assert [v is x for _, v in written_by(aten.add_.Tensor, (x, torch.ones(2)), {})] == [True]
    assert [v is x for _, v in written_by(aten.add.out, (x, x), {"out": x})] == [True]
    assert written_by(aten.add.Tensor, (x, x), {}) == []
    for training in (True, False):  # whose schema does not say so
        given = (torch.ones(3, 2), None, None, mean := torch.zeros(2), var := torch.ones(2), training, 0.1, 1e-5)
        aten.native_batch_norm.default(*given)
        written = written_by(aten.native_batch_norm.default, given, {})
        assert [id(v) for _, v in written] == ([id(mean), id(var)] if training else [])
        assert bool(mean.any()) == training
    assert op_facts(aten.view.default).is_view and op_facts(aten.split.Tensor).is_view
    assert not op_facts(aten.add_.Tensor).is_view and not op_facts(aten.add.Tensor).is_view
    written = schema_of(aten.add_.Tensor)
    assert next(iter(written.arguments[0].alias_info.before_set)) == next(
        iter(written.returns[0].alias_info.before_set)
    )


def test_recorded_randomness_rests_on_tags_of_ops_and_on_one_default_generator() -> None:
    seeded = torch.Tag.nondeterministic_seeded
    for op in (aten.normal_.default, aten.uniform_.default, aten.randn.default, aten.randperm.default):
        assert seeded in op.tags, op
    assert seeded not in aten.add.Tensor.tags
    assert torch.Tag.data_dependent_output in aten._local_scalar_dense.default.tags
    assert torch.Tag.dynamic_output_shape in aten.nonzero.default.tags
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = torch.empty(5).normal_()
    torch.set_rng_state(state)
    assert torch.equal(torch.empty(5).normal_(), first)


def test_redistribution_rests_on_one_function_that_three_modules_call_by_its_name() -> None:
    methods, functions, gradients = dtensor_redistribution()
    for module in (methods, functions, gradients):
        assert [*inspect.signature(module.redistribute_local_tensor).parameters][:3] == [
            "local_tensor",
            "current_spec",
            "target_spec",
        ]
    for caller in (
        methods._FromTorchTensor.backward if hasattr(methods, "_FromTorchTensor") else methods._ToTorchTensor.backward,
        functions.OpDispatcher.redistribute_local_args,
        gradients.Redistribute.forward,
    ):
        assert "redistribute_local_tensor" in caller.__code__.co_names, caller
    for kind in dtensor_placements():
        assert [*inspect.signature(kind._make_shard_tensor).parameters][:5] == [
            "dim",
            "tensor",
            "mesh",
            "mesh_dim",
            "src_data_rank",
        ]


def test_planning_rests_on_the_ops_that_read_values() -> None:
    meta = torch.empty(2, 3, device="meta")
    with Shadow() as shadow, MetaFunctions():
        assert meta.sum().item() == 1.0 and float(meta.sum()) == 1.0 and bool(meta.sum() > 0)
        assert int(meta.long().sum()) == 1 and shadow.reads == 4
        assert meta.nonzero().shape == (6, 2) and meta.masked_select(meta > 0).shape == (6,)
        assert torch.equal(meta, meta) and shadow.reads == 7
        assert meta.tolist() == [[1.0] * 3] * 2
        assert meta[meta > 0].shape == (6,) and meta[torch.ones(2, dtype=torch.bool)].shape == (2, 3)
        assert meta.to("cpu").is_meta and meta.to(torch.float64).dtype == torch.float64
        assert (meta + torch.ones(3)).is_meta and torch.arange(3, device=meta.device).device.type == "cpu"
        assert meta.device.type == "cpu" and shadow.sized == 3
        assert meta.type() == "torch.FloatTensor" and meta.type("torch.DoubleTensor").dtype == torch.float64
        assert meta.type(meta.long().type()).dtype == torch.int64 and meta.type(torch.float16).is_meta
        assert meta.unique().shape == (6,) and meta.unique(dim=1).shape == (2, 3)
        assert [t.shape for t in meta.unique(return_inverse=True, return_counts=True)] == [(6,), (2, 3), (6,)]
        assert [t.shape for t in meta.unique_consecutive(return_inverse=True)] == [(6,), (2, 3)]
        assert meta[0].long().bincount(minlength=5).shape == (5,) and shadow.sized == 8
    with Shadow(fewer=True):
        assert meta.nonzero().shape == (3, 2) and meta[meta > 0].shape == (3,) and meta.unique().shape == (3,)
    with Shadow(contrary=True):
        assert not (meta.sum() > 0) and meta.nonzero().shape == (0, 2)


def test_recording_and_planning_rest_on_modes_that_see_every_op_below_autograd() -> None:
    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Ops():
        functional.linear(torch.ones(2, 3), torch.ones(4, 3)).sum().item()
    assert seen[-1] is aten._local_scalar_dense.default and aten.sum.default in seen
    assert not any(op is aten.linear.default for op in seen), "composite functions come as their parts"


def test_batches_and_outputs_rest_on_which_containers_are_known() -> None:
    Pair = namedtuple("Pair", "a b")

    @dataclass
    class Plain:
        a: int

    value = {"x": [1, (2, None)], "y": Pair(3, Plain(4))}
    leaves, spec = pytree.tree_flatten(value)
    assert leaves == [1, 2, None, 3, Plain(4)], "None and what is not registered are leaves"
    assert pytree.tree_unflatten(leaves, spec) == value and {spec: 1}[pytree.tree_flatten(value)[1]] == 1
    assert pytree.tree_map_only(int, str, value)["y"] == Pair("3", Plain(4))


def test_values_that_share_memory_are_told_by_their_storage() -> None:
    x, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert storage_of(x) == storage_of(x[1:]) == storage_of(x.detach()) == storage_of(x.data) != storage_of(other)
    within: list[int] = []
    torch.vmap(lambda t: (within.append(storage_of(t)), t * 2)[1])(x)
    assert within == [storage_of(x)]


# --- workers ----------------------------------------------------------------------------------------------------------


def test_workers_that_stay_alive_rest_on_what_dtensor_remembers_being_forgotten(workers: Any) -> None:
    for alive in [workers.run(_meshes_alive, ranks=2) for _ in range(3)][1:]:
        assert alive == [[], []], "the meshes of earlier runs are gone, and with them their groups and threads"


_MESHES: list[weakref.ref] = []  # of a worker, from run to run


def _meshes_alive() -> list[str]:
    alive = [str(mesh()) for mesh in _MESHES if mesh() is not None]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    _MESHES[:] = [weakref.ref(mesh), weakref.ref(mesh["a"])]
    x = distribute_tensor(torch.ones(4), mesh["a"], [Shard(0)])
    (x + x).redistribute(mesh["a"], [Replicate()])
    assert worker._caches(sys.modules["torch.distributed.tensor._redistribute"]), (
        "what is to be cleared is found by its class"
    )
    return alive


def test_names_of_groups_of_one_run_are_not_those_of_another(workers: Any) -> None:
    first, second = (int(workers.run(_next_group_name, ranks=2)[0]) for _ in range(2))
    assert second - first >= worker._GROUP_NAMES_A_RUN > 0


def _next_group_name() -> str:
    count = dist.distributed_c10d._world.group_count
    name: str = dist.new_group().group_name
    assert name == str(count), "a group is named by the count"
    return name


# --- transformers -----------------------------------------------------------------------------------------------------


def test_the_cuts_of_hugging_face_models_rest_on_their_tp_plan() -> None:
    pytest.importorskip("transformers")
    from zoo import build_llama

    plan = build_llama()._tp_plan
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise" and plan["model.layers.*.mlp.down_proj"] == "rowwise"


def test_fsdp2_learns_of_the_end_of_a_backward_by_a_node_of_this_name():
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

    x = torch.ones(2, requires_grad=True)
    (given,) = RegisterPostBackwardFunction.apply(SimpleNamespace(), x)
    assert given._base is x or given._base is None
    assert given.grad_fn.name() == "RegisterPostBackwardFunctionBackward"


def test_prediction_world_is_one_rank_of_many_and_gone_afterwards() -> None:
    with rehearsed_world(5, 8):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 8)
        work = dist.isend(torch.zeros(2), 3)
        assert is_done(work), "(before torch 2.15 its own is_completed says no)"
    assert not dist.is_initialized()


def test_prediction_tracker_sees_memory_come_resize_and_go() -> None:
    tracker = Tracker(nn.Identity(), lambda: None)
    with followed(tracker):
        t = torch.empty(4) + 1.0
        t.untyped_storage().resize_(0)
        del t
        with rehearsed_world(0, 2):  # the shapes that DTensor asks for are of the whole, and no memory
            mesh = init_device_mesh("cpu", (2,))
            sharded = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)], run_check=False)
            torch._foreach_add_([sharded], 1.0)
    kinds = [type(event) for event in tracker.trace.events]
    sizes = [e.nbytes for e in tracker.trace.events if isinstance(e, Allocated)]
    assert {16, 24} <= set(sizes)
    assert 48 not in sizes
    assert [e.nbytes for e in tracker.trace.events if isinstance(e, Resized)] == [0]
    assert Freed in kinds
    assert "resize_" not in vars(torch.UntypedStorage)
    assert "_propagate_tensor_meta_non_cached" not in vars(sharding_propagator())


def test_a_group_tells_how_long_its_collectives_between_hosts_wait_and_a_module_keeps_its_hooks_in_known_tables(
    tmp_path: Path,
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    distributed_c10d._set_pg_timeout(timedelta(seconds=7), dist.group.WORLD)
    assert timeout_of(dist.group.WORLD) == timedelta(seconds=7)
    module = nn.Linear(2, 2)
    module.register_forward_hook(print, with_kwargs=True, always_call=True)
    module.register_forward_pre_hook(print, with_kwargs=True)
    module.register_full_backward_hook(print)
    module.register_full_backward_pre_hook(print)
    assert all(len(getattr(module, table)) == 1 for table in HOOK_TABLES)


def test_what_a_tensor_without_memory_says_of_its_device_is_what_its_mode_says() -> None:
    """``Tracker`` and ``KnownValues`` answer themselves where C++ asks."""
    heard: list[Any] = []

    class Hearing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is DEVICE:
                assert isinstance(args[0], FakeTensor)
                heard.append((out, args[0].device))
            return out

    with FakeTensorMode() as fake:
        x, w = torch.empty(3, 4, requires_grad=True), torch.empty(4, 4)
    with fake, Hearing():
        functional.linear(x, w).relu().sum().backward()
        torch._foreach_mul([x.detach(), w], 2.0)
    assert heard
    assert all(a == b == torch.device("cpu") for a, b in heard)


def test_a_pool_knows_threads_of_groups_by_their_name(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    groups = [dist.new_group([0]) for _ in range(3)]
    deadline = time.monotonic() + 20  # a thread gives itself its name
    while threads_named(os.getpid(), GROUP_THREAD) < 2 * (1 + len(groups)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads_named(os.getpid(), GROUP_THREAD) >= 2 * (1 + len(groups))
