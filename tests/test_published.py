"""bench/published.py: published tables as cases, as models and plans, and what is said of a predictor. The rows are made up."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import published
import pytest
import torch
from published_cases import estimates, predictor, roofline
from published_cases.case import GIB, Case, Layout, Measured, ModelShape, Predicted
from published_cases.models import build_model
from published_cases.plans import batch_of, plan_of, stand_ins
from published_cases.profiles import profile_of
from published_cases.report import Line, lines_of, rank_correlation, regrets, row_text, summary
from published_cases.shapes import llama, megatron_gpt, mpt, padded_vocab, parameter_count
from published_cases.tables import READERS, Table, read_table, unread

import meshwright as mw
from meshwright.hardware.profile import Profile
from meshwright.hardware.reader import read_profile

# One row of each table, by column: others are left empty. Seconds are what the case must say.
ROWS: dict[str, tuple[dict[str, Any], float | None]] = {
    "megatron_sc21_table1": (
        dict(params_b=2, heads=16, hidden=1024, layers=8, tp=2, pp=2, gpus=16, dp=4, global_batch=64, micro_batch=2,
             virtual_stages=2, tflops_per_gpu=100, iter_s=1.5),
        1.5,
    ),
    "vtrain_single": (
        dict(row=0, config="made_up", gpus=4, tp=1, dp=2, pp=2, global_batch=16, micro_batch=2, num_microbatches=4,
             hidden=512, heads=8, layers=4, seq_len=128, recompute_full=1, iter_ms=250),
        0.25,
    ),
    "bigscience_tr3m_v100": (
        dict(gpu="V100-16GB", gpus=8, tp=2, pp=2, dp=2, zero_stage=1, micro_batch=4, global_batch=32, seq_len=128,
             activation_checkpointing="none", mem_gb=12, sec_per_it=7, status="ok", layers=4, hidden=512, heads=8),
        7.0,
    ),
    "mosaic_a100": (
        dict(section="A100 80GB with 1600 Gbps node-node interconnect (RoCE)", model="made up", seq_len=100, gpus=16,
             gpu="a100_80gb", micro_batch=2, grad_accum=3, global_batch=96, tok_s=4800, precision="bf16", mp_mode="PURE",
             sharding="FULL_SHARD", activation_checkpointing="True", activation_cpu_offload="False", layers=4, d_model=512,
             heads=8, vocab=1000),
        2.0,
    ),
    "fms_fsdp_a100_h100": (
        dict(table_version="HEAD (made up)", model="13b", hardware="A100-80GB 400Gbps", gpus=64, sharding="HSDP", compile="Y",
             activation_checkpointing="Selective AC", batch_per_gpu=3, seq_len=1000, tok_s_gpu=1500),
        2.0,
    ),
    "yafsdp_a100": (
        dict(framework="FSDP1", model="Llama 2 7B", gpus=16, seq_len=512, batch_per_gpu=1, ckpt_layers=8, step_s=0.5),
        0.5,
    ),
    "torchtitan_a100_2024": (
        dict(model="llama3-8b", gpus=8, dp_shard=4, tp=2, seq_len=1000, local_batch=2, global_batch=8, ac="selective_layer",
             tok_s_gpu=500, status="ok"),
        2.0,
    ),
    "torchtitan_other": (
        dict(hardware="B200 (made up)", model="llama3-8b", gpus=8, dp_shard=8, tp=1, pp=1, cp=1, ep=1, seq_len=1000,
             local_batch=1, ac="selective_op", compile=1, precision="bf16", tok_s_gpu=2000, mem_gib=40, mem_kind="GB"),
        0.5,
    ),
    "torchtitan_prs_h100": (
        dict(hardware="H100 95.04 GiB", framework="FSDP2", model="llama-7b (minipile)", gpus=8, dp_shard=8, tp=1, seq_len=1000,
             local_batch=4, ac="full", compile=0, tok_s_gpu_low=1600, tok_s_gpu_high=2400, peak_active_pct=25,
             peak_reserved_gib=32),
        2.0,
    ),
    "internevo_a100": (
        dict(table="throughput", model="7B", gpus=32, tp=2, pp=1, zero1=4, fsdp=0, activation_ckpt="FALSE", seq_len=128,
             micro_batch=4, micro_num=2, global_batch_tokens=16384, tok_s_gpu=256),
        2.0,
    ),
}  # fmt: skip


def written(folder: Path, table: str, *rows: dict[str, Any]) -> Table:
    """A table of these rows, as it is read."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with (folder / f"{table}.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, columns, restval="")
        lines.writeheader()
        lines.writerows(rows)
    return read_table(folder, table)


