"""Set-ups of four ranks as people have them, none of them ours: HSDP, FSDP × tensor parallel, FSDP1, shards and stages by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import scripts
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshwright as mw


class Uneven(nn.Module):
    """Widths that no number of ranks divides: 7, 10, 3; a tied weight, a frozen one, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(scripts.Block(7) for _ in range(2))
        self.tied = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(2))
        self.tied[1].weight = self.tied[0].weight
        self.frozen = nn.Linear(7, 10).requires_grad_(False)
        self.head = nn.Linear(10, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, tied in zip(self.layers, self.tied, strict=True):
            x = tied(layer(x))
        return self.head(self.frozen(x))


def uneven() -> Uneven:
    torch.manual_seed(0)
    return Uneven().double()


def rows() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(8, 7, dtype=torch.float64, generator=made), torch.randint(3, (8,), generator=made)


def step(model: Any, forward: Callable[[Tensor], Tensor], path: Path, x: Tensor, y: Tensor, **how: Any) -> None:
    """Two steps of a model, recorded."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    with mw.record(model, path, optimizer=optimizer, steps=2, **how) as rec:
        for _ in range(2):
            loss = nn.functional.cross_entropy(forward(x), y)
            loss.backward()
            rec.loss(loss, batch=(x, y))
            optimizer.step()
            optimizer.zero_grad()


def alone(path: Path) -> None:
    model = uneven()
    step(model, model, path, *rows())


def share(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    x, y = rows()
    at, size = mesh.get_rank(), mesh.size()
    return x.chunk(size)[at - at // size * size], y.chunk(size)[at - at // size * size]


def hsdp(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = uneven()
    for block in (*model.layers, model):
        fully_shard(block, mesh=mesh)
    x, y = rows()
    step(model, model, path, x.chunk(4)[dist.get_rank()], y.chunk(4)[dist.get_rank()])


def fsdp_tp(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = uneven()
    for block in model.layers:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    x, y = rows()
    at = mesh.get_local_rank("dp")
    step(model, model, path, x.chunk(2)[at], y.chunk(2)[at])


def fsdp1(path: Path, use_orig_params: bool = True) -> None:
    model = FullyShardedDataParallel(
        uneven() if use_orig_params else scripts.net(), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    x, y = rows()
    step(model, model, path, x.chunk(4)[dist.get_rank()], y.chunk(4)[dist.get_rank()])


class _Sum(torch.autograd.Function):
    """The conjugates of tensor parallelism by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, into: bool, group: Any) -> Tensor:
        ctx.into, ctx.group = into, group
        if not into:
            x = x.clone()
            dist.all_reduce(x, group=group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.into:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


def by_hand(path: Path, flaw: str = "") -> None:
    """Plain tensors: a column and a row shard on each of two ranks, two copies of that, gradients averaged by hand."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, group = rank % 2, mesh["tp"].get_group()
    model = uneven()
    for block in model.layers:
        cut = 1 - tp if flaw == "swapped" else tp
        block.up.weight = nn.Parameter(block.up.weight.detach().chunk(2, 0)[cut].clone())
        block.up.bias = nn.Parameter(block.up.bias.detach().chunk(2, 0)[cut].clone())
        block.down.weight = nn.Parameter(block.down.weight.detach().chunk(2, 1)[cut].clone())
        up, down, bias = block.up, block.down, block.down.bias
        up.forward = lambda x, f=up: nn.functional.linear(_Sum.apply(x, True, group), f.weight, f.bias)
        down.forward = lambda x, f=down, b=bias: _Sum.apply(nn.functional.linear(x, f.weight), False, group) + b
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: _average(p, mesh["dp"].get_group()))
    x, y = rows()
    step(model, model, path, x.chunk(2)[rank // 2], y.chunk(2)[rank // 2], mesh={"dp": 2, "tp": 2})


def _average(p: nn.Parameter, group: Any) -> None:
    assert p.grad is not None
    dist.all_reduce(p.grad, group=group)
    p.grad.div_(2)


class _Stage(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def stages(path: Path, named: bool) -> None:
    """Two stages by hand, on two ranks, each of which counts its layers from 0."""
    rank, whole = dist.get_rank(), scripts.net()
    own: Any = _Stage([whole.layers[rank]])
    if rank == 1:
        own.head = whole.head
    x, y = scripts.batch()
    optimizer = scripts.adam(own)
    how: Any = {"names": lambda name: name.replace("layers.0", f"layers.{rank}")} if named else {}
    with mw.record(own, path, optimizer=optimizer, **how) as rec:
        if rank == 0:
            out = own.layers[0](x)
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            got = torch.empty(scripts.ROWS, 8, dtype=torch.float64)
            dist.recv(got, 0)
            loss = nn.functional.cross_entropy(own.head(own.layers[0](got.requires_grad_())), y)
            loss.backward()
            assert got.grad is not None
            dist.send(got.grad, 0)
            rec.loss(loss, rows=len(y))
        optimizer.step()


def killed(path: Path) -> None:
    """A rank that is gone before the recording is whole."""
    import os

    model = scripts.net()
    optimizer = scripts.adam(model)
    with mw.record(model, path, optimizer=optimizer):
        model(scripts.batch()[0]).sum().backward()
        if dist.get_rank() == 1:
            os._exit(3)
        optimizer.step()
