"""``candidates``: every plan that a search looks at: sizes of all axes, microbatches, schedule, recompute, resharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.plan.keys import SEARCHED

LARGEST_STAGES = 64
CHUNKS = (1, 2, 4)


@dataclass(frozen=True)
class Candidate:
    """A plan, as far as a search varies it.

    Attributes:
        rows: of one microbatch, on one data rank.
        chunks: stages of a rank of the pipeline axis.
        kept: if blocks are recomputed, how many of a rank's keep their activations all the same.
        split: whether backwards are done in halves (``zero_bubble``); of one stage a rank, without recompute.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    microbatches: int
    rows: int
    chunks: int = 1
    recompute: bool = False
    reshard: bool = True
    kept: int = 0
    split: bool = False

    @property
    def schedule(self) -> str:
        """Of its pipeline, as a plan names it."""
        return "interleaved" if self.chunks > 1 else "zero_bubble" if self.split else "1f1b"

    @property
    def data(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def family(self) -> tuple[int, int]:
        """(pp, tp): what decides most of memory and time."""
        return self.pp, self.tp

    @property
    def schedule_words(self) -> str:
        """Of its pipeline, for a person."""
        return "–" if self.pp == 1 else self.schedule if self.chunks == 1 else f"{self.schedule} × {self.chunks}"

    @property
    def recompute_words(self) -> str:
        """What is computed again, for a person."""
        if not self.recompute:
            return "none"
        return f"all but {self.kept * self.pp} blocks" if self.kept else "blocks"

    @property
    def words(self) -> str:
        """It for a person: the mesh, and what is not as by default."""
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
        more = [
            f"{self.microbatches} microbatches" if self.microbatches > 1 else "",
            f"recompute {self.recompute_words}" if self.recompute else "",
        ]
        return ", ".join(filter(None, [mesh, *more, self.schedule_words if self.pp > 1 else ""]))

    def plan(self, options: Mapping[str, Any], blocks: Sequence[str] = ()) -> dict[str, Any]:
        """It as a plan.

        Args:
            options: of every plan; they win.
            blocks: the names of the repeated blocks, in their order.
        """
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        mesh = {axis: size for axis, size in sizes.items() if size > 1} or {"dp_shard": 1}
        plan: dict[str, Any] = {"mesh": mesh, "microbatches": self.microbatches}
        if self.tp > 1:
            plan["sequence_parallel"] = True
        if self.recompute:
            plan["recompute"] = "blocks"
        if self.kept:
            entries = dict(options.get("modules") or {})
            kept = {
                name: {"recompute": "none", **entries.get(name, {})} for name in spread(blocks, self.kept * self.pp)
            }
            options = {**options, "modules": {**entries, **kept}}
        if self.pp > 1 and self.chunks > 1:
            plan["stages_per_rank"] = self.chunks
        if self.pp > 1 and self.schedule != "1f1b":
            plan["schedule"] = self.schedule
        if self.pp == 1 and self.dp_shard > 1 and not self.reshard:
            plan["reshard_after_forward"] = False
        return {**plan, **options}

    def agrees(self, options: Mapping[str, Any]) -> bool:
        """Whether it is a plan with these settings, as far as they say anything of it."""
        flat, gathered = self.pp == 1, self.pp == 1 and self.dp_shard > 1
        return (
            options.get("microbatches", self.microbatches) == self.microbatches
            and options.get("recompute", _RECOMPUTE[self.recompute]) == _RECOMPUTE[self.recompute]
            and (flat or self.chunks in (chunks_of(options) or CHUNKS))
            and (flat or options.get("schedule", self.schedule) in (self.schedule, *_TAKEN_FOR.get(self.schedule, ())))
            and (not gathered or options.get("reshard_after_forward", self.reshard) == self.reshard)
        )


_TAKEN_FOR = {"1f1b": ("gpipe",)}  # what is estimated as another
_RECOMPUTE = {True: "blocks", False: "none"}


def chunks_of(options: Mapping[str, Any]) -> tuple[int, ...] | None:
    """How many stages of a rank of the pipeline axis settings allow; None if they say nothing of it."""
    if (said := options.get("stages_per_rank")) is not None:
        return (said,)
    schedule = options.get("schedule")
    return None if schedule is None else tuple(n for n in CHUNKS if (n > 1) == (schedule == "interleaved"))


def spread(blocks: Sequence[str], number: int) -> list[str]:
    """So many of the blocks, evenly spread: stages of as many blocks have as many of them.

    >>> spread("abcdef", 2)
    ['c', 'f']
    """
    count = len(blocks)
    return [name for i, name in enumerate(blocks) if (i + 1) * number // count > i * number // count]


def varied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings which a search would vary otherwise."""
    return {key: value for key, value in options.items() if key in SEARCHED and value is not None}


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def candidates(
    devices: int,
    per_node: int,
    global_batch: int,
    tps: list[int],
    blocks: int,
    options: Mapping[str, Any] | None = None,
    *,
    recompute: bool,
) -> Iterator[Candidate]:
    """All plans of so many devices, with these settings.

    Args:
        per_node: devices of a node; tp stays within one.
        tps: sizes of tp that the model takes.
        blocks: that are repeated: a pipeline has at most as many stages.
        recompute: whether blocks may be computed again.
    """
    said = varied(options or {})
    if not recompute:
        said.pop("recompute", None)  # nothing is repeated: it makes no difference
    every = _all(devices, per_node, global_batch, tps, blocks, chunks_of(said) or CHUNKS, recompute=recompute)
    for candidate in every:
        one = replace(candidate, split=candidate.pp > 1 and said.get("schedule") == "zero_bubble")
        if one.agrees(said) and not (one.split and one.recompute):
            yield one


def _all(
    devices: int,
    per_node: int,
    global_batch: int,
    tps: list[int],
    blocks: int,
    chunks: tuple[int, ...],
    *,
    recompute: bool,
) -> Iterator[Candidate]:
    for tp in tps:
        for pp in divisors(devices // tp) if devices % tp == 0 else []:
            if pp > min(blocks or 1, LARGEST_STAGES) or tp > per_node:
                continue
            data = devices // (tp * pp)
            if global_batch % data:
                continue
            for shard in divisors(data):
                for microbatches in divisors(global_batch // data):
                    yield from _ways(
                        Candidate(pp, data // shard, shard, tp, microbatches, global_batch // data // microbatches),
                        blocks, chunks, recompute=recompute,
                    )  # fmt: skip


def _ways(of: Candidate, blocks: int, chunks: tuple[int, ...], *, recompute: bool) -> Iterator[Candidate]:
    if of.pp > 1 and of.microbatches < of.pp:
        return  # stages would stand idle
    numbers = [n for n in chunks if n == 1 or (of.pp * n <= blocks and of.microbatches % of.pp == 0)]
    for number in numbers if of.pp > 1 else [1]:
        for again in (False, True) if recompute else (False,):
            for reshard in (True, False) if of.pp == 1 and of.dp_shard > 1 else (True,):
                yield Candidate(
                    of.pp, of.dp_replicate, of.dp_shard, of.tp, of.microbatches, of.rows, number, again, reshard
                )
