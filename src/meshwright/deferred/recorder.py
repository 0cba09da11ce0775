"""``InitRecorder``: a dispatch mode that logs the ops that make large tensors, and computes values that are read."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.deferred.log import GeneratorState, Log, LoggedOp, Ref, copied, ref_of, refs_in, without_caller_modes
from meshwright.deferred.memory import address_of, bytes_of, reserve, storage_over
from meshwright.deferred.operation import Changed, mapped, outputs_on_meta, tensors_in
from meshwright.private import TorchDispatchMode, schema_of, without_modes
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.torch_functions import READS_BELOW, SHARES_MEMORY, op_facts, written_by

_aten = torch.ops.aten


class _Cell(NamedTuple):
    """A storage that is deferred now. ``buffer``: a weak reference to our memory, by which we see its end; or a storage that
    build allocated."""

    number: int
    buffer: weakref.ref[mmap.mmap] | torch.UntypedStorage

    def storage(self) -> torch.UntypedStorage | None:
        if isinstance(self.buffer, torch.UntypedStorage):
            return self.buffer
        memory = self.buffer()
        return None if memory is None else storage_over(memory)


# Classes of tensors that dispatch as plain tensors do. The last two have no values yet (``nn.LazyLinear``).
_PLAIN = (Tensor, nn.Parameter, nn.UninitializedParameter, nn.UninitializedBuffer)


class InitRecorder(TorchDispatchMode):
    """Defers large tensors while ``build()`` runs.

    Args:
        draw: whether to draw random numbers of deferred tensors.
        small: tensors with fewer elements stay real, unless they are computed from deferred ones.
    """

    def __init__(self, draw: bool, small: int) -> None:
        super().__init__()
        self.log = Log()
        self.cells: dict[int, _Cell] = {}  # address of a storage → its cell
        self.filled: dict[int, int] = {}  # address of a storage → its cell, if it became real while build ran
        self._draws, self._small = draw, small
        self._undrawn = 0  # the number of random ops whose numbers were not drawn
        self._random: set[int] = set()  # addresses of storages whose values depend on random numbers
        self.told_by_chance = False  # whether other values may depend on them too: Python read such a value, say
        self._aside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._aside:
            return func(*args, **kwargs or {})
        with without_modes():  # `Readers`, or a default device, must not see our own calls
            return self._dispatched(func, types, args, kwargs or {})

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an op, or defers it, by the rules at the top of this package."""
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a subclass dispatches first; its inner ops come here again
        # In inference mode torch does not decompose composite ops, some of which copy or alias by strides.
        if torch.is_inference_mode_enabled():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if torch.Tag.inplace_view in func.tags or op_facts(func).is_view:
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and device.type != "cpu":
            if device.type == "meta":
                return func(*args, **kwargs)
            self.told_by_chance = self.told_by_chance or op_facts(func).draws  # other devices are not followed
            return self._compute(func, args, kwargs)
        tensors = tensors_in((args, kwargs))
        deferred = any(self.cell(tensor) is not None for tensor in tensors)
        elsewhere = any(tensor.device.type != "cpu" for tensor in tensors)
        if not elsewhere and (deferred or not schema_of(func).is_mutable):
            outputs = outputs_on_meta(func, args, kwargs)
            if outputs is not None and (deferred or self._grows(tensors, tensors_in(outputs))):
                return self._follow_chance(func, tensors, kwargs, self._defer(func, args, kwargs, outputs))
        return self._follow_chance(func, tensors, kwargs, self._compute(func, args, kwargs))

    def is_by_chance(self, tensor: Tensor) -> bool:
        """Whether values of a tensor may depend on random numbers."""
        return address_of(tensor) in self._random

    def _follow_chance(self, func: Any, tensors: list[Tensor], kwargs: dict[str, Any], result: Any) -> Any:
        """Notes which tensors depend on random numbers after an op. Returns the result of the op."""
        results, mutable = tensors_in((result,)), schema_of(func).is_mutable
        if op_facts(func).draws or any(map(self.is_by_chance, tensors)):
            self._random.update(map(address_of, (*results, *(tensors if mutable else ()))))
            self._random.discard(0)  # no storage
            has_generator = any(isinstance(leaf, torch.Generator) for leaf in kwargs.values())
            self.told_by_chance = (
                self.told_by_chance or has_generator or not all(map(address_of, results)) or not results
            )
        elif not mutable:
            # A new storage may have the address of a freed one.
            self._random.difference_update(map(address_of, results))
        return result

    # -- deferred tensors

    def cell(self, tensor: Tensor) -> int | None:
        """The number of a tensor's cell; None if the tensor is real."""
        address = address_of(tensor)
        return self.cells[address].number if address in self.cells else None

    def ref(self, tensor: Tensor) -> Ref | None:
        """The ``Ref`` of a tensor; None if the tensor is real."""
        cell = self.cell(tensor)
        return None if cell is None else ref_of(tensor, cell)

    def _grows(self, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
        """Whether to defer an op on real tensors: if no output is larger than the inputs, the log would hold as much."""
        strided = [tensor for tensor in inputs if tensor.layout == torch.strided]
        least = max((tensor.untyped_storage().nbytes() for tensor in strided), default=0) if self._small else 0
        sizes = [(tensor.numel(), tensor.numel() * tensor.itemsize) for tensor in outputs]
        return any(numel >= self._small and nbytes > least for numel, nbytes in sizes)

    def _new(self, meta: Tensor) -> tuple[Tensor, Ref | None]:
        """A new deferred tensor with the geometry of `meta`, and its ``Ref``."""
        last = sum((n - 1) * stride for n, stride in zip(meta.size(), meta.stride(), strict=True))
        if meta.numel() == 0:  # it has no storage by which to identify it
            return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device="cpu"), None
        nbytes = (last + 1) * meta.itemsize
        memory = reserve(nbytes)
        storage = storage_over(memory)
        address, cell = storage.data_ptr(), self.log.cell(nbytes)
        self.cells[address] = _Cell(cell, weakref.ref(memory, lambda _: self._ended(address, cell)))
        tensor = torch.empty(0, dtype=meta.dtype, device="cpu").set_(storage, 0, meta.size(), meta.stride())
        tensor = torch.conj(tensor) if meta.is_conj() else tensor
        return tensor, ref_of(tensor, cell)

    def _ended(self, address: int, cell: int) -> None:
        """The memory of a cell was freed."""
        if address in self.cells and self.cells[address].number == cell:
            del self.cells[address]
        if self.filled.get(address) == cell:
            del self.filled[address]

    def _adopt(self, tensor: Tensor, overwritten: bool) -> None:
        """Makes a real tensor deferred, because an op on deferred tensors writes it. ``overwritten``: as a whole."""
        storage = tensor.untyped_storage()
        if self.cell(tensor) is not None or storage.nbytes() == 0:
            return
        cell = self.log.cell(storage.nbytes())
        if not (overwritten and tensor.numel() * tensor.itemsize == storage.nbytes()):
            memory, only = bytes_of(storage), frozenset([cell])
            args = (ref_of(memory, cell), memory.clone())
            dtype = torch.get_default_dtype()
            self.log.add(LoggedOp(_aten.copy_.default, args, {}, frozenset(), only, only, (None,), None, dtype))
        self.cells[storage.data_ptr()] = _Cell(cell, storage)

    # -- ops

    def _defer(self, func: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        """Logs an op, whose outputs on meta are ``outputs``. Returns deferred outputs."""
        changed = written_by(func, args, kwargs)
        overwrites = op_facts(func).overwrites
        overwritten_values = [value for argument, value in changed if overwrites or argument.is_out]
        read = Counter(map(address_of, tensors_in((args, kwargs))))
        read.subtract(map(address_of, tensors_in(overwritten_values)))
        for argument, value in changed:
            for tensor in tensors_in([value]):
                self._adopt(tensor, (overwrites or argument.is_out) and not read[address_of(tensor)])
        written = [self.ref(tensor) for _, value in changed for tensor in tensors_in([value])]
        overwritten = [self.ref(tensor) for tensor in tensors_in(overwritten_values)]
        result, fresh = self._results(func, outputs, changed)
        random = op_facts(func).draws
        generators = [leaf for leaf in kwargs.values() if isinstance(leaf, torch.Generator)]
        logged_args, logged_kwargs = mapped(self._logged, (args, kwargs))
        # A tensor may be overwritten by itself (``load_state_dict`` of what ``state_dict`` gave): it is an input, too.
        inputs = Counter(refs_in((logged_args, logged_kwargs)))
        inputs.subtract(ref for ref in overwritten if ref)
        op = LoggedOp(
            func,
            logged_args,
            logged_kwargs,
            reads=frozenset(ref.cell for ref, count in inputs.items() if count > 0),
            writes=frozenset(ref.cell for ref in (*written, *fresh) if ref),
            kills=frozenset(ref.cell for ref in (*overwritten, *fresh) if ref and self.log.covers(ref)),
            fresh=fresh,
            state=self._state() if random and not generators else None,
            default_dtype=torch.get_default_dtype(),
        )
        if random and self._draws:
            with without_caller_modes():
                self.log.run(op, self.log.evaluate(op.reads), *generators[:1])
        self.log.add(op)
        return result

    def _state(self) -> Tensor:
        """The state of the default generator for an op. If numbers are not drawn it never changes: then each op gets a new one.

        Else code that draws until the values fit, as ``nn.init.trunc_normal_`` does, would draw the same numbers for ever.
        """
        if self._draws:
            return torch.get_rng_state()
        self._undrawn += 1
        return torch.Generator().manual_seed(self._undrawn).get_state()

    def _logged(self, leaf: Any) -> Any:
        """An argument of an op, as the log keeps it."""
        if isinstance(leaf, torch.Generator):
            return GeneratorState(leaf.get_state() if self._draws else self._state())
        if not isinstance(leaf, Tensor):
            return leaf
        return self.ref(leaf) or copied(leaf)

    def _results(self, func: Any, outputs: Any, changed: Changed) -> tuple[Any, tuple[Ref | None, ...]]:
        """(the results of an op, the ``Ref`` of each output tensor). A result is an argument if the schema says so, else a new
        deferred tensor."""
        # Some arguments are written though the schema does not say so: the statistics of ``native_batch_norm``.
        aliased = {next(iter(a.alias_info.before_set)): value for a, value in changed if a.alias_info is not None}
        returns = schema_of(func).returns
        single = len(returns) == 1
        fresh: list[Ref | None] = []

        def deferred(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            tensor, ref = self._new(leaf)
            fresh.append(ref)
            return tensor

        results = []
        for result, output in zip(returns, (outputs,) if single else outputs or (), strict=True):
            if result.alias_info is not None:
                results.append(aliased[next(iter(result.alias_info.before_set))])
                fresh.extend(None for _ in tensors_in([output]))
            else:
                results.append(mapped(deferred, output))
        return (results[0] if single else tuple(results) or None), tuple(fresh)

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an op on values."""
        changed = {id(tensor) for _, value in written_by(func, args, kwargs) for tensor in tensors_in([value])}
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in changed:
                self.fill(tensor)
        args, kwargs = self.values((args, kwargs))
        return func(*args, **kwargs)

    # -- values

    def values(self, tree: Any) -> Any:
        """`tree` with a real copy of each deferred tensor."""
        refs = {id(tensor): self.ref(tensor) for tensor in tensors_in(tree)}
        cells = {ref.cell for ref in refs.values() if ref}
        if not cells:
            return tree
        with self.aside():
            storages = self.log.evaluate(cells)

        def real(leaf: Any) -> Any:
            ref = refs.get(id(leaf))
            if ref is None:
                return leaf
            with self.aside(), torch.no_grad():
                value = ref.view(storages[ref.cell]).requires_grad_(leaf.requires_grad)
                return nn.Parameter(value, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else value

        return mapped(real, tree)

    def fill(self, tensor: Tensor) -> None:
        """Makes a deferred tensor real, and with it all tensors that share its storage."""
        if self.cell(tensor) is not None:
            self._fill(address_of(tensor))

    def fill_all(self) -> None:
        for address in list(self.cells):
            self._fill(address)

    def _fill(self, address: int) -> None:
        """Computes the values of a cell into its memory; from then on its tensors are real."""
        cell = self.cells.get(address)
        storage = cell and cell.storage()
        if cell is None or storage is None:
            return
        with self.aside(), without_caller_modes():
            bytes_of(storage).copy_(bytes_of(self.log.evaluate([cell.number])[cell.number]))
        self.filled[address] = cell.number
        del self.cells[address]

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """While on, nothing is recorded: for our own calls."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before


class Readers(FunctionMode):
    """Gives values to functions that read tensors below torch's dispatcher."""

    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.as_tensor and args and isinstance(args[0], Tensor):
            kinds = dict(zip(("dtype", "device"), args[1:], strict=False)) | kwargs
            # The result may be the tensor itself, which writes to the result must reach.
            return args[0].to(**{name: x for name, x in kinds.items() if x is not None})
        if func is torch.asarray and args and isinstance(args[0], Tensor):
            self._recorder.fill(args[0])
        if func in READS_BELOW:
            args, kwargs = self._recorder.values((args, kwargs))
        elif func in SHARES_MEMORY:
            for tensor in tensors_in((args, kwargs)):
                self._recorder.fill(tensor)
        return func(*args, **kwargs)
