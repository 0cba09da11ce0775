"""``NameTracker``: a function mode that knows which tensors of a forward depend on the batch alone (runtime/rows/tape.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.private import pytree, storage_of, version
from meshwright.runtime.rows.batch import tensors_in
from meshwright.runtime.rows.tape import Name, Operation, Tape, constant_key
from meshwright.spmd.autograd_functions import FunctionMode, Segment, recomputations
from meshwright.spmd.torch_functions import GET_DATA, SET_DATA, is_fact, is_random, writes

# Functions for which only the dtype or the shape of the second tensor counts → (the function to call with that fact, the fact).
_LIKE_ANOTHER: dict[Any, tuple[Any, Callable[[Tensor], Any]]] = {
    Tensor.type_as: (Tensor.to, lambda t: t.dtype),
    Tensor.to: (Tensor.to, lambda t: t.dtype),
    Tensor.expand_as: (Tensor.expand, lambda t: t.shape),
    Tensor.view_as: (Tensor.view, lambda t: t.shape),
    Tensor.reshape_as: (Tensor.reshape, lambda t: t.shape),
}


class NameTracker(FunctionMode):
    """Tracks the names of tensors while a forward runs.

    It calls one method for each torch function, and subclasses override these:

        on_named_call      all tensors have names           the results get names too
        on_mixed_call      some have names, some have none
        on_unnamed_call    none has a name; or the function draws random numbers

    Attributes:
        tensors: path → buffer, or tensor that is a plain attribute, of the model.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.tensors: dict[str, Tensor] = {}
        # id → (tensor, its name, its version). The tensors are held, so that their ids are not reused.
        self._names: dict[int, tuple[Tensor, Name, int | None]] = {}
        self._read_data = False  # whether the forward used ``.data``: version counters do not show writes to it

    # --- names ------------------------------------------------------------------------------------------------------

    def name(self, x: Any) -> Name | None:
        """The name of a tensor, if it has one and has not been written since; else None."""
        entry = self._names.get(id(x))
        return entry[1] if entry is not None and entry[0] is x and entry[2] == version(x) else None

    def give_name(self, t: Any, name: Name | None) -> None:
        """Gives a tensor a name. Does nothing if ``t`` is no tensor or ``name`` is None."""
        if isinstance(t, Tensor) and name is not None:
            self._names[id(t)] = t, name, version(t)

    @contextmanager
    def entering(self, model: nn.Module) -> Iterator[None]:
        """A context for a forward of ``model``: the tensors of the batch and the buffers get their names."""
        self.tensors = dict(tensors_of_model(model)) if self.names_model_tensors else {}
        for path, t in self.tensors.items():
            self.give_name(t, self.buffer_name(path))
        # Registered last, so that it sees the casts of mixed precision.
        handle = model.register_forward_pre_hook(self._name_leaves, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _name_leaves(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        for i, t in enumerate(tensors_in((args, kwargs))):
            self.give_name(t, self.leaf_name(i, t))

    def _forget_memory_of(self, written: Any) -> None:
        """Removes the names of other tensors in a memory to which autograd does not count a write."""
        if not isinstance(written, Tensor) or not _has_memory(written):
            return
        memory = storage_of(written)
        for key, (t, *_) in list(self._names.items()):
            if t is not written and _has_memory(t) and storage_of(t) == memory:
                del self._names[key]

    # --- functions --------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == SET_DATA:
            self._names.pop(id(args[0]), None)
        if is_fact(func):
            return func(*args, **kwargs)
        result = self._call(func, args, kwargs)
        if self._read_data and args and writes(func, args, kwargs):
            self._forget_memory_of(args[0])
        self._read_data = self._read_data or func == GET_DATA
        return result

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a function that is no fact. Its results get names, if they depend on the batch alone."""
        tensors = [x for x in _shallow(args, kwargs) if isinstance(x, Tensor)]
        names = [self.name(t) for t in tensors]
        if is_random(func) or (tensors and not any(names)):
            return self.on_unnamed_call(func, args, kwargs, tensors)
        if all(names):
            return self.on_named_call(func, args, kwargs, tensors)
        if func in _LIKE_ANOTHER and len(args) == 2 and not kwargs and len(tensors) == 2 and names[0] is not None:
            simpler, fact = _LIKE_ANOTHER[func]
            result = self.on_call_like_another(func, args, simpler, fact)
            return self._name_results(simpler, (args[0], fact(args[1])), {}, result)
        return self.on_mixed_call(func, args, kwargs, tensors, names)

    def _name_results(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Names the results of a call whose arguments all have names. Returns the result."""
        is_write = bool(args) and isinstance(args[0], Tensor) and writes(func, args, kwargs)
        outputs = [args[0]] if is_write else pytree.tree_leaves(result)
        if kwargs.get("out") is not None:  # a replay would write to the tensor of the recording
            return result
        if not outputs or not all(isinstance(t, Tensor) and not t.is_meta for t in outputs):
            return result
        flat, spec = pytree.tree_flatten((args, kwargs))
        # Not ``self.name``: an argument that was just written has another version, and its old name counts here.
        flat = [self._names[id(x)][1] if isinstance(x, Tensor) else x for x in flat]
        try:
            signature = func, tuple(map(constant_key, flat)), spec
            operation = self.operation_for(signature, func, flat, spec, len(outputs), is_write)
        except TypeError:  # a constant that cannot be hashed
            return result
        if operation is not None:
            for t, name in zip(outputs, operation.outputs, strict=True):
                self.give_name(t, name)
        return result

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """A context for a forward. If a checkpoint recomputes a segment, the segment's arguments get the same names again."""
        with self, self.entering(model), recomputations(self._with_names):
            yield

    def _with_names(self, segment: Segment, args: tuple[Any, ...]) -> tuple[Segment, tuple[Any, ...]]:
        """A handler for ``recomputations``: the recomputed segment runs under this mode, and its arguments have their names."""
        names = [self.name(x) for x in args]

        def recomputed(*arguments: Any, **keywords: Any) -> Any:
            for x, name in zip(arguments, names, strict=False):
                self.give_name(x, name)
            with self:
                return segment(*arguments, **keywords)

        return recomputed, args

    @property
    def names_model_tensors(self) -> bool:
        """Whether tensors of the model need names."""
        return bool(self.tape.buffers)

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def leaf_name(self, i: int, t: Tensor) -> Name | None:
        """The name of tensor number i of the batch, as the model sees it; None if it gets none."""
        return Name(i)

    def buffer_name(self, path: str) -> Name | None:
        """The name of a buffer; None if it gets none."""
        return self.tape.buffers.get(path)

    def operation_for(
        self, signature: Any, func: Any, flat: Sequence[Any], spec: Any, outputs: int, is_write: bool
    ) -> Operation | None:
        """The operation for a call whose arguments all have names; None if it is not needed."""
        return self.tape.by_signature.get(signature)

    def on_named_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Called for a function all of whose tensors have names."""
        return self._name_results(func, args, kwargs, func(*args, **kwargs))

    def on_call_like_another(
        self, func: Any, args: tuple[Any, ...], simpler: Any, fact: Callable[[Tensor], Any]
    ) -> Any:
        """Called for a function of a tensor with a name and one without, if only the dtype or shape of the second counts.

        Args:
            simpler: a function with the same result for ``(args[0], fact(args[1]))``.
        """
        return func(*args)

    def on_mixed_call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], names: list[Name | None]
    ) -> Any:
        """Called for a function some of whose tensors have names, and some have none."""
        return func(*args, **kwargs)

    def on_unnamed_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Called for a function none of whose tensors has a name, or that draws random numbers."""
        return func(*args, **kwargs)


def tensors_of_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) for each buffer, and for each tensor that is a plain attribute of a module."""
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for key, x in vars(module).items():
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and not x.is_meta:
                yield f"{path}.{key}" if path else key, x


def _has_memory(t: Tensor) -> bool:
    """Whether a tensor is plain and strided, with real memory."""
    return type(t) is Tensor and t.layout is torch.strided and not t.is_meta


def _shallow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments of a call, including the items of lists and tuples."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            yield from pytree.tree_leaves(x)
        else:
            yield x
