"""The pictures in a real browser: each opens from disk, says of every slice what ``ShardMap`` says, and asks no network."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser import SCREENSHOTS, Visit, browser
from meshwright.amounts import size_text
from meshwright.draw.facts import shard_map
from meshwright.draw.html.page import page
from meshwright.draw.html.run import run_page
from meshwright.draw.parameters import elements
from meshwright.draw.report import report
from meshwright.draw.run import StepInTime
from meshwright.layout import even_shard
from meshwright.mesh import Mesh
from meshwright.mismatch import Mismatch
from meshwright.recipe import ParameterRecipe, Recipe, Slices
from meshwright.submesh import Submesh
from meshwright.train.history import history
from test_history import STEP, a_run
from test_report import piped, predicted, stages

LINE = ParameterRecipe
CASES = {
    "fused, uneven, fsdp and tp of one dim": Recipe(
        Mesh.parse("dp_replicate=2,dp_shard=2,tp=3"),
        (
            LINE("h.0.qkv.weight", (96, 288), "float32", tp=even_shard(1, [96, 96, 96], 3), reason="a fused QKV"),
            LINE("h.0.qkv.bias", (288,), "float32", tp=even_shard(0, [96, 96, 96], 3)),
            LINE("h.1.qkv.weight", (96, 288), "float32", tp=even_shard(1, [96, 96, 96], 3), reason="a fused QKV"),
            LINE("h.1.qkv.bias", (288,), "float32", tp=even_shard(0, [96, 96, 96], 3)),
            LINE("table.weight", (515, 7), "bfloat16", tp=even_shard(0, 515, 3), aliases=("head.weight",)),
            LINE("few.weight", (4, 10, 3), "float32", tp=even_shard(1, 10, 3, units=5)),
            LINE("norm.weight", (1,), "float32"),
            LINE("positions", (5, 2), "float32", data="replicate", requires_grad=False),
            LINE("scale", (), "float32", data="loose"),
        ),
    ),
    "a pipeline, one weight in two stages": Recipe(
        Mesh.parse("dp_shard=2,pp=2,tp=2"),  # stages need not be outermost
        (
            LINE("table.weight", (64, 8), "float32", stages=(0, 3), tp=even_shard(0, 64, 2)),
            *(LINE(f"blocks.{i}.up.weight", (16, 8), "float32", stages=(i // 2,), tp=even_shard(0, 16, 2)) for i in range(8)),
        ),
        stages=stages(3, 2, 2, 3), schedule="interleaved", microbatches=4,
    ),
    "branches, one within another": Recipe(
        Mesh.parse("dp_shard=2,tp=6"),
        (
            LINE("trunk.weight", (12, 6), "float32", tp=even_shard(0, 12, 6)),
            LINE("a.weight", (9, 4), "float32", places=(1,), tp=even_shard(0, 9, 2)),
            LINE("b.weight", (9, 4), "float32", places=(2,), tp=even_shard(1, 4, 2)),
            LINE("c.weight", (9, 4), "float32", places=(3,)),
            LINE("both.weight", (9, 4), "float32", places=(1, 2), data="replicate"),
        ),
        branches=(
            Submesh("tp[0:2]", 0, 0, 2, Mesh.parse("tp=2"), ("a",), work=10),
            Submesh("tp[2:6]", 0, 2, 6, Mesh.parse("dp_shard=2,tp=2"), ("b",), work=20),
            Submesh("tp[0]", 1, 0, 1, Mesh.parse("tp=1"), ("c",), work=5),
        ),
        placed={"a": (1,), "b": (2,), "c": (3,)},
    ),
}  # fmt: skip


def large() -> Recipe:
    """Ten thousand ranks, 80 blocks of 9 parameters, 400 microbatches."""
    shapes = {"q": (8192, 8192, 0), "k": (1024, 8192, 0), "v": (1024, 8192, 0), "o": (8192, 8192, 1),
              "gate": (28672, 8192, 0), "up": (28672, 8192, 0), "down": (8192, 28672, 1)}  # fmt: skip
    lines = [
        LINE(f"layers.{i}.{name}.weight", (rows, columns), "bfloat16", stages=(i // 8,), unit=f"layers.{i}",
             tp=even_shard(dim, (rows, columns)[dim], 8))
        for i in range(80) for name, (rows, columns, dim) in shapes.items()
    ]  # fmt: skip
    mesh = Mesh.parse("pp=10,dp_shard=125,tp=8")
    return Recipe(mesh, tuple(lines), stages=stages(*[9] * 10), schedule="1f1b", microbatches=400)


UNNAMED = """() => [...document.querySelectorAll("button, a, input, select, canvas, [role=region]")].filter((e) =>
    !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"""


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    with browser() as one:
        yield one


@pytest.fixture
def visit(running: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a page from disk; in the end, nothing went wrong in it, and it asked for nothing but itself."""
    visits: list[tuple[Visit, str]] = []

    def opened(text: str, **context: Any) -> Visit:
        file = tmp_path / f"page {len(visits)}.html"
        file.write_text(text, encoding="utf-8")
        visits.append((Visit(running, file.as_uri(), **context), file.as_uri()))
        return visits[-1][0]

    yield opened
    for one, address in visits:
        assert one.errors == [] and one.requests == [address]
        one.page.close()


def said(slices: Slices, shape: tuple[int, ...], ranks: tuple[int, ...], itemsize: int) -> str:
    """What a tooltip says of a slice, worked out from ``ShardMap`` alone."""
    words = [("rows", "columns")[dim] if len(shape) == 2 else f"dim {dim}:" if len(shape) > 2 else "elements"
             for dim in range(len(shape))]  # fmt: skip
    parts = []
    for word, ranges, size in zip(words, slices, shape, strict=True):
        text = [str(start) if stop - start == 1 else f"{start}–{stop - 1}" for start, stop in ranges]
        listed = f"{', '.join(text[:-1])} and {text[-1]}" if len(text) > 1 else text[0]
        parts.append(f"{word} {'all' if ranges == ((0, size),) else f'{listed} of {size}'}")
    held = re.sub(r"\.0 ", " ", size_text(elements(slices) * itemsize))
    plain = ", ".join(map(str, ranks))
    run = f"{ranks[0]}–{ranks[-1]}" if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1 else plain
    return f"{', '.join(parts) or 'the one number'}, {held}, {'rank' if len(ranks) == 1 else 'ranks'} {run}"


# --- who holds what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_page_works_out_what_the_shard_map_says(case: str, visit: Any) -> None:
    """Every parameter, every rank: what is held, and how many bytes lie at rest."""
    shards = shard_map(CASES[case])
    told = visit(page(report(shards))).page.evaluate(
        """() => { const { facts, holds, slicesOf, bytesAt } = window.meshwright;
            const world = facts.axes.reduce((n, [, size]) => n * size, 1);
            const ranks = Array.from({ length: world }, (_, rank) => rank);
            return { bytes: ranks.map(bytesAt), held: facts.rows.flatMap((row) => row.variants.map((one) =>
                [one.name, ranks.map((rank) => (holds(row, one.stages, rank) ? slicesOf(row, rank) : null))])) }; }"""
    )
    assert told["bytes"] == list(shards.bytes_by_rank)
    checked = set()
    for name, held in told["held"]:
        checked.add(name)
        for rank, slices in enumerate(held):
            assert (slices is not None) == shards.holds(name, rank), (name, rank)
            if slices is not None:
                assert slices == [[list(r) for r in ranges] for ranges in shards.slices(name, rank)], (name, rank)
    assert checked == {names[0] for row in shards.rows for names in row.by_stage.values()}


FIRST, *OTHERS = CASES


@pytest.mark.parametrize("case", [FIRST, *(pytest.param(case, marks=pytest.mark.proof) for case in OTHERS)])
def test_pointing_at_a_box_says_the_slice_and_its_owners(case: str, visit: Any) -> None:
    shards = shard_map(CASES[case])
    opened = visit(page(report(shards)))
    for index, row in enumerate(shards.rows):
        name = row.first.name
        opened.page.evaluate(f"window.meshwright.chosen.variant = 0, window.meshwright.chooseRow({index})")
        opened.page.evaluate("window.meshwright.chosen.variant = 0")
        held = {(ranks, slices) for ranks, slices in shards.held_by(name) if elements(slices)}
        itemsize = row.first.bytes // max(1, shards.recipe.by_name[name].numel)
        expected = {said(slices, row.first.shape, ranks, itemsize) for ranks, slices in held}
        boxes = opened.page.evaluate("window.meshwright.drawing.boxes.length")
        pointed = {opened.point("parameterPicture", f"drawing.boxes[{box}]")[0] for box in range(boxes)}
        assert sorted(pointed) == sorted(expected), name


def test_pointing_at_a_rank_says_where_it_stands_and_with_whom(visit: Any) -> None:
    shards = shard_map(CASES["fused, uneven, fsdp and tp of one dim"])
    opened = visit(page(report(shards)))
    mesh = shards.mesh
    for rank in range(mesh.size):
        lines = opened.point("meshPicture", str(rank))
        at = " · ".join(f"{axis} {i}" for axis, i in mesh.coordinate(rank).items())
        held = re.sub(r"\.0 ", " ", size_text(shards.bytes_by_rank[rank]))
        assert lines[:2] == [f"rank {rank}", at] and f"holds {held} of weights at rest" in lines
        shared = [axis for axis in mesh.names if rank and rank in mesh.group_of(0, axis)]
        assert ([f"with rank 0 on {', '.join(shared)}"] if shared else []) == [
            line for line in lines if "with rank" in line
        ]


def test_a_rank_is_followed_through_all_views(visit: Any) -> None:
    opened = visit(page(report(CASES["a pipeline, one weight in two stages"]))).page
    opened.locator("#find").fill("up")
    assert opened.locator("#model-table tr[data-row]").count() == 1
    opened.locator("#find").fill("")
    opened.get_by_role("button", name="up.weight: draw it").click()
    opened.locator("#rank").fill("3")
    opened.locator("#rank").press("Enter")
    assert opened.locator("#rank-panel h3").inner_text().startswith("Rank 3")
    shards = shard_map(CASES["a pipeline, one weight in two stages"])
    name = shards.example(shards.matching("blocks.*")[0], 3)
    slice_of_3 = said(shards.slices(name, 3), (16, 8), (3,), 4).removesuffix(", 128 B, rank 3")
    assert opened.locator("#parameter-mine").inner_text() == f"Rank 3 holds {slice_of_3}: 128 B."
    assert opened.locator("#model-table th", has_text="rank 3 holds").count() == 1


def test_the_page_opens_at_a_rank_and_a_parameter(visit: Any) -> None:
    recipe = CASES["branches, one within another"]
    opened = visit(page(report(recipe), rank=4, parameter="b.weight")).page
    assert opened.locator("#rank").input_value() == "4"
    assert opened.locator("#parameter-facts .name").inner_text() == "b.weight"
    with pytest.raises(ValueError, match="no rank 40"):
        page(report(recipe), rank=40)
    with pytest.raises(KeyError, match="no parameter"):
        page(report(recipe), parameter="z")


def test_who_else_holds_a_slice_is_said(visit: Any) -> None:
    recipe = CASES["fused, uneven, fsdp and tp of one dim"]
    opened = visit(page(report(recipe), parameter="table.weight")).page
    assert opened.locator("#parameter-mine").inner_text().endswith(": 1.2 KiB. Rank 6 holds the same.")


NOTHING = {"no parameters": (), "none with elements": (LINE("w", (0, 4), "float32"), LINE("v", (0,), "float32"))}


@pytest.mark.parametrize("lines", NOTHING.values(), ids=NOTHING)
def test_a_model_without_a_number_has_its_page(lines: tuple[ParameterRecipe, ...], visit: Any) -> None:
    shown = visit(page(report(Recipe(Mesh.parse("dp_shard=2,tp=2"), lines)))).page
    said = "Rank 0 holds nothing of it." if lines else "The model has no parameters."
    assert said in shown.locator("#parameter").inner_text()
    widths = shown.evaluate("[...document.querySelectorAll('.bar span')].map((bar) => bar.offsetWidth)")
    assert not any(widths)  # nothing at all is no full bar


def test_ranks_of_a_role_that_hold_less_are_told(visit: Any) -> None:
    """Two rows over four ranks: two of them have nothing."""
    recipe = Recipe(Mesh.parse("dp_shard=4"), (LINE("w", (2, 4), "float32"),))
    assert "0 B to 16 B" in visit(page(report(recipe))).page.locator("#memory").inner_text()


def test_one_rank_has_its_page(visit: Any) -> None:
    shown = visit(page(report(Recipe(Mesh.parse("dp_shard=1"), (LINE("w", (4, 4), "float32"),))))).page
    assert "holds 64 B of weights at rest" in shown.locator("#rank-panel").inner_text()


def test_a_model_of_many_parameters_begins_folded_and_is_searched(visit: Any) -> None:
    long = "a_long_name_" * 8
    names = [f"group_{i % 13}.{long}{i}.projection_{i}.weight" for i in range(3000)]
    lines = tuple(LINE(name, (8, 4 + i % 7), "float32") for i, name in enumerate(names))
    shown = visit(page(report(Recipe(Mesh.parse("dp_shard=4"), lines)))).page
    line = "#model-table tbody tr"
    assert shown.locator(line).count() == 13
    shown.get_by_role("button", name="group_0", exact=True).click()
    assert 200 < shown.locator(line).count() < 300
    shape = shown.locator("#model-table td.shape").first.bounding_box()
    assert shape["x"] < 800  # long names leave room for what is said of them
    shown.locator("#find").fill("weight")
    assert shown.locator(line).count() == 1001 and "more lines" in shown.locator(line).last.inner_text()
    shown.locator("#find").fill("projection_2999.")
    assert shown.locator(f"{line}[data-row]").count() == 1


# --- the step ---------------------------------------------------------------------------------------------------------


def test_each_view_shows_what_was_predicted(visit: Any) -> None:
    prediction = predicted()
    assert prediction.recipe is not None
    facts = report(prediction.recipe, prediction, title="a tower", others={"other.yaml": predicted()})
    opened = visit(page(facts), color_scheme="dark")
    shown = opened.page
    assert shown.locator("#terms figure").count() == 2 and "other.yaml" in shown.locator("#terms").inner_text()
    assert shown.locator("#memory-roles figure").count() == 2
    role = facts.memory.roles[0]
    assert shown.evaluate("window.meshwright.facts.memory.roles[0].moments.length") == len(role.moments)
    shown.locator("#memory-roles figure").first.get_by_text("as a table").click()
    table = shown.locator("#memory-roles figure").first.locator("table")
    table.wait_for()  # it is made when it is opened
    assert table.locator("tbody tr").count() == len(role.moments)
    peak = table.locator("tr", has_text="(peak)")
    assert peak.count() == 1 and re.sub(r"\.0 ", " ", size_text(role.moments[role.peak].bytes)) in peak.inner_text()
    total = sum(e.bytes for e in facts.communication.exchanges if e.role == role.name and e.axis == "tp")
    bars = shown.locator("#exchanges .axisbars li").filter(has=shown.get_by_text("tp", exact=True))
    assert re.sub(r"\.0 ", " ", size_text(total)) in bars.inner_text()
    shown.locator("#step-picture canvas").focus()
    shown.keyboard.press("ArrowRight")
    first = facts.timeline.lines[0].slots[0]
    assert opened.tip()[0].startswith(first.what)
    assert shown.locator("#spoken").inner_text().startswith(first.what)  # for who does not see it


def test_a_plan_alone_has_its_timeline_and_says_what_it_lacks(visit: Any) -> None:
    opened = visit(page(report(piped(3, 1, 2))))
    assert "With --hardware" in opened.page.locator("#memory").inner_text()
    assert opened.page.locator("#memory-roles tbody tr").count() == 3
    assert (
        f"bubble: {100 * report(piped(3, 1, 2)).timeline.idle:.0f} %"
        in opened.page.locator("#step-legend").inner_text()
    )


WRITTEN = """async () => {
    const fill = CanvasRenderingContext2D.prototype.fillText;
    const written = [];
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        const wide = this.measureText(text).width;
        const left = x - (this.textAlign === "center" ? wide / 2 : this.textAlign === "right" ? wide : 0);
        const place = this.canvas.closest("[id]");
        const number = [...place.querySelectorAll("canvas")].indexOf(this.canvas);
        written.push([place.id, number, text, left, left + wide, y]);
        return fill.call(this, text, x, y);
    };
    document.getElementById("theme").click(); // all is drawn anew
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    return written;
}"""


def test_a_rank_of_several_stages_names_the_stage_of_each_action(visit: Any) -> None:
    """An interleaved pipeline: a line is of two stages, and each has a forward of each microbatch."""
    opened = visit(page(report(CASES["a pipeline, one weight in two stages"])))
    texts = {text for place, _, text, *_ in opened.page.evaluate(WRITTEN) if place == "step-picture"}
    assert {"stages 0, 2", "stages 1, 3", "0F0", "2F0", "3B0"} <= texts
    assert "F0" not in texts and not any("…" in text for text in texts)
    opened.page.locator("#step summary").click()
    row = opened.page.locator("#step tbody tr").filter(has_text="forward").first
    row.wait_for()
    assert row.locator("td, th").first.inner_text() == "0"


def test_narrow_bars_of_memory_have_names_that_do_not_touch(visit: Any) -> None:
    prediction = predicted()
    assert prediction.recipe is not None
    opened = visit(page(report(prediction.recipe, prediction)), viewport={"width": 320, "height": 800})
    names: dict[int, list[tuple[float, float]]] = {}
    for place, number, _, start, stop, y in opened.page.evaluate(WRITTEN):
        if place == "memory-roles" and y > 140:  # below the bars
            names.setdefault(number, []).append((start, stop))
    assert len(names) == 2 and all(len(those) > 3 for those in names.values())
    for those in names.values():
        drawn_once = sorted(set(those))
        assert all(before[1] < after[0] for before, after in itertools.pairwise(drawn_once))


def test_a_run_has_its_curves(visit: Any, tmp_path: Path) -> None:
    run = history(a_run(tmp_path / "run"))
    opened = visit(run_page(run))
    shown = opened.page
    assert (
        shown.locator("#series figure").count() == len(run.series)
        and shown.locator("#checkpoints tbody tr").count() == 2
    )
    shown.locator("#series canvas").first.focus()
    for line in ("step 1: 3", "step 2: 2", "step 3: not finite", "step 4: 1"):
        shown.keyboard.press("ArrowRight")
        assert opened.tip()[0] == line
    assert "saved after it" in opened.tip()


def in_time(folder: Path) -> str:
    """The page of a run with a step that was observed, beside one that was predicted to take half as long."""
    slots = [replace(line, slots=line.slots[:1]) for line in STEP.lines]
    predicted = replace(STEP, length=2.0, lines=tuple(slots))
    first = StepInTime(2, replace(STEP, length=8.0), why="of another machine")
    return run_page(history(a_run(folder)), [first, StepInTime(3, STEP, predicted, "a machine")])


def test_a_step_stands_beside_its_prediction_on_one_scale(visit: Any, tmp_path: Path) -> None:
    opened = visit(in_time(tmp_path / "run"), viewport={"width": 390, "height": 800})
    shown = opened.page
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390
    ends = "Object.values(window.meshwright.timePictures).map((one) => one.at({ line: 0, slot: 0 }).x)"
    same, _ = shown.evaluate(ends)
    assert shown.evaluate(ends) == [same, same]  # the same second stands at the same place in both
    shown.get_by_role("button", name="Zoom in").click()
    assert len(set(shown.evaluate(ends))) == 1 and shown.evaluate(ends)[0] != same
    rows = shown.locator("#time-kinds tbody tr").all_inner_texts()
    assert [row.split("\t")[:4] for row in rows if row.startswith("backward")] == [["backward", "0 µs", "1 s", "+1 s"]]
    shown.get_by_label("Observed").select_option(label="step 2 (first, slowest): 8 s")
    assert shown.locator("#time-title").inner_text() == "Step 2 in time"
    assert "of another machine" in shown.locator("#in-time").inner_text()
    assert shown.locator("#in-time canvas").count() == 1 and not shown.locator("#predicted").is_visible()
    assert "8 s" in shown.locator("#time-kinds tbody tr").last.inner_text()
    shown.get_by_label("Observed").select_option(index=1)
    assert (
        shown.locator("#in-time canvas").count() == 2 and shown.locator("#time-title").inner_text() == "Step 3 in time"
    )
    assert shown.locator("#ranks tbody tr").count() == 2 and "3 MiB" in shown.locator("#ranks").inner_text()
    assert "equal; after step 1: 5 parameters" in shown.locator("#verdict").inner_text()


def test_the_keyboard_reads_a_step_of_a_run_aloud(visit: Any, tmp_path: Path) -> None:
    opened = visit(in_time(tmp_path / "run"), color_scheme="dark")
    shown = opened.page
    shown.locator("#measured-picture canvas").focus()
    shown.keyboard.press("ArrowRight")
    assert opened.tip()[0] == "forward of microbatch 0, stage 0"
    assert "all_reduce over tp: 4 KiB, 250 ms" in opened.tip()
    assert any(line.startswith("then sends values to stage 1") for line in opened.tip())
    shown.keyboard.press("ArrowDown")
    assert shown.locator("#spoken").inner_text().startswith("forward of microbatch 0, stage 1")
    shown.get_by_text("measured, as a table").click()
    rows = shown.locator("#time-tables table").locator("tbody tr")
    rows.nth(3).wait_for()  # a table is made once its summary has told that it was opened
    assert rows.count() == 4
    unnamed = shown.evaluate(UNNAMED)
    assert unnamed == [] and shown.evaluate("[...document.querySelectorAll('table')].every((t) => t.caption)")
    shown.emulate_media(media="print")
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.evaluate("document.documentElement.dataset.theme") == "light"
    assert not shown.locator("#time-zoom").is_visible() and shown.locator("#measured-picture canvas").is_visible()


@pytest.mark.parametrize("width", [390, pytest.param(1000, marks=pytest.mark.proof)])
def test_nothing_is_wider_than_the_window(visit: Any, width: int) -> None:
    prediction = predicted()
    assert prediction.recipe is not None
    texts = [page(report(prediction.recipe, prediction)), page(report(CASES["branches, one within another"]))]
    for text in texts:
        shown = visit(text, viewport={"width": width, "height": 800}).page
        assert shown.evaluate("document.documentElement.scrollWidth") <= width


# --- to be looked at --------------------------------------------------------------------------------------------------


def a_plan() -> str:
    """Every view: on several nodes, predicted, with an alarm, beside another plan."""
    prediction = replace(predicted(), per_node=4)
    others = {"other.yaml": replace(prediction, mesh="dp_shard=8")}
    wrong = [Mismatch(3, "blocks.0.up.weight", "rows 4:8", "rows 0:4")]
    assert prediction.recipe is not None
    return page(report(prediction.recipe, prediction, title="a tower", others=others, mismatches=wrong))


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.proof)])
def test_each_view_is_kept_as_a_picture(visit: Any, tmp_path: Path, scheme: str) -> None:
    """In ``build/screenshots``; no picture is blank, and no two views look alike."""
    texts = {
        "plan": a_plan(),
        "parameter": page(report(CASES[FIRST]), rank=4, parameter="h.0.qkv.weight"),
        "branches": page(report(CASES["branches, one within another"])),
        "run": in_time(tmp_path / "run"),
    }
    kept: dict[str, bytes] = {}
    for name, text in texts.items():
        opened = visit(text, color_scheme=scheme)
        kept[f"{name}-{scheme}"] = opened.keep(f"{name}-{scheme}")
        assert opened.blank() == []
        views = opened.page.evaluate("[...document.querySelectorAll('main section[id]')].map((one) => one.id)")
        for view in views if name == "plan" else ():
            kept[view] = opened.keep(f"{name}-{view}-{scheme}", f"#{view}")
        if name == "parameter":
            kept["one parameter"] = opened.keep(f"parameter-picture-{scheme}", "#parameter")
    assert {"mesh", "model", "step", "memory", "communication", "plan"} <= kept.keys()
    assert len(set(kept.values())) == len(kept)


