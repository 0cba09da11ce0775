"""``Recording``: one call of a block, run eagerly and recorded. From the recording, a ``LocalProgram`` is made.

before   collect the tensors that exist (arguments, parameters, buffers, attributes), and the moves already made of them
call     run the block's forward under a recorder, which is below all function modes that are on
after    make the program from nodes, results, and the moves that the call memoized on tensors from outside
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.private import function_mode_at, function_modes, pytree, without_modes
from meshwright.replay.nodes import InputSource
from meshwright.replay.program import (
    Constant,
    Expected,
    LocalProgram,
    MemoizedMove,
    Result,
    form_of,
    is_uneven,
    moves_of,
    valid_moves,
)
from meshwright.replay.recorder import BlockRecorder, Refused
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.tensor import GlobalTensor, local_of, spec_of

Inputs = list[tuple[Tensor, InputSource]]


class Recording:
    """Runs one call of a block and records it. Created before the call, with modes off.

    Args:
        module: the block.
        mode: the SPMD mode that is on.
        tensors: the tensors among the arguments of the call, in order.

    Attributes:
        recorder: holds the nodes, or the reason why there is no program.
    """

    def __init__(self, module: nn.Module, mode: SpmdMode, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._ledger = tensors, mode.dispatcher.ledger
        self._inputs, read_only = _inputs(module, mode, tensors)
        self._moves_before = {source: dict(moves_of(t)) for t, source in self._inputs}
        self._fallbacks: Counter[Any] = Counter()
        self.recorder = BlockRecorder([(local_of(t), s) for t, s in self._inputs] + _moves(self._inputs), read_only)

    def run(self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the block's forward. ``model``: the whole model, whose generators are watched."""
        before = Counter(self._ledger.fallbacks)
        result = _below(self.recorder, model, forward, args, kwargs)
        self._fallbacks = Counter(self._ledger.fallbacks) - before
        return result

    def program(self, result: Any) -> LocalProgram:
        """The program of the call, which returned ``result``. Modes must be off.

        Raises:
            Refused: no program can hold what the call did.
        """
        recorder = self.recorder
        if recorder.refusal:
            raise Refused(recorder.refusal)
        results, outputs, returned = self._results(result)
        memoized = _new_moves(recorder, self._inputs, self._moves_before) + _moves_of_results(
            recorder, outputs, results
        )
        used = tuple(sorted(recorder.used.items()))
        return LocalProgram(
            nodes=tuple(recorder.nodes),
            inputs=used,
            expected=self._expected(used, memoized),
            results=results,
            returned=returned,
            memoized=tuple(memoized),
            fallbacks=tuple(sorted(self._fallbacks.items(), key=str)),
            uneven=any(is_uneven(form_of(t)) for t in self._tensors),
        )

    def _results(self, result: Any) -> tuple[tuple[Result, ...], list[Tensor], tuple[Any, tuple[Any, ...]]]:
        """(a ``Result`` for each tensor that the call returned, the tensors, ``LocalProgram.returned``)."""
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

    def _expected(
        self, used: Sequence[tuple[int, InputSource]], memoized: Sequence[MemoizedMove]
    ) -> tuple[Expected, ...]:
        """The facts, before the call, of the parameters, buffers and attributes that the program needs."""
        sources = [s for _, s in used if s.kind not in ("argument", "move")]
        sources += [InputSource(s.at[0], s.at[1:]) for _, s in used if s.kind == "move" and not isinstance(s.at, int)]
        of_module = [m.tensor for m in memoized if not isinstance(m.tensor, int) and m.tensor[0] != "result"]
        sources += [InputSource(kind, tuple(at)) for kind, *at in of_module]
        tensor_at = {source: t for t, source in self._inputs}
        expected = []
        for source in dict.fromkeys(sources):
            t = tensor_at[source]
            moves = tuple(_moves_made(self._moves_before, source))
            expected.append(Expected(source, form_of(t), local_of(t).requires_grad, moves))
        return tuple(expected)


