"""The drawings of the documentation: the files are what ``make gallery`` makes, and show what ranks hold."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

import meshwright as mw
from meshwright.draw.parameters import elements
from meshwright.draw.svg import model_svg, schedule_svg
from meshwright.schedule import make_schedule

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
GALLERY = ROOT / "docs" / "gallery"


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module("gallery")
    for name in ("gallery", "demo", "branches"):
        sys.modules.pop(name, None)


def test_the_files_are_what_the_command_makes(gallery: ModuleType) -> None:
    assert {file.stem for file in GALLERY.glob("*.svg")} == set(gallery.DRAWINGS)
    changed = [
        name for name, draw in gallery.DRAWINGS.items() if draw() != (GALLERY / f"{name}.svg").read_text("utf-8")
    ]
    assert not changed, "run `make gallery`"


def test_a_card_shows_the_share_that_its_rank_holds(gallery: ModuleType) -> None:
    plan = {"mesh": {"dp_replicate": 2, "dp_shard": 2, "tp": 3}}  # 96 rows over 3, what is left over 2; twice
    shards = mw.shard_map(mw.make_recipe(gallery.MLP, plan, {"x": torch.zeros(12, 48)}))
    cards: list[list[float]] = []  # for each parameter of each card: its area, then those of what is coloured in it
    for rect in ElementTree.fromstring(model_svg(shards, "drawn")).iter(f"{SVG}rect"):
        area = float(rect.get("width", "0")) * float(rect.get("height", "0"))
        if rect.get("class") == "ghost":
            cards.append([area])
        elif rect.findtext(f"{SVG}title", "").startswith("rank "):
            cards[-1].append(area)
    expected = [
        elements(shards.slices(facts.name, rank)) / prod(facts.shape)
        for rank in range(12)
        for facts in shards.parameters.values()
    ]
    assert [sum(parts) / area for area, *parts in cards] == pytest.approx(expected, rel=0.05)  # tenths of a pixel


def test_what_no_one_could_read_is_refused() -> None:
    shards = mw.shard_map(
        mw.make_recipe(lambda: torch.nn.Linear(128, 128), {"mesh": {"dp_shard": 128}}, torch.zeros(128, 128), torch.sum)
    )
    with pytest.raises(ValueError, match="at most 64 ranks"):
        model_svg(shards, "too many")


def test_what_has_no_parameters_has_cards_without_any() -> None:
    recipe = mw.make_recipe(torch.nn.Tanh, {"mesh": {"dp_replicate": 2}}, torch.zeros(4, 4), torch.sum)
    drawn = model_svg(mw.shard_map(recipe), "nothing to divide")
    assert "rank 1" in drawn and "ghost" not in drawn.partition("</style>")[2]


def test_a_schedule_is_drawn_action_by_action() -> None:
    drawn = ElementTree.fromstring(schedule_svg(make_schedule("1f1b", 2, 2, 3), "drawn"))
    said = [title.text for title in drawn.iter(f"{SVG}title")]
    assert said.count("stage 1, microbatch 2, forward") == 1
    assert len([s for s in said if s and s.endswith("backward")]) == 6
