"""A model of transformers, cut by its own ``tp_plan``, in a script that has three lines of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw


def saved(path: Path) -> None:
    """A small Llama in a folder of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).save_pretrained(path)  # fmt: skip


def train(model: Any, path: Path, ids: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with mw.record(model.train(), path, optimizer=optimizer) as rec:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        rec.loss(loss, batch=ids)
        optimizer.step()


def rows() -> Tensor:
    return torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(1))


def alone(folder: Path, path: Path) -> None:
    from transformers import AutoModelForCausalLM

    train(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), path, rows())


def own_plan(folder: Path, path: Path, flaw: str = "", loads: bool = False) -> None:
    """Tensor parallelism as transformers does it: at loading, which takes accelerate; or of a model that is there."""
    from transformers import AutoModelForCausalLM

    if loads:
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float64)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        model = apply_tensor_parallelism(model, mesh, _named_plan(model))
    if flaw == "summed once more":
        for name, p in model.named_parameters():
            if "layernorm" in name:
                p.register_post_accumulate_grad_hook(_sum)
    ids = rows()
    train(model, path, ids.chunk(2)[dist.get_rank()] if flaw == "rows of data ranks" else ids)


def _named_plan(model: Any) -> dict[str, str]:
    """Its plan for each parameter and then its module, in place of ``model.layers.*.mlp``, as its own loading makes it."""
    plan = {}
    for name, module in model.named_modules():
        style = model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            plan |= {f"{name}.{own}": style for own, _ in module.named_parameters(recurse=False)} | {name: style}
    return plan


def _sum(p: Tensor) -> None:
    dist.all_reduce(p.grad)
