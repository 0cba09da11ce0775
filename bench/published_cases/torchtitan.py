"""Tables of torchtitan, from its documents, pull requests and issues.

torchtitan_a100_2024   docs/performance.md, 2024, 64 A100
torchtitan_other       its and torchao's documents: B200, H100, MI300X, GB200
torchtitan_prs_h100    pull request 165 (FSDP1 against FSDP2), issues 191 and 929

Mixed precision is torchtitan's: parameters at rest and reductions in float32, computation in bfloat16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from published_cases.case import GIB, Case, Layout, Machine, Measured, ModelShape, Precision
from published_cases.machines import A100_80, B200, H100, MI300X, linked_by_default
from published_cases.rows import Row, Unusable
from published_cases.shapes import llama

MIXED = Precision(parameters="float32", compute="bfloat16", reduce="float32")
LLAMA1 = "llama-7b (minipile)"


@dataclass(frozen=True)
class _Recompute:
    """What ``ac`` means. ``share``: of the blocks that are recomputed whole; None: some operations of all of them."""

    share: float | None
    assumed: tuple[str, ...] = ()


_EVERY_SECOND = "recompute: selective by layer taken as every second block, torchtitan's default"
_RECOMPUTE = {
    "none": _Recompute(0.0),
    "full": _Recompute(1.0),
    "selective_layer": _Recompute(0.5, (_EVERY_SECOND,)),
    "selective": _Recompute(0.5, (_EVERY_SECOND,)),
    "selective_op": _Recompute(None),
}


def a100(row: Row) -> Case:
    """64 A100, FSDP2. Seconds are tokens of a device over tokens a second of a device."""
    devices = row.whole("gpus")
    machine, assumed = linked_by_default(A100_80, devices)
    layout, shape, recomputed = _layout_and_shape(row)
    failed = row.text("status") == "OOM"
    measured = Measured(out_of_memory=True) if failed else _measured(layout, shape, row.number_of("tok_s_gpu"))
    return Case(
        table=row.table,
        row=f"{row.text('model')} {layout.microbatch_rows} rows, recompute {row.text('ac')}",
        model=shape,
        layout=layout,
        precision=MIXED,
        machine=machine,
        runtime="FSDP2",
        measured=measured,
        assumed=(*assumed, *recomputed, "eager: compile is not stated"),
    )


def other(row: Row) -> Case:
    """One node; the memory that torchtitan logs is what the allocator reserved, in GiB, whatever the page calls the unit."""
    if row.text("precision") != "bf16":
        raise Unusable(f"precision {row.text('precision')}: only bfloat16 is modelled")
    machine = _machine(row.text("hardware"))
    layout, shape, recomputed = _layout_and_shape(row)
    return Case(
        table=row.table,
        row=f"{row.text('model')} on {layout.devices} {machine.profile}, recompute {row.text('ac')}",
        model=shape,
        layout=layout,
        precision=MIXED,
        machine=machine,
        runtime="FSDP2",
        compiled=row.flag("compile"),
        measured=replace(
            _measured(layout, shape, row.number_of("tok_s_gpu")),
            reserved=int(row.number_of("mem_gib") * GIB),
            counter=row.text("mem_kind"),
        ),
        assumed=recomputed,
    )


def pull_requests(row: Row) -> Case:
    """FSDP1 against FSDP2 on 8 H100. Seconds are of the middle of the range of tokens a second."""
    if not row.stated("tok_s_gpu_low"):
        raise Unusable(f"no time, and {row.cells.get('note', '')}")
    if row.text("framework") not in ("FSDP1", "FSDP2"):
        raise Unusable(f"{row.text('framework')} on {row.text('model')} is not modelled")
    layout, shape, recomputed = _layout_and_shape(row)
    low, high = row.number_of("tok_s_gpu_low"), row.number_of("tok_s_gpu_high")
    machine = replace(H100, capacity=int(95.04 * GIB)) if "95.04" in row.text("hardware") else H100
    active = row.cells.get("peak_active_pct")
    measured = replace(
        _measured(layout, shape, (low + high) / 2),
        low=_measured(layout, shape, high).seconds,
        high=_measured(layout, shape, low).seconds,
        active=int(float(active) / 100 * machine.capacity) if active else None,
        reserved=int(row.number_of("peak_reserved_gib") * GIB),
        counter="peak reserved",
    )
    note = row.cells.get("note", "")
    return Case(
        table=row.table,
        row=f"{row.text('framework')} {row.text('model')} {layout.microbatch_rows} rows, recompute {row.text('ac')}"
        + (", compiled" if row.flag("compile") else "")
        + (f" ({note})" if note.startswith(("inductor", "buffer")) else ""),
        model=shape,
        layout=layout,
        precision=MIXED,
        machine=machine,
        runtime=row.text("framework"),
        compiled=row.flag("compile"),
        measured=measured,
        assumed=(*recomputed, "tokens a second are of one GPU: not stated"),
    )


def _layout_and_shape(row: Row) -> tuple[Layout, ModelShape, tuple[str, ...]]:
    """The layout and the model of a row, and what was assumed of its recomputation."""
    recompute = row.one_of("ac", _RECOMPUTE)
    name = "llama2-7b" if row.text("model") == LLAMA1 else row.text("model")
    try:
        shape = llama(name, row.whole("seq_len"))
    except KeyError:
        raise Unusable(f"no model {name} is known here") from None
    for axis in ("pp", "cp", "ep"):
        if row.stated(axis) and row.whole(axis) != 1:
            raise Unusable(f"{axis}={row.text(axis)} is not modelled for this table")
    blocks = shape.layers if recompute.share is None else round(recompute.share * shape.layers)
    layout = Layout(
        microbatches=1,
        microbatch_rows=row.whole("local_batch"),
        tp=row.whole("tp"),
        dp_shard=row.whole("dp_shard"),
        zero=3,
        recompute="selective" if recompute.share is None else "full" if blocks else "none",
        recomputed_blocks=0 if recompute.share is None else blocks,
    )
    if layout.devices != row.whole("gpus"):
        raise Unusable(f"{row.text('gpus')} devices, and a layout of {layout.devices}")
    if row.stated("global_batch") and layout.global_batch != row.whole("global_batch"):
        raise Unusable(f"{row.text('global_batch')} rows a step, and a layout of {layout.global_batch}")
    return layout, shape, recompute.assumed


def _measured(layout: Layout, shape: ModelShape, tokens_a_second: float) -> Measured:
    """The step of a device that does so many tokens a second; devices that share rows over tp count as its share."""
    tokens = layout.global_batch * shape.sequence / layout.devices
    return Measured(tokens / tokens_a_second, "tokens of a step / devices / tok_s_gpu")


def _machine(hardware: str) -> Machine:
    for name, machine in (("B200 (", B200), ("H100", H100), ("MI300X", MI300X)):
        if hardware.startswith(name):
            return machine
    kind = re.split(r"[,(]", hardware)[0].strip()
    raise Unusable(f"{kind}: the GPU is not stated, or not known here")
