"""``Recording``: one call of a block, run as ever and written down; what comes of it is a ``LocalProgram``.

before   the tensors that are there (arguments, parameters, buffers, attributes), and the moves already made of them
call     the block's forward under a recorder, which stands below all function modes that are on
after    nodes, results, and the moves that the call left on tensors from outside
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.private import function_mode_at, function_modes, pytree, without_modes
from meshwright.replay.nodes import Source
from meshwright.replay.program import (
    Constant,
    Given,
    LocalProgram,
    MoveLeft,
    Result,
    form_of,
    is_uneven,
    moves_of,
    valid_moves,
)
from meshwright.replay.recorder import Recorder, Refused
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.tensor import GlobalTensor, local_of, spec_of

Inputs = list[tuple[Tensor, Source]]


class Recording:
    """Runs one call of a block and writes it down. Made before the call, with modes off.

    Args:
        module: the block.
        mode: the SPMD mode that is on.
        tensors: those among the arguments of the call, in order.

    Attributes:
        recorder: what was written down, and why it is no program, if it is none.
    """

    def __init__(self, module: nn.Module, mode: SpmdMode, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._ledger = tensors, mode.dispatcher.ledger
        self._inputs, read_only = _inputs(module, mode, tensors)
        self._moves_before = {source: dict(moves_of(t)) for t, source in self._inputs}
        self._fallbacks: Counter[Any] = Counter()
        self.recorder = Recorder([(local_of(t), s) for t, s in self._inputs] + _moves(self._inputs), read_only)

    def run(self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the block's forward. ``model``: the whole model, whose generators are watched."""
        before = Counter(self._ledger.fallbacks)
        result = _below(self.recorder, model, forward, args, kwargs)
        self._fallbacks = Counter(self._ledger.fallbacks) - before
        return result

    def program(self, result: Any) -> LocalProgram:
        """The program of the call, which returned ``result``. With modes off.

        Raises:
            Refused: no program can hold what the call did.
        """
        recorder = self.recorder
        if recorder.refusal:
            raise Refused(recorder.refusal)
        results, outputs, returned = self._results(result)
        left = _left(recorder, self._inputs, self._moves_before) + _left_of_results(recorder, outputs, results)
        used = tuple(sorted(recorder.used.items()))
        return LocalProgram(
            nodes=tuple(recorder.nodes),
            inputs=used,
            kept=self._slots(used, left),
            results=results,
            returned=returned,
            left=tuple(left),
            fallbacks=tuple(sorted(self._fallbacks.items(), key=str)),
            uneven=any(is_uneven(form_of(t)) for t in self._tensors),
        )

    def _results(self, result: Any) -> tuple[tuple[Result, ...], list[Tensor], tuple[Any, tuple[Any, ...]]]:
        """(each tensor that the call returned, as a program gives it; the tensors; how they stand in what is returned)."""
        leaves, spec = pytree.tree_flatten(result)
        results: list[Result] = []
        outputs: list[Tensor] = []
        slots: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                slots.append(len(results))
                results.append(_result(self.recorder, leaf, self._tensors, [*outputs]))
                outputs.append(leaf)
            elif isinstance(leaf, (bool, int, float, str, type(None))):
                slots.append(Constant(leaf))
            else:
                raise Refused(f"it returns an object of the type {type(leaf).__name__}")
        alone = len(leaves) == 1 and leaves[0] is result
        return tuple(results), outputs, (None if alone else spec, tuple(slots))

    def _slots(self, used: Sequence[tuple[int, Source]], left: Sequence[MoveLeft]) -> tuple[Given, ...]:
        """The parameters, buffers and attributes of the block that the program needs, as they were before the call."""
        places = [s for _, s in used if s.kind not in ("argument", "move")]
        places += [Source(s.at[0], s.at[1:]) for _, s in used if s.kind == "move" and not isinstance(s.at, int)]
        places += [Source(m.of[0], m.of[1:]) for m in left if not isinstance(m.of, int) and m.of[0] != "result"]
        tensor_at = {source: t for t, source in self._inputs}
        return tuple(
            Given(
                place,
                form_of(tensor_at[place]),
                local_of(tensor_at[place]).requires_grad,
                tuple(_moves_made(self._moves_before, place)),
            )
            for place in dict.fromkeys(places)
        )


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


def _inputs(block: nn.Module, mode: SpmdMode, tensors: Sequence[Tensor]) -> tuple[Inputs, list[Tensor]]:
    """(every tensor that is there before a call, as the mode knows it, with where it comes from; what may not be written)."""
    inputs: Inputs = [(t, Source("argument", i)) for i, t in enumerate(tensors)]
    read_only = [local_of(t) for t in tensors]
    for path, module in block.named_modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            part = mode.local(p)
            part = p if part is None else part
            if not isinstance(part, DTensor):
                inputs.append((part, Source("parameter", (path, name))))
                read_only.append(local_of(part))
        inputs += [(b, Source("buffer", (path, n))) for n, b in module._buffers.items() if type(b) is Tensor]
        inputs += [(t, Source("attribute", (path, n))) for n, t in vars(module).items() if type(t) is Tensor]
    return inputs, read_only


def _moves(inputs: Inputs) -> Inputs:
    """What has been made of tensors before the call."""
    moves: Inputs = []
    for t, source in inputs:
        for kind in valid_moves(t):
            at = source.at if source.kind == "argument" else (source.kind, *source.at)
            moves.append((moves_of(t)[kind][2], Source("move", at, kind)))
    return moves


def _moves_made(before: Mapping[Source, Mapping[str, Any]], source: Source) -> list[str]:
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


__all__ = ["Recording"]
