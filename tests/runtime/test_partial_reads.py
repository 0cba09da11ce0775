"""Numbers that are read from parameters and gradients: those of the whole tensor, or an error on all ranks; never a part's."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from test_partial_gradients import Tower, rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshwright as mw
from meshwright.private import dtensor_handlers
from meshwright.workers.pool import LocalWorkers

READS = {
    "item": lambda p: p.grad.norm().item(),
    "float": lambda p: float(p.sum()),
    "int": lambda p: int(p.grad.count_nonzero()),
    "bool": lambda p: bool(p.grad.isnan().any()),
    "if": lambda p: 1 if p.amax() > 0 else 0,
}


class ByNumbers(torch.optim.Optimizer):
    """Scales each gradient by a norm that it reads on the host."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / (1.0 + self.size(p.grad) + float(p.sum())))

    @staticmethod
    def size(t: torch.Tensor) -> float:
        return t.norm().item()


def one_device() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Tower().double()
    optimizer = ByNumbers(model.parameters())
    model(rows().double()).backward()
    optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def whole(t: Any) -> float:
    return float(t.full_tensor().item() if isinstance(t, DTensor) else t.item())


def numbers(mesh: str) -> Any:
    """What reads say of the first weight; whether whole reads are right; the parameters after a step; whether torch is itself."""
    torch.manual_seed(0)
    batch = rows().double()
    job = mw.parallelize(lambda: Tower().double(), mesh, batch=batch)
    if "dp" in mesh:
        index = job.recipe.mesh.data_index(job.rank)
        batch = batch[2 * index : 2 * index + 2]
    job.step(batch)
    weight = next(iter(job.parameters()))
    told: dict[str, str] = {}
    for name, read in READS.items():
        try:
            told[name] = repr(read(weight))
        except mw.PlanError as error:
            told[name] = str(error)
    norms = sum(whole(p.grad.norm()) ** 2 for p in job.parameters()) ** 0.5, float(job.grad_norm())
    ByNumbers(job.parameters()).step()
    after = {recipe.name: p for recipe, p in job.full_parameters()}
    there = torch.ops.aten._local_scalar_dense.default in dtensor_handlers()
    del job, weight
    gc.collect()
    return told, norms, after, (there, torch.ops.aten._local_scalar_dense.default in dtensor_handlers())


@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
def test_a_number_of_a_part_is_not_read(fresh: LocalWorkers, mesh: str) -> None:
    expected = one_device()
    results = fresh.run(numbers, mesh, ranks=2)
    for told, (norm, of_job), _, patched in results:
        for name in READS.keys() - {"if"}:  # a comparison makes its operand whole
            assert "full_tensor().item()" in told[name] and f"a part over {mesh.split('=')[0]}" in told[name], (
                name,
                told,
            )
        assert told["if"] in ("0", "1") and norm == pytest.approx(of_job)
        assert patched == (True, False)
    for name, p in expected.items():
        torch.testing.assert_close(results[0][2][name], p)


def test_reads_of_whole_tensors_stay_as_they_are(fresh: LocalWorkers) -> None:
    (told, *_), (other, *_) = fresh.run(numbers, "dp_replicate=2", ranks=2)
    assert told == other and not any("full_tensor" in said for said in told.values())


def sum_without_a_job() -> float:
    return float(distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)]).sum())


def test_torch_itself_reads_the_part(fresh: LocalWorkers) -> None:
    """If torch changes this, ``partial_reads`` may go."""
    assert fresh.run(sum_without_a_job, ranks=2) == [1.0, 5.0]
