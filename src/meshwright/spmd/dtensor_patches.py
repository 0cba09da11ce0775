"""The patches of DTensor, for as long as a job lives: other lines of ``patches.TABLE``.

DTensorPatch   what DTensor does for a function of ATen
SetterPatch    what an assignment to an attribute of a tensor does
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from meshwright.private import dtensor_handlers, dtensor_placements, dtensor_redistribution
from meshwright.spmd.patches import JOB, LOCK, TABLE, Patch, PatchEntry

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(a function of ATen, its arguments, its keyword arguments) → its result."""


class _Counted:
    """Something that the first of several blocks changes, and the last one changes back."""

    _blocks = 0

    @contextmanager
    def _within(self, begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
        with LOCK:
            if not self._blocks:
                begin()
            self._blocks += 1
        try:
            yield
        finally:
            with LOCK:
                self._blocks -= 1
                if not self._blocks and not sys.is_finalizing():  # Python's own modules are gone then
                    end()


class DTensorPatch(_Counted):
    """What DTensor does for a function of ATen, replaced while at least one ``on`` block runs.

    Args:
        why, until: for the line in ``TABLE``.
    """

    def __init__(self, op: Any, why: str, until: str) -> None:
        self._op = op
        self._torch_s: Handler | None = None
        TABLE.append(PatchEntry(f"DTensor's handler of {op}", why, until))

    def on(self, handler: Handler) -> AbstractContextManager[None]:
        """While on, ``handler(op, args, kwargs)`` is called. All blocks that run at the same time give the same handler."""

        def begin() -> None:
            self._torch_s = dtensor_handlers().get(self._op)
            dtensor_handlers()[self._op] = handler

        return self._within(begin, self._put_back)

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch does for it. Another thread that calls the function at this moment gets the same."""
        if self._torch_s is not None:
            return self._torch_s(self._op, args, kwargs)
        handler = dtensor_handlers().pop(self._op, None)
        try:
            return self._op(*args, **kwargs)
        finally:
            if handler is not None and self._blocks:
                dtensor_handlers()[self._op] = handler

    def _put_back(self) -> None:
        if self._torch_s is None:
            dtensor_handlers().pop(self._op, None)
        else:
            dtensor_handlers()[self._op] = self._torch_s


class SetterPatch(_Counted):
    """What an assignment to an attribute in C does, replaced in a subclass of Tensor while at least one ``on`` block runs.

    Args:
        name: the attribute, of ``torch.Tensor``.
        why, until: for the line in ``TABLE``.
    """

    def __init__(self, owner: str, name: str, why: str, until: str) -> None:
        self._name = name
        TABLE.append(PatchEntry(f"{owner}.{name} (its setter)", why, until))

    def on(
        self, owner: type, setter: Callable[[Any, Any], None], values: type = object
    ) -> AbstractContextManager[None]:
        """While on, ``t.name = value`` calls ``setter(t, value)``, if no function mode answers. All blocks that run at the same
        time give the same setter.

        Args:
            values: the type of the values that it is called for; others go to torch's own.
        """
        of_tensor = getattr(torch.Tensor, self._name)
        attribute = property(of_tensor.__get__, _Setter(of_tensor.__set__, setter, values))
        return self._within(lambda: setattr(owner, self._name, attribute), lambda: delattr(owner, self._name))


class _Setter:
    """A setter that function modes take for torch's own, as they know it. It is equal to that."""

    __name__ = "__set__"

    def __init__(self, torch_s: Any, setter: Callable[[Any, Any], None], values: type) -> None:
        self._torch_s, self._setter, self._values = torch_s, setter, values
        self.__self__ = torch_s.__self__  # by which a function mode knows whose setter it is

    def __call__(self, t: Any, value: Any) -> None:
        if not isinstance(value, self._values):
            self._torch_s(t, value)
        elif has_torch_function((t,)):
            handle_torch_function(self, (t,), t, value)
        else:
            self._setter(t, value)

    def __eq__(self, other: object) -> bool:
        return other is self or bool(other == self._torch_s)

    def __hash__(self) -> int:
        return hash(self._torch_s)


READ = DTensorPatch(
    torch.ops.aten._local_scalar_dense.default,
    "the item of a DTensor that is Partial is this rank's part (runtime/weights/partial_reads.py)",
    JOB,
)
_ATEN = torch.ops.aten
MEANS = tuple(
    DTensorPatch(
        op, "torch weighs the means of all ranks alike, in uneven shares too (runtime/weights/redistribution.py)", JOB
    )
    for op in (_ATEN.mean.default, _ATEN.mean.dim)
)
POSITIONS = tuple(
    DTensorPatch(
        op, "torch takes a rank's part for a chunk, or for as large as all (runtime/weights/redistribution.py)", JOB
    )
    for op in (
        _ATEN.argmax.default,
        _ATEN.argmin.default,
        _ATEN.embedding.default,
        _ATEN._unsafe_view.default,
        _ATEN.mse_loss.default,
    )
)
INDEXED = tuple(
    DTensorPatch(
        op,
        "torch takes parts of tensors of different shapes for the same rows (runtime/weights/redistribution.py)",
        JOB,
    )
    for op in (_ATEN.gather.default, _ATEN.scatter.src, _ATEN.scatter.value, _ATEN.scatter_add.default)
)
VIEWS = tuple(
    DTensorPatch(op, "torch loses what is written to a view that it had to gather (runtime/weights/copied_views.py)", JOB)
    for op in (
        _ATEN.slice.Tensor, _ATEN.select.int, _ATEN.diagonal.default, _ATEN.split.Tensor, _ATEN.split_with_sizes.default,
        _ATEN.view.default, _ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.expand.default,
    )
)  # fmt: skip
WRITES = tuple(
    DTensorPatch(op, "DTensor lacks such writes, or does each rank's part alone (runtime/weights/copied_views.py)", JOB)
    for op in (
        _ATEN.fill_.Tensor, _ATEN.index_put_.default, _ATEN.index_fill_.int_Scalar, _ATEN.index_fill_.int_Tensor,
        _ATEN.index_copy_.default, _ATEN.index_add_.default, _ATEN.scatter_.src, _ATEN.scatter_.value,
        _ATEN.scatter_add_.default, _ATEN.masked_scatter_.default, _ATEN.triu_.default, _ATEN.tril_.default,
        _ATEN.renorm_.default, _ATEN.eye.m_out, _ATEN.addmv_.default, _ATEN.masked_fill_.Tensor,
    )
)  # fmt: skip
DRAWS = tuple(
    DTensorPatch(op, "each rank draws for its part alone: parts with the same numbers (runtime/weights/draws.py)", JOB)
    for op in (
        _ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.bernoulli_.float, _ATEN.bernoulli_.Tensor,
        _ATEN.exponential_.default, _ATEN.log_normal_.default, _ATEN.cauchy_.default, _ATEN.geometric_.default,
        _ATEN.random_.default, _ATEN.random_.to, getattr(_ATEN.random_, "from"), _ATEN.bernoulli.default,
        _ATEN.rand_like.default, _ATEN.randn_like.default, _ATEN.randint_like.default, _ATEN.randint_like.low_dtype,
        _ATEN.native_dropout.default,
    )
)  # fmt: skip
LOSSES = tuple(
    DTensorPatch(op, "torch divides by the elements of each rank's part (runtime/weights/reductions.py)", JOB)
    for op in (
        _ATEN.mse_loss.default, _ATEN.mse_loss_backward.default, _ATEN.huber_loss.default,
        _ATEN.huber_loss_backward.default, _ATEN.smooth_l1_loss.default, _ATEN.smooth_l1_loss_backward.default,
        _ATEN.soft_margin_loss.default, _ATEN.soft_margin_loss_backward.default, _ATEN.binary_cross_entropy.default,
        _ATEN.binary_cross_entropy_backward.default, _ATEN.binary_cross_entropy_with_logits.default,
    )
)  # fmt: skip
SUMS = tuple(
    DTensorPatch(op, "torch adds parts of norms as if they were sums (runtime/weights/reductions.py)", JOB)
    for op in (_ATEN.sum.default, _ATEN.sum.dim_IntList)
)
ANYS = tuple(
    DTensorPatch(op, "torch counts the ranks that have found one (runtime/weights/reductions.py)", JOB)
    for op in (_ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims)
)
FILLS = (
    DTensorPatch(
        _ATEN.fill_.Scalar, "torch fills each summand of a sum over parts (runtime/weights/reductions.py)", JOB
    ),
)
DATA = SetterPatch(
    "torch.distributed.tensor.DTensor",
    "data",
    "torch loses an assignment to the data of a DTensor (runtime/weights/copied_views.py)",
    JOB,
)
DATA_OF_PLAIN = SetterPatch(
    "torch.nn.Parameter",
    "data",
    "a DTensor as the data of a plain parameter ends the process in torch (runtime/weights/copied_views.py)",
    JOB,
)


@functools.cache
def redistributions() -> tuple[Patch, ...]:
    """The function that gathers and divides DTensors, wherever torch calls it. DTensor is imported only if this is called."""
    why = (
        "fused parameters and uneven shares over tp are gathered as the recipe says (runtime/weights/redistribution.py)"
    )
    return tuple(Patch(module, "redistribute_local_tensor", why, JOB) for module in dtensor_redistribution())


@functools.cache
def distributions() -> tuple[Patch, ...]:
    """The functions by which ``distribute_tensor`` takes parts: along a dim that one axis shards, and along one that two do."""
    why = "parts over tp are those of the recipe (runtime/weights/redistribution.py)"
    kinds = dtensor_placements()
    return tuple(Patch(kind, "_make_shard_tensor", why, JOB, of_class=True) for kind in kinds)
