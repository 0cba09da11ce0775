"""Two recordings side by side: which name of the one is which of the other, and what a step of both amounts to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from meshwright.recording.folder import Recorded, Seen

Renames = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Pair:
    """The recording of one process, that of many, and one of one process again, whose differences are noise.

    Attributes:
        names: of each parameter: the name in ``one`` → that in ``many``.
    """

    one: Recorded
    many: Recorded
    again: Recorded | None
    names: Mapping[str, str]

    @classmethod
    def of(cls, one: Recorded, many: Recorded, again: Recorded | None, renames: Renames) -> Pair:
        """``renames``: pairs of a regular expression and what takes its place, in the names of ``many``."""
        known = {alias: name for name, about in one.parameters.items() for alias in (name, *about["aliases"])}
        names: dict[str, str] = {}
        for name, about in many.parameters.items():
            for own in (name, *about["aliases"]):
                there = known.get(_renamed(own, renames))
                if there is not None:
                    names.setdefault(there, name)
        return cls(one, many, again, names)

    @property
    def missing(self) -> list[str]:
        """Names that ``many`` lacks."""
        return [name for name in self.one.parameters if name not in self.names]

    @property
    def extra(self) -> list[str]:
        """Names that ``one`` lacks."""
        there = set(self.names.values())
        return [name for name in self.many.parameters if name not in there]

    @cached_property
    def axes(self) -> dict[str, int]:
        """Axes of more than one rank; if none is known, all ranks as one."""
        known = {name: size for name, size in self.many.axes.items() if size > 1}
        return known or ({"ranks": self.many.world_size} if self.many.world_size > 1 else {})

    @cached_property
    def spans(self) -> dict[str, int]:
        """The axes, each two of them together, and all ranks."""
        spans = dict(self.axes)
        for (a, n), (b, m) in combinations(self.axes.items(), 2):
            spans[f"{a} × {b}"] = n * m
        if self.many.world_size > 1 and self.many.world_size not in spans.values():
            spans["ranks"] = self.many.world_size
        return spans

    @cached_property
    def sizes(self) -> list[int]:
        """Into how many blocks ranks may have cut a dim."""
        return sorted(set(self.spans.values()))

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks that stand together along an axis: the same coordinates on every other one."""
        together: dict[tuple[Any, ...], list[int]] = {}
        for rank, at in enumerate(self.many.manifest["coordinates"]):
            if axis in at:
                together.setdefault(tuple(item for item in at.items() if item[0] != axis), []).append(rank)
        return list(together.values())

    @property
    def steps(self) -> int:
        """How many both have."""
        return min(len(self.one.steps), len(self.many.steps))

    def seen(self, file: str, name: str) -> tuple[list[Seen], list[Seen]]:
        """The values of a tensor in both."""
        return self.one.views(file, name), self.many.views(file, self.names[name])

    def layout(self, name: str) -> str:
        return str(self.many.parameters[self.names[name]]["layout"])

    def trained(self) -> list[str]:
        """Names in both of parameters that ``one`` trains."""
        return [name for name, about in self.one.parameters.items() if about["trained"] and name in self.names]


@dataclass(frozen=True)
class StepFacts:
    """A step of one recording, over all of its ranks.

    Attributes:
        loss: the mean of all rows; None where no rank told one.
        dtype: of the loss.
        losses: how many a rank told.
        counts: rows of each rank that told them.
        rows: digest of each row → how often it was seen.
        rows_of: the digests of each rank.
        settings: of each rank's optimizers.
        notes: what a reader should know.
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
        told = [rank for rank in step["ranks"] if rank]
        losses = [loss for rank in told for loss in rank["losses"]]
        weights = [rows or 1 for _, _, rows in losses] if all(rows for *_, rows in losses) else [1] * len(losses)
        mean = sum(v * w for (v, *_), w in zip(losses, weights, strict=True)) / sum(weights) if losses else None
        return cls(
            loss=mean,
            dtype=losses[0][1] if losses else "",
            losses=max((len(rank["losses"]) for rank in told), default=0),
            counts=tuple(sum(rows or 0 for *_, rows in rank["losses"]) for rank in told if rank["losses"]),
            rows=Counter(row for rank in told for row in rank["rows"]),
            rows_of=tuple(tuple(rank.get("rows", ())) for rank in step["ranks"]),
            settings={at: rank["settings"] for at, rank in enumerate(step["ranks"]) if rank and rank["settings"]},
            notes=tuple(dict.fromkeys(note for rank in told for note in rank["notes"])),
        )

    @property
    def uneven(self) -> bool:
        """Whether ranks had different numbers of rows."""
        return len(set(self.counts)) > 1


def _renamed(name: str, renames: Renames) -> str:
    for pattern, text in renames:
        name = re.sub(pattern, text, name)
    return name


_DATA = ("dp", "data", "fsdp", "ddp", "replicate", "shard", "batch")
_TENSOR = ("tp", "tensor", "model")


def is_data(axis: str) -> bool:
    """Whether ranks along an axis have rows of their own, by its name."""
    return any(word in axis.lower() for word in _DATA) and "×" not in axis


def is_tensor(axis: str) -> bool:
    """Whether ranks along an axis share their rows and cut the layers, by its name."""
    return axis.lower() in _TENSOR
