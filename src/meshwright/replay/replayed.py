"""``LocalPrograms``: the blocks of a model that run as local programs.

    a call of a block     first   second   later
    its key is known       no      once     twice, and both recordings are equal
    what is done        record   record   replay

What is recorded runs as ever; only a replay passes the SPMD mode by. A block with other recordings of one key, or with what no
program can hold, stays eager, and the blocks in it are recorded in its place. Blocks of one kind share one compiled function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.names import few
from meshwright.private import function_mode_at, function_modes, has_hooks, modes_are_asked, pytree, without_modes
from meshwright.replay.program import (
    Binding,
    Function,
    LocalProgram,
    compiled,
    valid_moves,
)
from meshwright.replay.recorder import CONSTANTS, Recorder, Refused
from meshwright.replay.recording import Recording
from meshwright.replay.state import Incomparable, ModuleState
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.signature import NEVER, read
from meshwright.spmd.tensor import GlobalTensor, spec_of

_FEWEST = 4  # nodes below which a replay saves less than its look-up costs
_VARIANTS, _STATES = 16, 4  # keys of a block, and states of each, before it stays eager: each takes two recordings


@dataclass
class Variant:
    """What is known of a block for one key, and one state of what Python keeps.

    Attributes:
        first: the first recording.
        state: the Python state that it met.
        bound: the program, once a second recording was equal.
    """

    first: LocalProgram
    state: ModuleState
    bound: Binding | None = None


@dataclass
class Block:
    """A module that may run as a local program.

    Attributes:
        refusal: why it has none; empty while it may have one.
        given: what it was given that no key holds; its calls with that stay eager.
        modules: those in it, itself first.
        variants: by key, each with its states.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    refusal: str = ""
    given: str = ""
    variants: dict[Hashable, list[Variant]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = list(self.module.modules())

    def keeps(self) -> list[Any]:
        """The very objects that its modules keep as parameters and buffers."""
        return [t for m in self.modules for table in (m._parameters, m._buffers) for t in table.values()]

    def variant(self, key: Hashable) -> Variant | None:
        """What is known for a key and the state that holds now."""
        return next((v for v in self.variants.get(key, ()) if v.state.holds()), None)


@dataclass(frozen=True)
class Begun:
    """A recording of one call of a block, before the call.

    Attributes:
        key: of the call.
        variant: the first recording of the key, if this is to be the second.
        state: the Python state that the block's forward may read.
        keeps: the parameters and buffers of the block's modules.
    """

    key: Hashable
    variant: Variant | None
    state: ModuleState
    keeps: list[Any]
    recording: Recording


class LocalPrograms:
    """Records the blocks of a model, and replays them.

    Args:
        model: its modules.
        blocks: the names of its repeated blocks. The modules in them and beside them are blocks as well: where what is around
            them stays eager, they are recorded.
        compile: whether ``torch.compile`` makes the functions of programs.
        recomputed: whether backwards run blocks again: then none is compiled.
    """

    def __init__(
        self, model: nn.Module, blocks: Collection[str], *, compile: bool = False, recomputed: bool = False
    ) -> None:
        self._model, self._compile, self._recomputed = model, compile, recomputed
        self._uncompiled: dict[str, str] = {}
        self._blocks: dict[str, Block] = {}
        self._functions: list[tuple[Hashable, LocalProgram, Function]] = []
        self._thread: int | None = None  # which is recording
        self.names = _candidates(model, blocks)

    def around(self, name: str, module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A block's forward → what is called in its place."""

        def replaying(forward: Callable[..., Any]) -> Callable[..., Any]:
            block = self._blocks[name] = Block(name, module, forward)

            def call(*args: Any, **kwargs: Any) -> Any:
                if block.refusal or self._thread is not None or not function_modes():
                    return forward(*args, **kwargs)
                return self._call(block, args, kwargs)

            return call

        return replaying

    def program(self, name: str) -> LocalProgram | None:
        """The program of a block that was called last; None if it has none."""
        block = self._blocks.get(name)
        variants = [v for of_key in block.variants.values() for v in of_key] if block is not None else []
        bound = [v.bound for v in variants if v.bound is not None]
        return bound[-1].program if bound else None

    def refusal(self, name: str) -> str:
        """Why a block has no program; empty if it has one, or may have one."""
        return self._blocks[name].refusal if name in self._blocks else "it is no block"

    @property
    def notes(self) -> tuple[str, ...]:
        """Which blocks stay eager, and which programs are not compiled, and why."""
        why: dict[str, list[str]] = {}
        for name, block in self._blocks.items():
            reason = block.refusal or block.given
            if reason and reason != _SMALL:
                why.setdefault(f"no recorded program, as {reason}", []).append(name or "the model")
        for name, reason in self._uncompiled.items():
            why.setdefault(f"its program is not compiled, as {reason}", []).append(name or "the model")
        return tuple(f"{few(names)}: {reason}" for reason, names in why.items())

    # --- a call -----------------------------------------------------------------------------------------------------------

    def _call(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode, may_replay = _on()
        if mode is None:
            return block.forward(*args, **kwargs)
        with without_modes():
            key, tensors = _key(args, kwargs)
            variant = None if key is None else block.variant(key)
            if variant is not None and variant.bound is not None:
                out = variant.bound(mode, tensors) if may_replay else NotImplemented
                if out is not NotImplemented:
                    return out
                if may_replay:  # parameters are others: recorded anew
                    block.variants[key].remove(variant)
                    variant = None
        if key is None:
            block.given = block.given or _unkeyed(args, kwargs)
            return block.forward(*args, **kwargs)
        if variant is not None and variant.bound is not None:
            return block.forward(*args, **kwargs)
        with without_modes():
            begun = self._begin(block, key, variant, mode, tensors)
        if begun is None:
            return block.forward(*args, **kwargs)
        return self._recorded(block, begun, args, kwargs)

    # --- recording --------------------------------------------------------------------------------------------------------

    def _begin(
        self, block: Block, key: Hashable, variant: Variant | None, mode: SpmdMode, tensors: list[Tensor]
    ) -> Begun | None:
        """The recording of a call that is about to run; None if the block can have no program. With modes off."""
        if any(has_hooks(m) for m in block.modules[1:]):
            block.refusal = "modules in it have hooks"
            return None
        try:
            state = ModuleState(block.module, {})
        except Incomparable as why:
            block.refusal = f"its {why}"
            return None
        return Begun(key, variant, state, block.keeps(), Recording(block.module, mode, tensors))

    def _recorded(self, block: Block, begun: Begun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the block's forward, which runs as ever and is written down."""
        self._thread = threading.get_ident()
        try:
            result = begun.recording.run(self._model, block.forward, args, kwargs)
        finally:
            self._thread = None
        with without_modes():
            try:
                program = begun.recording.program(result)
                if not begun.state.holds() or any(a is not b for a, b in zip(begun.keeps, block.keeps(), strict=True)):
                    raise Refused("it changes what its modules keep")
                self._take(block, begun.key, begun.variant, program, begun.recording.recorder)
            except (Refused, Incomparable) as why:
                block.refusal = str(why)
                block.variants.clear()
        return result

    def _take(
        self, block: Block, key: Hashable, before: Variant | None, program: LocalProgram, recorder: Recorder
    ) -> None:
        """A recording: the first of its key and state, or the second, which is to be equal."""
        if len(program.nodes) < _FEWEST:
            raise Refused(_SMALL)
        if before is None:
            known = block.variants.setdefault(key, [])
            if len(known) >= _STATES or len(block.variants) > _VARIANTS:
                raise Refused("it is called in too many ways: shapes, types, constants or what Python keeps differ")
            known.append(Variant(program, ModuleState(block.module, recorder.codes, recorder.free)))
        elif not before.state.holds():
            raise Refused("it changes what its code keeps")
        elif before.first.structure != program.structure:
            raise Refused(f"it does not do the same in each call: {_difference(before.first, program)}")
        else:
            program, function = self._shared(block, program)
            before.bound = Binding(program, function, block.module)

    def _shared(self, block: Block, program: LocalProgram) -> tuple[LocalProgram, Function]:
        """The program and function of the kind."""
        coarse = tuple(node.target for node in program.nodes)
        for key, known, function in self._functions:
            if key == coarse and known.structure == program.structure:
                return known, function
        function = self._function(block, program)
        self._functions.append((coarse, program, function))
        return program, function

    def _function(self, block: Block, program: LocalProgram) -> Function:
        if self._compile:
            from meshwright.replay.inductor import NotCompiled, by_inductor  # the compiler takes seconds to import

            try:
                if self._recomputed:
                    # The forward may have been recorded, and what is compiled saves other tensors for the backward.
                    raise NotCompiled("the plan recomputes blocks")
                return by_inductor(program)
            except NotCompiled as why:
                self._uncompiled[block.name] = str(why)
        return compiled(program.graph())


_SMALL = "it is too small to gain by one"


def _candidates(model: nn.Module, blocks: Collection[str]) -> tuple[str, ...]:
    """The names of the modules that may be blocks, each after what is around it: not those around repeated blocks."""
    above = {*([""] if blocks else []), *(block[:end] for block in blocks for end in _ends(block))}
    return tuple(
        name
        for name, module in model.named_modules()
        if name not in above and any(True for _ in module.children()) and not isinstance(module, torch.jit.ScriptModule)
    )


def _ends(name: str) -> list[int]:
    """Where the names of the modules around one end."""
    return [i for i, c in enumerate(name) if c == "."]


def _on() -> tuple[SpmdMode | None, bool]:
    """(the SPMD mode, if it is on and all modes that are on let a block be recorded; whether they let it be replayed)."""
    view, passed = None, True
    if not modes_are_asked():
        return None, False
    for i in range(function_modes()):
        mode = function_mode_at(i)
        if not isinstance(mode, FunctionMode) or not mode.may_be_recorded():
            return None, False
        passed = passed and mode.may_be_passed()
        if type(mode) is SpmdMode:
            view = mode
    return view, passed


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable | None, list[Tensor]]:
    """(all that a program depends on of a call, or None if that cannot be said; the tensors of the call)."""
    _, parts, tensors = read(None, args, kwargs, None)
    if any(type(t) is GlobalTensor and t._mw_spec is None for t in tensors):
        for t in tensors:
            spec_of(t)
        _, parts, tensors = read(None, args, kwargs, None)
    parts.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()))
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
    """What of a call no key holds."""
    named = [*enumerate(args), *kwargs.items()]
    for name, x in named:
        for leaf in pytree.tree_leaves(x):
            if type(leaf) not in (Tensor, GlobalTensor) and not isinstance(leaf, CONSTANTS):
                return f"it is given an object of the type {type(leaf).__name__} ({name})"
    return "what it is given cannot be told apart from other calls"


def _difference(one: LocalProgram, other: LocalProgram) -> str:
    """Where two recordings differ first."""
    for a, b in zip(one.nodes, other.nodes, strict=False):
        if a.structure != b.structure:
            return f"{b.line}" if a.line == b.line else f"{a.line} in one, {b.line} in another"
    if len(one.nodes) != len(other.nodes):
        longer = max((one, other), key=lambda p: len(p.nodes))
        return longer.nodes[min(len(one.nodes), len(other.nodes))].line
    return "what it takes, or returns"


__all__ = ["LocalPrograms"]
