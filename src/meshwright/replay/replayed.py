"""``LocalPrograms``: the blocks of a model that run as local programs.

    a call of a block     first   second   later
    its key is known       no      once     twice, and both recordings are equal
    what is done        record   record   replay

What is recorded runs as ever; only a replay passes the SPMD mode by. A block with other recordings of one key, or with what no
program can hold, stays eager, and the blocks in it are recorded in its place. Blocks of one kind share one compiled function.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.names import few
from meshwright.private import function_mode_at, function_modes, has_hooks, modes_are_asked, pytree, without_modes
from meshwright.replay.nodes import Source
from meshwright.replay.program import (
    Binding,
    Constant,
    Function,
    Given,
    LocalProgram,
    MoveLeft,
    Result,
    compiled,
    form_of,
    is_uneven,
    moves_of,
    valid_moves,
)
from meshwright.replay.recorder import CONSTANTS, Recorder, Refused
from meshwright.replay.state import Incomparable, ModuleState
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.signature import NEVER, read
from meshwright.spmd.tensor import GlobalTensor, local_of, spec_of

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

    def variant(self, key: Hashable) -> Variant | None:
        """What is known for a key and the state that holds now."""
        return next((v for v in self.variants.get(key, ()) if v.state.holds()), None)


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
        view, passed = _on()
        if view is None:
            return block.forward(*args, **kwargs)
        with without_modes():
            key, tensors = _key(args, kwargs)
            variant = None if key is None else block.variant(key)
            if variant is not None and variant.bound is not None:
                out = variant.bound(view, tensors) if passed else NotImplemented
                if out is not NotImplemented:
                    return out
                if passed:  # parameters are others: recorded anew
                    block.variants[key].remove(variant)
                    variant = None
        if key is None:
            block.given = block.given or _unkeyed(args, kwargs)
            return block.forward(*args, **kwargs)
        if variant is not None and variant.bound is not None:
            return block.forward(*args, **kwargs)
        return self._record(block, key, variant, view, tensors, args, kwargs)

    # --- recording --------------------------------------------------------------------------------------------------------

    def _record(
        self,
        block: Block,
        key: Hashable,
        before: Variant | None,
        view: SpmdMode,
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The block runs as ever, and what it did is written down."""
        if any(has_hooks(m) for m in block.modules[1:]):
            block.refusal = "modules in it have hooks"
            return block.forward(*args, **kwargs)
        with without_modes():
            inputs, given = _inputs(block, view, tensors)
            try:
                state = ModuleState(block.module, {})
            except Incomparable as why:
                block.refusal = f"its {why}"
                state = None
            kept_before = _kept(block)
            moves_before = {s: dict(moves_of(t)) for t, s in inputs}
        if state is None:
            return block.forward(*args, **kwargs)
        recorder = Recorder([(local_of(t), s) for t, s in inputs] + _moves(inputs), given)
        ledger = view.dispatcher.ledger
        counted = Counter(ledger.fallbacks)
        self._thread = threading.get_ident()
        try:
            result = _below(recorder, self._model, block.forward, args, kwargs)
        finally:
            self._thread = None
        with without_modes():
            try:
                if recorder.refusal:
                    raise Refused(recorder.refusal)
                if not state.holds() or any(a is not b for a, b in zip(kept_before, _kept(block), strict=True)):
                    raise Refused("it changes what its modules keep")
                fallbacks = tuple(sorted((Counter(ledger.fallbacks) - counted).items(), key=str))
                program = _program(recorder, inputs, tensors, moves_before, result, fallbacks)
                self._take(block, key, before, program, recorder)
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


