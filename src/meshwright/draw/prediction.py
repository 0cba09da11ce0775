"""Prints a prediction: the memory of each role, the tensors alive at its peak, and the terms of a step's time.

role     ranks  peak     at   on a device  of 79.2 GiB
stage 0  0–3    3.4 GiB  0F3  4.0–4.2 GiB  █░           5 %, fits, 75.0 GiB left

compute                      1.27 ms  75 %  ███████████████
communication over tp        0.43 ms  25 %                 █████
a step                       1.70 ms        1.3 ms to 2.2 ms
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.amounts import count_text, duration_text, size_text
from meshwright.draw.nodes import links
from meshwright.draw.text import ranks_text, sparkline
from meshwright.draw.topology import topology
from meshwright.errors import source_place
from meshwright.names import few, fold_names

if TYPE_CHECKING:  # predictions are made where torch is loaded
    from meshwright.prediction.dryrun import DryRun
    from meshwright.prediction.memory import Memory
    from meshwright.prediction.result import Prediction
    from meshwright.prediction.roles import Role

_MOST = 16  # most roles in the table of memory, and most ranks in the table of measurements
_ITEMISED = 5  # most roles whose memory is itemised: their columns fit beside each other
_SITES = 8  # most source lines whose tensors are listed at the peak
_WIDE, _NARROW = 40, 10  # characters of the bars of time, and of memory
_MODULES = 2  # most modules that are named for a source line
_CAPTION = "at: the action of the schedule (stage, F: forward, B: backward, microbatch), or the phase of the step"


def drawn(prediction: Prediction, unit: str = "", amount: float = 0) -> RenderableType:
    """A prediction as a renderable for rich.

    Args:
        prediction: to print.
        unit: ``tokens`` or ``rows``.
        amount: number of them in a step; 0 if it is not known.
    """
    ranks = sum(role.count for role in prediction.roles)
    heading = Text.assemble(
        (f"{prediction.mesh}: {ranks} rank{'s' * (ranks > 1)}", "bold"),
        f" on {prediction.hardware}",
        f", {count_text(amount)} {unit} a step" if amount else "",
    )
    largest = max(prediction.roles, key=lambda role: prediction.memories[role.rank].peak)
    return Group(
        heading,
        *_links(prediction),
        *_titled("memory of a rank", _memory(prediction), Text(_CAPTION, style="dim")),
        *_over_time(prediction),
        *_titled("what it is", _items(prediction)),
        *_alive(largest.name, prediction.memories[largest.rank]),
        *_titled("seconds of a step", _waterfall(prediction)),
        Text(),
        _rate(prediction, unit, amount),
        *_notes(prediction.notes),
    )


def measured_table(predicted: Prediction, measured: Prediction) -> RenderableType:
    """A table of predicted and measured values with signed errors: of the step, and of each rank's peak memory."""
    table = _table(("", "ranks"), ("predicted", "measured", "error"))
    errors = predicted - measured
    table.add_row(
        "a step", "all", duration_text(predicted.seconds.seconds), duration_text(measured.seconds.seconds),
        _signed(errors["seconds"]),
    )  # fmt: skip
    for role in measured.roles[:_MOST]:
        before, after = predicted.memory(role.rank).peak, measured.memory(role.rank).peak
        error = _signed(errors[f"memory of rank {role.rank}"])
        table.add_row("memory", str(role.rank), size_text(before), size_text(after), error)
    if len(measured.roles) > _MOST:
        table.add_row("…", *[""] * 4)
    low, high = predicted.seconds.low, predicted.seconds.high
    within = low <= measured.seconds.seconds <= high
    side = "within" if within else "outside of"
    summary = f"the measured step is {side} the predicted interval, {_between(low, high)}"
    return Group(*_titled("predicted and measured", table), Text(summary))


