"""Init: what `build()` would give, recorded without its memory; each weight is made when it is wanted.

`build()` runs once, under a dispatch mode. Tensors of at least `small` elements become *deferred*: ordinary
CPU tensors (`.device` says cpu, `is_meta` is False) over reserved address space that nobody touches, and so
without memory. As they are ordinary tensors, views, `.data =`, `Parameter()`, `set_` and deep copies share
storages as ever; a storage, known by its address, is the unit of bookkeeping: a *cell*. For a deferred tensor

    1. a view runs as it is: it moves no data;
    2. any other op is logged, not run: its function, and for each tensor a `Ref` (cell, size, stride, offset)
       or, of a real tensor, a copy. Its outputs, whose shapes a run on meta tensors tells, are deferred too;
    3. a random op's generator state is logged; then it runs once on scratch, to move the generator on;
    4. an op that reads a value, or that meta tensors cannot run, gets the values it asks for, by replay.

A replay (`Log.evaluate`) walks the log backwards from what is wanted, stops at full overwrites, and runs what
it found forwards, each random op from its own generator state: `Recorded.value(name)` is bitwise what plain
`build()` gives. At the end parameters move to the meta device, in place, so that ties and aliases hold, and
every other deferred tensor that is still alive (buffers, attributes, caches elsewhere) is filled in place.

Limits. Same torch, machine and thread count, or reductions may round otherwise. Values from outside torch
(numpy, lists, files), or written through `.numpy()`, cannot be made anew: they are held. Not seen: memory
read behind torch's back (`data_ptr()`), other threads. A plain attribute computed from parameters loses its
graph, as those are on meta now; distinct parameters that share a storage no longer do.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import math
import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.private import TorchDispatchMode, without_modes, written_by

_aten = torch.ops.aten

# What is in their first argument before does not matter after.
_OVERWRITES = {_aten.copy_, _aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_, _aten.bernoulli_} | {
    _aten.random_,
    _aten.exponential_,
    _aten.log_normal_,
    _aten.geometric_,
    _aten.cauchy_,
}

# Functions that look at values below the dispatcher. These get a copy of the values,
_READS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.tolist} | {
    getattr(Tensor, f"__{name}__") for name in "repr format reduce_ex bool int index float complex".split()
}
# and these share the tensor's memory with their caller.
_SHARES = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.share_memory_, Tensor.storage} | {
    Tensor.untyped_storage  # which also pickles
}


_LARGE = 1 << 18  # bytes of a storage that is worth care

Held = dict[int, torch.UntypedStorage]  # cell → a real storage with its content

# --- the log ------------------------------------------------------------------------------------------------


class Ref(NamedTuple):
    """A tensor as a view of a cell's storage: sizes, strides and offset in elements."""

    cell: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = torch.conj(tensor) if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor  # no public function makes a negative view


class GeneratorState(NamedTuple):
    """Stands for an explicit `torch.Generator` argument."""

    state: Tensor


@dataclasses.dataclass(frozen=True)
class Entry:
    """One op on deferred tensors."""

    func: Any  # an OpOverload
    args: Any  # with a `Ref` for each deferred tensor and a copy of each real one
    kwargs: dict[str, Any]
    reads: frozenset[int]  # the cells whose content before matters
    writes: frozenset[int]  # the cells it changes or makes
    kills: frozenset[int]  # those of which nothing from before remains
    fresh: tuple[Ref | None, ...]  # for each output tensor; None: it is an argument
    state: Tensor | None  # the default generator's before, if the op may draw from it
    default_dtype: torch.dtype


