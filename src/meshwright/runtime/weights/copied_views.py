"""``write_through``: what is written to a slice of a sharded tensor, or assigned to its ``data``, is not lost.

DTensor gathers a tensor to slice a dim that is sharded, and slices the copy (torch 2.13). What is written to the copy is lost,
without an error; so is what is assigned to ``data``:

    model.embedding.weight.data[0].zero_()
    p.data = p.data * 0.9

An assignment gives the tensor other memory, as on one device: what shares its former memory keeps the former values.

    before = p.data
    p.data = average
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.errors import Finding, PlanError
from meshwright.private import description_of, pytree, raw_local, schema_of, set_raw_local, storage_of
from meshwright.runtime.weights.redistribution import gathered, is_in_even_chunks, is_sharded
from meshwright.spmd import dtensor_patches
from meshwright.spmd.dtensor_patches import Handler
from meshwright.spmd.patches import lasting

View = Callable[[Any], Any]


def write_through(owner: object) -> None:
    """Makes such writes reach the tensor, as long as ``owner`` lives, which this does not keep alive. They are collective.

    Functions that write to positions (``w[mask] = 0``) and that DTensor lacks, or has without plain tensors, are there as well.
    """
    views = (view.on(_viewing(view)) for view in dtensor_patches.VIEWS)
    writes = (write.on(_writing(write)) for write in dtensor_patches.WRITES)
    data = (
        dtensor_patches.DATA.on(DTensor, _set_data),
        dtensor_patches.DATA_OF_PLAIN.on(nn.Parameter, _set_plain_data, DTensor),
    )
    lasting(owner, [*views, *writes, *data])


class CopiedView(DTensor):
    """A DTensor that is a view of another on one device, and a copy here. What is written to it is written to the other, too.

    Attributes:
        root: the other, which is no such view.
        of_root: the whole root → the whole view, which shares its memory.
        relatives: all views that were made of the same first view; they are written, too.
    """

    root: DTensor
    of_root: View
    relatives: list[weakref.ref[CopiedView]]

    @classmethod
    def of(cls, source: DTensor, view: View, result: DTensor) -> CopiedView:
        made: CopiedView = cls(raw_local(result), description_of(result), requires_grad=False)
        if isinstance(source, CopiedView):
            made.root, made.relatives = source.root, source.relatives
            made.of_root = lambda whole: view(source.of_root(whole))
        else:
            # An alias: ``source`` gets other memory if its data are assigned.
            alias = DTensor(raw_local(source).detach(), description_of(source), requires_grad=False)
            made.root, made.relatives, made.of_root = alias, [], view
        made.relatives.append(weakref.ref(made))
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if any(isinstance(t, CopiedView) for t in written):
            _write(written, func, args, kwargs)
            return args[0] if schema_of(func).returns else None
        result = func(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs))
        return _views(args[0], func, args[1:], kwargs, result) if _is_view(func) else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return _plain(self).__deepcopy__(memo)


def _write(written: list[DTensor], func: Any, args: Any, kwargs: Any) -> None:
    """Calls a function of ATen that writes to DTensors, some of which may be copied views. Collective."""
    roots: dict[int, tuple[DTensor, Tensor]] = {}

    def whole(t: Any) -> Any:
        if not isinstance(t, CopiedView):
            return roots.setdefault(_memory(t), (t, t.full_tensor()))[1] if any(t is w for w in written) else _whole(t)
        if _memory(t.root) not in roots:
            roots[_memory(t.root)] = t.root, t.root.full_tensor()
        return t.of_root(roots[_memory(t.root)][1])

    with torch.no_grad():
        wholes = [whole(t) for t in written]
        if torch.Tag.nondeterministic_seeded in func.tags:  # DTensor makes all ranks draw alike
            func(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs))
            for values, t in zip(wholes, written, strict=True):
                values.copy_(_whole(t))
        else:
            arguments, keywords = pytree.tree_map(whole, (tuple(args), dict(kwargs)))
            func(*arguments, **keywords)
        for root, values in roots.values():
            copy_part(values, root)
        for view in _relatives(written):
            copy_part(view.of_root(roots[_memory(view.root)][1]), _plain(view))


def _relatives(written: list[DTensor]) -> Iterator[CopiedView]:
    """The views that are still in use and were made of the same as one of those written to."""
    for t in written:
        for relative in t.relatives if isinstance(t, CopiedView) else ():
            if (view := relative()) is not None:
                yield view


def _writing(patch: dtensor_patches.DTensorPatch) -> Handler:
    """For a function that writes to positions of the whole tensor."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = _written(op, args, kwargs)
        if not written or any(p.is_partial() for t in written for p in t.placements):
            return patch.plain(args, kwargs)
        _write(written, op, args, kwargs)
        return written[0]

    return handler