def test_what_is_printed_is_kept(visit: Any, tmp_path: Path) -> None:
    for name, text in {"plan": a_plan(), "run": in_time(tmp_path / "run")}.items():
        opened = visit(text, color_scheme="dark")
        opened.print(f"{name}-print")
        assert (SCREENSHOTS / f"{name}-print.pdf").read_bytes().startswith(b"%PDF")
        opened.page.set_viewport_size({"width": 794, "height": 1123})  # A4
        opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        opened.keep(f"{name}-print")
        assert opened.blank() == []


# --- for everybody ----------------------------------------------------------------------------------------------------


def test_the_keyboard_reaches_a_rank_and_a_box(visit: Any) -> None:
    opened = visit(page(report(CASES["fused, uneven, fsdp and tp of one dim"])))
    opened.page.locator("#mesh-picture canvas").focus()
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("Enter")
    assert opened.page.locator("#rank").input_value() == "1"
    opened.page.locator("#parameter-picture canvas").focus()
    opened.page.keyboard.press("ArrowLeft")
    opened.page.keyboard.press("ArrowRight")
    assert opened.tip() and opened.page.locator("#spoken").inner_text().startswith(opened.tip()[0])
    opened.page.keyboard.press("Escape")
    assert not opened.tip()


def test_what_can_be_clicked_has_a_name(visit: Any) -> None:
    shown = visit(page(report(CASES["branches, one within another"]))).page
    assert shown.evaluate(UNNAMED) == []  # a person who does not see it hears what it is
    assert shown.evaluate(
        "[...document.querySelectorAll('table')].every((t) => t.caption || t.closest('[role=alert]'))"
    )
    assert shown.locator("h1").count() == 1 and shown.locator("main section > h2").count() == 6


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ink_can_be_read_on_its_paper(visit: Any, scheme: str) -> None:
    """The contrast of WCAG 2: at least 4.5 for text, in both schemes, and after the switch."""
    shown = visit(page(report(CASES["branches, one within another"])), color_scheme=scheme).page
    script = """() => { const style = getComputedStyle(document.documentElement);
        const value = (name) => style.getPropertyValue(name).trim();
        const light = (hex) => { const c = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
            .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)); return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]; };
        const ratio = (a, b) => { const [x, y] = [light(value(a)), light(value(b))].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
        return ["--ink", "--muted", "--accent", "--bad", "--good"].flatMap((ink) => ["--back", "--panel"].map((paper) => [ink, paper, ratio(ink, paper)])); }"""
    for _ in range(2):
        for ink, paper, ratio in shown.evaluate(script):
            assert ratio >= 4.5, (ink, paper)
        shown.locator("#theme").click()


