"""``Job``: a model laid out over the mesh, ready to train. What ``parallelize`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.run.batches import Batches
from meshwright.run.clip import clip_grad_norm, grad_norm
from meshwright.run.counts import LabelCounter, Shares
from meshwright.run.coupling import COUPLED, MEAN, SUM, how_rows_combine, note
from meshwright.run.groups import Groups
from meshwright.run.routing import Routed
from meshwright.run.state import whole_tensors
from meshwright.run.step import gather_rows, microbatches, rows_of, take_rows, weights
from meshwright.view.axis import Ledger
from meshwright.view.mode import GlobalView
from meshwright.view.structure import map_tensors
from meshwright.view.tensor import View
from meshwright.view.work import python_body

Loss = Callable[[Any], Tensor]

# backward() hands over to function modes, and those answer with themselves turned off; but what a backward makes again
# (recompute, a model's own checkpoints) needs the view. So its body is run, which keeps them on.
_BACKWARD = python_body(torch.autograd.backward) or torch.autograd.backward


def output_loss(output: Any) -> Tensor:
    """The default loss: ``output.loss``, or ``output["loss"]``; a tensor without dims is a loss itself."""
    if isinstance(output, Tensor) and not output.dim():
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise TypeError(
            f"the model's output ({type(output).__name__}) has no loss; pass loss=, a function of the output "
            "(on the command line: --loss file.py:function)"
        )
    return loss


class Job:
    """A model over a mesh. Made by ``parallelize``; every method is called on every rank, alike.

    Attributes:
        module: the model, its parameters laid out; its names are its own.
        recipe: every decision.
        rows: how rows of a batch combine into its loss: ``auto`` until the first step has found out.
        ledger: collectives of the view, in calls and bytes, and its fallbacks, since the start.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        groups: Groups,
        *,
        view: GlobalView | None,
        ledger: Ledger,
        loss: Loss,
        counter: LabelCounter | None,
        routed: Routed | None = None,
    ) -> None:
        self.module, self.recipe, self.groups, self.ledger = module, recipe, groups, ledger
        self._view, self._loss, self._counter, self._routed = view, loss, counter, routed
        self._copies = recipe.mesh.size // recipe.mesh.data_size
        self.rows = recipe.rows

    # --- training ---------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Tensor:
        """Forward and backward over all microbatches of this rank's rows; gradients are added to ``.grad``.

        Returns:
            The mean loss over the global batch, a tensor without dims, the same on every rank.
        """
        return self._run(batch, backward=True)

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        """The mean loss over the global batch, without gradients. ``batch``: this rank's rows."""
        return self._run(batch, backward=False)

    def _run(self, batch: Any, *, backward: bool) -> Tensor:
        pieces, scale, shares = self._pieces(batch)
        total, kind = torch.zeros((), dtype=torch.float64, device=self.groups.device), torch.float32
        for i, piece in enumerate(pieces):
            self._sync(last=i == len(pieces) - 1)
            with self._on(shares[i]):
                loss = self._whole(self._loss(self._call(piece))) * scale[i]
                if backward and loss.requires_grad:
                    _BACKWARD(loss)
            total += loss.detach().double()
            kind = torch.promote_types(kind, loss.dtype)
        if backward:
            self._finish_gradients()
        else:
            self._reshard()
        if self.recipe.mesh.data_size > 1:
            dist.all_reduce(total)
            total = total / self._copies
        return total.to(kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this rank's rows, its tensors whole."""
        with self._on(None):
            output = map_tensors(self._whole, self.module(*args, **kwargs))
        if not torch.is_grad_enabled():
            self._reshard()
        return output

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients to a global 2-norm of at most ``max_norm``; returns the norm before."""
        return clip_grad_norm(self.module, self.recipe, self.groups.device, max_norm)

    def grad_norm(self) -> Tensor:
        """The global 2-norm of all gradients."""
        return grad_norm(self.module, self.recipe, self.groups.device)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What this rank holds, for an optimizer."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As on one device, by the model's own names."""
        return self.module.named_parameters()

    def batches(
        self, dataset: Any, global_batch: int, *, seed: int = 0, epochs: int | None = 1, shuffle: bool = True,
        drop_last: bool = False, start: int = 0,
    ) -> Iterable[Any]:  # fmt: skip
        """This rank's rows of each global batch; the order of rows is the same in every layout.

        Args:
            dataset: with ``len`` and ``dataset[i]``, one row: a dict (or tuple) of tensors or numbers; or a dict (or
                tuple) of tensors, whose dim 0 are the rows.
            global_batch: rows a step, over all ranks.
            seed: of the order, which differs from epoch to epoch.
            epochs: None goes on without end.
            drop_last: leave out a last batch that is short.
            start: batches to skip, to go on where another run stopped.

        Raises:
            PlanError: ``global_batch`` does not divide by data ranks × microbatches.
        """
        return Batches(
            dataset, global_batch, mesh=self.recipe.mesh, rank=self.rank, microbatches=self.recipe.microbatches,
            seed=seed, epochs=epochs, shuffle=shuffle, drop_last=drop_last, start=start, device=self.groups.device,
        )  # fmt: skip

    @property
    def rank(self) -> int:
        """This process's rank, as the plan's mesh counts them."""
        return self.groups.rank

    @property
    def notes(self) -> tuple[str, ...]:
        """The recipe's notes, and what was found out since."""
        return (*self.recipe.notes, *filter(None, [note(self.rows)]))

    # --- looking ----------------------------------------------------------------------------------------------------

    def shard_map(self) -> Any:
        """Which rank holds what, as data (see ``meshwright.shard_map``)."""
        from meshwright.draw.facts import shard_map  # drawing is loaded when something is drawn

        return shard_map(self.recipe)

    def full_state_dict(self) -> dict[str, Tensor]:
        """On rank 0 every parameter and persistent buffer, whole, on CPU; empty elsewhere. Gathered one at a time."""
        found: dict[str, Tensor] = {}
        for line, whole in self.whole_parameters():
            if whole is not None:
                for name in (line.name, *line.aliases):
                    found[name] = whole
        if self.rank == 0:
            parameters = set(self.recipe.by_name)
            state = {k: v for k, v in self.module.state_dict().items() if k not in parameters}
            found |= {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
        return found

    def whole_parameters(self) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
        """Each parameter in turn: whole on rank 0, None elsewhere."""
        self._reshard()
        return whole_tensors(self.module, self.recipe, self.groups, lambda p: p)

    def whole_gradients(self) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
        """Each parameter's gradient in turn: whole on rank 0; None elsewhere, and where there is no gradient."""
        return whole_tensors(self.module, self.recipe, self.groups, lambda p: p.grad)

    # --- within -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _on(self, shares: list[float] | None) -> Iterator[None]:
        """The view, and the shares of uneven means, for a forward and backward."""
        with ExitStack() as stack:
            if self._view is not None:
                stack.enter_context(self._view.on())
            if shares is not None:
                stack.enter_context(Shares(shares))
            yield

    def _call(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return self.module(**batch)
        return self.module(*batch) if isinstance(batch, (tuple, list)) else self.module(batch)

    def _whole(self, x: Any) -> Any:
        return x._mw_work.whole(x) if isinstance(x, View) else x

    def _some_rows(self, batch: Any) -> Any:
        """A rank without rows takes part with a copy of nothing: one row, which weighs nothing."""
        if rows_of(batch):
            return batch
        return pytree.tree_map(
            lambda t: t.new_zeros((1, *t.shape[1:])) if isinstance(t, Tensor) and t.dim() and not len(t) else t, batch
        )

    def _pieces(self, batch: Any) -> tuple[list[Any], list[float], list[list[float] | None]]:
        """What this rank runs: microbatches, each one's weight, and the shares of its mean losses."""
        data, pieces = self.recipe.mesh.data_size, self.recipe.microbatches
        if data * pieces == 1:
            return [batch], [1.0], [None]
        if self.rows == "auto":
            self.rows = self._how_rows_combine(batch)
        if self.rows in (COUPLED, "whole"):
            return [gather_rows(batch, self._data_groups())], [1 / data], [None]
        rows = rows_of(batch)
        split = list(microbatches(self._some_rows(batch), min(pieces, max(rows, 1))))
        # A rank without rows counts none of those that stand in for them.
        counted = split if rows else [take_rows(p, 0, 0) for p in split]
        scale, shares = weights(counted, self._counter if rows else None, self._copies, self.groups.device)
        return split, [1.0 if rows else 0.0] * len(split) if self.rows == SUM else scale, shares

    def _how_rows_combine(self, batch: Any) -> str:
        """Tries a few rows, whole and in halves; every rank comes to the same answer."""
        fewest = torch.tensor(rows_of(batch), device=self.groups.device)
        dist.all_reduce(fewest, dist.ReduceOp.MIN)
        rows = batch if fewest >= 4 else gather_rows(batch, self._data_groups())
        if rows_of(rows) < 2:
            return MEAN
        rows = take_rows(rows, 0, max(int(fewest), 4))

        def losses(pieces: list[Any]) -> tuple[list[float], list[float]]:
            scale, shares = weights(pieces, self._counter, self._copies, self.groups.device, alone=True)
            return [self._loss_alone(p, s) for p, s in zip(pieces, shares, strict=True)], scale

        kinds = (MEAN, SUM, COUPLED)
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.float32)
        if self.recipe.precision == "bfloat16":
            dtype = torch.bfloat16
        combine = how_rows_combine(rows, self.module, losses, dtype)
        self._reshard()
        kind = torch.tensor(kinds.index(combine), device=self.groups.device)
        dist.all_reduce(kind, dist.ReduceOp.MAX)
        return kinds[int(kind)]

    def _loss_alone(self, batch: Any, shares: list[float] | None) -> float:
        with self._on(shares):
            return float(self._whole(self._loss(self._call(batch))))

    def _data_groups(self) -> list[dist.ProcessGroup]:
        """The groups over the data axes, the innermost first."""
        axes = reversed(self.recipe.mesh.data_axes)
        return [self.groups.sharded[axis].get_group() for axis in axes if self.recipe.mesh.axis_size(axis) > 1]

    def _reshard(self) -> None:
        """Parameters back to rest. FSDP2 leaves the root gathered after a forward, for a backward that may not come."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _sync(self, *, last: bool) -> None:
        """Gradients are reduced over data ranks once a step, with the last microbatch."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
            self.module.set_is_last_backward(last)

    def _finish_gradients(self) -> None:
        """What FSDP2 does not do: agree on which parameters were used, and reduce parameters without dims."""
        if self._routed is not None:
            self._routed.settle()
        loose = [p for p in self.recipe.parameters if p.data == "loose" and p.requires_grad]
        if not loose or self.recipe.mesh.data_size == 1:
            return
        named = dict(self.module.named_parameters(remove_duplicate=False))
        for line in loose:
            p = named[line.name]
            local = getattr(p.grad, "_local_tensor", p.grad)
            for axis in ("dp_replicate", "dp_shard"):
                if self.groups.sharded[axis].size() > 1 and local is not None:
                    dist.all_reduce(local, group=self.groups.sharded[axis].get_group())
