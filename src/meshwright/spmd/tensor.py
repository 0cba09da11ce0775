"""``GlobalTensor``: a tensor with its global shape, of which this rank holds a local tensor in some layout.

Model code meets it as a ``torch.Tensor`` of the whole shape. Every torch function called with one is answered by the
``Dispatcher`` it belongs to; the autograd graph is that of the local tensors.
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
from meshwright.spmd.alias import Like, Memory, Strides, alike, contiguous, placed

if TYPE_CHECKING:
    from meshwright.spmd.dispatcher import Dispatcher

_NO_SOURCES: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False, slots=True)
class Spec:
    """All that decisions may depend on of a tensor. Made by ``spec``: equal ones are one object, compared by identity.

    Attributes:
        layout: along the axis; ``REPLICATE`` for a tensor that is no global tensor.
        strides: of the whole tensor on one device; None if it is contiguous, or is not cut (then it lies as it does here).
        offset: of the whole tensor in its storage on one device, if it is cut.
        lies: the strides of what this rank holds.
        parameter: whether it is a parameter of the model.
    """

    layout: Layout
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    strides: Strides | None
    offset: int
    lies: Strides
    parameter: bool

    @property
    def usual(self) -> bool:
        """Whether the whole tensor is contiguous."""
        if isinstance(self.layout, Shard):
            return self.strides is None
        return not self.lies or alike(self.shape, self.lies, contiguous(tuple(self.shape)))


spec = functools.lru_cache(maxsize=32768)(Spec)


class GlobalTensor(Tensor):
    """Global shape, local tensor, layout. Attributes carry a prefix: a plain name would shadow one of Tensor's.

    Attributes:
        _mw_local: what this rank holds.
        _mw_shape: of the whole tensor.
        _mw_layout: ``Shard``, ``PARTIAL``, or ``REPLICATE`` (planning only: a parameter whose layout is not decided yet).
        _mw_work: the view's rules, axis and counts.
        _mw_memo: results of moves of this very value, by kind, with the version of the local tensor they hold for.
        _mw_sources: planning only: the parameters whose cut this tensor's cut comes from.
        _mw_parameter: the parameter this is (or a slice of), and which of its dims each dim here is.
        _mw_origin: the tensor this is a slice of, made by a fallback, and how: writes go there too.
        _mw_strides: of the whole tensor on one device (see ``alias``), if it is cut; None: contiguous.
        _mw_offset: of the whole tensor in its storage on one device, if it is cut.
        _mw_memory: shared with all global tensors of the same storage; None until there is a second one.
        _mw_silent: whether this came from ``.data``: a write to it is none that autograd knows of.
        _mw_apart: whether it shares memory with another global tensor on one device, and not here: writes are refused.
        _mw_spec: the Spec, where it is known and says all that there is to know (see ``spec_of``).
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

    # Facts that models and rules ask for most, each many times an operation. As methods of this class they are no torch
    # functions, which cost ten times as much; as torch functions (``torch.numel(x)``) they say the same.

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

    # Where the whole tensor lies in memory, on one device.

    def stride(self, dim: int | None = None) -> Any:
        strides = self._mw_lies().strides or contiguous(self._mw_shape)
        return strides if dim is None else strides[dim]

    def storage_offset(self) -> int:
        return self._mw_lies().offset

    def data_ptr(self) -> int:
        """A number that two global tensors share if they begin at one place on one device."""
        memory = self._mw_local.untyped_storage()
        return (memory.data_ptr() or storage_of(self._mw_local)) + self.storage_offset() * self._mw_local.element_size()

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        if memory_format == torch.contiguous_format:
            return self._mw_strides is None if isinstance(self._mw_layout, Shard) else self._mw_local.is_contiguous()
        places = placed(Tensor.contiguous, (self._mw_lies(),), (("memory_format", memory_format),))
        return places is not None and places[0].source is not None

    def _mw_lies(self) -> Like:
        """How the whole tensor lies in memory on one device. A tensor that is not cut lies so here, too."""
        if isinstance(self._mw_layout, Shard):
            return Like(self._mw_shape, self._mw_strides, self._mw_offset, self._mw_local.dtype)
        return lies(self._mw_local)

    def _mw_twin(self) -> GlobalTensor:
        """Another global tensor of the same, which stays what it is when a function changes this one's shape or ``.data``."""
        twin = GlobalTensor(self._mw_local, self._mw_layout, self._mw_dispatcher)
        twin._mw_become(self)
        return twin

    def _mw_become(self, other: GlobalTensor) -> None:
        """Takes over what ``other`` is, as functions do that change a tensor's shape in place."""
        attributes = {k: v for k, v in self.__dict__.items() if not k.startswith("_mw_")}
        self.__dict__.clear()
        self.__dict__.update(other.__dict__, **attributes)
        self._mw_memo = {}
        with without_modes():
            Tensor.data.__set__(self, other)  # type: ignore[attr-defined]  # the wrapper's own shape

    def _mw_remember(self, *, silent: bool = False, apart: bool = False) -> None:
        """Notes what no Spec says."""
        self._mw_silent, self._mw_apart = self._mw_silent or silent, self._mw_apart or apart
        self._mw_spec = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        view = first_view((args, kwargs))
        if view is None:
            with without_subclasses():
                return func(*args, **kwargs)
        return view._mw_dispatcher.call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached only by code that goes round torch functions (a C++ extension, say). Without gradients the whole
        # value serves; with them the graph would silently lose this step.
        views = [t for t in pytree.tree_leaves((args, kwargs or {})) if isinstance(t, GlobalTensor)]
        if any(v._mw_local.requires_grad for v in views) and torch.is_grad_enabled():
            raise RuntimeError(
                f"{func} was called on a sharded tensor from outside torch's Python functions, where its gradient would "
                "be lost; call it through a torch function or mark the module whole in the plan: {tp: replicate}"
            )
        args, kwargs = pytree.tree_map_only(GlobalTensor, lambda v: v._mw_dispatcher.whole(v), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GlobalTensor(shape={tuple(self.shape)}, {self._mw_layout}, local={tuple(self._mw_local.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._mw_dispatcher.whole(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


@functools.lru_cache(maxsize=32768)
def wrapping(known: Spec) -> Callable[..., GlobalTensor]:
    """What makes a global tensor of a local tensor of which all is known. One for each Spec, as it is the half of what
    a call costs."""
    shape, layout, strides, offset = known.shape, known.layout, known.strides, known.offset
    # Strides, offset and memory format are left open; by place, as names take torch a fifth of a wrapper's time to read.
    facts: tuple[Any, ...] = (shape, None, None, None, known.dtype)
    if known.device.type != "cpu":  # said without need, it takes as long to read as the type
        facts += (torch.strided, known.device)
    as_usual = strides is None and not offset

    def wrapped(local: Tensor, dispatcher: Dispatcher, memory: Memory | None = None) -> GlobalTensor:
        made: GlobalTensor = make_wrapper(GlobalTensor, *facts)
        made.__dict__ = {  # at once: one by one, they take as long as half a wrapper
            "_mw_local": local, "_mw_dispatcher": dispatcher, "_mw_spec": known,
            "_mw_shape": shape, "_mw_layout": layout, "_mw_memo": {}, "_mw_memory": memory,
        }  # fmt: skip
        if not as_usual:
            made._mw_strides, made._mw_offset = strides, offset
        return made

    return wrapped


def spec_of(t: Tensor) -> Spec:
    """The Spec of a tensor. A global tensor keeps its own, unless it is a slice that a fallback made, comes from
    ``.data``, or shares memory with another on one device and not here: then there is more to know than the Spec says."""
    if not isinstance(t, GlobalTensor):
        strided = t.layout == torch.strided
        return spec(REPLICATE, t.shape, t.dtype, t.device, None, 0, t.stride() if strided else (), False)
    if t._mw_spec is not None:
        return t._mw_spec
    local, is_parameter = t._mw_local, t._mw_parameter is not None
    strides, offset = (t._mw_strides, t._mw_offset) if isinstance(t._mw_layout, Shard) else (None, 0)
    own_spec = spec(t._mw_layout, t._mw_shape, local.dtype, local.device, strides, offset, local.stride(), is_parameter)
    if t._mw_origin is None and not t._mw_silent and not t._mw_apart:
        t._mw_spec = own_spec
    return own_spec


def local_of(t: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return t._mw_local if isinstance(t, GlobalTensor) else t


def lies(t: Tensor) -> Like:
    """How a tensor lies in memory on one device."""
    if isinstance(t, GlobalTensor):
        return t._mw_lies()
    if t.layout != torch.strided:
        return Like(tuple(t.shape), None, 0, t.dtype)
    strides = None if t.is_contiguous() else t.stride()
    return Like(tuple(t.shape), strides, int(t.storage_offset()), t.dtype)


def first_view(value: Any) -> GlobalTensor | None:
    """The first global tensor in nested tuples, lists and dicts."""
    if isinstance(value, GlobalTensor):
        return value
    if isinstance(value, (tuple, list)):
        for item in value:
            if (view := first_view(item)) is not None:
                return view
    elif isinstance(value, dict):
        return first_view(tuple(value.values()))
    return None