def rehearsed(run: DryRun) -> RenderableType:
    """The rehearsed step of one rank, beside the prediction for its role."""
    is_role_rank = run.rank == run.role.rank
    heading = Text.assemble(
        (f"rank {run.rank} of {run.mesh}", "bold"),
        f" on {run.hardware}: {run.role.name}, with {run.role.count} rank{'s' * (run.role.count > 1)} alike",
    )
    alone = f"rank {run.rank} is the rank that predict rehearses for {run.role.name}: both are this rehearsal"
    return Group(
        heading,
        *_titled(f"memory at the peak ({run.memory.when})", _compared(run)),
        *((Text(alone, style="dim"),) if is_role_rank else ()),
        *_alive(f"rank {run.rank}", run.memory),
        *_exchanges(run),
        Text(),
        Text(f"{run.functions:,} functions in a step, {count_text(run.flops)}flop"),
        *_on_device(run),
        *_notes(run.notes),
    )


def _on_device(run: DryRun) -> Iterator[RenderableType]:
    """What the step takes on a real device, beside what the rehearsal says."""
    if (real := run.on_device) is None:
        return
    table = _table(("",), (f"on {run.hardware}, predicted", "measured", "error"))
    table.add_row("peak", size_text(run.memory.peak), size_text(real.peak), _signed(run.memory.peak / real.peak - 1))
    if real.reserved:
        table.add_row("held by the allocator", "", size_text(real.reserved), "")
    seconds = duration_text(run.seconds), duration_text(real.step_seconds)
    table.add_row("a step", *seconds, _signed(run.seconds / real.step_seconds - 1))
    rates = (f"{count_text(run.flops / of_step)}flop/s" for of_step in (run.seconds, real.step_seconds))
    table.add_row("its rate", *rates, "")
    yield from _titled(f"on {real.device}, without other ranks", table)
    yield Text("collectives return at once: this rank's own work, without communication and waiting", style="dim")


# --- memory -----------------------------------------------------------------------------------------------------------


def _links(prediction: Prediction) -> Iterator[RenderableType]:
    """On several nodes: for each axis a group of its ranks, and the links between them."""
    recipe, on = prediction.recipe, prediction.per_node
    if recipe is None or not 0 < on < recipe.mesh.size:
        return
    placed = topology(recipe.mesh, on)
    yield from _titled(f"{placed.nodes} nodes of {on} ranks, numbered node by node", links(placed))


def _memory(prediction: Prediction) -> Table:
    """A line for each role: its peak, the memory that a device needs, and whether the device has it."""
    capacity = f"of {size_text(prediction.capacity)}" if prediction.capacity else ""
    table = _table(("role", "ranks"), ("peak", "at", "on a device"), (capacity,))
    names, ranks, *_, verdicts = table.columns
    # A narrow terminal breaks only verdicts.
    names.no_wrap, verdicts.no_wrap, ranks.min_width = True, False, len("ranks")
    for role in prediction.roles[:_MOST]:
        memory = prediction.memories[role.rank]
        low, high = prediction.device_bytes(role.rank)
        table.add_row(
            role.name, ranks_text(role.ranks), size_text(memory.peak), memory.when, _sizes(low, high),
            _filled(low, high, prediction.capacity) + _verdict(high, prediction.capacity),
        )  # fmt: skip
    if len(prediction.roles) > _MOST:
        table.add_row("…", *[""] * 5)
    return table


def _over_time(prediction: Prediction) -> Iterator[RenderableType]:
    """A curve for each role: the memory in each action and phase of the step."""
    memories = [(role, prediction.memories[role.rank]) for role in prediction.roles[:_MOST]]
    if not any(memory.phases for _, memory in memories):
        return
    table = _table(("role",), (), ("from the first action to the last",))
    for role, memory in memories:
        amounts = [phase.nbytes for phase in memory.phases]
        line = sparkline(amounts, prediction.peak)
        peak = line.index(max(line)) if line else 0
        before, after = (line[:peak], "blue"), (line[peak + 1 :], "blue")
        table.add_row(role.name, Text.assemble(before, (line[peak : peak + 1], "bold red"), after))
    yield from _titled("what lives when, the peak of each role in red", table)


