"""``candidates``: all plans of a search: sizes of the axes, microbatches, schedule, recomputation, resharding."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from meshwright.plan.keys import SEARCHED

LARGEST_STAGES = 64
CHUNKS = (1, 2, 4)


class Sharding(NamedTuple):
    """How layers are sharded.

    Attributes:
        tp: size of the axis.
        sequence: whether the sequence is sharded between the regions of tp (sequence parallelism).
        whole: globs of the modules that tp leaves whole.
    """

    tp: int
    sequence: bool = True
    whole: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """What is not the default, for a person."""
        sequence = "" if self.sequence else "without sequence parallelism"
        return ", ".join(filter(None, [sequence, f"{', '.join(self.whole)} whole" if self.whole else ""]))

    def modules(self, entries: Mapping[str, Any] | None) -> dict[str, Any]:
        """The setting ``modules`` of a plan with this sharding. ``entries``: those of every plan."""
        return {**{glob: {"tp": "replicate"} for glob in self.whole}, **(entries or {})}


class Family(NamedTuple):
    """The settings of a plan that determine most of its memory and time. ``branches``: see ``Candidate``."""

    pp: int
    tp: int
    branches: bool = False

    @property
    def words(self) -> str:
        """The family for a person."""
        return f"pp={self.pp}, tp={self.tp}" + (" with branches" if self.branches else "")


@dataclass(frozen=True)
class Candidate:
    """The settings of a plan that a search varies.

    Attributes:
        pp, dp_replicate, dp_shard, tp: sizes of the mesh axes.
        microbatches: of a step.
        rows: of one microbatch on one data rank.
        chunks: stages of a rank of the pipeline axis.
        recompute: whether blocks are recomputed in the backward.
        reshard: whether FSDP frees gathered parameters after the forward.
        saved_blocks: number of blocks of a rank that save their activations although ``recompute`` is on.
        split: whether backwards are split (schedule ``zero_bubble``). Only with one stage a rank, and without recomputation.
        branches: whether blocks that can run at the same time are placed on slices of tp. Only without a pipeline.
        sequence, whole: see ``Sharding``.
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
    saved_blocks: int = 0
    split: bool = False
    branches: bool = False
    sequence: bool = True
    whole: tuple[str, ...] = ()

    @classmethod
    def over_tp(cls, sharding: Sharding) -> Candidate:
        """A candidate with tp alone, and one row."""
        return cls(1, 1, 1, sharding.tp, microbatches=1, rows=1, sequence=sharding.sequence, whole=sharding.whole)

    @property
    def schedule(self) -> str:
        """The name of its pipeline schedule in a plan."""
        return "interleaved" if self.chunks > 1 else "zero_bubble" if self.split else "1f1b"

    @property
    def data(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def sharding(self) -> Sharding:
        """The sharding whose ``LayerCosts`` count: with branches, that of one device."""
        return Sharding(1) if self.branches else Sharding(self.tp, self.sequence, self.whole)

    @property
    def family(self) -> Family:
        """Its family."""
        return Family(self.pp, self.tp, self.branches)

    @property
    def schedule_words(self) -> str:
        """Its pipeline schedule, for a person."""
        return "–" if self.pp == 1 else self.schedule if self.chunks == 1 else f"{self.schedule} × {self.chunks}"

    @property
    def recompute_words(self) -> str:
        """The recomputed blocks, for a person."""
        if not self.recompute:
            return "none"
        return f"all but {self.saved_blocks * self.pp} blocks" if self.saved_blocks else "blocks"

    @property
    def words(self) -> str:
        """The candidate for a person: the mesh, and the settings that are not the default."""
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
        more = [
            "branches" if self.branches else self.sharding.words,
            f"{self.microbatches} microbatches" if self.microbatches > 1 else "",
            f"recompute {self.recompute_words}" if self.recompute else "",
            "" if self.reshard else "no reshard after forward",
        ]
        return ", ".join(filter(None, [mesh, *more, self.schedule_words if self.pp > 1 else ""]))

    def plan(self, options: Mapping[str, Any], blocks: Sequence[str] = ()) -> dict[str, Any]:
        """The candidate as a plan, for ``Plan.parse``.

        Args:
            options: settings of every plan. They override those of the candidate.
            blocks: the names of the repeated blocks, in the order of the model.
        """
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        mesh = {axis: size for axis, size in sizes.items() if size > 1} or {"dp_shard": 1}
        plan: dict[str, Any] = {"mesh": mesh, "microbatches": self.microbatches}
        if self.branches:
            plan["branches"] = "auto"
        elif self.tp > 1 and self.sequence:
            plan["sequence_parallel"] = True
        if self.recompute:
            plan["recompute"] = "blocks"
        if self.whole:
            options = {**options, "modules": self.sharding.modules(options.get("modules"))}
        if self.saved_blocks:
            entries = dict(options.get("modules") or {})
            names = spread(blocks, self.saved_blocks * self.pp)
            without_recompute = {name: {"recompute": "none", **entries.get(name, {})} for name in names}
            options = {**options, "modules": {**entries, **without_recompute}}
        if self.pp > 1 and self.chunks > 1:
            plan["stages_per_rank"] = self.chunks
        if self.pp > 1 and self.schedule != "1f1b":
            plan["schedule"] = self.schedule
        if self.pp == 1 and self.dp_shard > 1 and not self.reshard:
            plan["reshard_after_forward"] = False
        # ``branches: auto`` among the options leaves it to the search whether branches pay.
        return {**plan, **{key: value for key, value in options.items() if (key, value) != ("branches", "auto")}}

    def agrees(self, options: Mapping[str, Any]) -> bool:
        """Whether the candidate has the settings in ``options``. Settings that do not apply to it are ignored."""
        flat, gathered = self.pp == 1, self.pp == 1 and self.dp_shard > 1
        return (
            options.get("microbatches", self.microbatches) == self.microbatches
            and options.get("recompute", _RECOMPUTE[self.recompute]) == _RECOMPUTE[self.recompute]
            and (flat or self.chunks in (chunks_of(options) or CHUNKS))
            and (
                flat
                or options.get("schedule", self.schedule) in (self.schedule, *_ALSO_ESTIMATES.get(self.schedule, ()))
            )
            and (not gathered or options.get("reshard_after_forward", self.reshard) == self.reshard)
        )


_ALSO_ESTIMATES = {"1f1b": ("gpipe",)}  # schedule → other schedules whose estimate is the same
_RECOMPUTE = {True: "blocks", False: "none"}


def chunks_of(options: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The numbers of stages a rank that the settings allow; None if the settings do not restrict them."""
    if (stages := options.get("stages_per_rank")) is not None:
        return (stages,)
    schedule = options.get("schedule")
    return None if schedule is None else tuple(n for n in CHUNKS if (n > 1) == (schedule == "interleaved"))


def spread(blocks: Sequence[str], number: int) -> list[str]:
    """``number`` of the blocks, evenly spread, so that stages with equal numbers of blocks have equal numbers of these.

    >>> spread("abcdef", 2)
    ['c', 'f']
    """
    count = len(blocks)
    return [name for i, name in enumerate(blocks) if (i + 1) * number // count > i * number // count]


def varied(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a search would vary if they were not in ``options``."""
    return {key: value for key, value in options.items() if key in SEARCHED and value is not None}


def divisors(number: int) -> list[int]:
    """All divisors in ascending order.

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
    coupled: bool = False,
    branches: Collection[int] = (),
    shardings: Collection[Sharding] = (),
) -> Iterator[Candidate]:
    """All candidates for a number of devices that agree with the settings in ``options``.

    Args:
        devices: number of ranks.
        per_node: devices of a node. The ranks of a tp group are on one node.
        global_batch: rows of a step.
        tps: sizes of tp that the model allows.
        blocks: number of repeated blocks. A pipeline has at most as many stages.
        options: settings of every plan.
        recompute: whether blocks may be recomputed.
        coupled: whether every data rank runs all rows, in one microbatch.
        branches: the sizes of tp on slices of which branches of the model can run.
        shardings: others that are tried, besides all modules and the sequence.
    """
    fixed = varied(options or {})
    if not recompute:
        fixed.pop("recompute", None)  # no block is repeated: the setting has no effect
    if coupled:
        fixed.pop("microbatches", None)  # nor has this
    every = _all(devices, per_node, global_batch, tps, blocks, chunks_of(fixed) or CHUNKS, recompute=recompute)
    if coupled:
        every = (replace(each, rows=global_batch) for each in every if each.microbatches == 1)
    for unsplit in every:
        candidate = replace(unsplit, split=unsplit.pp > 1 and fixed.get("schedule") == "zero_bubble")
        if candidate.agrees(fixed) and not (candidate.split and candidate.recompute):
            yield candidate
            if candidate.pp == 1 and candidate.tp in branches:
                yield replace(candidate, branches=True)
            for sharding in shardings:
                if sharding.tp == candidate.tp:
                    yield replace(candidate, sequence=sharding.sequence, whole=sharding.whole)


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
    """All candidates, without split backwards. ``chunks``: numbers of stages a rank. For the others, see ``candidates``."""
    for tp in tps:
        for pp in divisors(devices // tp) if devices % tp == 0 else []:
            if pp > min(blocks or 1, LARGEST_STAGES) or tp > per_node:
                continue
            data = devices // (tp * pp)
            if global_batch % data:
                continue
            for shard in divisors(data):
                for microbatches in divisors(global_batch // data):
                    yield from _variants(
                        Candidate(pp, data // shard, shard, tp, microbatches, global_batch // data // microbatches),
                        blocks, chunks, recompute=recompute,
                    )  # fmt: skip


def _variants(candidate: Candidate, blocks: int, chunks: tuple[int, ...], *, recompute: bool) -> Iterator[Candidate]:
    """The variants of a candidate in stages a rank, recomputation and resharding, as far as they apply to its mesh."""
    if candidate.pp > 1 and candidate.microbatches < candidate.pp:
        return  # stages would be idle
    divides = candidate.microbatches % candidate.pp == 0  # as interleaved schedules need
    numbers = [n for n in chunks if n == 1 or (candidate.pp * n <= blocks and divides)]
    for number in numbers if candidate.pp > 1 else [1]:
        for recomputes in (False, True) if recompute else (False,):
            for reshard in (True, False) if candidate.pp == 1 and candidate.dp_shard > 1 else (True,):
                yield replace(candidate, chunks=number, recompute=recomputes, reshard=reshard)