def case_of(folder: Path, table: str, /, **changed: Any) -> Case:
    read = written(folder, table, ROWS[table][0] | changed)
    assert not read.skipped, read.skipped
    return read.cases[0]


def reason(folder: Path, table: str, /, **changed: Any) -> str:
    """Why a row is skipped."""
    read = written(folder, table, ROWS[table][0] | changed)
    assert not read.cases
    return read.skipped[0].reason


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ROWS)
def test_seconds_of_a_step_are_derived(table: str, tmp_path: Path) -> None:
    measured = case_of(tmp_path, table).measured
    assert measured.seconds == pytest.approx(ROWS[table][1]) and measured.how


def test_every_table_has_a_reader() -> None:
    assert set(READERS) == {*ROWS, "korthikanti_memory_analytic", "seed_2d"}


def test_a_file_that_no_reader_knows_is_told(tmp_path: Path) -> None:
    (tmp_path / "another.csv").write_text("a,b\n")
    (tmp_path / "seed_2d.csv").write_text("a,b\n")
    assert unread(tmp_path) == ["another"]


def test_layouts(tmp_path: Path) -> None:
    sc21 = case_of(tmp_path, "megatron_sc21_table1").layout
    assert sc21 == Layout(8, 2, tp=2, pp=2, dp_replicate=4, schedule="interleaved", stages_per_rank=2, recompute="full",
                          recomputed_blocks=8)  # fmt: skip
    assert (sc21.devices, sc21.global_batch) == (16, 64)
    tr3m = case_of(tmp_path, "bigscience_tr3m_v100").layout
    assert tr3m == Layout(4, 4, tp=2, pp=2, dp_shard=2, schedule="1f1b", zero=1)
    fms = case_of(tmp_path, "fms_fsdp_a100_h100").layout
    assert fms == Layout(1, 3, dp_shard=8, dp_replicate=8, zero=3, recompute="full", recomputed_blocks=16)
    internevo = case_of(tmp_path, "internevo_a100").layout
    assert (internevo.dp_shard, internevo.dp_replicate, internevo.zero, internevo.microbatches) == (4, 4, 1, 2)
    everywhere = case_of(tmp_path, "internevo_a100", zero1=-1).layout
    assert (everywhere.dp_shard, everywhere.dp_replicate) == (16, 1)


def test_memory_is_in_bytes_and_out_of_memory_is_a_case(tmp_path: Path) -> None:
    ran = case_of(tmp_path, "bigscience_tr3m_v100")
    assert ran.measured.reserved == 12 * GIB and ran.machine.capacity == 16 * GIB
    failed = case_of(tmp_path, "bigscience_tr3m_v100", status="OOM", mem_gb="", sec_per_it="").measured
    assert failed.out_of_memory and failed.seconds is None and failed.reserved is None
    pulled = case_of(tmp_path, "torchtitan_prs_h100").measured
    assert pulled.active == int(0.25 * int(95.04 * GIB)) and pulled.reserved == 32 * GIB
    assert (pulled.low, pulled.high) == pytest.approx((4000 / 2400, 4000 / 1600))


def test_networks_are_those_between_nodes(tmp_path: Path) -> None:
    assert case_of(tmp_path, "mosaic_a100").machine.network_gbps == 1600
    assert case_of(tmp_path, "mosaic_a100", gpus=8, global_batch=48).machine.network == "none"
    assert any("network not stated" in said for said in case_of(tmp_path, "yafsdp_a100").assumed)


