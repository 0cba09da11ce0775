"""``make gallery``: the drawings of the documentation, made by this library's own renderer from real plans.

    python examples/gallery.py [DIR]        default docs/gallery; a test holds that the files there are what this makes

A drawing needs a plan and a model, and no process: 8 ranks, or 64, are values. Each file is the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import branches
import demo
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.draw.svg import model_svg, schedule_svg
from meshwright.schedule import make_schedule

FOLDER = Path(__file__).parents[1] / "docs" / "gallery"


class MLP(nn.Module):
    """Two matrices: the smallest model in which every kind of division can be seen."""

    def __init__(self, width: int = 48, hidden: int = 96) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def drawn(title: str, build: Callable[[], nn.Module], plan: dict[str, Any], batch: Any) -> str:
    return model_svg(mw.shard_map(mw.make_recipe(build, plan, batch)), title)


def of_an_mlp(title: str, width: int = 48, **axes: int) -> str:
    return drawn(title, lambda: MLP(width), {"mesh": axes}, {"x": torch.zeros(12, width)})


def of_a_decoder(title: str) -> str:
    rows = torch.zeros(demo.ROWS, demo.LENGTH, dtype=torch.long)
    return drawn(title, demo.build, demo.PLAN, demo.rows(rows))


def of_branches(title: str) -> str:
    return drawn(title, branches.Network, branches.PLANS["2 ranks | 6 ranks, tensor parallel each"], branches.data())


def of_a_schedule(title: str, name: str, stages: int = 4) -> str:
    return schedule_svg(make_schedule(name, 4, stages, 6), title)


DRAWINGS: dict[str, Callable[[], str]] = {
    "2x2x2": lambda: of_a_decoder("One model, unedited, on 2 × 2 × 2 ranks"),
    "ddp": lambda: of_an_mlp("DDP: every rank holds everything", dp_replicate=4),
    "fsdp": lambda: of_an_mlp("FSDP: every rank holds a share of the rows", dp_shard=4),
    "hsdp": lambda: of_an_mlp("HSDP: two copies, each shared by four ranks", dp_replicate=2, dp_shard=4),
    "tp": lambda: of_an_mlp("Tensor parallel: rows of the first matrix, columns of the second", tp=4),
    "2d": lambda: of_an_mlp("FSDP × tensor parallel", dp_shard=2, tp=4),
    "uneven": lambda: of_an_mlp("Sizes that do not divide: 50 over 4 ranks", 50, dp_shard=4),
    "pp": lambda: of_an_mlp("Pipeline: every rank holds some of the layers", pp=2),
    "branches": lambda: of_branches("Two blocks at the same time: on ranks 0–1, and on ranks 2–7"),
    "gpipe": lambda: of_a_schedule("GPipe: all forwards, then all backwards", "gpipe"),
    "1f1b": lambda: of_a_schedule("1F1B: a backward as soon as there is one", "1f1b"),
    "interleaved": lambda: of_a_schedule("Interleaved: two stages a rank", "interleaved", stages=8),
    "zero_bubble": lambda: of_a_schedule("Zero bubble: gradients of weights fill the gaps", "zero_bubble"),
}


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(f"{name}.svg")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