def test_what_is_printed_is_light_and_not_wider_than_the_paper(visit: Any) -> None:
    shown = visit(
        page(report(CASES["branches, one within another"])),
        color_scheme="dark",
        viewport={"width": 794, "height": 1123},
    ).page
    dark = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    shown.emulate_media(media="print")
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.evaluate("document.documentElement.dataset.theme") == "light"
    assert shown.evaluate("document.documentElement.scrollWidth") <= 794
    # Browsers leave backgrounds out on paper, if the page does not ask for them: legends, bars and badges are such.
    assert shown.evaluate("getComputedStyle(document.querySelector('.swatch, .bar, .cut')).printColorAdjust") == "exact"
    shown.emulate_media(media="screen")
    shown.evaluate("dispatchEvent(new Event('afterprint'))")
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_an_alarm_is_told_and_no_picture_is_taken_for_what_is_held(visit: Any) -> None:
    wrong = [Mismatch(3, "blocks.0.weight", "rows 4:8", "rows 0:4")]
    opened = visit(page(report(piped(1, 1), mismatches=wrong))).page
    assert opened.get_by_role("alert").inner_text().startswith("This job does not hold what its recipe says")
    assert "rows 4:8" in opened.get_by_role("alert").inner_text()
    for width in (390, 1400, 1800):  # its edge is that of the text
        opened.set_viewport_size({"width": width, "height": 800})
        edges = opened.evaluate(
            "['#alarm', '#mesh'].map((one) => document.querySelector(one).getBoundingClientRect().x)"
        )
        assert edges[0] == pytest.approx(edges[1], abs=1)
    agrees = visit(page(report(piped(1, 1), mismatches=[]))).page
    assert agrees.get_by_role("alert").count() == 0 and "no difference" in agrees.locator("#agrees").inner_text()