def _below(
    recorder: BlockRecorder,
    model: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of a forward that runs with the recorder below all modes that are on."""
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
                    intervened = counts != [m.interventions() for m in modes]
                    if intervened or any(m.follows(t) for m in modes for t in outputs):
                        recorder.refuse("it computes what the rows of all ranks weigh")
            finally:
                for mode in reversed(modes):
                    mode.__exit__(None, None, None)
    finally:
        for mode in modes:
            mode.__enter__()
    return result


def _inputs(block: nn.Module, mode: SpmdMode, tensors: Sequence[Tensor]) -> tuple[Inputs, list[Tensor]]:
    """(every tensor that exists before a call, as the mode has it, with its source; tensors that may not be written)."""
    inputs: Inputs = [(t, InputSource("argument", i)) for i, t in enumerate(tensors)]
    read_only = [local_of(t) for t in tensors]
    for path, module in block.named_modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            part = mode.local(p)
            part = p if part is None else part
            if not isinstance(part, DTensor):
                inputs.append((part, InputSource("parameter", (path, name))))
                read_only.append(local_of(part))
        inputs += [(b, InputSource("buffer", (path, n))) for n, b in module._buffers.items() if type(b) is Tensor]
        inputs += [(t, InputSource("attribute", (path, n))) for n, t in vars(module).items() if type(t) is Tensor]
    return inputs, read_only


def _moves(inputs: Inputs) -> Inputs:
    """The results of moves of ``inputs`` that were made before the call, with their sources."""
    moves: Inputs = []
    for t, source in inputs:
        for kind in valid_moves(t):
            at = source.at if source.kind == "argument" else (source.kind, *source.at)
            moves.append((moves_of(t)[kind][2], InputSource("move", at, kind)))
    return moves


def _moves_made(before: Mapping[InputSource, Mapping[str, Any]], source: InputSource) -> list[str]:
    """The names of the moves of a tensor that had been made before a call."""
    return sorted(kind for kind, memo in before[source].items() if type(memo) is tuple)


def _result(recorder: BlockRecorder, t: Tensor, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Result:
    """The ``Result`` for a tensor that the block returned.

    Args:
        tensors: the tensors among the arguments; ``others``: the tensors that were returned before ``t``.

    Raises:
        Refused: no program can return such a tensor.
    """
    argument = next((i for i, x in enumerate(tensors) if x is t), None)
    if argument is not None:
        return Result(None, argument=argument)
    if isinstance(t, (nn.Parameter, DTensor)) or getattr(t, "_mw_is_parameter", False):
        raise Refused("it returns a parameter")
    if any(not name.startswith("_mw_") for name in vars(t)):
        raise Refused("it puts attributes on a tensor that it returns")
    number = recorder.number(local_of(t))
    if number is None:
        raise Refused("it returns a tensor that no torch function made")
    if type(t) is not GlobalTensor:
        return Result(number)
    spec = spec_of(t)
    if t._mw_spec is None or t._mw_parameter is not None:
        raise Refused("it returns a part of a gathered tensor")
    return Result(number, spec, t._mw_dispatcher, memory=_memory(t, tensors, others))


def _memory(t: GlobalTensor, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> int | None:
    """The number of the memory that a result shares with an argument or another result, see ``Result.memory``."""
    if t._mw_memory is None:
        return None
    for i, x in enumerate(tensors):
        if type(x) is GlobalTensor and x._mw_memory is t._mw_memory:
            return -1 - i
    same = [i for i, x in enumerate(others) if type(x) is GlobalTensor and x._mw_memory is t._mw_memory]
    return same[0] if same else len(others)


def _new_moves(
    recorder: BlockRecorder, inputs: Inputs, before: Mapping[InputSource, Mapping[str, Any]]
) -> list[MemoizedMove]:
    """The moves of tensors from outside that the call made."""
    memoized = []
    for t, source in inputs:
        for kind in valid_moves(t):
            memo = moves_of(t)[kind]
            if before[source].get(kind) is memo:
                continue
            tensor = source.at if source.kind == "argument" else (source.kind, *source.at)
            memoized.append(_memoized_move(recorder, tensor, kind, memo))
    return memoized


def _moves_of_results(
    recorder: BlockRecorder, outputs: Sequence[Tensor], results: Sequence[Result]
) -> list[MemoizedMove]:
    return [
        _memoized_move(recorder, ("result", i), kind, moves_of(t)[kind])
        for i, (t, r) in enumerate(zip(outputs, results, strict=True))
        if r.argument is None
        for kind in valid_moves(t)
    ]


def _memoized_move(recorder: BlockRecorder, tensor: Any, kind: str, memo: Any) -> MemoizedMove:
    """The record of a move. ``tensor``: see ``MemoizedMove``; ``memo``: (version, with gradients, the moved tensor)."""
    number = recorder.number(memo[2]) if isinstance(memo[2], Tensor) else None
    if number is None:
        raise Refused("a collective of what it is given is kept, and cannot be followed")
    return MemoizedMove(tensor, kind, memo[1], number)


__all__ = ["Recording"]
