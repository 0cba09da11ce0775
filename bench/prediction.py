"""Predicted against measured, case by case, on local processes of this machine. Nothing is fitted on what is reported.

`python bench/prediction.py` prints a row for each rank of each case: bytes at the peak of a step, as torch's own allocator
counts them (the smallest of the steps after the first) and as `mw.predict` says, and the signed error; then the bytes of
the first step, which tries how rows combine, too. Models are small, and large beside what torch allocates by the way.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import meshwright as mw
from meshwright.amounts import size_text
from meshwright.plan import Plan
from meshwright.planned import Planned
from meshwright.prediction.measure import measured_rank
from meshwright.prediction.memory import memory_of
from meshwright.prediction.rehearsal import Rehearsal, rehearse
from meshwright.prediction.roles import roles_of
from meshwright.runtime.rows.batch import plain
from meshwright.runtime.rows.loss import output_loss
from meshwright.workers.pool import LocalWorkers

VOCAB, WIDTH, LENGTH, ROWS = 2048, 256, 64, 16


def llama() -> nn.Module:
    """A decoder of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH, intermediate_size=3 * WIDTH - 32, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, vocab_size=VOCAB,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    """An encoder and a decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=WIDTH, d_kv=32, d_ff=2 * WIDTH, num_layers=2, num_heads=8, vocab_size=VOCAB, decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    """A classifier of images."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=4, num_attention_heads=8, image_size=64,
            patch_size=8, num_labels=10,
        )
    )  # fmt: skip


class Convolutions(nn.Module):
    """Two convolutions with norms."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, made, 3, padding=1) for channels in (given, made))
        self.norm1, self.norm2 = nn.GroupNorm(8, made), nn.GroupNorm(8, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.silu(self.norm1(self.first(x)))
        return functional.silu(self.norm2(self.second(x)))


class UNet(nn.Module):
    """A U-Net with two skips."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.top, self.down1, self.down2 = (
            Convolutions(a, b) for a, b in ((3, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.up1, self.up0 = Convolutions(6 * width, 2 * width), Convolutions(3 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip0 = self.top(x)
        skip1 = self.down1(functional.avg_pool2d(skip0, 2))
        h = functional.interpolate(self.down2(functional.avg_pool2d(skip1, 2)), scale_factor=2)
        h = functional.interpolate(self.up1(torch.cat([h, skip1], 1)), scale_factor=2)
        return (self.out(self.up0(torch.cat([h, skip0], 1))) - x).square().mean()


def itself(output: Any) -> Any:
    """The loss of a model that returns it."""
    return output


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def images(labels: bool) -> Any:
    pixels = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.arange(8)} if labels else (pixels,)


class Model(NamedTuple):
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any], Any] = output_loss


MODELS = {
    "decoder": Model(llama, tokens),
    "encoder-decoder": Model(t5, tokens),
    "vision": Model(vit, partial(images, True)),
    "U-Net": Model(UNet, partial(images, False), itself),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {"mesh": "dp_shard=2"},
    "FSDP, bfloat16, 2 microbatches": {"mesh": "dp_shard=2", "precision": "bfloat16", "microbatches": 2},
    "FSDP, recompute": {"mesh": "dp_shard=2", "recompute": "blocks"},
    "HSDP": {"mesh": "dp_replicate=2,dp_shard=2"},
    "tp": {"mesh": "tp=2"},
    "FSDP × tp": {"mesh": "dp_shard=2,tp=2"},
    "pp": {"mesh": "pp=2", "microbatches": 4},
    "pp × tp, interleaved": {"mesh": "pp=2,tp=2", "microbatches": 4, "schedule": "interleaved"},
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    chosen = parser.parse_args()
    errors: list[float] = []
    print("| model | layout | role | measured | predicted | error | first step |\n|---|---|---|---|---|---|---|")
    with mw.local_workers(4) as workers:
        for name in chosen.models:
            for layout in chosen.layouts:
                if name == "U-Net" and LAYOUTS[layout].get("recompute"):
                    continue  # it has no repeated blocks
                errors += _row(name, layout, workers)
    worst = max(errors, key=abs)
    print(
        f"\n{len(errors)} rows: median of absolute errors {statistics.median(map(abs, errors)):.2%}, worst {worst:+.2%}"
    )


def _row(name: str, layout: str, workers: LocalWorkers) -> list[float]:
    model, plan, errors = MODELS[name], Plan.parse(LAYOUTS[layout]), []
    batch = plain(model.batch())
    measured = workers.run(
        measured_rank,
        model.build,
        batch,
        plan,
        model.loss,
        torch.optim.AdamW,
        1.0,
        4,
        ranks=plan.mesh.size,
        timeout=300,
    )
    planned = Planned(model.build, plan, batch, model.loss, whole_batch=True)
    for role in roles_of(planned.recipe):
        one = measured[role.rank]
        memory = memory_of(rehearse(Rehearsal(model.build, planned, batch, model.loss), role.rank))
        errors.append(memory.peak / one.peak - 1)
        print(f"| {name} | {layout} | {role.name} | {size_text(one.peak)} | {size_text(memory.peak)} | {errors[-1]:+.2%} "
              f"| {size_text(one.peaks[0])} |", flush=True)  # fmt: skip
    return errors


if __name__ == "__main__":
    main()