def test_names_are_text_and_never_markup(visit: Any) -> None:
    name = "</script><img src=x onerror=alert(1)>.weight"
    recipe = Recipe(Mesh.parse("tp=2"), (LINE(name, (4, 4), "float32"),), notes=("<b>bold</b>",))
    text = page(report(recipe, title="<i>it</i> & co"))
    opened = visit(text).page
    assert opened.locator("h1").inner_text() == "<i>it</i> & co"
    assert opened.locator(".notes li").inner_text() == "<b>bold</b>"
    assert opened.evaluate("window.meshwright.facts.rows[0].label") == name
    assert opened.locator("img").count() == 0


def test_the_page_names_no_address() -> None:
    text = page(report(CASES["branches, one within another"]))
    addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.]+\.\w+", text))
    assert addresses == {"http://www.w3.org"}  # the name space of SVG


def test_ten_thousand_ranks_open_at_once(visit: Any, record_property: Any) -> None:
    text = page(report(large()))
    for _ in range(3):  # so that a moment in which this machine is busy does not count
        opened = visit(text)
        load = opened.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        if load < 2000:
            break
    count = opened.page.evaluate("document.querySelectorAll('*').length")
    frames = opened.page.evaluate(
        """async () => { const times = []; let last = performance.now();
            for (let i = 0; i < 40; i++) { scrollBy(0, 90); await new Promise(requestAnimationFrame);
                const now = performance.now(); times.push(now - last); last = now; }
            return times.sort((a, b) => a - b); }"""
    )
    print(
        f"10,000 ranks: open after {load:.0f} ms, {count} elements, frame {frames[20]:.0f} ms (median), {frames[-1]:.0f} ms (most)"
    )
    record_property("load_ms", load)
    assert load < 2000
    assert count < 3000
    shards = shard_map(large())
    for rank, name in itertools.product((0, 4711, 9999), ("layers.0.q.weight", "layers.79.down.weight")):
        opened.page.evaluate(f"window.meshwright.chooseRank({rank})")
        row = next(i for i, row in enumerate(shards.rows) if name in row.names)
        held = opened.page.evaluate(f"window.meshwright.slicesOf(window.meshwright.facts.rows[{row}], {rank})")
        assert held == [[list(r) for r in ranges] for ranges in shards.recipe.held(shards.recipe.by_name[name], rank)]
    assert opened.point("meshPicture", "4711")[0] == "rank 4711"
