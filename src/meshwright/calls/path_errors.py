"""The errors for a forward that takes another path than the recorded one."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.calls.placeholder import PathError
from meshwright.calls.stage import StageProgram


def unavailable(program: StageProgram, name: Callable[[int], str], number: int, function: str, line: str) -> PathError:
    """The error if a function takes a value that is on other ranks.

    Args:
        name: a stage → its name in errors.
        number: the number of the value.
        function, line: the function that takes it, and its line in the model's code.
    """
    value = program.graph.values[number]
    maker = program.graph.events[value.position]
    stage = next(s for s, end in enumerate([*program.cuts, len(program.graph.events)]) if value.position < end)
    module = next((part for part, _ in reversed(maker.path) if part), "the model")
    if program.branches is not None and program.place(value.position) not in program.rank_places:
        submesh = program.branches[program.place(value.position)]
        return PathError(
            f"{function}{f' at {line}' if line else ''} takes a value of {module}, which lives on {submesh.on}. The recorded "
            "forward did not take it there: it took another path. Use a sample batch that takes the path of training"
        )
    return PathError(
        f"{function}{f' at {line}' if line else ''} takes a value of {module}, which lives on {name(stage)}, "
        f"on {name(program.stage)}. The recorded forward did not take it there: it took another path. Place the module that "
        f"takes it with {module}: modules: {{{module}: {{on: ...}}}}, or use a sample batch that takes the path of training"
    )


def parameter_elsewhere(stage: str, function: str, line: str) -> PathError:
    """The error if a function takes a parameter that another stage has, after the model read a value."""
    return PathError(
        f"{function}{f' at {line}' if line else ''} takes a parameter that is not on {stage}. The recorded forward did not "
        "take it there: the model reads a value, and what it runs then follows from that. Put the loop or the branch into a "
        "module of its own with these parameters, or leave out the pipeline: mesh: {dp_shard: 2}"
    )