@pytest.mark.parametrize(
    ("table", "changed", "why"),
    [
        ("torchtitan_other", {"precision": "float8_rowwise"}, "float8_rowwise: only bfloat16"),
        ("torchtitan_other", {"hardware": "Blackwell, 4 GPU"}, "the GPU is not stated"),
        ("torchtitan_other", {"ep": 16}, "ep=16"),
        ("torchtitan_other", {"model": "mixture"}, "no model mixture"),
        ("torchtitan_prs_h100", {"tok_s_gpu_low": "", "note": "a bug"}, "no time, and a bug"),
        ("mosaic_a100", {"sharding": "OTHER"}, "sharding OTHER"),
        ("mosaic_a100", {"precision": "amp_fp8"}, "amp_fp8"),
        ("mosaic_a100", {"global_batch": 95}, "95 rows a step, and a layout of 96"),
        ("mosaic_a100", {"tok_s": ""}, "tok_s is not stated"),
        ("mosaic_a100", {"tok_s": "fast"}, "tok_s is 'fast', not a number"),
        ("vtrain_single", {"gpus": 8}, "8 devices, and a layout of 4"),
        ("vtrain_single", {"heads": 8.5}, "not a whole number"),
        ("internevo_a100", {"table": "scaling"}, "repeats"),
    ],
)
def test_what_is_skipped_has_a_reason(table: str, changed: dict[str, Any], why: str, tmp_path: Path) -> None:
    assert why in reason(tmp_path, table, **changed)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    row = {column: value for column, value in ROWS["yafsdp_a100"][0].items() if column != "ckpt_layers"}
    assert written(tmp_path, "yafsdp_a100", row).skipped[0].reason == "the table has no column ckpt_layers"


def test_a_row_that_repeats_another_is_skipped(tmp_path: Path) -> None:
    row = ROWS["internevo_a100"][0]
    read = written(tmp_path, "internevo_a100", row, row | {"table": "flops"}, row | {"tok_s_gpu": 512})
    assert len(read.cases) == 2
    assert [(skipped.row, skipped.reason) for skipped in read.skipped] == [("2", "repeats row 1")]


# --- models and plans -------------------------------------------------------------------------------------------------


def reduced(case: Case, layers: int = 4) -> Case:
    """The case with a small model and at most two ranks an axis; schedule, recomputation and precision stay."""
    layout, shape = case.layout, case.model
    share = layout.recomputed_blocks / shape.layers
    small = replace(
        layout,
        **{axis: min(getattr(layout, axis), 2) for axis in ("pp", "tp", "dp_shard", "dp_replicate", "stages_per_rank")},
        microbatches=min(layout.microbatches, 4),
        recomputed_blocks=round(share * layers),
    )
    sizes = {"layers": layers, "hidden": 64, "heads": 4, "intermediate": 256, "vocab": 128, "sequence": 16}
    kv_heads = 4 if shape.kv_heads == shape.heads else 2
    return replace(case, model=replace(shape, **sizes, kv_heads=kv_heads), layout=small)


@pytest.mark.parametrize("table", ROWS)
def test_a_small_one_of_each_table_is_planned(table: str, tmp_path: Path) -> None:
    case = reduced(case_of(tmp_path, table))
    recipe = mw.make_recipe(build_model(case.model), plan_of(case), batch_of(case.model, case.layout))
    assert recipe.mesh.size == case.layout.devices
    assert len(recipe.recompute) == case.layout.recomputed_blocks


def test_a_plan_in_full(tmp_path: Path) -> None:
    assert plan_of(case_of(tmp_path, "megatron_sc21_table1")) == {
        "mesh": {"pp": 2, "dp_replicate": 4, "tp": 2},
        "precision": "bfloat16",
        "microbatches": 8,
        "schedule": "interleaved",
        "stages_per_rank": 2,
        "sequence_parallel": False,
        "recompute": "blocks",
    }
    some = plan_of(case_of(tmp_path, "yafsdp_a100"))
    assert list(some["modules"]) == [f"layers.{i}" for i in range(0, 32, 4)]


def test_what_stands_in_is_said(tmp_path: Path) -> None:
    said = stand_ins(case_of(tmp_path, "internevo_a100"))
    assert any(sentence.startswith("ZeRO-1 as FSDP") for sentence in said)


