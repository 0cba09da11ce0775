"""Code of a model's own that calls ``torch.distributed``: it sees one process, on every rank of every layout."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.distributed import all_reduce as reduce_over_all
from torch.distributed import get_rank, get_world_size, is_initialized
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.spmd.one_process import one_process
from meshwright.workers.pool import LocalWorkers, WorkerError


def is_distributed() -> bool:
    return is_initialized() and dist.get_world_size() > 1


class Experts(nn.Module):
    """Splits its experts over the world, if there is one, as packages of routed models do."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = get_world_size() if is_distributed() else 1
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4 // self.ranks))
        self.gate = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        own = slice(dist.get_rank(), 4, 2) if is_distributed() else slice(0, 4)
        weights = self.gate(x).softmax(-1)[..., own]
        out = sum(w * torch.tanh(e(x)) for w, e in zip(weights.split(1, -1), self.experts, strict=False))
        out = out * (1 + int(os.getenv("RANK", "0"))) * int(os.environ.get("WORLD_SIZE", "1"))
        group = dist.group.WORLD
        out = out if group is None else out * group.size()
        assert isinstance(out, Tensor)
        return x + out * (1 + get_rank())


class Codebook(nn.Module):
    """Vector quantisation whose statistics are summed over the world, if there is one, at the model's first choice."""

    def __init__(self) -> None:
        super().__init__()
        self.sum_over_all = reduce_over_all if dist.is_initialized() else self.alone
        self.register_buffer("codes", torch.randn(5, 6))
        self.register_buffer("counts", torch.ones(5))

    @staticmethod
    def alone(x: Tensor) -> None:
        """There is nothing to sum."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1, 6)
        chosen = torch.nn.functional.one_hot(torch.cdist(flat, self.codes).argmin(-1), 5).type_as(x)
        counts, sums = chosen.sum(0), chosen.t() @ flat
        self.sum_over_all(counts)
        self.sum_over_all(sums)
        found = (chosen @ self.codes).view_as(x)
        self.counts.mul_(0.9).add_(counts / get_world_size(), alpha=0.1)
        self.codes.lerp_(sums / counts.clamp(min=1)[:, None], 0.1)
        return x + (found - x).detach()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.codebook, self.last = nn.Linear(6, 6), Experts(), Codebook(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.experts(torch.tanh(self.first(x)))
        h = self.last(h + self.codebook(h))
        return {"loss": (h.square().mean() + h.mean()) * (2 if is_distributed() else 1)}


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(6, 2, 6, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "pp=2"])
def test_a_model_that_asks_for_the_world_is_one_device(mesh: str, workers: LocalWorkers) -> None:
    plan = {"mesh": mesh, "microbatches": 1, "recompute": "blocks"}
    report = mw.check(Model, batch(), plan, workers=workers, dtype=torch.float64, steps=2)
    assert report, str(report)


# --- what it may not call --------------------------------------------------------------------------------------------


class Calling(nn.Module):
    """Calls something of torch.distributed, whatever the world is; in its construction, or where it is called."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(6, 6), what if where != "build" else ""
        if where == "build":
            self.call(what, torch.ones(2))
        self.caught = where == "caught"

    @property
    def group(self) -> dist.ProcessGroup:
        return GROUPS[-1]

    def call(self, what: str, x: Tensor) -> Any:
        x = x.detach()
        if what == "all_reduce":
            return reduce_over_all(x)  # line: all_reduce
        if what == "nn":
            return dist_nn.all_reduce(x)  # line: nn
        if what == "mesh":
            return init_device_mesh("cpu", (2,))  # line: mesh
        if what == "method":
            return self.group.allreduce([x])  # line: method
        return dist.new_group([0, 1]) if what == "group" else None  # line: group

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.linear(x)
        try:
            self.call(self.what, x)
        except Exception:
            if not self.caught:
                raise
        return {"loss": x.square().mean()}


GROUPS: list[dist.ProcessGroup] = []  # that a model was handed

WAYS = [
    ("all_reduce", "forward"),
    ("method", "forward"),
    ("all_reduce", "caught"),
    ("nn", "forward"),
    ("mesh", "build"),
    ("group", "build"),
]


def _refused(rank_count: int) -> list[str]:
    """The errors of some models, the same on every rank: none hangs, and the pool is as it was."""
    found = []
    assert dist.group.WORLD is not None
    GROUPS[:] = [dist.group.WORLD]
    for what, where in WAYS:
        for mesh in (f"tp={rank_count}", f"pp={rank_count}", f"dp_shard={rank_count}"):
            with pytest.raises(mw.PlanError) as refused:
                mw.parallelize(partial(Calling, what, where), mesh, batch=batch())
            found.append(str(refused.value))
    assert dist.get_world_size() == rank_count
    return found


def test_a_collective_of_the_model_s_own_is_one_error(workers: LocalWorkers) -> None:
    found = workers.run(_refused, 2, ranks=2)
    marks = enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1)
    lines = {line.partition("# line: ")[2]: n for n, line in marks if "# line: " in line}
    names = {
        "all_reduce": "distributed.all_reduce",
        "nn": "functional.all_reduce",
        "method": "ProcessGroup.allreduce",
        "mesh": "init_device_mesh",
        "group": "new_group",
    }
    assert found[0] == found[1] and len(found[0]) == 3 * len(WAYS)
    for n, text in enumerate(found[0]):
        what = WAYS[n // 3][0]
        assert f"test_one_process.py:{lines[what]}" in text and names[what] in text, text


def test_a_collective_in_a_step_is_an_error_too(workers: LocalWorkers) -> None:
    """One that planning has not come to."""
    with pytest.raises(WorkerError, match=r"called by the model's own code"):
        workers.run(_calls_later, ranks=2)


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if not self.linear.weight.is_meta:
            dist.barrier()
        return {"loss": self.linear(x).square().mean()}


def _calls_later() -> None:
    mw.parallelize(Later, "tp=2", batch=batch()).step(batch())


# --- who sees what -----------------------------------------------------------------------------------------------------


def _seen() -> list[Any]:
    rank = str(get_rank())
    with patch.dict(os.environ, {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}):
        os.environ.pop("ROLE_RANK", None)
        return _seen_with_environment()


def _seen_with_environment() -> list[Any]:
    """Before, within, in another thread meanwhile, after; by names taken before and by attributes."""
    found: list[Any] = []

    group = dist.group.WORLD
    assert group is not None

    def look() -> None:
        told = os.environ["WORLD_SIZE"], os.getenv("RANK"), os.environ.get("LOCAL_RANK"), os.getenv("ROLE_RANK")
        of_group = group.size(), group.rank(), dist.group.WORLD is group
        found.append((is_initialized(), get_world_size(), get_rank(), dist.get_world_size(), told, of_group))

    look()
    with one_process():
        look()
        with one_process():
            pass
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        dist_before = torch.nn.SyncBatchNorm(3)(torch.randn(4, 3)).shape  # one of torch's that asks for the world
        assert dist_before == (4, 3)
    look()
    with pytest.raises(KeyError), one_process():
        raise KeyError
    look()
    total = torch.ones(1)
    reduce_over_all(total)
    return [*found, total.item()]


def test_the_world_is_there_before_after_and_for_other_threads(workers: LocalWorkers) -> None:
    for rank, found in enumerate(workers.run(_seen, ranks=2)):
        own = str(rank)
        world = (True, 2, rank, 2, ("2", own, own, None), (2, rank, True))
        alone = (False, 1, 0, 1, ("1", "0", own, None), (1, 0, False))
        assert found == [world, alone, alone, world, world, world, 2.0]
