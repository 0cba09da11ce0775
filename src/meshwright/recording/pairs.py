"""``Pair``: two recordings with their names matched. ``StepFacts``: a step of one recording, summed over its ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from meshwright.recording.folder import RankValue, RecordingFolder

Renames = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Pair:
    """Two recordings side by side.

    Attributes:
        one: of one process.
        many: of many processes.
        again: a second one of one process, whose differences to ``one`` are noise; None if there is none.
        names: name of a parameter in ``one`` → its name in ``many``.
    """

    one: RecordingFolder
    many: RecordingFolder
    again: RecordingFolder | None
    names: Mapping[str, str]

    @classmethod
    def of(cls, one: RecordingFolder, many: RecordingFolder, again: RecordingFolder | None, renames: Renames) -> Pair:
        """Matches the names of two recordings. ``renames``: (regular expression, replacement) pairs for names of ``many``."""
        first_names = {alias: name for name, about in one.parameters.items() for alias in (name, *about["aliases"])}
        names: dict[str, str] = {}
        for name, about in many.parameters.items():
            for any_name in (name, *about["aliases"]):
                name_in_one = first_names.get(_renamed(any_name, renames))
                if name_in_one is not None:
                    names.setdefault(name_in_one, name)
        return cls(one, many, again, names)

    @property
    def missing(self) -> list[str]:
        """Names of ``one`` that ``many`` lacks."""
        return [name for name in self.one.parameters if name not in self.names]

    @property
    def extra(self) -> list[str]:
        """Names of ``many`` that ``one`` lacks."""
        matched = set(self.names.values())
        return [name for name in self.many.parameters if name not in matched]

    @cached_property
    def axes(self) -> dict[str, int]:
        """Name → size, of axes with more than one rank; if none is known, all ranks are the axis ``ranks``."""
        larger_than_one = {name: size for name, size in self.many.axes.items() if size > 1}
        return larger_than_one or ({"ranks": self.many.world_size} if self.many.world_size > 1 else {})

    @cached_property
    def spans(self) -> dict[str, int]:
        """Text → number of ranks, of each axis, each two axes together, and all ranks."""
        spans = dict(self.axes)
        for (a, n), (b, m) in combinations(self.axes.items(), 2):
            spans[f"{a} × {b}"] = n * m
        if self.many.world_size > 1 and self.many.world_size not in spans.values():
            spans["ranks"] = self.many.world_size
        return spans

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of blocks into which ranks may have divided a dim."""
        return sorted(set(self.spans.values()))

    def groups(self, axis: str) -> list[list[int]]:
        """The rank groups of an axis: ranks with the same coordinates on every other axis."""
        groups: dict[tuple[Any, ...], list[int]] = {}  # coordinates on the other axes → ranks
        for rank, coordinate in enumerate(self.many.manifest["coordinates"]):
            if axis in coordinate:
                others = tuple(item for item in coordinate.items() if item[0] != axis)
                groups.setdefault(others, []).append(rank)
        return list(groups.values())

    @property
    def steps(self) -> int:
        """Number of steps that both recordings have."""
        return min(len(self.one.steps), len(self.many.steps))

    def seen(self, file: str, name: str) -> tuple[list[RankValue], list[RankValue]]:
        """The values of a tensor in ``one`` and in ``many``."""
        return self.one.views(file, name), self.many.views(file, self.names[name])

    def layout(self, name: str) -> str:
        return str(self.many.parameters[self.names[name]]["layout"])

    def trained(self) -> list[str]:
        """Names of parameters that both recordings have and ``one`` trains."""
        return [name for name, about in self.one.parameters.items() if about["trained"] and name in self.names]


@dataclass(frozen=True)
class StepFacts:
    """A step of one recording, over all of its ranks.

    Attributes:
        loss: mean over all rows; None if no rank recorded a loss.
        dtype: of the loss.
        losses: largest number of losses that a rank recorded.
        counts: number of rows of each rank that recorded losses.
        rows: digest of a row → how often it was seen.
        rows_of: the digests of each rank.
        settings: rank → settings of its optimizers.
        notes: texts for a reader.
    """

    loss: float | None
    dtype: str
    losses: int
    counts: tuple[int, ...]
    rows: Counter[str]
    rows_of: tuple[tuple[str, ...], ...]
    settings: Mapping[int, Sequence[Any]]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, step: Mapping[str, Any]) -> StepFacts:
        """The facts of a step, from the manifest. Ranks that did not take the step are left out."""
        ranks = [facts for facts in step["ranks"] if facts]
        losses = [loss for facts in ranks for loss in facts["losses"]]  # (value, dtype, rows)
        has_all_rows = all(rows for *_, rows in losses)
        weights = [rows if has_all_rows else 1 for *_, rows in losses]
        mean = sum(v * w for (v, *_), w in zip(losses, weights, strict=True)) / sum(weights) if losses else None
        return cls(
            loss=mean,
            dtype=losses[0][1] if losses else "",
            losses=max((len(facts["losses"]) for facts in ranks), default=0),
            counts=tuple(sum(rows or 0 for *_, rows in facts["losses"]) for facts in ranks if facts["losses"]),
            rows=Counter(row for facts in ranks for row in facts["rows"]),
            rows_of=tuple(tuple(facts.get("rows", ())) for facts in step["ranks"]),
            settings={
                rank: facts["settings"] for rank, facts in enumerate(step["ranks"]) if facts and facts["settings"]
            },
            notes=tuple(dict.fromkeys(note for facts in ranks for note in facts["notes"])),
        )

    @property
    def uneven(self) -> bool:
        """Whether ranks had different numbers of rows."""
        return len(set(self.counts)) > 1


def _renamed(name: str, renames: Renames) -> str:
    """The name after all replacements."""
    for pattern, text in renames:
        name = re.sub(pattern, text, name)
    return name


_DATA = ("dp", "data", "fsdp", "ddp", "replicate", "shard", "batch")  # parts of usual names of data axes
_TENSOR = ("tp", "tensor", "model")  # usual names of tensor-parallel axes


def is_data(axis: str) -> bool:
    """Whether an axis is data parallel, by its name: its ranks have different rows."""
    return any(word in axis.lower() for word in _DATA) and "×" not in axis


def is_tensor(axis: str) -> bool:
    """Whether an axis is tensor parallel, by its name: its ranks have the same rows."""
    return axis.lower() in _TENSOR