SHAPES = (
    megatron_gpt(2, 64, 4, 16, vocab=padded_vocab(100)),
    mpt(2, 64, 4, 16, vocab=100),
    replace(llama("llama3-8b", 16), layers=2, hidden=64, heads=4, kv_heads=2, intermediate=96, vocab=100),
)
VIT = ModelShape("vit", 2, 64, 4, 10, 16, 4, 256)


@pytest.mark.parametrize("shape", [*SHAPES, VIT], ids=lambda shape: shape.kind)
def test_models_train(shape: ModelShape) -> None:
    torch.manual_seed(0)
    model = build_model(shape)()
    model(**batch_of(shape, Layout(1, 2), "cpu")).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    if shape is not VIT:
        assert sum(p.numel() for p in model.parameters()) == parameter_count(shape)


@pytest.mark.parametrize(("name", "billions"), [("llama2-7b", 6.74), ("llama2-70b", 68.98), ("llama3-8b", 8.03)])
def test_shapes_have_the_size_of_their_name(name: str, billions: float) -> None:
    assert parameter_count(llama(name, 2048)) / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_vocabulary_is_padded_as_megatron_does() -> None:
    assert (padded_vocab(50257), padded_vocab(50257, 8), padded_vocab(51200)) == (50304, 51200, 51200)


# --- the baseline -----------------------------------------------------------------------------------------------------


def test_flops_by_hand(tmp_path: Path) -> None:
    case = case_of(tmp_path, "vtrain_single")
    tokens, blocks, scores, head = 16 * 128, 4 * 12 * 512**2, 4 * 2 * 512 * 128, 512 * 50304
    assert roofline.flops(case) == pytest.approx(tokens * (8 * blocks + 8 * scores + 6 * head))
    assert roofline.ideal_seconds(case) == roofline.flops(case) / (4 * 312e12)


def timed(base: Case, *seconds: float) -> list[Case]:
    return [replace(base, row=str(i), measured=Measured(s)) for i, s in enumerate(seconds)]


def test_the_fit_has_the_least_mean_error(tmp_path: Path) -> None:
    base = case_of(tmp_path, "vtrain_single")
    cases = timed(base, 1.0, 1.1, 1.3, 2.0, 9.0)

    def mape(predict: roofline.Roofline) -> float:
        return sum(abs(line.error or 0.0) for line in lines_of(cases, predict))

    best = roofline.fit(cases, "made_up")
    for factor in (0.5, 0.8, 0.95, 1.05, 1.2, 2):
        assert mape(best) < mape(replace(best, efficiency=best.efficiency * factor))
    assert "5 rows of made_up" in best.fitted("another") and "no evidence" not in best.fitted("another")
    assert "no evidence" in best.fitted("made_up")


# --- the report -------------------------------------------------------------------------------------------------------


def line(
    base: Case, seconds: float | None, said: float, *, row: str = "", layout: Layout | None = None, **more: Any
) -> Line:
    """A case that took so many seconds (None: it ran out of memory) and of which so many were said."""
    measured = Measured(seconds, out_of_memory=seconds is None)
    return Line(replace(base, row=row, layout=layout or base.layout, measured=measured), Predicted(said, **more))


@pytest.fixture
def base(tmp_path: Path) -> Case:
    return case_of(tmp_path, "vtrain_single")


def test_errors_are_signed(base: Case) -> None:
    lines = [line(base, 1.0, 1.5), line(base, 2.0, 1.8), line(base, 4.0, 4.0), line(base, 4.0, 3.0, row="slow")]
    assert [said.error for said in lines] == pytest.approx([0.5, -0.1, 0.0, -0.25])
    text = "\n".join(summary(lines))
    assert "MAPE 21.2%" in text and "median |error| 17.5%" in text and "median error -5.0%" in text
    assert "worst +50.0%" in text


def test_rank_correlation() -> None:
    assert rank_correlation([(1, 10), (2, 20), (3, 40)]) == pytest.approx(1)
    assert rank_correlation([(3, 10), (2, 20), (1, 40)]) == pytest.approx(-1)
    assert rank_correlation([(1, 1), (2, 3), (3, 2), (4, 4)]) == pytest.approx(0.8)  # 1 − 6·2 / (4·15)
    assert rank_correlation([(1, 1), (1, 2), (2, 3)]) == pytest.approx(3**0.5 / 2)  # ranks 1.5 1.5 3
    assert rank_correlation([(1, 1), (1, 2), (1, 3)]) is None and rank_correlation([(1, 1), (2, 2)]) is None


