"""Tables of Megatron-LM and Megatron-DeepSpeed: GPTs over tensors, pipelines and data.

megatron_sc21_table1   arXiv 2104.04473, table 1, and the scripts of NVIDIA/Megatron-LM
vtrain_single          VIA-Research/vTrain, data/ground_truth_single.csv
bigscience_tr3m_v100   bigscience-workshop/bigscience, experiments/tr3m-1B3.md and its Slurm script
"""

from __future__ import annotations

from typing import Literal

from published_cases.case import GIB, Case, Layout, Machine, Measured, Precision
from published_cases.machines import A100_80, V100_16, V100_32, linked
from published_cases.rows import Row, Unusable
from published_cases.shapes import megatron_gpt, padded_vocab

HALF = Precision(parameters="float16", compute="float16", reduce="float16", master=True)
GPT2_TOKENS = 50257
_PADDED = f"vocabulary: GPT-2's, {GPT2_TOKENS}, padded to {padded_vocab(GPT2_TOKENS)}"


def sc21(row: Row) -> Case:
    """Table 1 of the SC21 paper. Seconds are the file's ``iter_s``, derived from TFLOP/s a GPU, ±0.4 %."""
    devices, layers = row.whole("gpus"), row.whole("layers")
    stages_per_rank = row.whole("virtual_stages")
    layout = _layout(row, layers, dp=row.whole("dp"), micro=row.whole("micro_batch"), stages_per_rank=stages_per_rank)
    _check_devices(layout, devices)
    return Case(
        table=row.table,
        row=f"{row.text('params_b')}B on {devices}",
        model=megatron_gpt(layers, row.whole("hidden"), row.whole("heads"), sequence=2048, vocab=51200),
        layout=layout,
        precision=HALF,
        machine=linked(A100_80, devices, "infiniband", 8 * 200),
        runtime="Megatron-LM",
        measured=Measured(row.number_of("iter_s"), "iter_s, derived from TFLOP/s a GPU"),
    )


def vtrain(row: Row) -> Case:
    """vTrain's single-node measurements."""
    devices, layers = row.whole("gpus"), row.whole("layers")
    layout = _layout(row, layers, dp=row.whole("dp"), micro=row.whole("micro_batch"))
    _check_devices(layout, devices)
    if layout.microbatches != row.whole("num_microbatches"):
        raise Unusable(f"{row.text('num_microbatches')} microbatches, and {layout.microbatches} from the global batch")
    vocab = padded_vocab(GPT2_TOKENS)
    return Case(
        table=row.table,
        row=row.text("config"),
        model=megatron_gpt(layers, row.whole("hidden"), row.whole("heads"), row.whole("seq_len"), vocab),
        layout=layout,
        precision=HALF,
        machine=A100_80,
        runtime="Megatron-DeepSpeed",
        measured=Measured(row.number_of("iter_ms") / 1e3, "iter_ms / 1000"),
        assumed=(_PADDED, "A100 of 80 GB, float16, and no ZeRO: not stated"),
    )


def tr3m(row: Row) -> Case:
    """BigScience's 1.3B on two nodes of four V100. ``mem_gb`` is what ``nvidia-smi`` shows of a process, in whole GB."""
    devices, layers = row.whole("gpus"), row.whole("layers")
    layout = _layout(row, layers, dp=row.whole("dp"), micro=row.whole("micro_batch"), zero=1)
    _check_devices(layout, devices)
    failed = row.text("status") == "OOM"
    measured = Measured(
        seconds=None if failed else row.number_of("sec_per_it"),
        how="sec_per_it, in whole seconds",
        reserved=None if failed else int(row.number_of("mem_gb") * GIB),
        counter="process, with about 1.1 GiB of CUDA kernels",
        out_of_memory=failed,
    )
    vocab = padded_vocab(GPT2_TOKENS)
    return Case(
        table=row.table,
        row=f"{row.text('gpu')} {_axes(layout)} {layout.microbatch_rows} rows, recompute {layout.recompute}",
        model=megatron_gpt(layers, row.whole("hidden"), row.whole("heads"), row.whole("seq_len"), vocab),
        layout=layout,
        precision=HALF,
        machine=linked(_v100(row.text("gpu")), devices, "omnipath", 4 * 100),
        runtime="Megatron-DeepSpeed",
        measured=measured,
        assumed=(_PADDED, "network: 4 × 100 Gbit/s of Omni-Path a node, Jean Zay's; the page does not state it"),
    )


def _layout(row: Row, layers: int, *, dp: int, micro: int, stages_per_rank: int = 1, zero: Literal[0, 1] = 0) -> Layout:
    """A layout of Megatron-LM; all rows but some of tr3m compute every layer again."""
    full = row.cells.get("activation_checkpointing", "full") == "full"
    microbatches, rest = divmod(row.whole("global_batch"), dp * micro)
    if rest:
        raise Unusable("the global batch is no multiple of the rows of all data ranks")
    pp = row.whole("pp")
    return Layout(
        microbatches=microbatches,
        microbatch_rows=micro,
        tp=row.whole("tp"),
        pp=pp,
        dp_shard=dp if zero else 1,
        dp_replicate=1 if zero else dp,
        schedule="none" if pp == 1 else "interleaved" if stages_per_rank > 1 else "1f1b",
        stages_per_rank=stages_per_rank,
        recompute="full" if full else "none",
        recomputed_blocks=layers if full else 0,
        zero=zero,
    )


def _check_devices(layout: Layout, devices: int) -> None:
    if layout.devices != devices:
        raise Unusable(f"{devices} devices, and a layout of {layout.devices}")


def _axes(layout: Layout) -> str:
    return f"tp={layout.tp} pp={layout.pp} dp={layout.data_ranks}"


def _v100(name: str) -> Machine:
    machines = {"V100-32GB": V100_32, "V100-16GB": V100_16}
    if name not in machines:
        raise Unusable(f"{name} is no machine that is known here")
    return machines[name]
