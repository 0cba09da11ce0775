"""What is wrong with a forward that takes another path than was recorded, in words."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.calls.placeholder import PathError
from meshwright.calls.stage import StageProgram


def unavailable(program: StageProgram, name: Callable[[int], str], number: int, function: str, line: str) -> PathError:
    """The error for taking a value that is not here.

    Args:
        name: a stage → how errors call it.
        number: of the value; ``function`` takes it, at the model's ``line``.
    """
    value = program.graph.values[number]
    maker = program.graph.events[value.position]
    stage = next(s for s, end in enumerate([*program.cuts, len(program.graph.events)]) if value.position < end)
    module = next((part for part, _ in reversed(maker.path) if part), "the model")
    if program.branches is not None and program.place(value.position) not in program.mine:
        place = program.branches[program.place(value.position)]
        return PathError(
            f"{function}{f' at {line}' if line else ''} takes a value of {module}, which lives on {place.on}, where it "
            "was not to take it when the forward was recorded: it took another path then. Give the sample batch the "
            "path that training takes"
        )
    return PathError(
        f"{function}{f' at {line}' if line else ''} takes a value of {module}, which lives on {name(stage)}, "
        f"on {name(program.stage)}, which was not to take it when the forward was recorded: it took "
        f"another path then. Place what takes it with {module}: modules: {{{module}: {{on: ...}}}}, or give the "
        "sample batch the path that training takes"
    )