def layouts(base: Case) -> list[Layout]:
    """Three layouts of the same devices and rows."""
    first = base.layout
    return [first, replace(first, pp=1, tp=2), replace(first, pp=1, dp_replicate=4, microbatches=2)]


def test_regret_is_the_time_of_what_is_put_first_over_the_fastest(base: Case) -> None:
    a, b, c = layouts(base)
    lines = [line(base, 1.2, 0.5, layout=a), line(base, 1.0, 0.6, layout=b), line(base, 3.0, 0.7, layout=c)]
    other = replace(base, model=replace(base.model, layers=2))
    alone = line(other, 5.0, 5.0)
    assert [regret for _, regret in regrets([*lines, alone])] == pytest.approx([0.2])
    tied = [line(base, 1.2, 0.5, layout=a), line(base, 1.0, 0.5, layout=b), line(base, 3.0, 0.7, layout=c)]
    assert [regret for _, regret in regrets(tied)] == pytest.approx([0.1])


def test_a_choice_that_runs_out_of_memory_has_no_limit(base: Case) -> None:
    a, b, _ = layouts(base)
    lines = [line(base, None, 0.5, layout=a), line(base, 1.0, 0.6, layout=b)]
    assert regrets(lines)[0][1] == float("inf")
    assert "in 1, what is put first ran out of memory" in "\n".join(summary(lines))
    told = [line(base, None, 0.5, layout=a, active=base.machine.capacity + 1), lines[1]]
    assert regrets(told)[0][1] == 0