def _viewing(patch: dtensor_patches.DTensorPatch) -> Handler:
    """For a function that returns views: those that had to be gathered are copied views."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, rest = args[0], args[1:]
        result = _reshaped(patch, source, rest) if op in _RESHAPES else patch.plain(args, kwargs)
        first = result if isinstance(result, DTensor) else next(iter(result), None)
        return _views(source, op, rest, kwargs, result) if first is not None and _is_copy(source, first) else result

    return handler


# They take shapes of local tensors.
_RESHAPES = {torch.ops.aten.view.default, torch.ops.aten.expand.default}


def _reshaped(patch: dtensor_patches.DTensorPatch, source: DTensor, rest: Any) -> Any:
    """The result of a function that takes a shape. Torch takes parts for even chunks; with others it may fail on some ranks."""
    if is_in_even_chunks(source):
        try:
            return patch.plain((source, *rest), {})
        except RuntimeError:  # on all ranks: dims that are sharded would be joined or divided
            pass
    return patch.plain((gathered(source), *rest), {})


def _views(source: DTensor, op: Any, rest: Any, kwargs: Any, result: Any) -> Any:
    """The results of a view function as views of ``source``."""
    if isinstance(result, DTensor):
        return CopiedView.of(source, lambda whole: op(whole, *rest, **kwargs), result)

    def number(i: int) -> View:
        return lambda whole: op(whole, *rest, **kwargs)[i]

    return type(result)(CopiedView.of(source, number(i), one) for i, one in enumerate(result))


def _is_copy(source: DTensor, result: DTensor) -> bool:
    """Whether a result was gathered over an axis: the same on all ranks, whatever their parts."""
    return any(
        is_sharded(before) and after.is_replicate() and source.device_mesh.size(axis) > 1
        for axis, (before, after) in enumerate(zip(source.placements, result.placements, strict=True))
    )


def _is_view(func: Any) -> bool:
    """Whether a function returns views of its first argument."""
    returns, arguments = schema_of(func).returns, schema_of(func).arguments
    alias = arguments[0].alias_info if arguments else None
    return bool(returns) and alias is not None and not alias.is_write and returns[0].alias_info is not None


def _written(func: Any, args: Any, kwargs: Any) -> list[DTensor]:
    """The DTensors that a function of ATen writes to."""
    arguments = schema_of(func).arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    written = [
        given.get(argument.name) for argument in arguments if argument.alias_info and argument.alias_info.is_write
    ]
    return [value for value in pytree.tree_leaves(written) if isinstance(value, DTensor)]


def _plain(t: Any) -> Any:
    return DTensor(raw_local(t), description_of(t), requires_grad=False) if isinstance(t, CopiedView) else t


def _memory(t: DTensor) -> int:
    return storage_of(raw_local(t))


def _whole(t: Any) -> Any:
    return _plain(t).full_tensor() if isinstance(t, DTensor) else t


def copy_part(whole: Tensor, t: DTensor) -> None:
    """Copies this rank's part of a whole tensor into ``t``."""
    mesh = t.device_mesh
    with torch.no_grad():
        replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        raw_local(t).copy_(raw_local(replicated.redistribute(placements=t.placements)))


def _set_data(t: DTensor, value: Any) -> None:
    """``t.data = value``: the local tensor of ``t`` is replaced by another one, by which jobs see the change. It shares the
    memory of the value's, if that has the same form; a whole tensor is copied."""
    if not isinstance(value, Tensor) or (value.shape, value.dtype, value.device) != (t.shape, t.dtype, t.device):
        raise PlanError([_other_kind(t, value)], "this assignment to the data of a tensor")
    local = raw_local(t)
    with torch.no_grad(), torch.inference_mode(mode=False):
        if _has_form_of(t, value):
            new = raw_local(value)
            new = new.clone() if new.is_inference() else new.detach()
        else:
            new = torch.empty_like(local)
            copy_part(_whole(value).detach(), DTensor(new, description_of(t), requires_grad=False))
        set_raw_local(t, new)


def _set_plain_data(p: nn.Parameter, value: DTensor) -> None:
    """For a parameter that no axis divides, which is no DTensor."""
    p.data = _whole(value)


def _has_form_of(t: DTensor, value: Tensor) -> bool:
    """Whether a value is divided as ``t`` is, with local tensors of the same strides."""
    if not isinstance(value, DTensor) or isinstance(value, CopiedView):
        return False
    same_layout = (value.device_mesh, value.placements) == (t.device_mesh, t.placements)
    return same_layout and raw_local(value).stride() == raw_local(t).stride()


def _other_kind(t: DTensor, value: Any) -> Finding:
    def kind(x: Any) -> str:
        return f"shape {tuple(x.shape)}, {x.dtype}, {x.device}" if isinstance(x, Tensor) else type(x).__name__

    return Finding(
        where="data of a sharded parameter or gradient",
        given=kind(value),
        required=f"{kind(t)}, as before: the whole tensor, or a DTensor",
        fix="p.data = value.to(device=p.device, dtype=p.dtype)  # of the whole shape",
    )


__all__ = ["copy_part", "write_through"]
