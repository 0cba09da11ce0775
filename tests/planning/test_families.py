"""Families: what is repeated is decided as one; what only has a digit in its name is decided by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.planning.families import families


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(x)))


def grouped(model: nn.Module) -> list[set[str]]:
    """The names of parameters by family; biases left out."""
    found: dict[str, set[str]] = {}
    for name, family in families(model, [n for n, _ in model.named_parameters() if "bias" not in n]).items():
        found.setdefault(family, set()).add(name.removesuffix(".weight"))
    return list(found.values())


def test_blocks_of_a_list_and_of_a_sequence_are_repeated() -> None:
    for blocks in (nn.ModuleList([Mlp(), Mlp()]), nn.Sequential(Mlp(), Mlp())):
        assert grouped(blocks) == [{"0.fc1", "1.fc1"}, {"0.fc2", "1.fc2"}]


def test_blocks_of_another_structure_are_another_family() -> None:
    blocks = nn.ModuleList([Mlp(8), Mlp(6), Mlp(8), Mlp(6)])
    assert grouped(blocks) == [{"0.fc1", "2.fc1"}, {"0.fc2", "2.fc2"}, {"1.fc1", "3.fc1"}, {"1.fc2", "3.fc2"}]


def test_steps_of_a_sequence_are_not_repeated_and_layers_of_a_list_are() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    assert grouped(nn.Sequential(*layers)) == [{"0"}, {"1"}]
    assert grouped(nn.ModuleList(layers)) == [{"0", "1"}]
    assert grouped(nn.ParameterList([torch.ones(3, 2), torch.ones(3, 2), torch.ones(4)])) == [{"0", "1"}, {"2"}]


def test_numbered_attributes_are_repeated_where_they_are_blocks() -> None:
    model = nn.Module()
    model.block1, model.block2, model.conv1, model.conv2 = Mlp(), Mlp(), nn.Linear(8, 8), nn.Linear(8, 8)
    model.w1, model.w2 = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
    blocks = [{"block1.fc1", "block2.fc1"}, {"block1.fc2", "block2.fc2"}]
    assert grouped(model) == [{"w1"}, {"w2"}, *blocks, {"conv1"}, {"conv2"}]


class SortedHead(nn.Module):
    """Two layers that can be sharded, and a third whose output is sorted: for that, its shards would be gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> Any:
        h = self.fc2(F.gelu(self.fc1(x)))
        return SimpleNamespace(loss=self.fc3(h).sort(-1).values.square().mean())


def test_a_layer_whose_cut_would_be_gathered_leaves_the_other_numbered_ones_cut() -> None:
    recipe = mw.make_recipe(SortedHead, {"mesh": {"tp": 2}}, {"x": torch.ones(4, 16)})
    weights = {name: str(p.tp) for name, p in recipe.by_name.items() if name.endswith("weight")}
    assert weights == {"fc1.weight": "Shard(0)", "fc2.weight": "Shard(1)", "fc3.weight": "Replicate"}