def _filled(low: int, high: int, capacity: int) -> Text:
    """A bar of a device's memory: the tensors, then what its allocator may hold besides; with the share of both."""
    tensors, reserved = (min(_NARROW, round(_NARROW * nbytes / capacity)) for nbytes in (low, high))
    style = "green" if high <= capacity else "red"
    share = f" {100 * high / capacity:3.0f} %, "
    bar = "█" * tensors + "░" * (reserved - tensors)
    return Text.assemble((bar, style), "·" * (_NARROW - reserved), share)


def _verdict(high: int, capacity: int) -> Text:
    if high <= capacity:
        return Text(f"fits, {size_text(capacity - high)} left", style="green")
    return Text(f"does not fit: {size_text(high - capacity)} too much", style="bold red")


def _items(prediction: Prediction) -> RenderableType:
    """The memory at the peak: a line for each kind, a column for each role. Of many roles, those that need the most."""
    by_peak = sorted(prediction.roles, key=lambda role: -prediction.memories[role.rank].peak)[:_ITEMISED]
    shown = [role for role in prediction.roles if role in by_peak]
    table = _itemised(shown, [prediction.memories[role.rank] for role in shown])
    others = len(prediction.roles) - len(shown)
    if not others:
        return table
    return Group(table, Text(f"and {others} role{'s' * (others > 1)} that need no more than these", style="dim"))


def _itemised(roles: Sequence[Role], memories: Sequence[Memory]) -> Table:
    table = _table(("",), tuple(role.name for role in roles))
    for kind in _kinds(memories):
        table.add_row(kind, *(_amount(memory.items.get(kind, 0)) for memory in memories))
    table.add_section()
    table.add_row("all", *(size_text(memory.peak) for memory in memories))
    return table


def _kinds(memories: Sequence[Memory]) -> list[str]:
    """The kinds of tensors, those with the most bytes first."""
    most: dict[str, int] = defaultdict(int)
    for memory in memories:
        for kind, nbytes in memory.items.items():
            most[kind] = max(most[kind], nbytes)
    return sorted(most, key=lambda kind: -most[kind])


def _compared(run: DryRun) -> Table:
    """A line for each kind: rehearsed, predicted, and the difference."""
    table = _table(("",), (f"rank {run.rank}", f"predicted (rank {run.role.rank})", "error"))
    rehearsed_memory, predicted = run.memory, run.predicted
    for kind in _kinds((rehearsed_memory, predicted)):
        a, b = rehearsed_memory.items.get(kind, 0), predicted.items.get(kind, 0)
        table.add_row(kind, _amount(a), _amount(b), _signed(b / a - 1) if a else "")
    table.add_section()
    error = _signed(predicted.peak / rehearsed_memory.peak - 1) if rehearsed_memory.peak else ""
    table.add_row("all", size_text(rehearsed_memory.peak), size_text(predicted.peak), error)
    return table


def _alive(who: str, memory: Memory) -> Iterator[RenderableType]:
    """The source lines of the activations and temporaries at the peak. A line of several repeated blocks comes once."""
    sites = _folded(memory)
    if not sites:
        return
    table = _table(("module", "line", "function"), ("bytes",))
    for module, line, function, nbytes in sites[:_SITES]:
        table.add_row(module, line, function, size_text(nbytes))
    if len(sites) > _SITES:
        rest = sum(nbytes for *_, nbytes in sites[_SITES:])
        table.add_row(f"{len(sites) - _SITES} more places", "", "", size_text(rest))
    yield from _titled(f"activations and temporaries alive at the peak of {who}", table)


def _folded(memory: Memory) -> list[tuple[str, str, str, int]]:
    """(modules, line, function, bytes), the largest first, for each source line and function."""
    bytes_by_module: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)  # (line, function) → module → bytes
    for (module, line, function), nbytes in memory.sites.items():
        bytes_by_module[line, function][module] = nbytes
    folded = [
        (_modules(modules, line), _position(line), function, sum(modules.values()))
        for (line, function), modules in bytes_by_module.items()
    ]
    return sorted(folded, key=lambda site: -site[3])


