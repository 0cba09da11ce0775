"""Layouts that programs run under: by name, and what is drawn on top of each."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from grammar import program
from idioms import KINDS
from program import Case, Program

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=2": {"mesh": {"tp": 2}},
    "tp=3": {"mesh": {"tp": 3}},
    "dp_shard=2": {"mesh": {"dp_shard": 2}},
    "dp_replicate=2": {"mesh": {"dp_replicate": 2}},
    "pp=2": {"mesh": {"pp": 2}},
    "pp=3": {"mesh": {"pp": 3}},
    "sequence": {"mesh": {"tp": 2}, "sequence_parallel": True},
    "branches": {"mesh": {"tp": 2}},
    "dp_shard=2,tp=2": {"mesh": {"dp_shard": 2, "tp": 2}},
    "pp=2,tp=2": {"mesh": {"pp": 2, "tp": 2}},
    "pp=2,dp_shard=2": {"mesh": {"pp": 2, "dp_shard": 2}},
}

# Random numbers of torch's own are one device's only if all ranks run all rows in one go.
_DRAWS = {"tp=2", "tp=3", "sequence", "branches"}
_ROWS = [((4,), (4,)), ((4, 4), (4,)), ((5,), (4,), (6,)), ((4,),), ((6, 5),)]
_SCHEDULES = ["1f1b", "gpipe", "interleaved", "zero_bubble"]


def kinds_for(layout: str) -> frozenset[str]:
    """What a layout's programs are made of."""
    return KINDS if layout in _DRAWS else KINDS - {"dropout"}


def case(draw: random.Random, layout: str, kinds: frozenset[str], options: frozenset[str]) -> Case:
    """A program of these kinds under a layout.

    Args:
        options: of plan and steps: ``cuts``, ``accumulate``, ``microbatches``, ``recompute``, ``schedule``, ``replicate``.
    """
    half = "half" in kinds and draw.randint(1, 5) == 1
    made = None
    while made is None:
        made = program(draw, kinds if half else kinds - {"half"})
    plan = {**LAYOUTS[layout], "mesh": dict(LAYOUTS[layout]["mesh"])}
    mesh = plan["mesh"]
    if "microbatches" in options and draw.randint(1, 2) == 1:
        plan["microbatches"] = draw.choice([1] if "dropout" in made.kinds else [1, 2, 3])
    if "recompute" in options and draw.randint(1, 3) == 1:
        plan["recompute"] = "blocks"
    if "schedule" in options and "pp" in mesh and draw.randint(1, 3) == 1:
        plan["schedule"] = draw.choice(_SCHEDULES)
    modules, parameters = _entries(draw, made, layout, options)
    if modules:
        plan["modules"] = modules
    if parameters:
        plan["parameters"] = parameters
    rows = draw.choice(_ROWS)
    if "accumulate" not in options:
        rows = tuple((first, *()) for first, *_ in rows)
    return Case(made, plan, rows, layout)


def _entries(
    draw: random.Random, program: Program, layout: str, options: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the plan says of some modules and parameters."""
    modules: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    mesh = LAYOUTS[layout]["mesh"]
    source = program.source()
    for member in program.classes[-1].members:
        if f"self.{member.name} = " not in source:
            continue
        if layout == "branches" and member.name.startswith(("left", "right")):
            side = member.name.startswith("right")
            modules[member.name] = {"on": f"tp[{int(side)}:{int(side) + 1}]"}
        elif "cuts" in options and "tp" in mesh and layout != "branches" and draw.randint(1, 3) == 1:
            if "nn.Linear(" in member.text:
                modules[member.name] = {"tp": draw.choice(["column", "row", "replicate"])}
            elif sizes := re.search(r"nn.Parameter\(torch.randn\(([\d, ]+)\)", member.text):
                dims = sizes.group(1).count(",") + 1
                parameters[member.name] = {"tp": f"shard:{draw.randint(0, dims - 1)}"}
        elif "replicate" in options and "dp_shard" in mesh and "nn." in member.text and draw.randint(1, 6) == 1:
            modules[member.name] = {"dp": "replicate"}
    return modules, parameters


OPTIONS = frozenset({"cuts", "accumulate", "microbatches", "recompute", "schedule", "replicate"})


def random_cases(layout: str, count: int, seed: int) -> Iterator[Case]:
    """The same for the same seed."""
    for number in range(count):
        yield case(random.Random(f"{layout} {seed} {number}"), layout, kinds_for(layout), OPTIONS)