def _below(
    recorder: Recorder, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of a forward, with the recorder below all modes that are on."""
    modes = [function_mode_at(i) for i in range(function_modes())]
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    try:
        with recorder.on(model):
            for mode in modes:
                mode.__enter__()
            try:
                counts = [mode.interventions() for mode in modes]
                result = forward(*args, **kwargs)
                with without_modes():
                    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
                    if counts != [m.interventions() for m in modes] or any(
                        m.follows(t) for m in modes for t in outputs
                    ):
                        recorder.refuse("it computes what the rows of all ranks weigh")
            finally:
                for mode in reversed(modes):
                    mode.__exit__(None, None, None)
    finally:
        for mode in modes:
            mode.__enter__()
    return result


Inputs = list[tuple[Tensor, Source]]


def _inputs(block: Block, view: SpmdMode, tensors: Sequence[Tensor]) -> tuple[Inputs, list[Tensor]]:
    """(every tensor that is there before a call, as the mode knows it, with where it comes from; what may not be written)."""
    inputs: Inputs = [(t, Source("argument", i)) for i, t in enumerate(tensors)]
    given = [local_of(t) for t in tensors]
    for path, module in block.module.named_modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            part = view.local(p)
            part = p if part is None else part
            if not isinstance(part, DTensor):
                inputs.append((part, Source("parameter", (path, name))))
                given.append(local_of(part))
        inputs += [(b, Source("buffer", (path, n))) for n, b in module._buffers.items() if type(b) is Tensor]
        inputs += [(t, Source("attribute", (path, n))) for n, t in vars(module).items() if type(t) is Tensor]
    return inputs, given


def _moves(inputs: Inputs) -> Inputs:
    """What has been made of tensors before the call."""
    moves: Inputs = []
    for t, source in inputs:
        for kind in valid_moves(t):
            at = source.at if source.kind == "argument" else (source.kind, *source.at)
            moves.append((moves_of(t)[kind][2], Source("move", at, kind)))
    return moves


def _kept(block: Block) -> list[Any]:
    """The very objects that a block's modules keep as parameters and buffers."""
    return [t for m in block.modules for table in (m._parameters, m._buffers) for t in table.values()]


def _program(
    recorder: Recorder,
    inputs: Inputs,
    tensors: Sequence[Tensor],
    moves_before: Mapping[Source, Mapping[str, Any]],
    result: Any,
    fallbacks: Iterable[Any],
) -> LocalProgram:
    """What was recorded, with what comes out."""
    leaves, spec = pytree.tree_flatten(result)
    results: list[Result] = []
    outputs: list[Any] = []
    slots: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            slots.append(len(results))
            results.append(_result(recorder, leaf, tensors, [*outputs]))
            outputs.append(leaf)
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            slots.append(Constant(leaf))
        else:
            raise Refused(f"it returns an object of the type {type(leaf).__name__}")
    left = _left(recorder, inputs, moves_before) + _left_of_results(recorder, outputs, results)
    used = tuple(sorted(recorder.used.items()))
    at_source = {s: t for t, s in inputs}
    places = [s for _, s in used if s.kind not in ("argument", "move")]
    places += [Source(s.at[0], s.at[1:]) for _, s in used if s.kind == "move" and not isinstance(s.at, int)]
    places += [Source(m.of[0], m.of[1:]) for m in left if not isinstance(m.of, int) and m.of[0] != "result"]
    kept = tuple(
        Given(s, form_of(at_source[s]), local_of(at_source[s]).requires_grad, tuple(moves_of_valid(moves_before, s)))
        for s in dict.fromkeys(places)
    )
    return LocalProgram(
        tuple(recorder.nodes), used, kept, tuple(results),
        (None if len(leaves) == 1 and leaves[0] is result else spec, tuple(slots)), tuple(left), tuple(fallbacks),
        any(is_uneven(form_of(t)) for t in tensors),
    )  # fmt: skip


def moves_of_valid(before: Mapping[Source, Mapping[str, Any]], source: Source) -> list[str]:
    """The moves of a tensor that had been made before a call."""
    return sorted(kind for kind, memo in before[source].items() if type(memo) is tuple)


def _result(recorder: Recorder, t: Tensor, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Result:
    """A tensor that comes out."""
    itself = next((i for i, x in enumerate(tensors) if x is t), None)
    if itself is not None:
        return Result(None, itself=itself)
    if isinstance(t, (nn.Parameter, DTensor)) or getattr(t, "_mw_is_parameter", False):
        raise Refused("it returns a parameter")
    if any(not name.startswith("_mw_") for name in vars(t)):
        raise Refused("it puts attributes on a tensor that it returns")
    number = recorder.number(local_of(t))
    if number is None:
        raise Refused("it returns a tensor that no torch function made")
    if type(t) is not GlobalTensor:
        return Result(number)
    known = spec_of(t)
    if t._mw_spec is None or t._mw_parameter is not None:
        raise Refused("it returns a part of a gathered tensor")
    return Result(number, known, t._mw_dispatcher, memory=_memory(t, tensors, others))


def _memory(t: GlobalTensor, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> int | None:
    """With which argument, or other result, a result shares its memory."""
    if t._mw_memory is None:
        return None
    for i, x in enumerate(tensors):
        if type(x) is GlobalTensor and x._mw_memory is t._mw_memory:
            return -1 - i
    same = [i for i, x in enumerate(others) if type(x) is GlobalTensor and x._mw_memory is t._mw_memory]
    return same[0] if same else len(others)


def _left(recorder: Recorder, inputs: Inputs, before: Mapping[Source, Mapping[str, Any]]) -> list[MoveLeft]:
    """Moves of tensors from outside that were made in the call."""
    left = []
    for t, source in inputs:
        for kind in valid_moves(t):
            memo = moves_of(t)[kind]
            if before[source].get(kind) is memo:
                continue
            of = source.at if source.kind == "argument" else (source.kind, *source.at)
            left.append(_move_left(recorder, of, kind, memo))
    return left


def _left_of_results(recorder: Recorder, outputs: Sequence[Tensor], results: Sequence[Result]) -> list[MoveLeft]:
    return [
        _move_left(recorder, ("result", i), kind, moves_of(t)[kind])
        for i, (t, r) in enumerate(zip(outputs, results, strict=True))
        if r.itself is None
        for kind in valid_moves(t)
    ]


def _move_left(recorder: Recorder, of: Any, kind: str, memo: Any) -> MoveLeft:
    number = recorder.number(memo[2]) if isinstance(memo[2], Tensor) else None
    if number is None:
        raise Refused("a collective of what it is given is kept, and cannot be followed")
    return MoveLeft(of, kind, memo[1], number)


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
