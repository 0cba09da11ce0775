"""``View``: a tensor with its global shape, of which this rank holds a local tensor in some layout.

Model code meets it as a ``torch.Tensor`` of the whole shape. Every torch function called with one is answered by the
``Work`` it belongs to; the autograd graph is that of the local tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.layout import Cut, Layout
from meshwright.private import pytree, without_subclasses, wrapper

if TYPE_CHECKING:
    from meshwright.view.work import Work

_NO_SOURCES: frozenset[str] = frozenset()


class View(Tensor):
    """Global shape, local tensor, layout. Attributes carry a prefix: a plain name would shadow one of Tensor's.

    Attributes:
        _mw_local: what this rank holds.
        _mw_shape: of the whole tensor.
        _mw_layout: ``Cut``, ``PARTIAL``, or ``WHOLE`` (planning only: a parameter whose layout is not decided yet).
        _mw_work: the view's rules, axis and counts.
        _mw_memo: results of moves of this very value, by kind, with the version of the local tensor they hold for.
        _mw_sources: planning only: the parameters whose cut this tensor's cut comes from.
        _mw_parameter: the parameter this is (or a slice of), and which of its dims each dim here is.
        _mw_origin: the tensor this is a slice of, made by a fallback, and how: writes go there too.
    """

    _mw_local: Tensor
    _mw_shape: torch.Size
    _mw_layout: Layout
    _mw_work: Work
    _mw_memo: dict[str, Any]
    _mw_sources: frozenset[str]
    _mw_parameter: tuple[str, tuple[int, ...]] | None
    _mw_origin: tuple[View, Any] | None

    @staticmethod
    def __new__(
        cls: type[View],
        local: Tensor,
        layout: Layout,
        work: Work,
        sources: frozenset[str] = _NO_SOURCES,
        parameter: tuple[str, tuple[int, ...]] | None = None,
    ) -> View:
        shape = list(local.shape)
        if isinstance(layout, Cut):
            shape[layout.dim] = layout.size
        self = wrapper(cls, local, shape)
        self._mw_local, self._mw_shape, self._mw_layout, self._mw_work = local, torch.Size(shape), layout, work
        self._mw_memo, self._mw_sources, self._mw_parameter, self._mw_origin = {}, sources, parameter, None
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

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        view = first_view((args, kwargs))
        if view is None:
            with without_subclasses():
                return func(*args, **kwargs)
        return view._mw_work.call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached only by code that goes round torch functions (a C++ extension, say). Without gradients the whole
        # value serves; with them the graph would silently lose this step.
        views = [t for t in pytree.tree_leaves((args, kwargs or {})) if isinstance(t, View)]
        if any(v._mw_local.requires_grad for v in views) and torch.is_grad_enabled():
            raise RuntimeError(
                f"{func} was called on a cut tensor from outside torch's Python functions, where its gradient would "
                "be lost; call it through a torch function or mark the module whole in the plan: {tp: whole}"
            )
        args, kwargs = pytree.tree_map_only(View, lambda v: v._mw_work.whole(v), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"View(shape={tuple(self.shape)}, {self._mw_layout}, local={tuple(self._mw_local.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._mw_work.whole(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


def local_of(t: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return t._mw_local if isinstance(t, View) else t


def first_view(value: Any) -> View | None:
    """The first View in nested tuples, lists and dicts."""
    if isinstance(value, View):
        return value
    if isinstance(value, (tuple, list)):
        for item in value:
            if (found := first_view(item)) is not None:
                return found
    elif isinstance(value, dict):
        return first_view(tuple(value.values()))
    return None
