"""What is known of each torch function: the one table.

    aliases(func)     whether its result may share memory with an argument to which it does not write
    writes(func, …)   whether it writes to its first argument
    reshaped(func)    if it changes a tensor's shape in place: the function that returns the same as a new tensor
    draws(name)       whether it draws random numbers
    is_fact(func)     whether its result follows from shape, dtype, memory or autograd, and not from values

Torch says most of this itself: in the schemas of its operators (alias annotations, mutable arguments) and in their tags
(``inplace_view``, ``nondeterministic_seeded``, ``maybe_aliasing_or_mutating``). They are looked up for the operator with the
function's name, in any overload. What torch does not say is listed here by name, with the reason.
``tests/spmd/test_torch_functions.py`` compares both with the installed torch: it fails for a function that neither covers, and
for a name here that torch has come to cover.

There is no list of the dtypes in which functions compute under autocast: torch is asked, with a tensor of one element
(``decide/types.py``).

For an ``OpOverload``, as dispatch modes see it: ``op_facts``, ``flops_of``, ``written_by``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import flop_registry

from meshwright.private import schema_of, schemas

_NAMESPACES = (torch, Tensor, functional, torch._C._nn, torch.special, torch.linalg, torch._VF)


def functions(name: str) -> Iterator[Any]:
    """Every torch function with that name: in torch, as a method, in torch.nn.functional …"""
    for namespace in _NAMESPACES:
        func = getattr(namespace, name, None)
        if callable(func):
            yield func


# --- functions whose operator has another name -------------------------------------------------------------------------

_AS = {
    # Python's operators in place, which have schemas under other names.
    **{f"__i{op}__": f"{op}_" for op in ("add", "sub", "mul", "pow")},
    "__idiv__": "div_",
    "__itruediv__": "div_",
    "__ifloordiv__": "floor_divide_",
    "__imod__": "remainder_",
    # Writes of values from Python: ``x[i] = y``, ``x.data = y``, and a Python function of each element.
    **dict.fromkeys(("__setitem__", "data=", "apply_", "map_", "map2_"), "copy_"),
    # Properties whose operator has another name.
    "T": "numpy_T",
    "H": "matrix_H",
    "data": "detach",
    # Casts: ``to`` returns the tensor itself if it has the type. (The schemas of ``type_as`` and ``chalf`` do not say so.)
    **dict.fromkeys("float double half bfloat16 int long short bool byte char cfloat cdouble chalf".split(), "to"),
    **dict.fromkeys("type type_as xpu ipu mtia".split(), "to"),
    # An index of numbers and slices gives a view; so does each step of an iteration.
    "__getitem__": "select",
    "__iter__": "unbind",
    # Written in Python or composed in C++; their schemas do not say that they give views if there is nothing to compute.
    **dict.fromkeys(("broadcast_tensors", "meshgrid", "sum_to_size"), "expand"),
    "einsum": "permute",
    # Written in Python: they draw random numbers, and give a new tensor.
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), "feature_dropout"),
    **dict.fromkeys("gumbel_softmax lobpcg svd_lowrank pca_lowrank".split(), "rand_like"),
    **{f"fractional_max_pool{n}d{kind}": "rand_like" for n in (2, 3) for kind in ("", "_with_indices")},
}

# Their names or tags say that they write, or change the shape, in place; but no value and no shape changes. (Dims of tensors
# have names before torch 2.13: ``rename_``, ``has_names``.)
_NO_WRITE = frozenset(["requires_grad_", "rename_"])
_NO_RESHAPE = frozenset(["detach_", "rename_"])


class Operator(NamedTuple):
    """What torch says of an operator: each is true if it is true for one of the overloads."""

    aliases: bool
    writes: bool
    reshapes: bool
    draws: bool


@functools.lru_cache(maxsize=8192)
def operator(name: str) -> Operator:
    """What torch says of the operator ``name``; all false if there is no such operator."""
    overloads = schemas(name)
    packet = getattr(torch.ops.aten, name, None) if overloads else None
    tags = {tag for overload in getattr(packet, "overloads", list)() for tag in getattr(packet, overload).tags}
    # Of tensors alone, not of items of Python lists.
    alias_infos = [r.alias_info for schema in overloads for r in schema.returns if "Tensor" in str(r.type)]
    # With dropout of 0, as in most models, these draw nothing; and their values are followed anyway.
    dropout_within = any(a.name in ("dropout", "dropout_p") for schema in overloads for a in schema.arguments)
    returns_alias = any(info is not None and not info.is_write for info in alias_infos)
    return Operator(
        aliases=returns_alias or torch.Tag.maybe_aliasing_or_mutating in tags,
        writes=_is_in_place(name, overloads) and name not in _NO_WRITE,
        reshapes=torch.Tag.inplace_view in tags and name not in _NO_RESHAPE,
        draws=torch.Tag.nondeterministic_seeded in tags and not dropout_within,
    )


def _is_in_place(name: str, overloads: Sequence[Any]) -> bool:
    """Whether an operator writes in place, by its name and schemas: ``add_(Tensor(a!) self, …)``, ``__iadd__``.

    From torch 2.13 on there is a tag, which follows from the same facts.
    """
    named = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    firsts = [s.arguments[0].alias_info for s in overloads if s.arguments]
    return named and any(info is not None and info.is_write for info in firsts)


def name_of(func: Any) -> str:
    """The name of a torch function; for a getter the name of its property, for a setter that name with ``=``."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__" or name == "__set__":
        owner: str = getattr(func.__self__, "__name__", "")
        return owner if name == "__get__" else f"{owner}="
    return name


