"""``LocalPrograms``: records the blocks of a model and replays them as local programs.

    call of a block with a key    first    second                      later
    recordings before             none     one                         two, which are equal
    action                        record   record, compare the two     replay

A recorded call runs eagerly; only a replay bypasses the SPMD mode. A block stays eager if two recordings of a key differ, or if
it does something that no program can hold; then the blocks within it are recorded instead. Blocks of one kind share one
compiled function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.names import few
from meshwright.private import (
    function_mode_at,
    function_modes,
    has_hooks,
    in_backward,
    modes_are_asked,
    pytree,
    saved_tensors_are_hooked,
    without_modes,
)
from meshwright.replay.overlap import overlapping
from meshwright.replay.program import (
    Binding,
    Function,
    LocalProgram,
    valid_moves,
)
from meshwright.replay.recorder import CONSTANTS, BlockRecorder, Refused, can_profile
from meshwright.replay.recording import Recording
from meshwright.replay.state import Incomparable, ModuleState
from meshwright.spmd.autograd_functions import FunctionMode, transforming
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.signature import NEVER, read_call
from meshwright.spmd.tensor import GlobalTensor, spec_of

_FEWEST = 4  # with fewer nodes, a replay saves less than its look-up costs
# most keys of a block, and most states of a key, before it stays eager: each costs two recordings
_VARIANTS, _STATES = 16, 4


@dataclass
class Variant:
    """The recordings of a block for one key and one Python state.

    Attributes:
        first: the first recording.
        state: the Python state at that recording.
        bound: the program for this block, after a second recording was equal; else None.
    """

    first: LocalProgram
    state: ModuleState
    bound: Binding | None = None


@dataclass
class ReplayedBlock:
    """A module that may run as a local program.

    Attributes:
        refusal: why it has no program; "" while it may have one.
        unkeyed: why a call of it had no key; such calls stay eager. "" if there was none.
        modules: the module and all modules within it.
        variants: key → its variants, one for each Python state.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    refusal: str = ""
    unkeyed: str = ""
    variants: dict[Hashable, list[Variant]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = list(self.module.modules())

    def tensors(self) -> list[Any]:
        """The objects that its modules have as parameters and buffers now."""
        return [t for m in self.modules for table in (m._parameters, m._buffers) for t in table.values()]

    def variant(self, key: Hashable) -> Variant | None:
        """The variant for a key and the current Python state; None if there is none."""
        return next((v for v in self.variants.get(key, ()) if v.state.holds()), None)


@dataclass(frozen=True)
class OpenRecording:
    """A recording of one call of a block, before the call.

    Attributes:
        key: the key of the call.
        variant: the variant with the first recording, if this is to be the second.
        state: the Python state that the block's forward may read, before the call.
        tensors: the parameters and buffers of the block's modules before the call.
        recording: runs and records the call.
    """

    key: Hashable
    variant: Variant | None
    state: ModuleState
    tensors: list[Any]
    recording: Recording


class LocalPrograms:
    """Records the blocks of a model, and replays them.

    Args:
        model: the model.
        blocks: the names of its repeated blocks. The modules within them and beside them are blocks as well: they are recorded
            if the block around them stays eager.
        compile: whether ``torch.compile`` compiles the programs.
        recomputed: whether backwards run blocks again: then no program is compiled by ``torch.compile``.
    """

    def __init__(
        self, model: nn.Module, blocks: Collection[str], *, compile: bool = False, recomputed: bool = False
    ) -> None:
        self._model, self._compile, self._recomputed = model, compile, recomputed
        self._uncompiled: dict[str, str] = {}
        self._blocks: dict[str, ReplayedBlock] = {}
        self._functions: list[tuple[Hashable, LocalProgram, Function]] = []
        self._thread: int | None = None  # the thread that is recording
        self.names = _candidates(model, blocks)

    def around(self, name: str, module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A function that wraps a block's forward: the result records and replays its calls."""

        def replaying(forward: Callable[..., Any]) -> Callable[..., Any]:
            block = self._blocks[name] = ReplayedBlock(name, module, forward)

            def call(*args: Any, **kwargs: Any) -> Any:
                if block.refusal or self._thread is not None or not function_modes() or transforming():
                    return forward(*args, **kwargs)
                return self._call(block, args, kwargs)

            return call

        return replaying

    def program(self, name: str) -> LocalProgram | None:
        """The newest program of a block; None if it has none."""
        block = self._blocks.get(name)
        variants = [v for of_key in block.variants.values() for v in of_key] if block is not None else []
        bound = [v.bound for v in variants if v.bound is not None]
        return bound[-1].program if bound else None

    def refusal(self, name: str) -> str:
        """Why a block has no program; "" if it has one, or may get one."""
        return self._blocks[name].refusal if name in self._blocks else "it is no block"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for a person: which blocks stay eager, which programs are not compiled, and why."""
        why: dict[str, list[str]] = {}
        for name, block in self._blocks.items():
            reason = block.refusal or block.unkeyed
            if reason and reason != _SMALL:
                why.setdefault(f"no recorded program, as {reason}", []).append(name or "the model")
        for name, reason in self._uncompiled.items():
            why.setdefault(f"its program is not compiled, as {reason}", []).append(name or "the model")
        return tuple(f"{few(names)}: {reason}" for reason, names in why.items())

    # --- a call -----------------------------------------------------------------------------------------------------------

    def _call(self, block: ReplayedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode, may_replay, kinds = _spmd_mode()
        if mode is None:
            return block.forward(*args, **kwargs)
        with without_modes():
            key, tensors = _key(args, kwargs, kinds)
            variant = None if key is None else block.variant(key)
            if variant is not None and variant.bound is not None:
                out = variant.bound(mode, tensors) if may_replay else NotImplemented
                if out is not NotImplemented:
                    return out
                if may_replay:  # parameters have changed: record anew
                    block.variants[key].remove(variant)
                    variant = None
        if key is None:
            block.unkeyed = block.unkeyed or _unkeyed(args, kwargs)
            return block.forward(*args, **kwargs)
        # A checkpoint's recomputation ends as soon as all is there that its forward saved: its recording would not be complete.
        recomputing = in_backward() and saved_tensors_are_hooked()
        if (variant is not None and variant.bound is not None) or recomputing or not can_profile():
            return block.forward(*args, **kwargs)
        with without_modes():
            begun = self._prepare(block, key, variant, mode, tensors)
        if begun is None:
            return block.forward(*args, **kwargs)
        return self._recorded(block, begun, args, kwargs)

    # --- recording --------------------------------------------------------------------------------------------------------

    def _prepare(
        self, block: ReplayedBlock, key: Hashable, variant: Variant | None, mode: SpmdMode, tensors: list[Tensor]
    ) -> OpenRecording | None:
        """Prepares to record the next call; None if the block can have no program. Modes must be off."""
        if any(has_hooks(m) for m in block.modules[1:]):
            block.refusal = "modules in it have hooks"
            return None
        try:
            state = ModuleState(block.module, {})
        except Incomparable as why:
            block.refusal = f"its {why}"
            return None
        return OpenRecording(key, variant, state, block.tensors(), Recording(block.module, mode, tensors))

    def _recorded(
        self, block: ReplayedBlock, begun: OpenRecording, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the block's forward eagerly, records it, and returns its result."""
        self._thread = threading.get_ident()
        items, structure = pytree.tree_flatten((args, kwargs))
        try:
            result = begun.recording.run(self._model, block.forward, args, kwargs)
        finally:
            self._thread = None
        with without_modes():
            try:
                program = begun.recording.program(result)
                if not begun.state.holds() or any(
                    a is not b for a, b in zip(begun.tensors, block.tensors(), strict=True)
                ):
                    raise Refused("it changes what its modules keep")
                items_after, structure_after = pytree.tree_flatten((args, kwargs))
                if structure_after != structure or not all(map(_unchanged, items, items_after)):
                    raise Refused("it changes a list or dict that it is given")
                self._keep(block, begun.key, begun.variant, program, begun.recording.recorder)
            except (Refused, Incomparable) as why:
                block.refusal = str(why)
                block.variants.clear()
        return result

    def _keep(
        self,
        block: ReplayedBlock,
        key: Hashable,
        before: Variant | None,
        program: LocalProgram,
        recorder: BlockRecorder,
    ) -> None:
        """Keeps a recording: the first of its key and state; or the second, which must be equal and becomes a program.

        Raises:
            Refused: the block can have no program.
        """
        if len(program.nodes) < _FEWEST:
            raise Refused(_SMALL)
        if before is None:
            variants = block.variants.setdefault(key, [])
            if len(variants) >= _STATES or len(block.variants) > _VARIANTS:
                raise Refused("it is called in too many ways: shapes, types, constants or what Python keeps differ")
            variants.append(Variant(program, ModuleState(block.module, recorder.codes, recorder.free)))
        elif not before.state.holds():
            raise Refused("it changes what its code keeps")
        elif before.first.structure != program.structure:
            raise Refused(f"it does not do the same in each call: {_difference(before.first, program)}")
        else:
            program, function = self._shared(block, program)
            before.bound = Binding(program, function, block.module)

    def _shared(self, block: ReplayedBlock, program: LocalProgram) -> tuple[LocalProgram, Function]:
        """An equal program of another block with its function; else ``program`` with a new function."""
        targets = tuple(node.target for node in program.nodes)
        for other_targets, other, function in self._functions:
            if other_targets == targets and other.structure == program.structure:
                return other, function
        function = self._function(block, program)
        self._functions.append((targets, program, function))
        return program, function

    def _function(self, block: ReplayedBlock, program: LocalProgram) -> Function:
        if self._compile:
            from meshwright.replay.inductor import NotCompiled, by_inductor  # the compiler takes seconds to import

            try:
                if self._recomputed:
                    # A recomputation may replay a call whose forward was eager, and compiled code saves other tensors.
                    raise NotCompiled("the plan recomputes blocks")
                return by_inductor(program)
            except NotCompiled as why:
                self._uncompiled[block.name] = str(why)
        return overlapping(program)


def _unchanged(before: Any, after: Any) -> bool:
    """Whether an item of an argument is the same tensor, or an equal constant."""
    return before is after or (not isinstance(before, Tensor) and type(before) is type(after) and before == after)


_SMALL = "it is too small to gain by one"


def _candidates(model: nn.Module, blocks: Collection[str]) -> tuple[str, ...]:
    """The names of the modules that may be blocks, outer ones first, without the modules around repeated blocks."""
    above = {*([""] if blocks else []), *(block[:end] for block in blocks for end in _ends(block))}
    return tuple(
        name
        for name, module in model.named_modules()
        if name not in above and any(True for _ in module.children()) and not isinstance(module, torch.jit.ScriptModule)
    )


def _ends(name: str) -> list[int]:
    """The positions in a module's name at which the names of the modules around it end."""
    return [i for i, c in enumerate(name) if c == "."]


def _spmd_mode() -> tuple[SpmdMode | None, bool, tuple[type, ...]]:
    """(the SPMD mode, None if it is off or if a mode that is on forbids recording; whether all modes allow a replay; the kinds
    of all modes)."""
    view, passed, kinds = None, True, []
    if not modes_are_asked():
        return None, False, ()
    for i in range(function_modes()):
        mode = function_mode_at(i)
        if not isinstance(mode, FunctionMode) or not mode.may_be_recorded():
            return None, False, ()
        passed = passed and mode.may_be_passed()
        kinds.append(type(mode))
        if type(mode) is SpmdMode:
            view = mode
    return view, passed, tuple(kinds)


def _key(
    args: tuple[Any, ...], kwargs: dict[str, Any], kinds: tuple[type, ...]
) -> tuple[Hashable | None, list[Tensor]]:
    """(the key of a call: everything on which a program depends, None if no key can hold it; the tensors of the call).

    Args:
        kinds: of the function modes that are on: losses are weighed by one that is off in a step whose microbatches have as
            many labels each.
    """
    _, parts, tensors = read_call(None, args, kwargs, None)
    if any(type(t) is GlobalTensor and t._mw_spec is None for t in tensors):
        for t in tensors:
            spec_of(t)
        _, parts, tensors = read_call(None, args, kwargs, None)
    parts.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), kinds))
    for t in tensors:
        if type(t) is GlobalTensor:
            parts.append(t._mw_local.requires_grad)
            if t._mw_spec is None or t._mw_origin is not None:
                return None, tensors
        elif type(t) is Tensor:
            parts.append(t.requires_grad)
        else:
            return None, tensors
        if moves := valid_moves(t):
            parts.append(moves)
    if len({id(t) for t in tensors}) < len(tensors):
        ids = [id(t) for t in tensors]
        parts.append(tuple(ids.index(i) for i in ids))
    key = tuple(parts)
    return (None if NEVER in key else key), tensors


def _unkeyed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call has no key, as text for a person."""
    named = [*enumerate(args), *kwargs.items()]
    for name, x in named:
        for leaf in pytree.tree_leaves(x):
            if type(leaf) not in (Tensor, GlobalTensor) and not isinstance(leaf, CONSTANTS):
                return f"it is given an object of the type {type(leaf).__name__} ({name})"
    return "what it is given cannot be told apart from other calls"


def _difference(one: LocalProgram, other: LocalProgram) -> str:
    """The first difference between two recordings, as text for a person: the model's line or lines."""
    for a, b in zip(one.nodes, other.nodes, strict=False):
        if a.structure != b.structure:
            return f"{b.line}" if a.line == b.line else f"{a.line} in one, {b.line} in another"
    if len(one.nodes) != len(other.nodes):
        longer = max((one, other), key=lambda p: len(p.nodes))
        return longer.nodes[min(len(one.nodes), len(other.nodes))].line
    return "what it takes, or returns"


__all__ = ["LocalPrograms"]