class Log:
    """Entries in program order, and the size in bytes of every cell."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.nbytes: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}  # cell → its entries, ascending
        self._length = 0

    def cell(self, nbytes: int) -> int:
        self.nbytes[len(self.nbytes)] = nbytes
        return len(self.nbytes) - 1

    def add(self, entry: Entry) -> None:
        self.entries[self._length] = entry
        for cell in entry.writes:
            self._writers.setdefault(cell, []).append(self._length)
        self._length += 1

    def needed(self, cells: Iterable[int]) -> list[int]:
        """The entries that the present content of `cells` comes from, ascending."""
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        wanted = [(cell, self._length) for cell in cells]
        while wanted:
            cell, before = wanted.pop()
            for index in reversed(self._writers.get(cell, ())):
                if index >= before:
                    continue
                if (cell, index) in seen:  # and so has been all before it
                    break
                seen.add((cell, index))
                entry = self.entries[index]
                if index not in found:
                    found.add(index)
                    wanted += [(read, index) for read in entry.reads]
                if cell in entry.kills:
                    break
        return sorted(found)

    def keep(self, cells: Iterable[int]) -> None:
        """Forget what the content of `cells` does not come from."""
        self.entries = {index: self.entries[index] for index in self.needed(cells)}
        self._writers = {}
        for index, entry in self.entries.items():
            for cell in entry.writes:
                self._writers.setdefault(cell, []).append(index)

    def evaluate(self, cells: Iterable[int]) -> Held:
        """New storages with the present content of `cells`. Generators are left as they were."""
        cells = frozenset(cells)
        order = self.needed(cells)
        last = {cell: i for i in order for cell in self.entries[i].reads | self.entries[i].writes}
        held: Held = {}
        rng = torch.get_rng_state()
        try:
            with _plainly():
                for i in order:
                    entry = self.entries[i]
                    if entry.state is not None:
                        torch.set_rng_state(entry.state)
                    self.run(entry, held)
                    for cell in (entry.reads | entry.writes) - cells:
                        if last[cell] == i:  # its memory is not needed any more
                            held.pop(cell, None)
                return {cell: self._held(held, cell) for cell in cells}
        finally:
            torch.set_rng_state(rng)

    def tensor(self, ref: Ref) -> Tensor:
        """The present value of `ref`, in memory of its own."""
        with _plainly():
            tensor = ref.view(self.evaluate([ref.cell])[ref.cell])
            return tensor if self.covers(ref) else tensor.clone()

    def covers(self, ref: Ref) -> bool:
        """Is all of the storage in this view? (Ops do not write to views that overlap themselves.)"""
        return math.prod(ref.size) * ref.dtype.itemsize == self.nbytes[ref.cell]

    def run(self, entry: Entry, held: Held, generator: torch.Generator | None = None) -> None:
        """Run one entry on the storages in `held`. A generator given goes on from where it is."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return leaf.view(self._held(held, leaf.cell))
            if isinstance(leaf, GeneratorState):
                return generator or torch.Generator().set_state(leaf.state)
            return leaf

        args, kwargs = _map(real, (entry.args, entry.kwargs))
        if any(ref and self.nbytes[ref.cell] >= _LARGE for ref in entry.fresh):
            _trim()
        with _default_dtype(entry.default_dtype):
            outputs = _tensors(entry.func(*args, **kwargs))
        for ref, output in zip(entry.fresh, outputs, strict=True):
            if ref is not None:
                held[ref.cell] = self._own(output, ref)

    def _held(self, held: Held, cell: int) -> torch.UntypedStorage:
        if cell not in held:
            held[cell] = _allocate(self.nbytes[cell])
        return held[cell]

    def _own(self, output: Tensor, ref: Ref) -> torch.UntypedStorage:
        """The output's storage if it is as was foreseen, else a copy."""
        storage = output.untyped_storage()
        foreseen = (self.nbytes[ref.cell], ref.size, ref.stride, ref.offset, ref.conj, ref.neg)
        seen = (storage.nbytes(), output.size(), output.stride(), output.storage_offset())
        if (*seen, output.is_conj(), output.is_neg()) == foreseen:
            return storage
        fresh = _allocate(self.nbytes[ref.cell])
        ref.view(fresh).copy_(output)
        return fresh


# --- small helpers ------------------------------------------------------------------------------------------


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `function` of each leaf; op arguments nest in lists, tuples and dicts only."""
    if isinstance(tree, dict):
        return {key: _map(function, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_map(function, value) for value in tree])
    return function(tree)


def _address(tensor: Tensor) -> int:
    """The address of the storage, which says which one it is; 0 if there is none."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
        return 0
    return tensor.untyped_storage().data_ptr()


