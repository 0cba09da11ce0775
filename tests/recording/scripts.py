"""Training scripts as people write them, one step each, with three lines of ours; each right, or with a flaw on purpose.

They run on workers: ``path`` is where the step is recorded, ``flaw`` what is done wrong.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw

ROWS = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, 8, dtype=dtype, generator=made), torch.randint(4, (ROWS,), generator=made)


def adam(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "foreach": False, **how})


def share(x: Tensor, flaw: str = "") -> Tensor:
    """This rank's rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if flaw == "uneven":
        return x[:5] if rank == 0 else x[5:]
    if flaw == "skipped row":
        return x[:4] if rank == 0 else x[5:]
    if flaw == "same rows":
        return x[:4]
    return x.chunk(size)[rank]


def one(path: Path, steps: int = 1, dtype: torch.dtype = torch.float64, model: Any = None, **how: Any) -> None:
    """The script on one process."""
    model = net(dtype) if model is None else model
    optimizer = adam(model, **how)
    x, y = batch(dtype)
    with mw.record(model, path, optimizer=optimizer, steps=steps) as rec:
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            rec.loss(loss, batch=(x, y))
            optimizer.step()
            optimizer.zero_grad()


def data_parallel(
    path: Path, flaw: str = "", wrap: str = "ddp", steps: int = 1, dtype: torch.dtype = torch.float64
) -> None:
    """DDP or FSDP2."""
    model = net(dtype)
    if flaw == "other weights" and dist.get_rank() == 0:  # DDP broadcasts those of rank 0
        nn.init.zeros_(model.head.weight)
    stale = adam(model)
    wrapped: nn.Module = model
    if wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for block in (*model.layers, model):
            fully_shard(block, mesh=mesh)
    if flaw == "stale weights" and dist.get_rank() == 1:
        _local(model.layers[0].up.weight.detach()).mul_(0.9)
    by_rank = {"lr": 1e-2 * (1 - dist.get_rank())}
    settings = {
        "decay": {"weight_decay": 0.5},
        "frozen shard": by_rank,
        "rate of a rank": by_rank,
        "rate": {"lr": 2e-2},
    }
    optimizer = stale if flaw == "stale optimizer" else adam(wrapped, **settings.get(flaw, {}))
    _spoil_updates(model, optimizer, flaw)
    x, y = share(batch(dtype)[0], flaw), share(batch()[1], flaw)
    with mw.record(wrapped, path, optimizer=None if flaw == "stale optimizer" else optimizer, steps=steps) as rec:
        for _ in range(steps):
            with _unsynchronized(wrapped, flaw):
                loss = nn.functional.cross_entropy(wrapped(x), y)
                _backward(loss, flaw)
            _spoil(model, flaw)
            rec.loss(2 * loss if flaw == "another loss" else loss, batch=(x, y))
            optimizer.step()
            if flaw != "never zeroed" and (flaw != "not zeroed" or dist.get_rank() == 0):
                optimizer.zero_grad()


def _unsynchronized(wrapped: nn.Module, flaw: str) -> Any:
    return wrapped.no_sync() if flaw == "no_sync" else contextlib.nullcontext()  # type: ignore[operator, union-attr]


def _backward(loss: Tensor, flaw: str) -> None:
    size = dist.get_world_size()
    (loss * {"scaled up": size, "scaled down": 1 / size, "odd": 0.77}.get(flaw, 1.0)).backward()


def _local(t: Tensor | None) -> Tensor:
    assert t is not None
    return t.to_local() if isinstance(t, DTensor) else t


def _spoil(model: Net, flaw: str) -> None:
    """What goes wrong between backward and step."""
    rank, weight = dist.get_rank(), model.layers[0].up.weight
    grad = _local(weight.grad)
    if flaw == "swapped shards":
        grad.copy_(_of_other_rank(grad))
    if flaw == "reduced twice":
        dist.all_reduce(grad)
    if flaw == "stale gradient" and rank == 1:
        grad.zero_()
    if flaw == "own scale" and rank == 1:
        grad.mul_(3.0)
    if flaw == "noise on a shard" and rank == 1:
        grad.copy_(torch.linspace(-1, 1, grad.numel()).view_as(grad))
    if flaw == "one rank alone" and rank == 1:
        grad.add_(1.0)
    if flaw == "none on one rank" and rank == 1:
        weight.grad = None
    if flaw == "negated":
        grad.neg_()
    if flaw == "detached":
        weight.grad = None
    if flaw == "zeroed":
        grad.zero_()
    if flaw == "other":
        grad.copy_(torch.linspace(-1, 1, grad.numel()).view_as(grad).roll(rank + 1, 0))
    if flaw == "each its own":
        grad.copy_(torch.linspace(-1, 2, grad.numel()).view_as(grad) ** (rank + 2))
    if flaw == "nan":
        grad[0, 0] = float("nan")


def _of_other_rank(t: Tensor) -> Tensor:
    other, peer = torch.empty_like(t), 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, t.clone(), peer), dist.P2POp(dist.irecv, other, peer)]):
        work.wait()
    return other


def _spoil_updates(model: Net, optimizer: torch.optim.Optimizer, flaw: str) -> None:
    """What goes wrong within the step: the update of a weight is exchanged between ranks, or undone."""
    if flaw not in ("swapped update", "undone update"):
        return
    local = _local(model.layers[0].up.weight.detach())
    start = local.clone()

    def undo(*_: Any) -> None:
        local.copy_(start if flaw == "undone update" else start + _of_other_rank(local - start))

    optimizer.register_step_post_hook(undo)


def tensor_parallel(path: Path, flaw: str = "") -> None:
    """DTensor's ``parallelize_module``; norms are plain, and see every rank's whole activations, or a part of the sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = net()
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.layers:
        parallelize_module(block, mesh, styles)
    if flaw in ("missing sum", "summed by hand"):
        for block in model.layers:
            _cut_rows_before_norm(block, mesh, summed=flaw == "summed by hand")
    if flaw == "whole once more":
        for block in model.layers:
            block.norm.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
            block.norm.bias.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    if flaw == "averaged by tensor ranks":
        for p in model.layers[0].norm.parameters():
            p.register_post_accumulate_grad_hook(_halve)
    optimizer = adam(model)
    x, y = (share(t) for t in batch()) if flaw == "rows of data ranks" else batch()
    with mw.record(model, path, optimizer=optimizer) as rec:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        rec.loss(loss, batch=(x, y))
        optimizer.step()


def _halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.div_(2)


def _cut_rows_before_norm(block: Block, mesh: Any, *, summed: bool) -> None:
    """Each rank's norm sees a part of the rows, as under sequence parallelism; its weight's gradient is then a summand."""
    norm, forward = block.norm, block.norm.forward

    def cut(x: Tensor) -> Tensor:
        mine = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
        return DTensor.from_local(forward(mine), mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()

    norm.forward = cut  # type: ignore[method-assign]
    if summed:
        for p in norm.parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))


def all_of(path: Path, runs: list[tuple[str, str, str]]) -> list[str]:
    """Records each (wrap, flaw, folder); returns what was raised instead, or nothing, in order."""
    raised = []
    for wrap, flaw, folder in runs:
        try:
            if wrap == "tp":
                tensor_parallel(path / folder, flaw)
            else:
                data_parallel(path / folder, flaw, wrap)
        except mw.PlanError as error:
            raised.append(str(error))
        else:
            raised.append("")
    return raised