def _modules(modules: Iterable[str], line: str) -> str:
    """The folded names of modules, as text."""
    text = few([folded.label for folded in fold_names(filter(None, modules))], _MODULES)
    return text or ("–" if line else "outside of the model")


def _position(line: str) -> str:
    """A source line ``file:number`` with a short path; ``–`` if there is none."""
    file, _, number = line.rpartition(":")
    return source_place(file, int(number)) if file else "–"


def _exchanges(run: DryRun) -> Iterator[RenderableType]:
    if run.exchanges:
        table = _table(("collective", "axis"), ("calls", "bytes"))
        for one in run.exchanges:
            table.add_row(one.kind, one.axis, str(one.calls), size_text(one.nbytes))
        yield from _titled("collectives of a step", table)


# --- time -------------------------------------------------------------------------------------------------------------


def _waterfall(prediction: Prediction) -> Table:
    """The terms of a step's time. The bar of each term begins where the previous one ends."""
    seconds = prediction.seconds
    table = _table(("",), ("", ""), ("",))
    table.show_header = False
    begin, total = 0.0, sum(seconds.waterfall.values()) or 1.0
    for term, duration in seconds.waterfall.items():
        start, stop = (round(_WIDE * moment / total) for moment in (begin, begin + duration))
        bar = Text.assemble(" " * start, ("█" * (stop - start) or "▏", _style(term)))
        table.add_row(term, duration_text(duration), f"{100 * duration / total:.0f} %", bar)
        begin += duration
    table.add_section()
    table.add_row("a step", duration_text(seconds.seconds), "", _between(seconds.low, seconds.high))
    return table


def _style(term: str) -> str:
    if term == "compute":
        return "green"
    return "yellow" if term.startswith("communication") else "cyan" if term in ("clip", "optimizer") else "red"


def _rate(prediction: Prediction, unit: str, amount: float) -> Text:
    """Tokens or rows per second, of all ranks together and of one."""
    seconds, ranks = prediction.seconds, sum(role.count for role in prediction.roles)
    if not seconds.seconds or not amount:
        return Text()
    mean, low, high = (amount / s for s in (seconds.seconds, seconds.high, seconds.low))
    each = f", {count_text(mean / ranks)} a rank" if ranks > 1 else ""
    return Text.assemble(
        (f"{count_text(mean)} {unit} a second", "bold"), f" ({count_text(low)} to {count_text(high)}){each}"
    )


# --- words ------------------------------------------------------------------------------------------------------------


def _titled(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
    yield from (Text(), Text(title, style="bold"), *parts)


def _table(left: Sequence[str], right: Sequence[str] = (), last: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in left:
        table.add_column(title)
    for title in right:
        table.add_column(title, justify="right", no_wrap=True)
    for title in last:
        table.add_column(title, no_wrap=True)
    return table


def _notes(notes: Sequence[str]) -> Iterator[RenderableType]:
    if notes:
        yield Text("\nnotes", style="bold")
    for note in notes:
        yield Text(f"  {note}")


def _amount(nbytes: int) -> str:
    return size_text(nbytes) if nbytes else "–"


def _sizes(low: int, high: int) -> str:
    """Two sizes as a range, with one unit if they have the same: ``2.1–2.2 GiB``."""
    (least, unit), (_, other) = size_text(low).split(), size_text(high).split()
    if size_text(low) == size_text(high):
        return size_text(high)
    return f"{least}–{size_text(high)}" if unit == other else f"{size_text(low)} to {size_text(high)}"


def _between(low: float, high: float) -> str:
    return f"{duration_text(low)} to {duration_text(high)}"


def _signed(error: float) -> str:
    return f"{100 * error:+.1f} %"