def _ref(tensor: Tensor, cell: int) -> Ref:
    offset, conj, neg = int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
    return Ref(cell, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), offset, conj, neg)


def _refs(tree: Any) -> list[Ref]:
    found: list[Ref] = []
    _map(lambda leaf: found.append(leaf) if isinstance(leaf, Ref) else None, tree)
    return found


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, tree)
    return found


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """The caller's autograd, inference mode and autocast do not reach a replay."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _reserve(nbytes: int) -> mmap.mmap:
    """Address space without memory: pages come when they are touched."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        flags |= 0x4000  # MAP_NORESERVE, a name old Pythons lack: not counted against memory and swap
    return mmap.mmap(-1, nbytes, flags=flags)


def _over(memory: mmap.mmap) -> torch.UntypedStorage:
    """A storage over `memory`, which it keeps alive."""
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _allocate(nbytes: int) -> torch.UntypedStorage:
    """A real storage. A large one goes back to the system when it ends; malloc's leave holes in the heap."""
    if nbytes < _LARGE:
        return torch.UntypedStorage(nbytes, device="cpu")
    return _over(_reserve(nbytes))


def _trim() -> None:
    """Give what is free in the heap back to the system: glibc does not reuse the holes of large tensors."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, of the tensor or, where that is less (it is expanded), of its storage."""
    storage = tensor.untyped_storage()
    if tensor.numel() * tensor.itemsize < storage.nbytes():
        return tensor.detach().clone()
    copy = _bytes(storage).clone().untyped_storage()
    return _ref(tensor, cell=0).view(copy)


def _schema(func: Any) -> Any:
    return func._schema  # there is no public way to an overload's aliasing and mutation


def _is_view(func: Any) -> bool:
    infos = [result.alias_info for result in _schema(func).returns]
    return not _schema(func).is_mutable and any(info is not None for info in infos)


_Changed = list[tuple[Any, Any]]


