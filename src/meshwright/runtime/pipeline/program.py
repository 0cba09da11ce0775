"""``Programs``: forwards divided into stages, recorded for the sizes of a batch and cached.

    sizes of a batch ──► recorded before, and the values that decided its path are equal  ──► cached Program
                    └──► between recorded lengths                                          ──► Program of a resized graph
                    └──► neither: record the forward, and compare it between the ranks of one copy of the model

A program determines all sends and receives. So the ranks that send to each other compare it when they have recorded a batch,
and not at each send.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.calls.stage import Crossing, StageProgram, crossings
from meshwright.calls.stub import without_values
from meshwright.calls.tracer import Slot
from meshwright.errors import PlanError, StageError, UncutPathError
from meshwright.evaluation import Evaluating, Modes
from meshwright.generators import random_numbers_kept
from meshwright.graph import ROOT, ModelGraph
from meshwright.private import storage_of, without_modes
from meshwright.recipe import Recipe
from meshwright.regions import cross_places, place_events
from meshwright.runtime.batch_caches import LengthCache, LruCache, Points, ValueCache, sizes_of
from meshwright.runtime.pipeline.homes import Home
from meshwright.runtime.pipeline.resized import graphs_between
from meshwright.runtime.rows.batch import changed_tensors, copied, tensors_in, versions
from meshwright.runtime.rows.loss import Loss
from meshwright.switches import NO_SWITCHES, Switch, Switches

_Key = TypeVar("_Key")
Edge = tuple[int, int]
"""(stage, later stage)"""
Call = Callable[[nn.Module, Any], Any]
"""(model, batch) → the model's output"""


class Replanner(Protocol):
    """The interface from a run to planning: records forwards for batches of other shapes than the sample's.

    An implementation has a copy of the model without values.
    """

    def graph(
        self,
        run: Callable[[nn.Module], Any],
        *,
        grad: bool = True,
        evaluating: Evaluating = frozenset(),
        switches: Mapping[Switch, Any] = NO_SWITCHES,
    ) -> ModelGraph:
        """Records a forward, and cuts it into stages.

        Args:
            run: runs the forward of a model.
            grad: whether gradients are enabled.
            evaluating: the modules that are in eval mode.
            switches: settings that a person has changed on modules.
        """

    def record(
        self,
        batch: Any,
        recorder: Any,
        evaluating: Evaluating = frozenset(),
        switches: Mapping[Switch, Any] = NO_SWITCHES,
    ) -> None:
        """Runs the forward for the shapes of a batch under a recorder (``CountRecorder`` in runtime/rows/label_program.py)."""


@dataclass(frozen=True)
class Program:
    """A forward that was recorded for one set of shapes, divided into stages.

    Attributes:
        graph: the recorded forward.
        crossing: the values that cross between stages.
        stages: number → program, of this rank's stages.
        writes: index of each tensor of the batch that the forward writes to → the ranks that write to it.
        changed: (module, name) of each buffer or attribute that one stage or branch changes → the ranks that change it.
    """

    graph: ModelGraph
    crossing: Crossing
    stages: dict[int, StageProgram]
    writes: Mapping[int, Home]
    changed: Mapping[Slot, Home]

    def differentiable(self, edge: Edge) -> tuple[int, ...]:
        """The values over an edge whose gradients are sent back: those that a backward from the loss reaches. A value before a
        ``detach`` has no gradient, not even zeros."""
        return tuple(n for n in self.crossing.values[edge] if n in self.graph.live)

    @cached_property
    def digest(self) -> int:
        """A 32-bit checksum of all that determines sends and receives. Ranks with matching transfers have equal ones."""
        graph, crossing = self.graph, sorted(self.crossing.values.items())
        events = [(e.path, e.index, e.function, e.inputs, e.outputs) for e in graph.events]
        crossed = {n for _, numbers in crossing for n in numbers}
        values = [(n, graph.values[n].shape, graph.values[n].dtype, n in graph.live) for n in sorted(crossed)]
        facts = self.crossing.cuts, crossing, values, sorted(self.writes.items()), sorted(graph.ways), events
        return zlib.crc32(repr(facts).encode())


