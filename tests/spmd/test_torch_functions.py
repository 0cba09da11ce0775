"""The table of torch functions against the torch that is installed: what neither knows, and what torch knows by now."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import get_overridable_functions

from meshwright.private import schemas
from meshwright.spmd import torch_functions as table
from meshwright.spmd.torch_functions import (
    NUMBERS,
    YES_OR_NO,
    aliases,
    draws,
    is_fact,
    name_of,
    op_facts,
    operator,
    reshaped,
    writes,
)

aten = torch.ops.aten

# Functions without a schema that give a tensor of their own.
_COMPUTES = frozenset(
    "__add__ __sub__ __mul__ __truediv__ __div__ __mod__ __matmul__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __invert__ \
    __radd__ __rmul__ __rand__ __ror__ __rxor__ dsmm hsmm saddmm spmm".split()
)
# Functions without a schema that are no functions of tensors, or that only look at one.
_LOOKS = frozenset("__nonzero__ __long__ _is_view autocast const_data_ptr".split())

# Methods of tensors that give no tensor and are neither facts nor reads that Python acts on.
_OF_OTHER_KINDS = frozenset(
    # of sparse and quantized tensors, and of other devices, which are not cut: they fall back
    "dense_dim sparse_dim is_coalesced _nnz _dimI _dimV q_scale q_zero_point q_per_channel_axis qscheme is_distributed \
    is_pinned is_set_to record_stream _is_zerotensor _nested_tensor_size".split()
)


def overridable() -> Iterator[Any]:
    for group in get_overridable_functions().values():
        yield from group


def test_a_function_that_has_no_schema_is_known_by_name() -> None:
    unknown = {
        name_of(f) for f in overridable()
        if not isinstance(f, types.FunctionType) and getattr(f, "__name__", "") not in ("__get__", "")
        and not is_fact(f) and not schemas(table._AS.get(name_of(f), name_of(f)))
    }  # fmt: skip
    assert unknown <= _COMPUTES | _LOOKS | YES_OR_NO | NUMBERS, "say in spmd/torch_functions.py what they do"


def test_a_property_of_tensors_is_known_by_name() -> None:
    found = {n for n in dir(Tensor) if type(getattr(Tensor, n)).__name__ == "getset_descriptor" and n[:2] != "__"}
    own = frozenset(
        "_backward_hooks _base _cdata _grad _grad_fn _has_symbolic_sizes_strides _post_accumulate_grad_hooks _python_dispatch \
        grad_dtype name retains_grad volatile".split()  # of autograd, and torch's own
    )
    own |= found & {"_has_grad_dtype_override"}  # torch has it from 2.15 on
    of_tensors = {n for n in found if getattr(Tensor, n).__get__ in table._TENSOR_PROPERTIES}
    facts = {n for n in found if getattr(Tensor, n).__get__ in table._NO_VALUE}
    assert of_tensors == {"T", "mT", "H", "mH", "data", "real", "imag"}
    assert found == of_tensors | facts | own, "a new property: of shape, of memory, of autograd, or a tensor?"


def test_a_method_that_gives_no_tensor_is_a_fact_or_reads_values() -> None:
    wrong = []
    for name in dir(Tensor):
        said = [s for s in schemas(name) if s.arguments and str(s.arguments[0].type) == "Tensor"]
        if (
            not said
            or not callable(getattr(Tensor, name))
            or any("Tensor" in str(r.type) for s in said for r in s.returns)
        ):
            continue
        func, is_write = getattr(Tensor, name), operator(name).writes
        if not (is_fact(func) or is_write or name in YES_OR_NO | NUMBERS | _OF_OTHER_KINDS):
            wrong.append(name)
    assert not wrong


def test_names_that_stand_in_the_table_are_needed() -> None:
    for name, known_as in table._AS.items():
        assert schemas(known_as), f"{name}: torch has no {known_as}"
        assert operator(name) != operator(known_as), f"{name}: torch says so itself by now"
    for name in table._NO_WRITE:
        if name == "rename_" and not hasattr(Tensor, name):
            continue  # dims have no names from torch 2.13 on
        assert table._is_in_place(name, schemas(name))
    assert torch.Tag.inplace_view in aten.detach_.default.tags


def _overloads() -> Iterator[Any]:
    for packet in (getattr(aten, name) for name in dir(aten)):
        for overload in getattr(packet, "overloads", list)():
            yield getattr(packet, overload)


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="torch has no such tag before 2.13")
def test_a_write_in_place_by_its_schemas_is_one_by_its_tags() -> None:
    tagged: dict[str, bool] = {}
    for op in _overloads():
        name = op._schema.name.removeprefix("aten::")
        tagged[name] = tagged.get(name, False) or torch.Tag.inplace in op.tags
    assert sum(tagged.values()) > 100
    differ = {name for name, is_tagged in tagged.items() if is_tagged != table._is_in_place(name, schemas(name))}
    without_tags = {name for name in differ if name.startswith("_no_grad_")}  # for scripts
    without_tags |= differ & {"shallow_copy_data_"}  # what compiled programs of torch 2.15 have for ``.data =``
    assert differ == without_tags


@pytest.mark.parametrize("name", sorted(n for n in dir(Tensor) if n.endswith("_") and not n.endswith("__")))
def test_a_name_with_a_bar_at_its_end_writes(name: str) -> None:
    writes_nothing = ("requires_grad_", "is_shared_", "share_memory_", "rename_")
    assert writes(getattr(Tensor, name), (), {}) == (name not in writes_nothing)


def test_other_ways_to_write() -> None:
    for func in (Tensor.__iadd__, Tensor.__setitem__, Tensor.data.__set__, torch._foreach_add_, torch._C._nn.silu_):  # type: ignore[attr-defined]
        assert writes(func, (), {}), func
    relu, x = torch.nn.functional.relu, torch.ones(2)
    assert writes(relu, (x,), {"inplace": True}) and writes(relu, (x, True), {})
    assert not writes(relu, (x,), {}) and not writes(Tensor.add, (x, x), {}) and not writes(torch.sort, (x,), {})


def test_what_reshapes_in_place_has_a_function_that_gives_a_new_tensor() -> None:
    found = {n for n in dir(Tensor) if reshaped(getattr(Tensor, n)) is not None}
    assert found == {f"{n}_" for n in "squeeze unsqueeze transpose t swapaxes swapdims as_strided".split()}
    assert reshaped(torch.as_strided_) is Tensor.as_strided


def test_what_can_alias() -> None:
    for func in (Tensor.__getitem__, Tensor.float, Tensor.T.__get__, torch.reshape, torch.einsum, torch.dropout):  # type: ignore[attr-defined]
        assert aliases(func), func
    for func in (torch.add, Tensor.add_, torch.cat, Tensor.clone, torch.nn.functional.gumbel_softmax):
        assert not aliases(func), func


def _drawn_by_code(func: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Whether the code of a Python function of torch's names a function that draws."""
    for name in func.__code__.co_names:
        if operator(name).draws:
            return True
        inner = func.__globals__.get(name)
        of_torch = isinstance(inner, types.FunctionType) and inner.__module__.startswith("torch")
        if of_torch and inner not in seen and _drawn_by_code(inner, seen | {func}):
            return True
    return False


