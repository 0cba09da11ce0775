"""``GlobalTensor``: a tensor with its global shape; underneath, this rank's local tensor and its layout.

Model code sees a ``torch.Tensor`` with the global shape. A torch function that is called with one is answered by the
``Dispatcher`` of that tensor. The autograd graph is that of the local tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.layout import REPLICATE, Layout, Shard
from meshwright.private import make_wrapper, pytree, storage_of, without_modes, without_subclasses, wrapper
from meshwright.spmd.alias import Geometry, Memory, Strides, cached_geometries, contiguous, same_strides

if TYPE_CHECKING:
    from meshwright.spmd.dispatcher import Dispatcher

_NO_SOURCES: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False, slots=True)
class Spec:
    """Everything about a tensor that a decision may depend on. Made by ``spec``: equal Specs are one object.

    Attributes:
        layout: along the axis; ``REPLICATE`` for a tensor that is not a ``GlobalTensor``.
        strides: the strides on one device, if the tensor is sharded; None if contiguous. If the tensor is not sharded: None,
            as the local strides say it.
        offset: the offset in its storage on one device, if the tensor is sharded.
        local_strides: the strides of the local tensor.
        parameter: whether it is a parameter of the model.
    """

    layout: Layout
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    strides: Strides | None
    offset: int
    local_strides: Strides
    parameter: bool

    @property
    def is_contiguous(self) -> bool:
        """Whether the tensor is contiguous on one device."""
        if isinstance(self.layout, Shard):
            return self.strides is None
        return not self.local_strides or same_strides(self.shape, self.local_strides, contiguous(tuple(self.shape)))


spec = functools.lru_cache(maxsize=32768)(Spec)


class GlobalTensor(Tensor):
    """A tensor with a global shape, a local tensor and a layout.

    The attributes have a prefix, because a plain name could shadow one of ``torch.Tensor``.

    Attributes:
        _mw_local: this rank's local tensor.
        _mw_shape: the global shape.
        _mw_layout: ``Shard``, ``PARTIAL``, or ``REPLICATE`` (planning only: a parameter whose layout is not decided yet).
        _mw_dispatcher: answers torch functions of this tensor.
        _mw_memo: results of collectives of this tensor, by kind, with the version of the local tensor that they belong to.
        _mw_sources: planning only: the parameters from whose layouts the layout of this tensor follows.
        _mw_parameter: (name of the parameter that this tensor is, or is a slice of; for each dim the dim of the parameter).
        _mw_origin: (base, how to select this tensor from it), if a fallback made it as a view: a write goes to the base too.
        _mw_strides: the strides on one device, if the tensor is sharded (see ``alias``); None: contiguous.
        _mw_offset: the offset in its storage on one device, if the tensor is sharded.
        _mw_memory: shared by all global tensors of one storage; None until there is a second one.
        _mw_silent: whether the tensor comes from ``.data``: autograd does not know of a write to it.
        _mw_apart: whether it shares memory with another global tensor on one device but not on this rank: writes are refused.
        _mw_spec: the Spec, if it is known and says everything that a decision depends on (see ``spec_of``).
    """

    _mw_local: Tensor
    _mw_shape: torch.Size
    _mw_layout: Layout
    _mw_dispatcher: Dispatcher
    _mw_memo: dict[str, Any]
    _mw_sources: frozenset[str] = _NO_SOURCES
    _mw_parameter: tuple[str, tuple[int, ...]] | None = None
    _mw_origin: tuple[GlobalTensor, Any] | None = None
    _mw_strides: Strides | None = None
    _mw_offset: int = 0
    _mw_memory: Memory | None = None
    _mw_silent: bool = False
    _mw_apart: bool = False
    _mw_spec: Spec | None = None

    @staticmethod
    def __new__(
        cls: type[GlobalTensor],
        local: Tensor,
        layout: Layout,
        dispatcher: Dispatcher,
        sources: frozenset[str] = _NO_SOURCES,
        parameter: tuple[str, tuple[int, ...]] | None = None,
    ) -> GlobalTensor:
        shape = list(local.shape)
        if isinstance(layout, Shard):
            shape[layout.dim] = layout.size
        self = wrapper(cls, local, shape)
        self._mw_local, self._mw_shape, self._mw_layout, self._mw_dispatcher = (
            local,
            torch.Size(shape),
            layout,
            dispatcher,
        )
        self._mw_memo, self._mw_sources, self._mw_parameter = {}, sources, parameter
        return self

    # The facts that models and deciders ask for most, many times for each operation. Methods of this class are no torch
    # functions, which cost ten times as much; the torch functions (``torch.numel(x)``) give the same answers.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._mw_shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._mw_shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._mw_local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._mw_local.device

    def size(self, dim: int | None = None) -> Any:
        return self._mw_shape if dim is None else self._mw_shape[dim]

    def dim(self) -> int:
        return len(self._mw_shape)

    def numel(self) -> int:
        return self._mw_shape.numel()

    # How the tensor lies in memory on one device.

    def stride(self, dim: int | None = None) -> Any:
        strides = self._mw_geometry().strides or contiguous(self._mw_shape)
        return strides if dim is None else strides[dim]

    def storage_offset(self) -> int:
        return self._mw_geometry().offset

    def data_ptr(self) -> int:
        """A number that is equal for two global tensors if they begin at one address on one device."""
        memory = self._mw_local.untyped_storage()
        return (memory.data_ptr() or storage_of(self._mw_local)) + self.storage_offset() * self._mw_local.element_size()

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        if memory_format == torch.contiguous_format:
            return self._mw_strides is None if isinstance(self._mw_layout, Shard) else self._mw_local.is_contiguous()
        geometries = cached_geometries(Tensor.contiguous, (self._mw_geometry(),), (("memory_format", memory_format),))
        return geometries is not None and geometries[0].source is not None

    def _mw_geometry(self) -> Geometry:
        """How the tensor lies in memory on one device: as on this rank, if it is not sharded."""
        if isinstance(self._mw_layout, Shard):
            return Geometry(self._mw_shape, self._mw_strides, self._mw_offset, self._mw_local.dtype)
        return geometry_of(self._mw_local)

    def _mw_twin(self) -> GlobalTensor:
        """Another global tensor with the same local tensor. It stays unchanged if a function changes this one's shape or
        ``.data``."""
        twin = GlobalTensor(self._mw_local, self._mw_layout, self._mw_dispatcher)
        twin._mw_become(self)
        return twin

    def _mw_become(self, other: GlobalTensor) -> None:
        """Makes this tensor what ``other`` is, as a function does that changes a tensor's shape in place."""
        attributes = {k: v for k, v in self.__dict__.items() if not k.startswith("_mw_")}
        self.__dict__.clear()
        self.__dict__.update(other.__dict__, **attributes)
        self._mw_memo = {}
        with without_modes():
            Tensor.data.__set__(self, other)  # type: ignore[attr-defined]  # the wrapper's own shape

    def _mw_remember(self, *, silent: bool = False, apart: bool = False) -> None:
        """Sets facts that no Spec contains."""
        self._mw_silent, self._mw_apart = self._mw_silent or silent, self._mw_apart or apart
        self._mw_spec = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = first_global_tensor((args, kwargs))
        if first is None:
            with without_subclasses():
                return func(*args, **kwargs)
        return first._mw_dispatcher.call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Only code that bypasses torch functions (a C++ extension, say) comes here. Without gradients it gets whole
        # tensors. With gradients, the graph would silently lose this call.
        global_tensors = [t for t in pytree.tree_leaves((args, kwargs or {})) if isinstance(t, GlobalTensor)]
        if any(t._mw_local.requires_grad for t in global_tensors) and torch.is_grad_enabled():
            raise RuntimeError(
                f"{func} was called on a sharded tensor without a torch function, so its gradient would be lost; "
                "call it through a torch function, or replicate the module in the plan: {tp: replicate}"
            )
        args, kwargs = pytree.tree_map_only(
            GlobalTensor, lambda v: v._mw_dispatcher.full_tensor(v), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GlobalTensor(shape={tuple(self.shape)}, {self._mw_layout}, local={tuple(self._mw_local.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._mw_dispatcher.full_tensor(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


@functools.lru_cache(maxsize=32768)
def wrapping(known: Spec) -> Callable[..., GlobalTensor]:
    """The function that makes global tensors with this Spec: (local tensor, dispatcher, memory) → global tensor.

    Made once for each Spec, as wrapping takes half of the time of a call.
    """
    shape, layout, strides, offset = known.shape, known.layout, known.strides, known.offset
    # Strides, offset and memory format are None. Positional, as keywords take a fifth of the time that a wrapper takes.
    facts: tuple[Any, ...] = (shape, None, None, None, known.dtype)
    if known.device.type != "cpu":  # to pass the default would take as long as to pass the dtype
        facts += (torch.strided, known.device)
    is_plain = strides is None and not offset

    def wrapped(local: Tensor, dispatcher: Dispatcher, memory: Memory | None = None) -> GlobalTensor:
        result: GlobalTensor = make_wrapper(GlobalTensor, *facts)
        result.__dict__ = {  # in one step: one by one, attributes take half of the time that a wrapper takes
            "_mw_local": local, "_mw_dispatcher": dispatcher, "_mw_spec": known,
            "_mw_shape": shape, "_mw_layout": layout, "_mw_memo": {}, "_mw_memory": memory,
        }  # fmt: skip
        if not is_plain:
            result._mw_strides, result._mw_offset = strides, offset
        return result

    return wrapped


def spec_of(t: Tensor) -> Spec:
    """The Spec of a tensor.

    A global tensor keeps its Spec, unless a decision depends on more: if a fallback made the tensor as a view, if it comes
    from ``.data``, or if it shares memory with another global tensor on one device but not on this rank.
    """
    if not isinstance(t, GlobalTensor):
        strided = t.layout == torch.strided
        return spec(REPLICATE, t.shape, t.dtype, t.device, None, 0, t.stride() if strided else (), False)
    if t._mw_spec is not None:
        return t._mw_spec
    local, is_parameter = t._mw_local, t._mw_parameter is not None
    strides, offset = (t._mw_strides, t._mw_offset) if isinstance(t._mw_layout, Shard) else (None, 0)
    result = spec(t._mw_layout, t._mw_shape, local.dtype, local.device, strides, offset, local.stride(), is_parameter)
    if t._mw_origin is None and not t._mw_silent and not t._mw_apart:
        t._mw_spec = result
    return result


def local_of(t: Tensor) -> Tensor:
    """This rank's local tensor; ``t`` itself if it is not a ``GlobalTensor``."""
    return t._mw_local if isinstance(t, GlobalTensor) else t


def geometry_of(t: Tensor) -> Geometry:
    """How a tensor lies in memory on one device."""
    if isinstance(t, GlobalTensor):
        return t._mw_geometry()
    if t.layout != torch.strided:
        return Geometry(tuple(t.shape), None, 0, t.dtype)
    strides = None if t.is_contiguous() else t.stride()
    return Geometry(tuple(t.shape), strides, int(t.storage_offset()), t.dtype)


def first_global_tensor(value: Any) -> GlobalTensor | None:
    """The first global tensor in nested tuples, lists and dicts."""
    if isinstance(value, GlobalTensor):
        return value
    if isinstance(value, (tuple, list)):
        for item in value:
            if (first := first_global_tensor(item)) is not None:
                return first
    elif isinstance(value, dict):
        return first_global_tensor(tuple(value.values()))
    return None
