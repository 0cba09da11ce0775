"""Sparse tensors: in buffers (the graph of a graph network), in checkpoints, and in batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.described import dense, in_layout, layout_of
from meshwright.workers.pool import LocalWorkers

NODES = 8
LAYOUTS = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((2, 4)),
}


def edges(kind: str, nodes: int = NODES) -> Tensor:
    drawn = torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(5))
    return LAYOUTS[kind]((drawn > 0.5) * drawn)


class Graph(nn.Module):
    """Two layers over the edges of a graph; ``heads`` is a table that the forward does not use, as whisper has one."""

    def __init__(self, kind: str = "coo") -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, NODES), nn.Linear(NODES, NODES), nn.Linear(NODES, 6)
        self.register_buffer("edges", edges(kind))
        self.register_buffer("heads", (torch.rand(3, 3) > 0.5).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.edges @ self.first(x).tanh().t()).t()
        h = h + (self.edges @ self.middle(h).relu().t()).t()
        return self.last(h).square().mean()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, NODES), nn.Linear(NODES, 6)
        self.register_buffer("heads", (torch.rand(3, 3) > 0.5).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).square().mean()


class GivenEdges(nn.Module):
    """Rows are nodes, whose edges come with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.last((edges @ self.first(x)).relu()).square().mean()


def rows() -> tuple[Tensor]:
    return (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "dp_replicate=2", "pp=2"])
@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_sparse_buffers(kind: str, mesh: str, workers: LocalWorkers) -> None:
    if kind == "csr" and mesh == "pp=2":  # torch has no sparse matrices in rows on meta
        with pytest.raises(mw.PlanError, match="do not have strides"):
            mw.check(partial(Graph, kind), rows(), mesh, workers=workers)
        return
    report = mw.check(partial(Graph, kind), rows(), mesh, workers=workers, dtype=torch.float64)
    assert report, report


class Computed(nn.Module):
    """Its constructor computes with sparse matrices."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, NODES), nn.Linear(NODES, 6)
        self.register_buffer("edges", edges(kind).clone() * 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.edges @ self.first(x).relu().t()).t()).square().mean()


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2"])
@pytest.mark.parametrize("kind", ["coo", "csr", "csc"])
def test_constructors_that_compute_with_sparse_matrices(kind: str, mesh: str, workers: LocalWorkers) -> None:
    report = mw.check(partial(Computed, kind), rows(), mesh, workers=workers, dtype=torch.float64)
    assert report, report


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "pp=3", "dp_shard=2,tp=2"])
def test_sparse_buffers_that_no_forward_uses(mesh: str, workers: LocalWorkers) -> None:
    report = mw.check(Unused, rows(), mesh, workers=workers, dtype=torch.float64)
    assert report, report


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "dp_replicate=2", "pp=2"])
def test_sparse_tensors_in_a_batch(mesh: str, workers: LocalWorkers) -> None:
    report = mw.check(GivenEdges, (*rows(), edges("coo", 4)), mesh, workers=workers)
    assert report, report


def saved(kind: str, mesh: str, folder: str, other: str) -> tuple[Tensor | None, Tensor | None]:
    """The edges of a job on rank 0, and those that a job of another layout, with other edges, has loaded."""
    job = mw.parallelize(partial(Graph, kind), mesh, batch=rows())
    job.save(folder, step=1)
    state = job.full_state_dict()
    again = mw.parallelize(partial(Graph, kind), other, batch=rows())
    for name, buffer in again.module.named_buffers():
        if name == "edges":
            again.module.get_submodule("").edges = in_layout(layout_of(buffer), torch.eye(NODES))
    again.load(folder)
    loaded = again.full_state_dict()
    dist.barrier()
    return (state or {}).get("edges"), (loaded or {}).get("edges")


@pytest.mark.parametrize("kind", LAYOUTS)
def test_checkpoints_with_sparse_buffers(kind: str, tmp_path: Path, workers: LocalWorkers) -> None:
    before, after = workers.run(saved, kind, "dp_shard=2", str(tmp_path), "tp=2", ranks=2)[0]
    assert before.layout == after.layout == edges(kind).layout
    assert torch.equal(dense(before), dense(edges(kind))) and torch.equal(dense(after), dense(edges(kind)))


def test_checkpoints_of_a_plain_module(tmp_path: Path) -> None:
    module, other = Graph(), Graph()
    other.edges = torch.eye(NODES).to_sparse()
    mw.save_checkpoint(tmp_path, module, step=1)
    mw.load_checkpoint(tmp_path, other)
    assert other.edges.is_sparse and torch.equal(other.edges.to_dense(), module.edges.to_dense())
