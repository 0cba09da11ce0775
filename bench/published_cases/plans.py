"""A case as a plan of Meshwright: what of its layout a plan can say, and what stands in for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from published_cases.case import Case, Layout, ModelShape
from published_cases.models import PATCH

_COMPUTED_IN = {"float16": "bfloat16"}  # of one size and, on every device here, one rate


def plan_of(case: Case) -> dict[str, Any]:
    """The plan of a case, as ``meshwright.make_recipe`` takes it. What it cannot say is in ``stand_ins``."""
    layout = case.layout
    axes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
    plan: dict[str, Any] = {"mesh": {axis: size for axis, size in axes.items() if size > 1} or {"dp_shard": 1}}
    plan["precision"] = computed_in(case)
    if layout.microbatches > 1:
        plan["microbatches"] = layout.microbatches
    if layout.pp > 1:
        plan["schedule"] = layout.schedule
        if layout.stages_per_rank > 1:
            plan["stages_per_rank"] = layout.stages_per_rank
    if layout.tp > 1:
        plan["sequence_parallel"] = layout.sequence_parallel
    if layout.dp_shard > 1:
        plan["reshard_after_forward"] = layout.reshard_after_forward and layout.zero == 3
    if layout.recompute == "full":
        plan |= _recompute(layout.recomputed_blocks, case.model.layers)
    return plan


def computed_in(case: Case) -> str:
    """The type that stands in for the one that a case computes in."""
    return _COMPUTED_IN.get(case.precision.compute, case.precision.compute)


def _recompute(blocks: int, layers: int) -> dict[str, Any]:
    """All blocks, or some of them, spread evenly."""
    if blocks == layers:
        return {"recompute": "blocks"}
    chosen = (i * layers // blocks for i in range(blocks))
    return {"modules": {f"layers.{i}": {"recompute": "block"} for i in chosen}}


def stand_ins(case: Case) -> tuple[str, ...]:
    """In what the plan differs from what was measured, a sentence each."""
    layout, said = case.layout, []
    if layout.zero in (1, 2) and layout.dp_shard > 1:
        said.append(f"ZeRO-{layout.zero} as FSDP that keeps parameters gathered until the backward has used them")
    if layout.recompute == "selective":
        said.append("selective recomputation as none: a plan recomputes whole blocks")
    if case.precision.compute == "float16":
        said.append("float16 as bfloat16")
    if case.precision.master:
        said.append(f"parameters of {case.precision.parameters} with a float32 copy as float32 parameters")
    if case.compiled:
        said.append("torch.compile is not planned")
    if case.model.attention == "plain":
        said.append(
            "Megatron-LM's fused kernels as plain operations; its scale and mask of the scores, free, are left out"
        )
    if case.model.dropout > 0:
        said.append("dropout as a mask without random numbers")
    if case.runtime not in ("FSDP2", "Megatron-LM"):
        said.append(f"{case.runtime} as this runtime")
    return tuple(said)


def batch_of(shape: ModelShape, layout: Layout, device: str = "meta") -> dict[str, Tensor]:
    """A step's rows of all data ranks; on meta they take no memory."""
    rows = layout.global_batch
    if shape.kind == "vit":
        patches = torch.zeros(rows, shape.sequence, PATCH, device=device)
        return {"patches": patches, "labels": torch.zeros(rows, dtype=torch.long, device=device)}
    tokens = torch.zeros(rows, shape.sequence, dtype=torch.long, device=device)
    return {"tokens": tokens, "labels": tokens.clone()}
