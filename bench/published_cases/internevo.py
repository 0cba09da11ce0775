"""internevo_a100: InternLM/InternEvo, doc/en/train_performance.md: a 7B and a 20B, ZeRO-1 within groups, tensors, pipelines.

Models and defaults are those of its configs/7B_sft.py: RMSNorm, SwiGLU, flash attention, bfloat16 with a float32 master copy,
no sequence parallelism.
"""

from __future__ import annotations

from typing import Literal

from published_cases.case import GIB, Case, Layout, Measured, Precision
from published_cases.machines import A100_80, linked
from published_cases.rows import Row, Unusable
from published_cases.shapes import llama

MASTER = Precision(parameters="bfloat16", compute="bfloat16", reduce="bfloat16", master=True)
_SEQUENCE = 2048


def internevo(row: Row) -> Case:
    """One row. Seconds are tokens of a step over tokens a second of all devices."""
    if row.text("table") == "scaling":
        raise Unusable("repeats runs of the tables throughput and flops; its microbatches are not stated")
    devices = row.whole("gpus")
    shape = llama(f"internlm-{row.text('model').lower()}", row.whole("seq_len") if row.stated("seq_len") else _SEQUENCE)
    layout = _layout(row, devices, shape.layers)
    memory = row.text("table") == "memory"
    return Case(
        table=row.table,
        row=f"{row.text('table')} {row.text('model')} on {devices}, tp={layout.tp} pp={layout.pp} "
        f"zero{layout.zero} over {layout.dp_shard}, {layout.microbatches} × {layout.microbatch_rows} rows, "
        f"recompute {layout.recompute}",
        model=shape,
        layout=layout,
        precision=MASTER,
        machine=linked(A100_80, devices, "roce", 4 * 100),
        runtime="InternEvo",
        measured=_memory(row) if memory else _seconds(row, layout, shape.sequence),
        assumed=(f"sequence of {_SEQUENCE}, the config's default; GB read as GiB",) if memory else (),
    )


def _layout(row: Row, devices: int, layers: int) -> Layout:
    tp, pp = row.whole("tp"), row.whole("pp")
    data, rest = divmod(devices, tp * pp)
    if rest:
        raise Unusable(f"{devices} devices are no multiple of tp × pp")
    shard = data if row.whole("zero1") <= 0 else min(data, row.whole("zero1"))
    zero: Literal[1, 3] = 3 if row.flag("fsdp") else 1
    full = row.flag("activation_ckpt")
    return Layout(
        microbatches=row.whole("micro_num"),
        microbatch_rows=row.whole("micro_batch"),
        tp=tp,
        pp=pp,
        dp_shard=shard,
        dp_replicate=data // shard,
        schedule="none" if pp == 1 else "1f1b",
        recompute="full" if full else "none",
        recomputed_blocks=layers if full else 0,
        reshard_after_forward=zero == 3,
        zero=zero,
    )


def _seconds(row: Row, layout: Layout, sequence: int) -> Measured:
    tokens = row.whole("global_batch_tokens")
    if tokens != layout.global_batch * sequence:
        raise Unusable(f"{tokens} tokens a step, and {layout.global_batch * sequence} from the layout")
    return Measured(tokens / (row.number_of("tok_s_gpu") * layout.devices), "global_batch_tokens / (tok_s_gpu × gpus)")


def _memory(row: Row) -> Measured:
    return Measured(reserved=int(row.number_of("mem_gb") * GIB), counter="not stated")
