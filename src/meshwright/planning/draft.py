"""``Draft``: a recipe in the making, a frozen value. Each pass of planning/resolve.py takes one and returns the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from meshwright.errors import Finding
from meshwright.graph import ModelGraph
from meshwright.plan import Entry, Plan
from meshwright.planning.parameter_shards import ParameterShards
from meshwright.planning.places import Branches
from meshwright.planning.rows import rows_of
from meshwright.planning.units import ParameterUses
from meshwright.recipe import Stage, Unit

Run = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Names:
    """The model's parameters: first name → (parameter, its other names)."""

    parameters: Mapping[str, tuple[nn.Parameter, tuple[str, ...]]]

    @staticmethod
    def of(model: nn.Module) -> Names:
        """Every parameter once, in the order of ``named_parameters``."""
        ties: dict[int, tuple[str, nn.Parameter, list[str]]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            if id(p) in ties:
                ties[id(p)][2].append(name)
            else:
                ties[id(p)] = (name, p, [])
        return Names({name: (p, tuple(aliases)) for name, p, aliases in ties.values()})


@dataclass(frozen=True)
class Draft:
    """A recipe in the making.

    Attributes:
        model: the model, with parameters on the meta device and real buffers.
        plan: the plan as a person wrote it; after a pass also with the branches that ``auto`` found.
        run: runs the model's forward on the sample batch, and the loss on its output.
        batch: the sample batch; ``whole_batch``: whether it has the rows of all data ranks together.
        names: every parameter once, with its tied names.
        findings: problems of the plan, in the order in which the passes found them.
        notes: notes for a person, in the order in which they are printed.
        entries: module or parameter → the plan's settings for it.
        blocks: repeated blocks of the model; ``writing``: those that write to their arguments.
        graph: the recorded forward; None without stages and branches.
        branches: which ranks run which branch.
        units: FSDP2's units, innermost first and the root last.
        recompute: modules that are run again in the backward.
        shards: over tp; None if the forward cannot be followed without values, and the plan names none.
        uses: which parameters the forward uses, and where; None if it cannot be followed.
        written: without ``uses``, the parameters that the forward writes, as far as they are known.
        drawn: whether the forward draws random numbers that can decide its path: from Python, NumPy, or from torch if it
            reads them.
        stages: the pipeline's stages; empty without a pipeline. ``homes``: parameter → the stages that use it.
        schedule: the pipeline's schedule.
        buffers: for each buffer (name, stage, place): whose copy counts.
        loose: parameter → why it stays out of its unit; "" if a note says why.
        referenced_outside: those of ``loose`` that the model also reaches by a reference outside its modules, to the Parameter
            object itself.
    """

    model: nn.Module
    plan: Plan
    run: Run
    batch: Any
    whole_batch: bool
    names: Names
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    entries: Mapping[str, Entry] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    graph: ModelGraph | None = None
    branches: Branches = field(default_factory=Branches)
    units: tuple[Unit, ...] = ()
    recompute: tuple[str, ...] = ()
    shards: ParameterShards | None = None
    uses: ParameterUses | None = None
    written: frozenset[str] = frozenset()
    drawn: bool = False
    stages: tuple[Stage, ...] = ()
    homes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    schedule: str = ""
    buffers: tuple[tuple[str, int, int], ...] = ()
    loose: Mapping[str, str] = field(default_factory=dict)
    referenced_outside: tuple[str, ...] = ()
    writing: frozenset[str] = frozenset()

    @property
    def data(self) -> int:
        """The largest number of data ranks over which rows are divided: those of the mesh times those within a branch."""
        return self.plan.mesh.data_size * max((p.data for p in self.branches.places), default=1)

    @property
    def microbatches(self) -> int:
        """The number of microbatches: ``plan.pieces``, but not more than the rows of one data rank."""
        return max(1, min(self.plan.pieces, (rows_of(self.batch) or 1) // self._ranks))

    @property
    def pieces(self) -> int:
        """The number of microbatches, of all data ranks, of which the sample batch has the rows."""
        return self._ranks * self.microbatches

    @property
    def _ranks(self) -> int:
        return self.plan.mesh.data_size if self.whole_batch else 1

    @property
    def routed(self) -> bool:
        """Whether data ranks may use different parameters, as the forward's path may depend on values or random numbers."""
        return self.data > 1 and (self.shards is None or self.uses is None or self.shards.reads > 0 or self.drawn)

    @property
    def sequence(self) -> tuple[str, ...]:
        """The blocks whose inputs are sharded over the sequence."""
        sharded = self.plan.sequence_parallel and self.plan.mesh.axis_size("tp") > 1
        return tuple(block for block in self.blocks if block not in self.writing) if sharded else ()

    def entry(self, name: str) -> Entry:
        """The plan's settings for a module or parameter; an empty entry if the plan has none."""
        return self.entries.get(name, Entry())

    def wrong(self, findings: Iterable[Finding]) -> Draft:
        """The draft with more problems."""
        return replace(self, findings=(*self.findings, *findings))

    def noted(self, notes: Iterable[str]) -> Draft:
        """The draft with more notes."""
        return replace(self, notes=(*self.notes, *notes))
