"""The other side of each row of ``ratios.py``: (a case, its global batch) → a step, which gives that batch's loss."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from ratio_models import HEADS, Model, built
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import meshwright as mw

Step = Callable[[], float]
Batch = dict[str, Tensor]

CUT = ("llama", "gpt2")
"""Shapes of which there are cuts and stages by hand here."""

_BY_COLUMN = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
_BY_ROW = ("attention.o", "mlp.down")


def rows_of_rank(batch: Batch, case: Any) -> Batch:
    """This rank's rows."""
    mesh, rank = mw.Mesh.parse(case.mesh), dist.get_rank() if dist.is_initialized() else 0
    return {name: rows.chunk(mesh.data_size)[mesh.data_index(rank)] for name, rows in batch.items()}


def _model(case: Any) -> nn.Module:
    torch.manual_seed(0)
    return built(case)


def _axis(case: Any) -> DeviceMesh:
    ((axis, size),) = case.mesh.items()
    return init_device_mesh("cpu", (size,), mesh_dim_names=(axis,))


def _stepping(model: nn.Module, loss_of: Callable[[], Any], *, ranks: int = 1, around: Any = nullcontext) -> Step:
    """``ranks``: data ranks, whose losses have a mean, which a person wants to see."""

    def step() -> float:
        model.zero_grad()
        with around():
            loss = loss_of()
            loss.backward()
        mean = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
            mean /= ranks
        return float(mean)

    return step


def plain(case: Any, batch: Batch) -> Step:
    """One process."""
    model = _model(case)
    return _stepping(model, lambda: model(**batch))


def ddp(case: Any, batch: Batch) -> Step:
    model, mine = nn.parallel.DistributedDataParallel(_model(case)), rows_of_rank(batch, case)
    return _stepping(model, lambda: model(**mine), ranks=case.ranks)


def by_fully_shard(case: Any, batch: Batch) -> Step:
    model, mesh, mine = _model(case), _axis(case), rows_of_rank(batch, case)
    assert isinstance(model, Model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _stepping(model, lambda: model(**mine), ranks=case.ranks)


def by_accelerate(case: Any, batch: Batch) -> Step:
    """Accelerate's FSDP2, a unit for each block. It is no requirement of ours."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin  # type: ignore[import-not-found]

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if accelerator.distributed_type != "FSDP":
        raise RuntimeError(f"Error: Accelerate takes {accelerator.distributed_type} in place of FSDP2 here")
    model, mine = accelerator.prepare(_model(case)), rows_of_rank(batch, case)
    return _stepping(model, lambda: model(**mine), ranks=case.ranks)


def by_parallelize_module(case: Any, batch: Batch) -> Step:
    """Vocabulary-parallel embedding, head and loss; layers that share an input share its gradient's all-reduce."""
    model, mesh = _model(case), _axis(case)
    whole = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False)
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        **dict.fromkeys(("blocks.*.norm1", "blocks.*.norm2", "norm"), whole),
        **{f"blocks.*.{name}": ColwiseParallel() for name in _BY_COLUMN},
        **{f"blocks.*.{name}": RowwiseParallel() for name in _BY_ROW},
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    })  # fmt: skip
    return _stepping(model, lambda: model(**batch), around=loss_parallel)


def by_dtensors(case: Any, batch: Batch) -> Step:
    """Every parameter and the batch are DTensors; functions find layouts themselves."""
    model, mesh = _model(case), _axis(case)
    for path, module in model.named_modules():
        for name, p in list(module.named_parameters(recurse=False)):
            cut = (
                Shard(0)
                if path.endswith(_BY_COLUMN)
                else Shard(1)
                if path.endswith(_BY_ROW) and p.dim() == 2
                else Replicate()
            )
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [cut])))
    whole = {name: distribute_tensor(rows, mesh, [Replicate()]) for name, rows in batch.items()}
    return _stepping(model, lambda: model(**whole))


class _Part(nn.Module):
    """The stage of one rank."""

    def __init__(self, model: Model, stage: int, stages: int) -> None:
        super().__init__()
        each = -(-len(model.blocks) // stages)
        self.embed = model.embed if stage == 0 else nn.Identity()
        self.blocks = nn.ModuleList(model.blocks[stage * each : (stage + 1) * each])
        self.head = nn.Sequential(model.norm, model.head) if stage == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_pipelining(case: Any, batch: Batch) -> Step:
    """``torch.distributed.pipelining``: 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole, rank, stages = _model(case), dist.get_rank(), case.ranks
    assert isinstance(whole, Model)
    part = _Part(whole, rank, stages)
    stage = PipelineStage(part, rank, stages, torch.device("cpu"))
    loss_of = lambda out, labels: nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())  # noqa: E731
    schedule = Schedule1F1B(stage, n_microbatches=case.microbatches, loss_fn=loss_of)

    def step() -> float:
        part.zero_grad()
        losses: list[Tensor] = []
        given = (batch["x"],) if rank == 0 else ()
        schedule.step(*given, target=batch["labels"] if rank == stages - 1 else None, losses=losses)
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(mean, stages - 1)
        return float(mean)

    return step


def by_tp_plan(case: Any, batch: Batch) -> Step:
    """Hugging Face's own tensor parallelism, which takes weights of a folder."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        at = [folder]
        dist.broadcast_object_list(at)  # only the first rank writes
        _model(case).save_pretrained(at[0])
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(at[0], tp_plan="auto", device_mesh=_axis(case))
        dist.barrier()
    model.train()
    return _stepping(model, lambda: model(**batch).loss)


SIDES: dict[str, Callable[[Any, Batch], Step]] = {
    "plain": plain,
    "ddp": ddp,
    "fully_shard": by_fully_shard,
    "accelerate": by_accelerate,
    "parallelize_module": by_parallelize_module,
    "dtensor": by_dtensors,
    "pipelining": by_pipelining,
    "tp_plan": by_tp_plan,
}


def in_short(error: Exception) -> str:
    """What an error of a worker says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any("No module named" in line for line in lines):
        return "not installed"
    last = next((line for line in lines if "Error" in line), lines[0] if lines else type(error).__name__)
    return f"does not run: {last[:120]}".replace("|", "/")


__all__ = ["CUT", "HEADS", "SIDES", "in_short", "rows_of_rank"]
