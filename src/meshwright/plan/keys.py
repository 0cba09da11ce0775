"""The keys of a plan and of an entry, and the values that each accepts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import listing
from meshwright.schedule import NAMES as SCHEDULES
from meshwright.submesh import SLICE

DRAWN, CHECKPOINT, PRETRAINED, NO_WEIGHTS = "drawn", "checkpoint", "pretrained", "none"
"""Values of ``weights``: the model draws initial values; a load brings them (two kinds); no values."""


@dataclass(frozen=True)
class Kind:
    """The values that one key accepts."""

    accepts: Callable[[Any], bool]
    required: str  # the accepted values in words, for an error
    example: object  # an accepted value, for a fix
    words: tuple[str, ...] = ()  # the accepted words, if there are few: an error suggests the nearest to a misspelt one


def _choice(*words: str) -> Kind:
    return Kind(lambda v: isinstance(v, str) and v in words, listing(words), words[0], words)


def _flag() -> Kind:
    return Kind(lambda v: isinstance(v, bool), "true or false", True)


def _number(least: int, example: int) -> Kind:
    return Kind(lambda v: _is_int(v, least), f"a whole number of at least {least}", example)


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _is_style(value: object) -> bool:
    return isinstance(value, str) and (value in _STYLES or re.fullmatch("shard:[0-9]{1,3}", value) is not None)


def _is_parts(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(_is_int(size, 1) for size in value)
    return _is_int(value, 1)


_RANK = re.compile(r"(pp|stream)\[[0-9]{1,4}\]")


def _is_on(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(isinstance(v, str) and SLICE.fullmatch(v) for v in value)
    return isinstance(value, str) and (value == "auto" or _RANK.fullmatch(value) or SLICE.fullmatch(value)) is not None


def _is_mesh(value: object) -> bool:
    """Whether a value is a mesh: a mapping or a string; from Python also pairs."""
    pairs = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    return isinstance(value, (Mapping, str)) or pairs


_STYLES = ("column", "row", "replicate", "auto")

PLAN = {
    "sequence_parallel": _flag(),
    "recompute": _choice("none", "blocks"),
    "microbatches": _number(1, 4),
    "schedule": _choice(*SCHEDULES),
    "stages_per_rank": _number(1, 2),
    "precision": _choice("float32", "bfloat16", "float64"),
    "reshard_after_forward": _flag(),
    "rows": _choice("auto", "split", "whole"),
    "branches": _choice("said", "auto"),
    "seed": _number(0, 0),
    "nonfinite": _choice("stop", "skip"),
    "verify": _number(0, 100),
    "eager": _flag(),
    "compile": _flag(),
    "weights": _choice(DRAWN, CHECKPOINT, PRETRAINED, NO_WEIGHTS),
}
ENTRY = {
    "dp": _choice("shard", "replicate"),
    "tp": Kind(_is_style, f"{', '.join(_STYLES)} or shard:<dim>", "column", words=(*_STYLES, "shard:0", "shard:1")),
    "parts": Kind(_is_parts, "how many equal fused blocks, or a list of their sizes", 3),
    "units": _number(1, 8),
    "recompute": _choice("none", "block"),
    "unit": _flag(),
    "on": Kind(
        _is_on,
        "a rank of the pipeline axis, pp[<rank>], a slice of tp, tp[<from>:<to>], a stream of each rank, stream[<n>], or auto",
        "tp[0:2]",
    ),
    "mesh": Kind(_is_mesh, "axes with their sizes", {"tp": 2}),
}

SEARCHED = (
    "sequence_parallel", "recompute", "microbatches", "schedule", "stages_per_rank", "reshard_after_forward", "branches",
)  # fmt: skip
"""The settings that a search decides besides the mesh, if the plan leaves them out."""

SECTIONS = ("modules", "parameters")
KEYS = ("mesh", *SECTIONS, *PLAN)
"""The keys of a plan."""