def test_memory_and_capacity(base: Case) -> None:
    full = base.machine.capacity
    held = replace(base, measured=Measured(1.0, active=10 * GIB, reserved=20 * GIB))
    lines = [
        Line(held, Predicted(1.0, active=11 * GIB)),
        line(base, None, 1.0, active=full + 1),
        line(base, None, 1.0, active=full // 2),
        line(base, 1.0, 1.0, active=full + 1),
    ]
    assert (lines[0].active_error, lines[0].reserved_error) == pytest.approx((0.1, -0.45))
    text = "\n".join(summary(lines))
    assert "1 of 2 that ran out of memory told, 1 of 2 that ran told to fit" in text
    assert "11.0 GiB" in row_text(lines[0])


def test_intervals_and_failures(base: Case) -> None:
    def predict(case: Case) -> Predicted:
        if case.row == "2":
            raise ValueError("no such layout")
        return Predicted(1.0, low=0.9, high=1.1)

    lines = lines_of(timed(base, 1.05, 2.0, 1.0), predict)
    text = "\n".join(summary(lines))
    assert "1 of 2 measured times lie in it" in text
    assert "1 not predicted: ValueError: no such layout" in text and "no such layout" in row_text(lines[2])


def test_meshwright_is_asked_for_each_stage_and_once_for_cases_alike(
    base: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def predict(build: Any, batch: Any, plan: dict[str, Any], *, hardware: Profile) -> Any:
        asked.append((build().layers, plan["mesh"], tuple(batch["tokens"].shape), hardware.name))
        memory = {0: SimpleNamespace(peak=5), 2: SimpleNamespace(peak=7)}  # the first ranks of both stages
        seconds = SimpleNamespace(seconds=2.0, low=1.0, high=3.0)
        return SimpleNamespace(
            seconds=seconds, memory=memory.__getitem__, device_bytes=lambda rank: (8, 9 + memory[rank].peak)
        )

    monkeypatch.setattr(mw, "predict", predict, raising=False)
    said = lines_of(timed(base, 1.0, 2.0), published.remembered(predictor.predict))
    assert [line.predicted for line in said] == [Predicted(2.0, 1.0, 3.0, active=7, reserved=16)] * 2
    assert [(mesh, rows, hardware) for _, mesh, rows, hardware in asked] == [
        ({"pp": 2, "dp_replicate": 2}, (16, 128), "a100-80")
    ]


# --- hardware and arithmetic ------------------------------------------------------------------------------------------


def test_a_profile_has_the_network_the_node_and_the_capacity_of_the_row(tmp_path: Path) -> None:
    wide = profile_of(case_of(tmp_path, "mosaic_a100").machine)
    assert wide.network is not None and wide.network.bandwidth == 1600e9 / 8 / 8
    assert wide.network.efficiency == read_profile("a100-80", network="roce-100").network.efficiency  # type: ignore[union-attr]
    narrow = profile_of(case_of(tmp_path, "internevo_a100").machine)
    assert narrow.network is not None and narrow.network.bandwidth == 400e9 / 8 / 8
    known = read_profile("a100-80").slower["attention_backward"]  # of FlashAttention 2; MPT's was written in Triton
    assert (wide.slower["attention"], wide.slower["attention_backward"]) == (1.4, 2.0 * known)
    alone = case_of(tmp_path, "vtrain_single").machine
    assert profile_of(alone) == read_profile("a100-80")  # 80 GB as sold is what the profile says
    small = profile_of(case_of(tmp_path, "bigscience_tr3m_v100").machine)
    assert (small.memory, small.devices_per_node) == (16 * GIB, 4)
    half = profile_of(case_of(tmp_path, "bigscience_tr3m_v100").machine, "float16")
    assert half.peak["bfloat16"] == small.peak["float16"] > small.peak["bfloat16"]
    assert half.matmul["bfloat16"] == small.matmul["float16"]
    assert profile_of(case_of(tmp_path, "torchtitan_prs_h100").machine).memory == int(95.04 * GIB)


@pytest.mark.proof
def test_the_arithmetic_is_near_the_prediction(tmp_path: Path) -> None:
    case = case_of(tmp_path, "mosaic_a100", layers=8, mp_mode="DEFAULT")
    said, rehearsed = estimates.estimate(case), predictor.predict(case)
    assert said.seconds == pytest.approx(rehearsed.seconds, rel=0.25)
    assert said.active == pytest.approx(rehearsed.active, rel=0.25)


def test_more_is_recomputed_takes_longer_and_less_memory(tmp_path: Path) -> None:
    case = case_of(tmp_path, "mosaic_a100", layers=12)
    layouts = [replace(case.layout, recompute="full" if n else "none", recomputed_blocks=n) for n in (0, 6, 12)]
    said = [estimates.estimate(replace(case, layout=layout)) for layout in layouts]
    assert said[0].seconds < said[1].seconds < said[2].seconds
    assert said[0].active > said[1].active > said[2].active  # type: ignore[operator]


def test_large_tables_are_taken_by_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS["vtrain_single"][0]
    written(
        tmp_path,
        "vtrain_single",
        *(row | {"config": i, "global_batch": 16 * i, "num_microbatches": 4 * i} for i in range(1, 43)),
    )
    written(tmp_path, "mosaic_a100", ROWS["mosaic_a100"][0])
    for module, name in ((predictor, "predict"), (estimates, "estimate")):
        monkeypatch.setattr(module, name, lambda case: Predicted(1.0))
    arguments = ["--data", str(tmp_path), "--predictor", "meshwright", "--tables", "vtrain_single", "mosaic_a100"]
    monkeypatch.setattr(sys, "argv", ["published.py", *arguments])
    published.main()
    large, small = capsys.readouterr().out.split("\nmosaic_a100: ")
    assert "by arithmetic" in large and "by mw.predict" in small


def test_the_report_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    for table, (row, _) in ROWS.items():
        written(tmp_path, table, row)
    written(tmp_path, "korthikanti_memory_analytic", {"figure": "fig1"})
    written(tmp_path, "seed_2d", {"claim_id": "made up"})
    monkeypatch.setattr(sys, "argv", ["published.py", "--data", str(tmp_path), "--rows"])
    published.main()
    printed = capsys.readouterr().out
    assert all(f"\n{table}: " in printed for table in READERS)
    assert "fitted on 1 rows of mosaic_a100" in printed  # for the report on the table that all others are fitted on
    assert printed.count("fitted on 1 rows of megatron_sc21_table1") == len(ROWS) - 1
    assert "no evidence" not in printed
