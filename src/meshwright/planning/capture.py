"""``capture``: one forward of a model, recorded as a ``ModelGraph``. Parameters have shapes only; nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import is_ours, line_of
from meshwright.calls.hook import following
from meshwright.calls.structure import tensors_of
from meshwright.calls.tracer import Slot
from meshwright.chance import held_kept, host_drawn, host_generators
from meshwright.errors import Findings, PlanError
from meshwright.graph import ModelGraph, Span
from meshwright.planning.memory import path_of_sizes, path_of_the_next_forward, size_of_value
from meshwright.planning.meta_functions import MetaFunctions
from meshwright.planning.module_state import StateSnapshot
from meshwright.planning.origins import Origins
from meshwright.planning.recorder import ForwardRecorder
from meshwright.planning.shadow import Shadow
from meshwright.private import pytree


def capture(
    model: nn.Module, run: Callable[[nn.Module], Any], *, staged: bool = True, grad: bool = True, follow: bool = False
) -> ModelGraph:
    """Records one forward as a graph. The forward may run several times; afterwards, the model's state is as before.

    Args:
        model: the model, with parameters on meta.
        run: runs the model's forward on a batch, and the loss on its output; returns the results.
        staged: whether pipeline stages will each run a part of the forward. Else every rank has all buffers and attributes of
            modules, and changes all of them.
        grad: whether gradients are enabled in the forward (``torch.is_grad_enabled()``, which a model may read).
        follow: whether to record where buffers and attributes of modules are used even if every rank has them
            (``ModelGraph.followed``).

    Raises:
        PlanError: the forward cannot run on tensors without values.
    """
    with torch.set_grad_enabled(grad), held_kept(model):
        return _captured(model, run, staged, follow)


def _captured(model: nn.Module, run: Callable[[nn.Module], Any], staged: bool, follow: bool) -> ModelGraph:
    snapshot, origins, generators = StateSnapshot(model), Origins(), host_generators(model)
    numbers = host_drawn(generators)
    record = partial(_recorded, model, run, origins)
    recorder, shadow = record(())
    changed = snapshot.changed(recorder.memory.written) if staged or follow else []
    draws, changes_hooks = host_drawn(generators) != numbers, snapshot.hooks_changed()
    snapshot.put_back()
    reshaped: list[Slot] = []
    followed, changed = (None, changed) if staged or not changed else (record(changed)[0].graph, [])
    snapshot.put_back()
    # Record again: a slot that the forward changes is a value from its start. Only now it is known which slots change, and
    # whether the forward draws random numbers.
    if changed or draws:
        recorder, shadow = record(changed, draws=draws)
        reshaped = recorder.slot_uses.reshaped()
        snapshot.put_back()
    if staged and (acted_on := [*snapshot.by_python(changed), *reshaped]):
        recorder.graph.spans += _next_path(recorder.graph, record, changed, acted_on, snapshot, draws)
    in_parts = staged or follow
    if in_parts and shadow.sized:
        recorder = _with_sizes_of_values(recorder, record, changed, snapshot, draws)
    if in_parts and shadow.measured and not recorder.graph.of_this_batch:
        _with_sizes_of_batch(recorder, record, changed, snapshot, draws)
    recorder.graph.followed = followed
    recorder.graph.changed, recorder.graph.changes_hooks = frozenset(changed), changes_hooks
    recorder.graph.read = None if draws or origins.unknown else frozenset(origins.read - snapshot.memories())
    return recorder.graph


def _next_path(
    graph: ModelGraph,
    record: Callable[..., tuple[ForwardRecorder, Shadow]],
    changed: Sequence[Slot],
    acted_on: Sequence[Slot],
    snapshot: StateSnapshot,
    draws: bool,
) -> list[Span]:
    """The calls that must stay in one stage because the next forward takes another path through them, due to state that this
    forward leaves.

    Args:
        changed: the slots that a forward changes; ``acted_on``: those whose contents may decide the path in Python.
    """
    try:
        record(changed, draws=draws)
        # As a stage follows it: a kept tensor that is computed from constants alone (a cache of positions) is no value.
        following = record(graph.carried, draws=draws)[0].graph
    except PlanError:  # the next forward cannot run on state without values
        return []
    finally:
        snapshot.put_back()
    return path_of_the_next_forward(graph, following, acted_on)


def _with_sizes_of_values(
    recorder: ForwardRecorder,
    record: Callable[..., tuple[ForwardRecorder, Shadow]],
    changed: Sequence[Slot],
    snapshot: StateSnapshot,
    draws: bool,
) -> ForwardRecorder:
    """The recording, with a span for each tensor whose size depends on values (a mask selects it): it may not cross a cut.

    The first recording assumed such sizes. A second one with other sizes shows which tensors have them. If the path depends
    on these sizes too, the forward is recorded once more, and the returned recorder is a new one.
    """
    graph = recorder.graph
    other = _of_other_sizes(record, changed, snapshot, draws, fewer=True)
    sized = _of_another_size(recorder, other)
    if sized is not None and not sized & recorder.asked:
        graph.spans += size_of_value(graph, sorted(sized))
        graph.sized_by_model = frozenset(sized)
        return recorder
    recorder, _ = record(changed, sizes_read=True, draws=draws)  # the path depends on these sizes too
    snapshot.put_back()
    if other is not None:
        recorder.graph.spans += path_of_sizes(recorder.graph, other.graph)
    return recorder


def _with_sizes_of_batch(
    recorder: ForwardRecorder,
    record: Callable[..., tuple[ForwardRecorder, Shadow]],
    changed: Sequence[Slot],
    snapshot: StateSnapshot,
    draws: bool,
) -> None:
    """Adds a span for each tensor whose size depends on values of the batch (a mask of its labels selects it).

    Another batch has other sizes. If the path depends on them as well, sets ``of_this_batch``: each batch is then recorded.
    """
    graph = recorder.graph
    sized = _of_another_size(recorder, _of_other_sizes(record, changed, snapshot, draws, fewer_known=True))
    if sized is None or sized & recorder.asked:
        graph.of_this_batch = True
    else:
        graph.spans += size_of_value(graph, sorted(sized), of_batch=True)
        graph.sized = frozenset(sized)


def _of_other_sizes(
    record: Callable[..., tuple[ForwardRecorder, Shadow]],
    changed: Sequence[Slot],
    snapshot: StateSnapshot,
    draws: bool,
    **sizes: bool,
) -> ForwardRecorder | None:
    """The forward, recorded with other assumptions about sizes that depend on values; None if it cannot run with them."""
    try:
        return record(changed, draws=draws, **sizes)[0]
    except PlanError:
        return None
    finally:
        snapshot.put_back()


def _of_another_size(recorder: ForwardRecorder, other: ForwardRecorder | None) -> set[int] | None:
    """The values whose shape differs between two recordings.

    None if the recordings have different events, or if Python read a differing size of a tensor that is no value.
    """
    if other is None or other.told != recorder.told or _path(recorder.graph) != _path(other.graph):
        return None
    values = zip(recorder.graph.values, other.graph.values, strict=True)
    return {n for n, (a, b) in enumerate(values) if a.shape != b.shape}


def _path(graph: ModelGraph) -> list[Any]:
    return [(e.path, e.function, e.outputs) for e in graph.events]


def _recorded(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    origins: Origins,
    changed: Sequence[Slot],
    *,
    fewer: bool = False,
    fewer_known: bool = False,
    sizes_read: bool = False,
    draws: bool = False,
) -> tuple[ForwardRecorder, Shadow]:
    """Records one forward. Returns the recorder, and the shadow with the assumptions that it made.

    Args:
        origins: gets the memory on which the path depends.
        changed: the slots that the forward changes.
        fewer: assume that masks without values select half of the elements instead of all; ``fewer_known``: assume that masks
            of the batch select another number of elements than they do.
        sizes_read: count an event whose result has a size that depends on values as a read, on which Python acts.
        draws: whether the forward draws random numbers from Python or NumPy.
    """
    shadow = Shadow(fewer=fewer, fewer_known=fewer_known, origins=origins)
    functions = MetaFunctions(origins)
    recorder = ForwardRecorder(model, changed, lambda: shadow.sized if sizes_read else 0, draws=draws)
    modes = (shadow, recorder.cost, recorder.memory, functions, following(model, recorder), recorder.uses.watched())
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        try:
            result = run(model)
        except Exception as error:  # a model may raise anything on tensors without values
            if is_ours(error) or isinstance(error, PlanError):
                raise
            raise _not_followed(error, shadow) from error
    graph = recorder.graph
    graph.of_this_batch = shadow.known + functions.known > 0
    graph.returned = tuple(n for t in tensors_of(result) if (n := recorder.number(t)) is not None)
    recorder.finish()
    return recorder, shadow


def _not_followed(error: Exception, shadow: Shadow) -> PlanError:
    """The error for a forward that cannot be followed: the line that failed, and the last three values that it read before."""
    findings = Findings()
    reads = [f"{function} at {line}" for function, line in dict.fromkeys(shadow.assumed)]
    after = f", after it read values that follow from parameters: {'; '.join(reads[-3:])}" if reads else ""
    findings.add(
        where=f"the model's {line_of(error) or 'forward'}",
        given=f"a forward that cannot be followed without values: {type(error).__name__}: {str(error)[:200]}{after}",
        required="for a pipeline or branches, a forward whose shapes do not follow from values of parameters",
        fix="mesh: {dp_shard: 2}",
    )
    return findings.error()


@contextmanager
def computing_in(model: nn.Module, precision: str) -> Iterator[None]:
    """Inside the ``with``, parameters and inputs have the dtype in which FSDP2's mixed precision computes.

    Does nothing unless ``precision`` is ``bfloat16`` or ``float16``.
    """
    if precision not in ("bfloat16", "float16"):
        yield
        return
    dtype, before = getattr(torch, precision), [(p, p.data) for p in model.parameters() if p.is_floating_point()]
    for p, value in before:
        p.data = value.to(dtype)

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))

    handle = model.register_forward_pre_hook(cast, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        for p, value in before:
            p.data = value