def test_python_functions_that_draw_within_are_known() -> None:
    within = frozenset(["multi_head_attention_forward"])  # for dropout in an attention: see ``operator``
    names = {f.__name__ for f in overridable() if isinstance(f, types.FunctionType) and _drawn_by_code(f)}
    assert {n for n in names if not draws(n)} == within
    assert not any(map(draws, ("scaled_dot_product_attention", "lstm", "add", "linear")))
    assert all(map(draws, ("rand", "binomial", "_standard_gamma", "dropout", "dropout2d", "rrelu_", "randperm")))


def test_draws_in_place_keep_or_overwrite_what_was_there() -> None:
    arguments = {"random_": (5,), "geometric_": (0.5,), "bernoulli_": (0.5,), "log_normal_": (), "cauchy_": ()}
    for op in _overloads():
        name = op.overloadpacket.__name__
        if not (op_facts(op).draws and name.endswith("_") and hasattr(Tensor, name)):
            continue
        given, found = arguments.get(name, ()), []
        for before in (1.0, 2.0):
            torch.manual_seed(0)
            found.append(getattr(torch.full((64,), before), name)(*given))
        assert op_facts(op).overwrites == torch.equal(*found), op
    assert op_facts(aten.copy_.default).overwrites and not op_facts(aten.add_.Tensor).overwrites
    assert not op_facts(aten.dropout_.default).overwrites