def label_of(func: Any) -> str:
    """The name of a function in reports, the same in every process.

    A scripted function has a ``name``; its text contains an address. The first one of a process has the name of its class as
    ``__name__``, later ones have no ``__name__``.
    """
    labels = (getattr(func, key, None) for key in ("name", "__name__"))
    return next((label for label in labels if isinstance(label, str)), type(func).__name__)


def known_as(name: str) -> Operator:
    """The facts of the functions with this name."""
    return operator(_AS.get(name, name))


def aliases(func: Any) -> bool:
    """Whether a result of a torch function may share memory with an argument to which it does not write."""
    return known_as(name_of(func)).aliases


def draws(name: str) -> bool:
    """Whether torch functions with this name draw random numbers. (Dropout within an attention or an LSTM does not count.)"""
    return known_as(name).draws


def is_random(func: Any) -> bool:
    """Whether a torch function draws random numbers."""
    return draws(getattr(func, "__name__", ""))


def writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` writes to its first argument."""
    if known_as(name_of(func)).writes or kwargs.get("inplace"):
        return True
    position = _inplace_positions().get(func)
    return position is not None and len(args) > position and bool(args[position])


def writes_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``writes`` for arguments as the caller wrote them: the first may be a keyword."""
    return (bool(args) or "input" in kwargs) and writes(func, args, kwargs)


def target_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor to which ``func`` writes: its first argument, or the one that ``out`` names; None if it writes to none."""
    first = args[0] if args else kwargs.get("input")
    target = first if writes(func, args, kwargs) else kwargs.get("out")
    return target if isinstance(target, Tensor) else None


@functools.cache
def _inplace_positions() -> dict[Any, int]:
    """Functions with an argument ``inplace`` → its position."""
    positions = {}
    for func in vars(functional).values():
        if isinstance(func, FunctionType):
            names = list(signature(func).parameters)
            if "inplace" in names:
                positions[func] = names.index("inplace")
    return positions


def reshaped(func: Any) -> Callable[..., Any] | None:
    """For a function that changes a tensor's shape in place (``t_``): the function that returns the same view as a new tensor
    (``t``). Else None."""
    name = name_of(func)
    if not name.endswith("_") or not operator(name).reshapes or not operator(name[:-1]).aliases:
        return None
    anew: Callable[..., Any] | None = getattr(Tensor, name[:-1], None)
    return anew


# --- facts ------------------------------------------------------------------------------------------------------------


def _getters(names: str) -> frozenset[Any]:
    return frozenset(getattr(Tensor, n).__get__ for n in names.split() if hasattr(Tensor, n))


def _setters(names: str) -> frozenset[Any]:
    return frozenset(getattr(Tensor, n).__set__ for n in names.split())


GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _methods(names: str) -> frozenset[Any]:
    return frozenset(f for n in names.split() for f in functions(n))


# Facts of shape and dtype: equal for a tensor and for one that stands for it.
FACTS = _getters(
    "shape dtype device layout ndim itemsize nbytes is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_nested \
    is_mps is_xpu is_xla is_ipu is_maia is_mtia is_vulkan is_sparse_csr names"
) | _methods(
    "size dim numel nelement element_size is_floating_point is_complex get_device ndimension __len__ is_signed is_conj \
    is_neg is_inference is_same_size result_type _has_compatible_shallow_copy_type has_names"
)

# The facts among them that follow from the number of elements.
SIZES = _getters("shape nbytes") | _methods("size numel nelement __len__")

# Facts of how a tensor lies in memory.
_OF_MEMORY = _methods("stride is_contiguous storage_offset data_ptr untyped_storage is_shared share_memory_")

# They wait for the gradient of a tensor: the sum over all its uses.
LISTENING = _methods("register_hook register_post_accumulate_grad_hook retain_grad")
# What changes whether a tensor has a gradient, or what is done with that.
CHANGES_GRADIENT = _methods("register_hook register_post_accumulate_grad_hook requires_grad_") | _setters(
    "requires_grad"
)
# Facts of autograd, and calls that control it: they compute no values.
_OF_AUTOGRAD = _methods("register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad backward") | (
    _getters("requires_grad grad grad_fn is_leaf _version output_nr") | _setters("requires_grad grad")
)

# Facts of which object the tensor is.
_OF_IDENTITY = frozenset([Tensor.__hash__, Tensor.__repr__])

# A parameter at rest answers these itself, although its local part computes in its place.
OF_ITSELF = _OF_MEMORY | _OF_AUTOGRAD | _OF_IDENTITY | {Tensor.__format__} | _setters("data")

_NO_VALUE = FACTS | _OF_MEMORY | _OF_AUTOGRAD | _OF_IDENTITY
_TENSOR_PROPERTIES = _getters("T mT H mH data real imag")


def is_fact(func: Any) -> bool:
    """Whether a torch function reads no values and computes none: it asks for a fact of the tensor, or controls autograd."""
    if func in _NO_VALUE:
        return True
    return getattr(func, "__name__", "") in ("__get__", "__set__") and func not in _TENSOR_PROPERTIES


# --- functions that hand values to Python or to other memory -----------------------------------------------------------

YES_OR_NO = frozenset("__bool__ is_nonzero equal allclose __contains__".split())  # Python gets one answer
# functions from which Python gets numbers
NUMBERS = frozenset("item tolist __int__ __float__ __index__ __complex__ numpy __array__".split())

# These read values below torch's dispatcher,
READS_BELOW = frozenset(
    [torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.tolist]
    + [getattr(Tensor, f"__{name}__") for name in "repr format reduce_ex bool int index float complex".split()]
)
# and these share the tensor's memory with their caller (``untyped_storage`` also pickles).
SHARES_MEMORY = frozenset(
    [Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.share_memory_, Tensor.storage, Tensor.untyped_storage]
)

# Products of two tensors, and a product to which a third is added.
MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
ADDMMS = (torch.addmm, Tensor.addmm)

# The strides of the result depend on the kernel, and meta has another kernel.
BY_DEVICE = frozenset([functional.scaled_dot_product_attention])


# --- operators as dispatch modes see them ------------------------------------------------------------------------------


class OpFacts(NamedTuple):
    """The facts of an ``OpOverload``.

    Attributes:
        written: (position, argument of the schema) of each argument to which it writes.
        is_view: whether a result shares memory with an argument, and it writes nothing.
        is_fresh: whether no result shares memory with an argument, and it writes nothing.
        draws: whether it draws random numbers.
        overwrites: whether it replaces all values of its first argument without reading them.
    """

    written: tuple[tuple[int, Any], ...]
    is_view: bool
    is_fresh: bool
    draws: bool
    overwrites: bool


# Random functions in place whose result depends on the old values.
_DRAWS_FROM_OLD_VALUES = frozenset(
    "dropout_ alpha_dropout_ feature_dropout_ feature_alpha_dropout_ rrelu_ rrelu_with_noise_".split()
)


@functools.lru_cache(maxsize=4096)
def op_facts(op: Any) -> OpFacts:
    """The facts of an op, from its schema and tags."""
    schema, name = schema_of(op), op.overloadpacket.__name__
    aliased = [r.alias_info is not None for r in schema.returns]
    written = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    drawn = torch.Tag.nondeterministic_seeded in op.tags
    return OpFacts(
        tuple(written),
        is_view=not schema.is_mutable and any(aliased),
        is_fresh=not any(aliased) and all(a.alias_info is None for a in schema.arguments),
        draws=drawn,
        overwrites=name in ("copy_", "fill_", "zero_")
        or (drawn and name.endswith("_") and name not in _DRAWS_FROM_OLD_VALUES),
    )


# These ops write these arguments in training, although their schemas do not say so.
_STATISTICS = frozenset(["running_mean", "running_var"])
_BATCH_NORMS = frozenset(
    getattr(torch.ops.aten, f"{name}_batch_norm").default for name in ("native", "cudnn", "miopen")
)


# Fused attention on a CPU, for which torch has no formula → the position of query among its arguments; key and value follow.
_FUSED_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": 0,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 1,
}


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, products: int) -> int:
    """Floating-point operations of a fused attention.

    A forward has two products, a backward five, because it recomputes the scores. With a causal mask half of them are needed
    (Dao, FlashAttention-2, arXiv 2307.08691, section 4.1).

    Args:
        query: (rows, heads, queries, width).
        key: (rows, key heads, keys, width).
        value: (rows, key heads, keys, value width).
    """
    rows, heads, queries, width = query.shape
    widths = (width + value.shape[-1]) / 2
    flops = 2 * products * rows * heads * queries * key.shape[-2] * widths
    return round(flops / 2 if causal else flops)


def flops_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """The floating-point operations of an op (an ``OpOverload``) with result ``out``, by torch's formulas; 0 without one."""
    if (first := _FUSED_ATTENTION.get(op.overloadpacket.__name__)) is not None:
        return _attention_flops(*args[first : first + 3], causal=args[-1] is True, products=5 if first else 2)
    if op.overloadpacket.__name__ == "_grouped_mm":
        return _grouped_flops(args[0], args[1], out)
    formula = flop_registry.get(op.overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _grouped_flops(a: Tensor, b: Tensor, out: Tensor) -> int:
    """2 · rows · width · columns, summed over the groups: those of one product, as groups divide the rows.

    A gradient of weights, (width, rows) × (rows, columns), has a matrix for each group: (groups, width, columns).
    """
    groups = out.shape[0] if a.dim() == b.dim() == 2 else 1
    return int(2 * out.numel() * a.shape[-1] // groups)


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """(argument of the schema, its value) for each argument to which an op (an ``OpOverload``) writes."""
    written = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in op_facts(op).written]
    if not written and op in _BATCH_NORMS:
        named = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(schema_of(op).arguments)]
        if any(value for a, value in named if a.name == "training"):
            return [(a, value) for a, value in named if a.name in _STATISTICS]
    return written


def takes_batch_statistics(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op (an ``OpOverload``) computes statistics of several rows: a batch norm in training. (For an instance norm,
    torch calls that with rows as channels, of one row.)"""
    if op not in _BATCH_NORMS or args[0].shape[0] == 1:
        return False
    at = next(i for i, argument in enumerate(schema_of(op).arguments) if argument.name == "training")
    return bool(args[at] if at < len(args) else kwargs.get("training"))
