"""``Branching``: performs the forks and joins of branches, and keeps the state of what runs within them.

    fork   forward: nothing moves; each branch uses the value    backward: one all-reduce of the distinct shares of gradients;
                                                                 if other branches made the values, one all-to-all: each
                                                                 branch gets the gradients of its own values
    join   forward: one all-to-all: each rank gets the values    backward: nothing moves; each branch takes the gradients of
           that it lacks, whole                                  its own values

All ranks of the place around a region take part in both. No rank waits where an all-to-all begins: the received tensors have
memory from then on, and the first use waits until it is filled: of a value (calls/interpreter.py), or of a gradient (``Gate``).
Every fork is tied to the join by an anchor, a tensor of autograd. So on every rank the backward of the join comes before that
of the forks, whichever values the rank used: autograd runs in the reverse order of the forward, and all ranks enter the same
collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.calls.exchange import JoinResult
from meshwright.calls.placeholder import PathError
from meshwright.generators import Generators
from meshwright.graph import ModelGraph, Value
from meshwright.recipe import Recipe
from meshwright.regions import Fork, Join, gradient_returns, row_parts
from meshwright.runtime.branches.branch_rows import BranchRows
from meshwright.runtime.branches.conjugates import ForkValues, Gate, GateValue, JoinValues
from meshwright.runtime.branches.draws import BranchDraws
from meshwright.runtime.branches.pieces import Arrival, OrderedGroup, RowPiece
from meshwright.runtime.branches.wire import Wire
from meshwright.runtime.coupling.float64 import wider
from meshwright.runtime.groups import Groups
from meshwright.spmd.alias import laid_out, overwrite
from meshwright.spmd.comm import Ledger, without_function_modes
from meshwright.spmd.dispatcher import full_tensor


class Branching:
    """The forks and joins of one rank. Implements ``calls.exchange.Exchange``.

    Args:
        ledger: counts calls and bytes, as ``fork`` and ``join``.
        random: the generators of this rank.

    Attributes:
        rank_places: the places to which this rank belongs.
        running: the places whose code is running, the innermost last.
    """

    def __init__(self, recipe: Recipe, groups: Groups, ledger: Ledger, random: Generators) -> None:
        self.recipe, self.groups, self.ledger, self.places = recipe, groups, ledger, recipe.places
        self.rank_places = self.places.of(groups.rank)
        lines = {a: self._line(a) for a in {p.parent for p in recipe.branches} if a in self.rank_places}
        self._wire = Wire(lines, ledger, groups.device)
        self._branch_rows = BranchRows(self.places, groups.rank)
        self._draws = BranchDraws(self.places, groups.rank, self._branch_rows, random)
        self._members = {
            b: self.places.members(b, groups.rank)
            for b in self.places.branches
            if self.places[b].parent in self.rank_places
        }
        self._in_trial = self._wide = False  # in a trial; in one that computes in float64
        self._gates: dict[tuple[int, int], tuple[Gate, Tensor]] = {}  # (place around, value) → for a later fork
        self.running: list[int] = [0]

    def _line(self, around: int) -> OrderedGroup:
        """This rank's tp group in a place, among which its regions fork and join."""
        group = self.groups.meshes[around]["tp"].get_group()
        return OrderedGroup(group, dist.get_rank(group), dist.get_world_size(group), self.ledger.orders[around])

    def begin(self, rows: int) -> None:
        """Call before a forward. ``rows``: the number of its rows."""
        self._branch_rows.rows, self._gates = rows, {}
        self._draws.begin()

    def finish(self) -> None:
        """Call at the end of a step: waits for everything that was sent."""
        self._wire.finish()
        self._draws.finish()

    @property
    def rows(self) -> int:
        """The number of rows of the running forward."""
        return self._branch_rows.rows

    # --- forks ------------------------------------------------------------------------------------------------------

    def fork(
        self, move: Fork, values: Mapping[int, Tensor], graph: ModelGraph, tail: Tensor | None
    ) -> tuple[dict[tuple[int, int], Tensor], Tensor]:
        """See ``calls.exchange.Exchange``."""
        gates = {n: self._gates.pop((move.around, n)) for n in move.values if (move.around, n) in self._gates}
        full_values = {n: gates[n][1] if n in gates else full_tensor(t) for n, t in values.items()}
        pairs = [(n, b) for n in move.values for b in sorted(move.takers[n])]
        forked = {(n, b): full_values[n] for n, b in pairs if n in full_values}
        differentiable = [(n, b) for n, b in pairs if n in graph.live and torch.is_grad_enabled()]
        anchor = self._anchor() if tail is None else tail
        if differentiable:
            # This rank lacks a value that only other branches take, but takes part in the sum of its gradients, with zeros.
            stand_ins = {n: self._zeros(n, graph) for n, _ in differentiable if n not in full_values}
            inputs = [(full_values | stand_ins)[n] for n, _ in differentiable]
            anchor, *out = ForkValues.apply(
                self, move, graph, tuple(differentiable), {n: gate for n, (gate, _) in gates.items()}, anchor, *inputs
            )
            forked |= dict(zip(differentiable, out, strict=True))
        return forked, anchor

    def _anchor(self) -> Tensor:
        """A new anchor, for the first region of a place."""
        return torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())

    def _zeros(self, number: int, graph: ModelGraph) -> Tensor:
        """Zeros with the shape and dtype of a value, which take no memory."""
        value = graph.values[number]
        return torch.zeros((), dtype=getattr(torch, value.dtype), device=self.device).expand(value.shape)

    def keep_for_fork(self, around: int, number: int, t: Tensor) -> None:
        """See ``calls.exchange.Exchange``."""
        if t.requires_grad and torch.is_grad_enabled():
            gate = Gate()
            self._gates[around, number] = gate, GateValue.apply(gate, t)

    def gradients(
        self,
        move: Fork,
        graph: ModelGraph,
        branch_gradients: Mapping[tuple[int, int], Tensor | None],
        rows: int,
        gates: Mapping[int, Gate],
    ) -> dict[int, Tensor]:
        """Value → the sum of its gradients over the branches, on every rank that needs it. Values to which no branch gives a
        gradient are left out.

        Args:
            branch_gradients: (value, branch) → the gradient on this rank, or None.
        """
        gradients = {pair: self._zeros(pair[0], graph) if g is None else g for pair, g in branch_gradients.items()}
        if move.homes:
            sums = self._send_back(move, gradients, rows, gates)
        else:
            sums = self._sum_over_branches(move, gradients, rows)
        if not graph.may_lack_gradients:
            return sums
        numbers = self._with_gradient(move.around, branch_gradients)
        return {n: g for n, g in sums.items() if n in numbers}

    def _with_gradient(self, around: int, branch_gradients: Mapping[tuple[int, int], Tensor | None]) -> set[int]:
        """The values to which some branch, on any rank, gives a gradient."""
        numbers = list(dict.fromkeys(n for n, _ in branch_gradients))
        on_this_rank = {n for (n, _), g in branch_gradients.items() if g is not None}
        counts = torch.tensor([float(n in on_this_rank) for n in numbers], device=self.device)
        self.ledger.moved("fork", counts)
        self._wire.lines[around].order.enter("fork", counts.shape, counts.dtype)
        dist.all_reduce(counts, group=self._wire.lines[around].group)
        return {n for n, count in zip(numbers, counts.tolist(), strict=True) if count}

    def _sum_over_branches(
        self, move: Fork, gradients: Mapping[tuple[int, int], Tensor], rows: int
    ) -> dict[int, Tensor]:
        """The gradients of values that the place around gave to branches: one all-reduce."""
        summands: dict[int, Tensor] = {}
        for (n, branch), g in gradients.items():
            g = g if self._branch_rows.leads(branch, rows) else torch.zeros_like(g)
            summands[n] = g if n not in summands else summands[n] + g
        return dict(zip(summands, self._wire.all_reduce(move.around, list(summands.values())), strict=True))

    def _send_back(
        self, move: Fork, gradients: Mapping[tuple[int, int], Tensor], rows: int, gates: Mapping[int, Gate]
    ) -> dict[int, Tensor]:
        """The gradients of values that branches gave each other, on the ranks of the branch that made them: one all-to-all."""
        line = self._wire.lines[move.around]
        sent: list[list[Tensor]] = [[] for _ in range(line.size)]
        # for each rank: (value, first row, a tensor of that shape)
        wanted: list[list[tuple[int, int, Tensor]]] = [[] for _ in range(line.size)]
        sums: dict[int, Tensor] = {}
        for (n, branch), g in gradients.items():
            home = move.homes[n]
            if home in self.rank_places and n not in sums:
                sums[n] = torch.zeros_like(g)
            for back in gradient_returns(self._members[home], self._members[branch], self.places[home].shares(g.shape, rows),
                                self.places[branch].shares(g.shape, rows)):  # fmt: skip
                part = g if back.stop is None else g[back.start : back.stop]
                if back.sender == line.rank:
                    sent[back.receiver].append(part)
                if back.receiver == line.rank:
                    wanted[back.sender].append((n, back.start, part))
        likes = [[part for _, _, part in of_rank] for of_rank in wanted]
        received, arrival = self._wire.all_to_all("fork", line, sent, likes)
        for of_rank, tensors in zip(wanted, received, strict=True):
            for (n, start, part), g in zip(of_rank, tensors, strict=True):
                rows_of_sum = sums[n][start : start + len(part)] if part.dim() else sums[n]
                arrival.on_arrival.append(partial(rows_of_sum.add_, g))
        if sums.keys() <= gates.keys():
            for n in sums:
                gates[n].arrival = arrival
        else:
            arrival.wait()
        return sums

    # --- joins ------------------------------------------------------------------------------------------------------

    def join(
        self, move: Join, branch_values: Mapping[int, Tensor], graph: ModelGraph, anchors: Sequence[Tensor]
    ) -> JoinResult:
        """See ``calls.exchange.Exchange``."""
        anchors = anchors or [self._anchor()]
        if not move.values:
            return JoinResult({}, anchors[0])
        pieces = [piece for n, b in move.values for piece in self._pieces(n, b, move, graph)]
        local_values = {n: full_tensor(t) for n, t in branch_values.items()}
        if self._in_trial:
            local_values = {n: cast(t, sent_dtype(graph.values[n], wide=self._wide)) for n, t in local_values.items()}
        self._check(local_values, dict(move.values), graph)
        # A value without a gradient on one device gets none here, and not zeros.
        differentiable = frozenset(n for n, _ in move.values if n in graph.live and torch.is_grad_enabled())
        inputs = [local_values[n] if n in differentiable else local_values[n].detach() for n in local_values]
        joined, arriving, arrival = self._exchange_values(move, pieces, local_values, graph)
        tail, *out = JoinValues.apply(
            self, move, joined, tuple(local_values), differentiable, len(anchors), *anchors, *inputs
        )
        return JoinResult(dict(zip(joined, out, strict=True)), tail, arriving, arrival.wait)

    def _pieces(self, number: int, branch: int, move: Join, graph: ModelGraph) -> list[RowPiece]:
        """The pieces of a joined value: one for each share of the rows of the branch that made it."""
        value, members = graph.values[number], self._members[branch]
        dtype = sent_dtype(value, wide=self._wide)
        branches = move.takers.get(number)
        takers = tuple(
            r for r in range(len(members))
            if branches is None or members[r] >= 0 or any(self._members[b][r] >= 0 for b in branches)
        )  # fmt: skip
        return [
            RowPiece(
                number,
                value.shape if stop is None else (stop - start, *value.shape[1:]),
                dtype,
                start,
                stop,
                owners,
                takers,
            )
            for start, stop, owners in row_parts(members, self.places[branch].shares(value.shape, self.rows))
        ]

    @without_function_modes  # without modes: in a trial one would report another dtype (runtime/coupling/float64.py)
    def _check(self, local_values: Mapping[int, Tensor], branches: Mapping[int, int], graph: ModelGraph) -> None:
        """Raises PathError if a value of this rank's branch has not the recorded shape and dtype, for which others wait."""
        for n, t in local_values.items():
            value = graph.values[n]
            shape = list(value.shape)
            if (local_rows := self._branch_rows.local_rows(branches[n], value.shape, self.rows)) is not None:
                shape[0] = local_rows.stop - local_rows.start
            if list(t.shape) != shape or t.dtype != sent_dtype(value, wide=self._wide):
                event = graph.events[value.position]
                raise PathError(
                    f"{event.function} ({event.line}) gave {tuple(t.shape)} {t.dtype}, but {tuple(shape)} "
                    f"torch.{value.dtype} was recorded, for which the other branches wait"
                )

    @without_function_modes
    @torch.no_grad()
    def _exchange_values(
        self, move: Join, pieces: Sequence[RowPiece], local_values: Mapping[int, Tensor], graph: ModelGraph
    ) -> tuple[dict[int, Tensor], frozenset[int], Arrival]:
        """Sends the pieces of joined values to the ranks that take them: one all-to-all.

        Args:
            local_values: value → the tensor that this rank's branch made.

        Returns:
            (value → the full tensor, for each value that this rank takes; the values that are still on their way; the arrival
            of these values).
        """
        line = self._wire.lines[move.around]
        sent = [[local_values[p.number] for p in pieces if p.sender(r) == line.rank] for r in range(line.size)]
        wanted = [[p for p in pieces if p.sender(line.rank) == r] for r in range(line.size)]
        likes = [[torch.empty(p.shape, dtype=p.dtype, device="meta") for p in of_rank] for of_rank in wanted]
        received, arrival = self._wire.all_to_all("join", line, sent, likes)
        # value → first row → the tensor of this piece
        parts: dict[int, dict[int, Tensor]] = {p.number: {} for p in pieces if line.rank in (*p.owners, *p.takers)}
        wanted_pieces = [p for of_rank in wanted for p in of_rank]
        received_tensors = [t for of_rank in received for t in of_rank]
        for p, t in zip(wanted_pieces, received_tensors, strict=True):
            parts[p.number][p.start] = t
        arriving = frozenset(p.number for p in wanted_pieces if p.numel)
        for p in pieces:
            if line.rank in p.owners:
                parts[p.number][p.start] = local_values[p.number]
        joined = {}
        for n, rows in parts.items():
            first = joined[n] = next(iter(rows.values()))
            if len(rows) > 1:  # the rows of several shares
                joined[n] = first.new_empty(sum(map(len, rows.values())), *first.shape[1:])
                arrival.on_arrival += [partial(joined[n][start : start + len(t)].copy_, t) for start, t in rows.items()]
            # The same strides on every rank: they decide in which order a sum is added, and which functions return views.
            contiguous, joined[n] = joined[n], laid_out(joined[n], graph.values[n].stride)
            if joined[n] is not contiguous:
                arrival.on_arrival.append(partial(overwrite, joined[n], contiguous))
        return joined, arriving, arrival

    @property
    def device(self) -> torch.device:
        return self.groups.device

    def returned(self, branch: int, gradient: Tensor, rows: int) -> Tensor:
        """See ``BranchRows.returned``."""
        return self._branch_rows.returned(branch, gradient, rows)

    # --- within a branch --------------------------------------------------------------------------------------------

    def take_rows(self, place: int, t: Tensor) -> Tensor:
        """See ``calls.exchange.Exchange``."""
        return self._branch_rows.take_rows(place, t)

    def row_counts(self, place: int) -> tuple[int, int]:
        """See ``calls.exchange.Exchange``."""
        return self._branch_rows.row_counts(place)

    def padded(self, place: int, rows: Tensor, like: Tensor) -> Tensor:
        """See ``calls.exchange.Exchange``."""
        return self._branch_rows.padded(place, rows, like)

    def ones_like(self, like: Tensor) -> Tensor:
        """See ``calls.exchange.Exchange``."""
        dtype = wider(like.dtype) if self._in_trial else like.dtype
        return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=self.device).fill_(1)

    @contextmanager
    def in_trial(self, *, wide: bool) -> Iterator[None]:
        """A context for a trial. ``wide``: whether values are in float64 (runtime/coupling/float64.py)."""
        self._in_trial, self._wide = True, wide
        try:
            yield
        finally:
            self._in_trial = self._wide = False

    @contextmanager
    def inside(self, place: int) -> Iterator[None]:
        """See ``calls.exchange.Exchange``."""
        with self._draws.inside(place):
            self.running.append(place)
            try:
                yield
            finally:
                self.running.pop()

    def counts(self, places: Sequence[int]) -> bool:
        """Whether this rank's gradient of a parameter, from the code that is running, counts in the sum over ``places``, all
        places that use the parameter."""
        return self._branch_rows.at(self.running[-1]).tp == 0 and self.running[-1] in places


@without_function_modes
def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype, without the modes of a trial."""
    return t.to(dtype)


def sent_dtype(value: Value, *, wide: bool) -> torch.dtype:
    """The dtype in which a value is sent: the recorded one, or in a ``wide`` trial a wider one."""
    dtype: torch.dtype = getattr(torch, value.dtype)
    return wider(dtype) if wide else dtype
