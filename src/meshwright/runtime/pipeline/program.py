"""``Programs``: a forward as stages run it, recorded for the sizes of a batch.

    sizes of a batch ──► recorded before?  the values that decided are the same?  ──► Program
                    └──► between lengths that were recorded                        ──► Program, of a resized graph
                    └──► neither: the forward is recorded, and the ranks of a copy of the model compare what they have

What is sent and received follows from a program alone. So the ranks that send to each other agree on it once, when it is new,
and not at each send.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from meshwright.calls.stage import Crossing, StageProgram, crossings
from meshwright.calls.stub import without_values
from meshwright.errors import StageError, UncutPathError
from meshwright.evaluation import Evaluating, Modes
from meshwright.generators import random_numbers_kept
from meshwright.graph import ModelGraph
from meshwright.private import storage_of, without_modes
from meshwright.recipe import Recipe
from meshwright.runtime.pipeline.resized import graphs_between
from meshwright.runtime.recent import ByValues, Lengths, Points, Recent, sizes_of
from meshwright.runtime.rows.batch import copied, differs, tensors_in, versions
from meshwright.runtime.rows.loss import Loss
from meshwright.switches import NO_SWITCHES, Switch, Switches

Edge = tuple[int, int]
"""(stage, later stage)"""
Call = Callable[[nn.Module, Any], Any]
"""(model, batch) → what the model returns for it"""


class Replanner(Protocol):
    """What a run asks of planning, for batches of other shapes than the sample's. It has the model, with shapes alone."""

    def graph(
        self,
        run: Callable[[nn.Module], Any],
        *,
        grad: bool = True,
        evaluating: Evaluating = frozenset(),
        switches: Mapping[Switch, Any] = NO_SWITCHES,
    ) -> ModelGraph:
        """A forward, recorded, with where stages begin in it; ``run`` runs it, ``grad``: whether it is one for a backward;
        ``evaluating``: the modules that are in evaluation mode; ``switches``: what a person has set on modules."""

    def record(
        self,
        batch: Any,
        recorder: Any,
        evaluating: Evaluating = frozenset(),
        switches: Mapping[Switch, Any] = NO_SWITCHES,
    ) -> None:
        """Runs the forward for a batch's shapes under a recorder (runtime/rows/label_program.py)."""


@dataclass(frozen=True)
class Program:
    """A forward recorded for some shapes, and what crosses its cuts.

    Attributes:
        stages: those of this rank.
        writes: the tensors of the batch that the forward writes to, by their places in it.
    """

    graph: ModelGraph
    crossing: Crossing
    stages: dict[int, StageProgram]
    writes: frozenset[int]

    def differentiable(self, edge: Edge) -> tuple[int, ...]:
        """The values over an edge whose gradients come back: those that a backward from the loss comes to, as what is before
        a ``detach`` has no gradient, and no zeros either."""
        return tuple(n for n in self.crossing.values[edge] if n in self.graph.live)

    @property
    def digest(self) -> int:
        """The same number, below 2**32, on ranks that would send each other the same; it differs, all but surely, otherwise."""
        graph, crossing = self.graph, sorted(self.crossing.values.items())
        events = [(e.path, e.index, e.function, e.inputs, e.outputs) for e in graph.events]
        crossed = {n for _, numbers in crossing for n in numbers}
        values = [(n, graph.values[n].shape, graph.values[n].dtype, n in graph.live) for n in sorted(crossed)]
        told = self.crossing.cuts, crossing, values, sorted(self.writes), sorted(graph.ways), events
        return zlib.crc32(repr(told).encode())