class Programs:
    """The programs of a job. They are recorded when a batch needs them.

    Args:
        recipe: every decision of the plan.
        replanner: records forwards.
        stages: numbers of this rank's stages.
        among: the process groups of ranks that run one copy of the model: over its stages, and over tp.
        modes: train or eval mode of the model's modules.
        switches: settings that a person changes on modules between steps.
        rank_places: numbers of the submeshes that contain this rank, if there are branches.
        streamed: whether this rank runs blocks on several streams.
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
        rank_places: frozenset[int] | None = None,
        streamed: bool = False,
    ) -> None:
        self.replanner = replanner
        self._recipe, self._stages, self._among, self._modes, self._switches = recipe, stages, among, modes, switches
        self._rank_places, self._streamed = rank_places, streamed
        self._by_sizes = LengthCache(self._between)
        self._by_path = LruCache[Program]()
        self._by_values = ValueCache[Program]()

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """A context at whose end the programs that were recorded in it are dropped: they hold what follows from their batches
        alone (masks, tables of positions)."""
        with self._by_sizes.forgetting(), self._by_path.forgetting(), self._by_values.forgetting():
            yield

    def for_batch(self, batch: Any, call: Call, loss: Loss | None, *, grad: bool = True) -> Program:
        """The program for a microbatch of these shapes. Collective over the ranks of a copy of the model, if it is new.

        Args:
            batch: the microbatch.
            call: runs the model on it.
            loss: of the model's output; None: the output itself is the result.
            grad: whether gradients are enabled: a model may ask for that.

        Raises:
            UncutPathError: the forward cannot be cut so that each stage has the parameters and buffers that it uses.
            StageError: ranks recorded different forwards.
        """
        evaluating = self._modes.now()
        with without_modes():  # in a trial, a mode reports another dtype
            sizes = sizes_of(batch, loss is None, grad, evaluating, self._switches.common[0])
        recorded: list[Program] = []

        def record() -> Program:
            graph, writes = self._recorded(batch, call, loss, evaluating, grad=grad)
            if loss is None and not graph.calls[ROOT].repeatable:
                raise _unrepeatable()
            path = (sizes, graph.signature) if sizes is not None else object()
            recorded.append(self._by_path.get_or_make(path, lambda: self._program(graph, writes, loss is None)))
            self._agree(recorded[-1].digest)  # (also if this rank had it: another may not, as strides may differ there)
            deciding = self._deciding(graph, batch)
            if sizes is not None and deciding is not None:
                self._by_values.put(sizes, batch, deciding, recorded[-1])
            return recorded[-1]

        known = self._by_sizes.get_or_make(sizes, record)
        if not known.graph.of_this_batch or recorded:
            return known
        # Another batch of these sizes may take another path, unless the values that were read are the same.
        return (self._by_values.get(sizes, batch) if sizes is not None else None) or record()

    def _recorded(
        self, batch: Any, call: Call, loss: Loss | None, evaluating: Evaluating, *, grad: bool
    ) -> tuple[ModelGraph, dict[int, tuple[int, ...]]]:
        """The graph of a forward, and the tensors of the batch that it writes to: index → the positions of the events that do
        so, or make views; the end if none does, as writes that follow from the batch alone are every stage's."""
        runs: list[tuple[list[Tensor], list[int | None]]] = []

        def run(model: nn.Module) -> Any:
            clone = copied(batch)
            runs.append((tensors_in(clone), versions(clone)))  # before the forward, which may add others to a container
            output = call(model, clone)
            return loss(output) if loss else output

        with random_numbers_kept():
            graph = self.replanner.graph(run, grad=grad, evaluating=evaluating, switches=self._switches.common[1])
        # After the recording: within it, reading values would count as a read of the forward.
        writes: dict[int, tuple[int, ...]] = {}
        for clone, before in runs:
            for i in changed_tensors(clone, batch, before):
                memory = storage_of(clone[i])
                positions = {value.position for value in graph.values if value.storage == memory}
                writes[i] = tuple(sorted(positions)) or writes.get(i, (len(graph.events),))
        return graph, dict(sorted(writes.items()))

    def _deciding(self, graph: ModelGraph, batch: Any) -> frozenset[int] | None:
        """The indices of the tensors of a batch whose values decided the path of the forward. None if other values decided,
        too."""
        tensors = [(i, t) for i, t in enumerate(tensors_in(batch)) if t.layout is torch.strided]
        if graph.read is None or not graph.read.issubset(storage_of(t) for _, t in tensors):
            return None
        if self._recipe.branches:  # whether rows can run apart depends on more tensors than the forward has read
            return frozenset(i for i, _ in tensors)
        return frozenset(i for i, t in tensors if storage_of(t) in graph.read)

    def _between(self, points: Points[Program]) -> Callable[[int], Program] | None:
        """A function: length → program, for lengths between those of ``points``. None if more than sizes differs."""
        lengths, programs = zip(*points, strict=True)
        first = programs[0]
        same_crossing = all((p.crossing.values, p.writes) == (first.crossing.values, first.writes) for p in programs)
        # A tensor that follows from the batch alone and is left in an argument has no value, whose size would be known.
        unknown = any(None in change.values for change in first.graph.left_changes)
        if not same_crossing or unknown or self._recipe.branches:
            return None
        graph_for = graphs_between(lengths, [program.graph for program in programs])
        if graph_for is None:
            return None

        def between(length: int) -> Program:
            resized = graph_for(length)
            stages = {s: stage.with_graph(resized) for s, stage in first.stages.items()}
            return Program(resized, first.crossing, stages, first.writes, first.changed)

        return between

    def _program(self, graph: ModelGraph, writes: Mapping[int, tuple[int, ...]], whole_output: bool) -> Program:
        """Divides a recorded forward into stages, and compares the result with other ranks. Collective."""
        recipe, cuts = self._recipe, graph.cuts
        if cuts is None:
            raise UncutPathError(
                "with this batch the forward takes another path than with the sample, which cannot be cut so that each stage "
                "has the parameters and buffers that it uses. Give parallelize a sample that takes this path"
            )
        crossing = crossings(graph, cuts, whole_output=whole_output)
        without_values(graph)
        if recipe.branches and graph.sized:  # another batch has other sizes, for which ranks wait
            event_places = place_events(graph, recipe.placed, recipe.places)
            graph.of_this_batch |= bool(cross_places(graph, graph.sized, event_places))
        branch_facts = () if self._rank_places is None else (recipe.placed, recipe.places, self._rank_places)
        streams = dict(recipe.streams) if self._streamed else None
        stages = {
            s: StageProgram(
                graph,
                crossing,
                s,
                *branch_facts,
                streams=streams,
                whole_output=whole_output,
                batch_writes=sum(writes.values(), ()),
            )
            for s in self._stages
        }
        followed = graph.followed or graph
        changed: dict[Slot, tuple[int, ...]] = {slot: (position,) for slot, position in followed.changes.items()}
        changed |= {slot: changes for slot, (_, changes) in followed.slot_uses.items() if changes}
        homes = _homes(graph, cuts, recipe, writes)
        return Program(graph, crossing, stages, homes, _homes(followed, cuts, recipe, changed))

    def _agree(self, digest: int) -> None:
        """Compares the digest of a recorded program between the ranks of one copy of the model. Collective.

        Raises:
            StageError: on all of these ranks, if the digests differ.
        """
        for group in self._among:
            extremes = torch.tensor([digest, -digest], device="cpu")
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
            largest, negated_smallest = extremes.tolist()
            if largest != -negated_smallest:
                ranks = " ".join(map(str, dist.get_process_group_ranks(group)))
                raise StageError(
                    f"ranks {ranks} recorded different forwards for one batch, and would wait for each other: the model acts "
                    "on what differs between processes, the order of a set perhaps, a clock or the process's own number"
                )


def _unrepeatable() -> PlanError:
    return PlanError.of(
        "this call",
        where="job(...)",
        given="a forward that changes an object among its arguments in a way that cannot be repeated on other ranks",
        required="over pp or branches: new items of lists (none removed) and dicts, and attributes of plain objects",
        fix="return what the forward leaves there",
    )


def _homes(
    graph: ModelGraph, cuts: Sequence[int], recipe: Recipe, changes: Mapping[_Key, tuple[int, ...]]
) -> dict[_Key, Home]:
    """The ranks that make changes. ``changes``: a key for each thing that changes → the positions of its changes."""
    if not changes:
        return {}
    places = place_events(graph, recipe.placed, recipe.places) if recipe.branches else []

    def home(positions: tuple[int, ...]) -> Home:
        # A position after the last event: what Python does there belongs to the last stage, and to no branch.
        in_branches = (places[p] for p in positions if p < len(places))
        return Home(bisect_right(cuts, positions[-1]), next(filter(None, in_branches), 0))

    return {key: home(positions) for key, positions in changes.items()}
