"""``Draft``: what is known so far of a model under a plan; a frozen value. Each pass of planning/resolve.py gives the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from meshwright.errors import Finding
from meshwright.graph import ModelGraph
from meshwright.plan import Entry, Plan
from meshwright.planning.cuts import Cuts
from meshwright.planning.places import Branches
from meshwright.planning.units import Uses
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
        model: with parameters on the meta device, buffers real.
        plan: as a person wrote it; then with the branches that it leaves to be found.
        run: runs the model's forward on the sample batch, and the loss on its output.
        batch: the sample; ``whole_batch``: whether these are the rows of all data ranks together.
        names: every parameter once, with its tied names.
        findings: what is wrong, in the order in which it was found.
        notes: what a person should know, in the order in which it is told.
        entries: module or parameter → what the plan's globs say of it.
        blocks: repeated blocks of the model; ``writing``: those that write to what they are given.
        graph: the forward, recorded; None without stages and branches.
        branches: which ranks run which branch.
        units: FSDP2's, innermost first and the root last.
        recompute: modules that are run again in the backward.
        cuts: the shards over tp; None if the forward cannot be followed without values, and the plan names none.
        uses: what the forward uses, and where; None if it cannot be followed.
        drawn: whether it draws random numbers that can decide what it calls: Python's, NumPy's, or torch's that it reads.
        stages: of the pipeline; none without one. ``homes``: parameter → the stages that use it.
        schedule: of the pipeline.
        buffers: for each buffer its name, and the stage and the place whose copy counts.
        loose: parameter → why it stays out of its unit, or nothing where a note says so.
        kept: of these, those of which the model uses the very object, from elsewhere than its modules.
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
    cuts: Cuts | None = None
    uses: Uses | None = None
    drawn: bool = False
    stages: tuple[Stage, ...] = ()
    homes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    schedule: str = ""
    buffers: tuple[tuple[str, int, int], ...] = ()
    loose: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    writing: frozenset[str] = frozenset()

    @property
    def data(self) -> int:
        """Over how many data ranks the rows are divided, at most: of the mesh, and within a branch."""
        return self.plan.mesh.data_size * max((p.data for p in self.branches.places), default=1)

    @property
    def routed(self) -> bool:
        """Whether data ranks may use different parameters: the forward's path may follow from values or chance."""
        return self.data > 1 and (self.cuts is None or self.uses is None or self.cuts.reads > 0 or self.drawn)

    @property
    def sequence(self) -> tuple[str, ...]:
        """The blocks whose inputs are sharded over the sequence."""
        cut = self.plan.sequence_parallel and self.plan.mesh.axis_size("tp") > 1
        return tuple(block for block in self.blocks if block not in self.writing) if cut else ()

    def entry(self, name: str) -> Entry:
        """What the plan says of a module or parameter; an empty entry if it says nothing."""
        return self.entries.get(name, Entry())

    def wrong(self, findings: Iterable[Finding]) -> Draft:
        """The draft with more problems."""
        return replace(self, findings=(*self.findings, *findings))

    def noted(self, notes: Iterable[str]) -> Draft:
        """The draft with more notes."""
        return replace(self, notes=(*self.notes, *notes))
