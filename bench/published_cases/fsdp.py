"""Tables of FSDP on large models.

mosaic_a100          mosaicml/llm-foundry, scripts/train/benchmarking/README.md
fms_fsdp_a100_h100   foundation-model-stack/fms-fsdp, README.md, three versions
yafsdp_a100          yandex/YaFSDP, README.md
"""

from __future__ import annotations

import re
from dataclasses import replace

from published_cases.case import Case, Layout, Measured, Precision
from published_cases.machines import A100_40, A100_80, H100, linked, linked_by_default
from published_cases.rows import Row, Unusable
from published_cases.shapes import llama, mpt

MIXED = Precision(parameters="float32", compute="bfloat16", reduce="float32")
PURE = replace(MIXED, reduce="bfloat16")

# --- llm-foundry ------------------------------------------------------------------------------------------------------

_TRITON = (("attention", 1.4), ("attention_backward", 2.0))
"""The tables of A100 are of July 2023 (llm-foundry ef350d9), whose submit_benchmarks.py takes torch 1.13.1 and the attention
that was written in Triton. FlashAttention 2, which the profile has, is 1.3 to 1.5 times as fast as that forwards, and around
twice as fast backwards (Dao, arXiv 2307.08691, section 4.1)."""
_MOSAIC_GPUS = {
    "a100_80gb": replace(A100_80, slower=_TRITON),
    "a100_40gb": replace(A100_40, slower=_TRITON),
    "h100_80gb": H100,
}
_MOSAIC_MODES = {"PURE": PURE, "DEFAULT": MIXED}


def mosaic(row: Row) -> Case:
    """MPT under FSDP1. Seconds are tokens of a step over tokens a second of all devices."""
    if row.text("precision") not in ("bf16", "amp_bf16"):
        raise Unusable(f"{row.text('precision')} is not modelled")
    if row.flag("activation_cpu_offload"):
        raise Unusable("activations are moved to the host")
    devices, layers = row.whole("gpus"), row.whole("layers")
    full = row.flag("activation_checkpointing")
    layout = _sharded(row.text("sharding"), devices)
    layout = replace(
        layout,
        microbatches=row.whole("grad_accum"),
        microbatch_rows=row.whole("micro_batch"),
        recompute="full" if full else "none",
        recomputed_blocks=layers if full else 0,
    )
    if layout.global_batch != row.whole("global_batch"):
        raise Unusable(f"{row.text('global_batch')} rows a step, and a layout of {layout.global_batch}")
    shape = mpt(layers, row.whole("d_model"), row.whole("heads"), row.whole("seq_len"), row.whole("vocab"))
    seconds = layout.global_batch * shape.sequence / row.number_of("tok_s")
    return Case(
        table=row.table,
        row=f"{row.text('model')} s={shape.sequence} on {devices} {row.text('gpu')}, {layout.microbatch_rows} rows",
        model=shape,
        layout=layout,
        precision=row.one_of("mp_mode", _MOSAIC_MODES),
        machine=linked(row.one_of("gpu", _MOSAIC_GPUS), devices, "roce", _gbps(row.text("section"))),
        runtime="FSDP1",
        measured=Measured(seconds, "global_batch × seq_len / tok_s"),
    )


def _sharded(strategy: str, devices: int, node: int = 8) -> Layout:
    """A layout of one microbatch of one row, from a sharding strategy of FSDP1."""
    if strategy in ("FULL_SHARD", "FSDP"):
        return Layout(1, 1, dp_shard=devices, zero=3)
    if strategy == "SHARD_GRAD_OP":
        return Layout(1, 1, dp_shard=devices, zero=2, reshard_after_forward=False)
    if strategy in ("HYBRID_SHARD", "HSDP"):
        shard = min(node, devices)
        return Layout(1, 1, dp_shard=shard, dp_replicate=devices // shard, zero=3)
    raise Unusable(f"sharding {strategy} is not modelled")


def _gbps(text: str) -> float:
    match = re.search(r"(\d+) ?Gbps", text)
    if match is None:
        raise Unusable("the network is not stated")
    return float(match[1])


# --- fms-fsdp ---------------------------------------------------------------------------------------------------------

_FMS_POLICIES = {  # share of blocks that are recomputed, and what was assumed
    "No AC": (0.0, ()),
    "Full AC": (1.0, ()),
    "AC on (policy not stated)": (1.0, ("recompute: which blocks is not stated, all taken",)),
}
_FMS_SELECTIVE = {"7b": 0.4, "13b": 0.4, "34b": 1.0, "70b": 1.0}
_FMS_INFERRED = "recompute: {share:.0%} of the blocks, not stated: the README's HFU / MFU on A100 is 1 + a third of it"


def fms(row: Row) -> Case:
    """Llama 2 under FSDP1 and HSDP. Seconds are tokens of a device over tokens a second of a device."""
    size, devices, sequence = row.text("model"), row.whole("gpus"), row.whole("seq_len")
    shape = llama(f"llama2-{size}", sequence)
    share, assumed = _fms_recompute(row, size)
    blocks = round(share * shape.layers)
    layout = replace(
        _sharded(row.text("sharding"), devices),
        microbatch_rows=row.whole("batch_per_gpu"),
        recompute="full" if blocks else "none",
        recomputed_blocks=blocks,
    )
    hardware = row.text("hardware")
    machine = A100_80 if hardware.startswith("A100") else H100
    version = row.text("table_version").split()[0]
    return Case(
        table=row.table,
        row=f"{version} {size} on {devices} {hardware.split()[0]}, {layout.microbatch_rows} rows",
        model=shape,
        layout=layout,
        precision=PURE,
        machine=linked(machine, devices, "ethernet", _gbps(hardware)),
        runtime="FSDP1",
        compiled=row.flag("compile"),
        measured=Measured(layout.microbatch_rows * sequence / row.number_of("tok_s_gpu"), "rows × seq_len / tok_s_gpu"),
        assumed=assumed,
    )


def _fms_recompute(row: Row, size: str) -> tuple[float, tuple[str, ...]]:
    if row.text("activation_checkpointing") == "Selective AC":
        share = _FMS_SELECTIVE[size]
        return share, (_FMS_INFERRED.format(share=share),)
    return row.one_of("activation_checkpointing", _FMS_POLICIES)


# --- YaFSDP -----------------------------------------------------------------------------------------------------------


def yafsdp(row: Row) -> Case:
    """Llama 2 and 3 under FSDP1 and under YaFSDP, one row a device."""
    devices, sequence = row.whole("gpus"), row.whole("seq_len")
    name = row.text("model").lower().replace("llama ", "llama").replace(" ", "-")
    blocks = row.whole("ckpt_layers")
    machine, assumed = linked_by_default(A100_80, devices)
    return Case(
        table=row.table,
        row=f"{row.text('framework')} {row.text('model')} s={sequence} on {devices}",
        model=llama(name, sequence),
        layout=Layout(
            microbatches=1,
            microbatch_rows=row.whole("batch_per_gpu"),
            dp_shard=devices,
            zero=3,
            recompute="full" if blocks else "none",
            recomputed_blocks=blocks,
        ),
        precision=MIXED,
        machine=machine,
        runtime=row.text("framework"),
        measured=Measured(row.number_of("step_s"), "step_s"),
        assumed=(
            *assumed,
            "bfloat16 with float32 reductions, as YaFSDP's migration guide; the README does not state it",
        ),
    )