def _foreseen(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The outputs on the meta device; None if values, or other kinds of output, are needed to know them."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return None
    if not all("Tensor" in str(result.type) for result in _schema(func).returns):
        return None
    was = []

    def on_meta(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None if isinstance(leaf, torch.Generator) else leaf
        meta = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
        was.append((meta, leaf))
        return meta

    meta_args, meta_kwargs = _map(on_meta, (args, dict(kwargs)))
    if any(argument.name == "device" for argument in _schema(func).arguments):
        meta_kwargs |= {"device": torch.device("meta")}
        meta_kwargs.pop("pin_memory", None)
    try:
        outputs = func(*meta_args, **meta_kwargs)
    except Exception:  # no meta kernel, or the call is wrong: the run with values will tell
        return None
    if any(meta.size() != leaf.size() or meta.stride() != leaf.stride() for meta, leaf in was):
        return None  # it resizes an argument
    plain = all(tensor.is_meta and tensor.layout == torch.strided for tensor in _tensors(outputs))
    return outputs if plain else None


# --- recording ----------------------------------------------------------------------------------------------


class _Cell(NamedTuple):
    """A storage that is deferred now: ours, weakly, so that its end is seen; or one of build's own, held."""

    number: int
    buffer: weakref.ref[mmap.mmap] | torch.UntypedStorage

    def storage(self) -> torch.UntypedStorage | None:
        if isinstance(self.buffer, torch.UntypedStorage):
            return self.buffer
        memory = self.buffer()
        return None if memory is None else _over(memory)


class _Recorder(TorchDispatchMode):
    def __init__(self, draw: bool, small: int) -> None:
        super().__init__()
        self.log = Log()
        self.cells: dict[int, _Cell] = {}  # address of a storage → its cell
        self.filled: dict[int, int] = {}  # the same, for those that became real while build ran
        self._draws, self._small = draw, small
        self._aside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._aside:
            return func(*args, **kwargs or {})
        with without_modes():  # what we do is not for `_Readers`, or a default device, to see
            return self._dispatched(func, types, args, kwargs or {})

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a subclass dispatches itself; what it does inside comes here again
        if torch.is_inference_mode_enabled():  # there composite ops come whole, and some may copy or may not
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if torch.Tag.inplace_view in func.tags or _is_view(func):
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and device.type != "cpu":
            return func(*args, **kwargs) if device.type == "meta" else self._compute(func, args, kwargs)
        tensors = _tensors((args, kwargs))
        deferred = any(self.cell(tensor) is not None for tensor in tensors)
        elsewhere = any(tensor.device.type != "cpu" for tensor in tensors)
        if not elsewhere and (deferred or not _schema(func).is_mutable):
            outputs = _foreseen(func, args, kwargs)
            if outputs is not None and (deferred or self._grows(tensors, _tensors(outputs))):
                return self._defer(func, args, kwargs, outputs)
        return self._compute(func, args, kwargs)

    # -- what is deferred

    def cell(self, tensor: Tensor) -> int | None:
        address = _address(tensor)
        return self.cells[address].number if address in self.cells else None

    def ref(self, tensor: Tensor) -> Ref | None:
        cell = self.cell(tensor)
        return None if cell is None else _ref(tensor, cell)

    def _grows(self, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
        """Is an output of real tensors to be deferred? If none is larger, the log would hold as much."""
        strided = [tensor for tensor in inputs if tensor.layout == torch.strided]
        least = max((tensor.untyped_storage().nbytes() for tensor in strided), default=0) if self._small else 0
        sizes = [(tensor.numel(), tensor.numel() * tensor.itemsize) for tensor in outputs]
        return any(numel >= self._small and nbytes > least for numel, nbytes in sizes)

    def _new(self, meta: Tensor) -> tuple[Tensor, Ref | None]:
        """A deferred tensor of the geometry of `meta`."""
        last = sum((n - 1) * stride for n, stride in zip(meta.size(), meta.stride(), strict=True))
        if meta.numel() == 0:  # there is no storage to know it by
            return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device="cpu"), None
        nbytes = (last + 1) * meta.itemsize
        memory = _reserve(nbytes)
        storage = _over(memory)
        address, cell = storage.data_ptr(), self.log.cell(nbytes)
        self.cells[address] = _Cell(cell, weakref.ref(memory, lambda _: self._ended(address, cell)))
        tensor = torch.empty(0, dtype=meta.dtype, device="cpu").set_(storage, 0, meta.size(), meta.stride())
        tensor = torch.conj(tensor) if meta.is_conj() else tensor
        return tensor, _ref(tensor, cell)

    def _ended(self, address: int, cell: int) -> None:
        if address in self.cells and self.cells[address].number == cell:
            del self.cells[address]
        if self.filled.get(address) == cell:
            del self.filled[address]

    def _adopt(self, tensor: Tensor, overwritten: bool) -> None:
        """A real tensor is about to be written from deferred ones, and becomes deferred."""
        storage = tensor.untyped_storage()
        if self.cell(tensor) is not None or storage.nbytes() == 0:
            return
        cell = self.log.cell(storage.nbytes())
        if not (overwritten and tensor.numel() * tensor.itemsize == storage.nbytes()):
            whole, only = _bytes(storage), frozenset([cell])
            args = (_ref(whole, cell), whole.clone())
            dtype = torch.get_default_dtype()
            self.log.add(Entry(_aten.copy_.default, args, {}, frozenset(), only, only, (None,), None, dtype))
        self.cells[storage.data_ptr()] = _Cell(cell, storage)

    # -- what happens to an op

    def _defer(self, func: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        """Log the op; return deferred outputs."""
        changed = written_by(func, args, kwargs)
        overwrites = func.overloadpacket in _OVERWRITES
        for argument, value in changed:
            for tensor in _tensors([value]):
                self._adopt(tensor, overwrites or argument.is_out)
        written = [self.ref(tensor) for _, value in changed for tensor in _tensors([value])]
        useless = [self.ref(tensor) for a, v in changed if overwrites or a.is_out for tensor in _tensors([v])]
        result, fresh = self._results(func, outputs, changed)
        random = torch.Tag.nondeterministic_seeded in func.tags
        generators = [leaf for leaf in kwargs.values() if isinstance(leaf, torch.Generator)]
        logged_args, logged_kwargs = _map(self._logged, (args, kwargs))
        inputs = [leaf for leaf in _refs((logged_args, logged_kwargs)) if leaf not in useless]
        entry = Entry(
            func,
            logged_args,
            logged_kwargs,
            reads=frozenset(ref.cell for ref in inputs),
            writes=frozenset(ref.cell for ref in (*written, *fresh) if ref),
            kills=frozenset(ref.cell for ref in (*useless, *fresh) if ref and self.log.covers(ref)),
            fresh=fresh,
            state=torch.get_rng_state() if random and not generators else None,
            default_dtype=torch.get_default_dtype(),
        )
        if random and self._draws:
            with _plainly():
                self.log.run(entry, self.log.evaluate(entry.reads), *generators[:1])
        self.log.add(entry)
        return result

    def _logged(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return GeneratorState(leaf.get_state())
        if not isinstance(leaf, Tensor):
            return leaf
        return self.ref(leaf) or _copied(leaf)

    def _results(self, func: Any, outputs: Any, changed: _Changed) -> tuple[Any, tuple[Ref | None, ...]]:
        """What the op returns: its own arguments where the schema says so, else new deferred tensors."""
        own = {next(iter(argument.alias_info.before_set)): value for argument, value in changed}
        returns = _schema(func).returns
        single = len(returns) == 1
        fresh: list[Ref | None] = []

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            tensor, ref = self._new(leaf)
            fresh.append(ref)
            return tensor

        results = []
        for result, output in zip(returns, (outputs,) if single else outputs or (), strict=True):
            if result.alias_info is not None:
                results.append(own[next(iter(result.alias_info.before_set))])
                fresh.extend(None for _ in _tensors([output]))
            else:
                results.append(_map(made, output))
        return (results[0] if single else tuple(results) or None), tuple(fresh)

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the op on values."""
        changed = {id(tensor) for _, value in written_by(func, args, kwargs) for tensor in _tensors([value])}
        for tensor in _tensors((args, kwargs)):
            if id(tensor) in changed:
                self.fill(tensor)
        args, kwargs = self.values((args, kwargs))
        return func(*args, **kwargs)

    # -- values

    def values(self, tree: Any) -> Any:
        """`tree` with a real copy of each deferred tensor."""
        refs = {id(tensor): self.ref(tensor) for tensor in _tensors(tree)}
        cells = {ref.cell for ref in refs.values() if ref}
        if not cells:
            return tree
        with self.aside():
            held = self.log.evaluate(cells)

        def real(leaf: Any) -> Any:
            ref = refs.get(id(leaf))
            if ref is None:
                return leaf
            with self.aside(), torch.no_grad():
                value = ref.view(held[ref.cell]).requires_grad_(leaf.requires_grad)
                return nn.Parameter(value, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else value

        return _map(real, tree)

    def fill(self, tensor: Tensor) -> None:
        """Make a deferred tensor, and all that shares its storage, real."""
        if self.cell(tensor) is not None:
            self._fill(_address(tensor))

    def fill_all(self) -> None:
        for address in list(self.cells):
            self._fill(address)

    def _fill(self, address: int) -> None:
        cell = self.cells.get(address)
        storage = cell and cell.storage()
        if cell is None or storage is None:
            return
        with self.aside(), _plainly():
            _bytes(storage).copy_(_bytes(self.log.evaluate([cell.number])[cell.number]))
        self.filled[address] = cell.number
        del self.cells[address]

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What we do ourselves is not recorded."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before


class _Readers(TorchFunctionMode):
    """Gives the functions that look below the dispatcher the values they look at."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            args, kwargs = self._recorder.values((args, kwargs))
        elif func in _SHARES:
            for tensor in _tensors((args, kwargs)):
                self._recorder.fill(tensor)
        return func(*args, **kwargs)


# --- the result ---------------------------------------------------------------------------------------------


_Value = Ref | Tensor | None  # in the log; held; there is none


class Recorded:
    """A module whose parameters are on the meta device, and the means to make the value of each."""

    def __init__(self, module: nn.Module, log: Log, values: Mapping[str, _Value], drawn: bool) -> None:
        self.module = module
        self._log, self._values, self._drawn = log, values, drawn

    def value(self, name: str) -> Tensor:
        """The whole value of a parameter, by any of its names, on CPU, made anew at each call."""
        if not self._drawn:
            raise RuntimeError(
                f"no value of {name!r}: this model was recorded for planning, with draw=False, so its random "
                "numbers were not drawn; record it with draw=True"
            )
        if name not in self._values:
            raise KeyError(f"no parameter {name!r}; there are {', '.join(self._values) or 'none'}")
        value = self._values[name]
        if value is None:
            raise RuntimeError(f"no value of {name!r}: build() itself left it without one (on meta, or lazy)")
        return self._log.tensor(value) if isinstance(value, Ref) else _copied(value)


def record(
    build: Callable[[], nn.Module], *, seed: int | None = None, draw: bool = True, small: int = 4096
) -> Recorded:
    """Run `build` without memory for its parameters.

    `seed` is given to `torch.manual_seed` first; None leaves the generator as it is. Afterwards it is where
    plain `build()` would leave it. With `draw=False` random numbers of deferred tensors are not drawn: fast,
    but then `value` raises, and buffers that come from them are right in shape only. Tensors of fewer than
    `small` elements are real while build runs, unless they come from deferred ones.
    """
    if seed is not None:
        torch.manual_seed(seed)
    recorder = _Recorder(draw, small)
    with _Readers(recorder), recorder:
        module = build()
    _drop_graphs(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    made: dict[int, _Value] = {}
    for parameter in parameters.values():
        if id(parameter) not in made:
            made[id(parameter)] = _value(parameter, recorder)
    values = {name: made[id(parameter)] for name, parameter in parameters.items()}
    for parameter in {id(parameter): parameter for parameter in parameters.values()}.values():
        _to_meta(parameter)
    if recorder.cells:
        gc.collect()  # what only cycles hold need not be filled
    recorder.fill_all()
    recorder.log.keep(value.cell for value in values.values() if isinstance(value, Ref))
    return Recorded(module, recorder.log, values, draw)


def _value(parameter: Tensor, recorder: _Recorder) -> _Value:
    """How to make the parameter's value: from the log, or as it is if it does not come from there."""
    if nn.parameter.is_lazy(parameter) or parameter.is_meta:
        return None
    ref = recorder.ref(parameter)
    if ref is not None:
        return ref
    cell = recorder.filled.get(_address(parameter))
    if cell is not None:  # `.numpy()` gave its memory away: has it been written since?
        ref = _ref(parameter, cell)
        if torch.equal(_bits(recorder.log.tensor(ref)), _bits(parameter)):
            return ref
    return _copied(parameter.detach().cpu())


def _to_meta(parameter: Tensor) -> None:
    """Move a parameter to the meta device in place: the same object, wherever it is referred to."""
    if nn.parameter.is_lazy(parameter) or parameter.is_meta:
        return
    with torch.no_grad():
        meta = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")
    meta.requires_grad_(parameter.requires_grad)
    # The public `torch.utils.swap_tensors` refuses tensors with weak references, which an LSTM has.
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(parameter, meta)
    for name, kept in zip(("_backward_hooks", "_post_accumulate_grad_hooks"), hooks, strict=True):
        if kept:  # setting them anew tells the new implementation of them; None first, or nothing happens
            setattr(parameter, name, None)
            setattr(parameter, name, kept)


def _drop_graphs(module: nn.Module) -> None:
    """Plain attributes computed from parameters (old weight norm) hold them through their graph."""
    for owner in module.modules():
        attributes = [value for name, value in vars(owner).items() if name not in ("_parameters", "_modules")]
        for tensor in _tensors_within(attributes, set()):
            if tensor.grad_fn is not None:
                with contextlib.suppress(RuntimeError):  # a view cannot be detached: it keeps its graph
                    tensor.detach_()


def _tensors_within(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for item in items:
        yield from _tensors_within(item, seen)