class Programs:
    """The programs of a job, as batches ask for them.

    Args:
        stages: those of this rank.
        among: the groups of ranks that run one copy of the model: those of its stages, and of its tensor parallelism.
        modes: of the model that runs; ``switches``: what a person sets on it between steps.
        mine: the places that this rank is of, if there are branches.
        streamed: whether this rank runs blocks at the same time.
    """

    def __init__(
        self,
        recipe: Recipe,
        replanner: Replanner,
        stages: Sequence[int],
        among: Sequence[dist.ProcessGroup],
        modes: Modes,
        switches: Switches,
        *,
        mine: frozenset[int] | None = None,
        streamed: bool = False,
    ) -> None:
        self.replanner = replanner
        self._recipe, self._stages, self._among, self._modes, self._switches = recipe, stages, among, modes, switches
        self._mine, self._streamed = mine, streamed
        self._of_sizes = Lengths(self._between)
        self._of_paths = Recent[Program]()
        self._of_values = ByValues[Program]()

    def of(self, batch: Any, call: Call, loss: Loss | None, *, grad: bool = True) -> Program:
        """The forward for a microbatch of these shapes. Collective if it is new: all ranks of a copy of the model ask for it.

        Args:
            loss: None if the output itself is wanted.
            grad: whether it is recorded with gradients on: a model may ask.

        Raises:
            UncutPathError: it cannot be cut so that each stage has what it uses.
            StageError: the ranks recorded different ones.
        """
        evaluating = self._modes.now()
        with without_modes():  # in a trial, which may tell another type
            sizes = sizes_of(batch, loss is None, grad, evaluating, self._switches.common[0])
        recorded: list[Program] = []

        def record() -> Program:
            graph, writes = self._recorded(batch, call, loss, evaluating, grad=grad)
            path = (sizes, graph.signature) if sizes is not None else object()
            recorded.append(self._of_paths.made(path, lambda: self._program(graph, writes, loss is None)))
            deciding = self._deciding(graph, batch)
            if sizes is not None and deciding is not None:
                self._of_values.put(sizes, batch, deciding, recorded[-1])
            return recorded[-1]

        known = self._of_sizes.made(sizes, record)
        if not known.graph.of_this_batch or recorded:
            return known
        # Another batch of these sizes may take another path, unless the values that were read are the same.
        return (self._of_values.get(sizes, batch) if sizes is not None else None) or record()

    def _recorded(
        self, batch: Any, call: Call, loss: Loss | None, evaluating: Evaluating, *, grad: bool
    ) -> tuple[ModelGraph, frozenset[int]]:
        """The graph of a forward, and the tensors of the batch that it writes to."""
        runs: list[tuple[Any, list[int | None]]] = []

        def run(model: nn.Module) -> Any:
            clone = copied(batch)
            runs.append((clone, versions(clone)))
            output = call(model, clone)
            return loss(output) if loss else output

        with random_numbers_kept():
            graph = self.replanner.graph(run, grad=grad, evaluating=evaluating, switches=self._switches.common[1])
        # Not within: a look at values would seem to be the forward's own.
        return graph, frozenset(i for clone, before in runs for i in differs(clone, batch, before))

    def _deciding(self, graph: ModelGraph, batch: Any) -> frozenset[int] | None:
        """The tensors of a batch, by their places, whose values decided what was recorded; None if not they alone did."""
        tensors = [(i, t) for i, t in enumerate(tensors_in(batch)) if t.layout is torch.strided]
        if graph.read is None or not graph.read.issubset(storage_of(t) for _, t in tensors):
            return None
        if self._recipe.branches:  # which rows can be run apart is asked of more than was read
            return frozenset(i for i, _ in tensors)
        return frozenset(i for i, t in tensors if storage_of(t) in graph.read)

    def _between(self, points: Points[Program]) -> Callable[[int], Program] | None:
        """A program for lengths between those that were recorded, if nothing but sizes differs."""
        lengths, programs = zip(*points, strict=True)
        first = programs[0]
        same = all((p.crossing.values, p.writes) == (first.crossing.values, first.writes) for p in programs)
        graph = graphs_between(lengths, [p.graph for p in programs]) if same and not self._recipe.branches else None
        if graph is None:
            return None

        def between(length: int) -> Program:
            resized = graph(length)
            stages = {s: stage.of(resized) for s, stage in first.stages.items()}
            return Program(resized, first.crossing, stages, first.writes)

        return between

    def _program(self, graph: ModelGraph, writes: frozenset[int], whole_output: bool) -> Program:
        recipe, cuts = self._recipe, graph.cuts
        if cuts is None:
            raise UncutPathError(
                "with this batch the forward takes another path than with the sample, which cannot be cut so that each stage "
                "has the parameters and buffers that it uses. Give parallelize a sample that takes this path"
            )
        crossing = crossings(graph, cuts, whole_output=whole_output)
        without_values(graph)
        placed = None if self._mine is None else (recipe.placed, recipe.places, self._mine)
        streams = dict(recipe.streams) if self._streamed else None
        stages = {
            s: StageProgram(graph, crossing, s, *(placed or ()), streams=streams, whole_output=whole_output)
            for s in self._stages
        }
        program = Program(graph, crossing, stages, writes)
        self._agree(program.digest)
        return program

    def _agree(self, digest: int) -> None:
        """Compares a new program with those of the ranks that run the same copy of the model. Collective."""
        for group in self._among:
            most = torch.tensor([digest, -digest], device="cpu")
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            highest, lowest = most.tolist()
            if highest != -lowest:
                ranks = " ".join(map(str, dist.get_process_group_ranks(group)))
                raise StageError(
                    f"ranks {ranks} recorded different forwards for one batch, and would wait for each other: the model acts "
                    "on what differs between processes, the order of a set perhaps, a clock or the process's own number"
                )
