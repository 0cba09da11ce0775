"""Patterns of made-up tensors: what differs is told apart, and noise is no pattern."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.recording.assembly import assemble
from meshwright.recording.causes import CAUSES, PAGE
from meshwright.recording.diagnosis import Facts, grouped
from meshwright.recording.folder import RankValue
from meshwright.recording.pattern import Pattern, pattern_of
from meshwright.recording.tolerance import tolerance_of
from meshwright.recording.verdict import TensorDifference

E = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TOLERANCE = tolerance_of(["float64"], 3.0)
SIZES = [2, 4]


def rolled(dim: int, count: int) -> Tensor:
    chunks = list(E.chunk(count, dim))
    return torch.cat([*chunks[1:], chunks[0]], dim)


def blocks(*factors: float) -> Tensor:
    return torch.cat([k * block for k, block in zip(factors, E.chunk(len(factors), 0), strict=True)])


@pytest.mark.parametrize(
    ("actual", "kind", "told"),
    [
        (E, "same", {}),
        (E * (1 + 1e-11), "same", {}),
        (E * 0.25, "scaled", {"factor": 0.25}),
        (E * 1.01, "scaled", {"factor": 1.01}),
        (torch.zeros_like(E), "zeros", {}),
        (E.T, "transposed", {}),
        (rolled(0, 2), "order", {"dim": 0, "order": (1, 0)}),
        (rolled(1, 4), "order", {"dim": 1, "order": (1, 2, 3, 0)}),
        (rolled(0, 12), "order", {"dim": 0, "order": (*range(1, 12), 0)}),  # fused: 3 blocks of each of 4 ranks
        (torch.cat([E[:6] + E[6:]] * 2), "block_sums", {"dim": 0, "factor": 1}),
        (torch.cat([sum(E.chunk(4, 1)) / 4] * 4, 1), "block_sums", {"dim": 1, "factor": 0.25}),
        (blocks(1, 1, 2, 1), "blocks", {"dim": 0, "factors": (1, 1, 2, 1)}),
        (blocks(1, 0), "blocks", {"dim": 0, "factors": (1, 0)}),
        (torch.cat([E[:6], E[6:].sin()]), "block_wrong", {"dim": 0, "factors": (1, None)}),
        (E.sin(), "other", {}),
        (E + 3e-3 * E.abs().max() * torch.sign(rolled(0, 3)), "rounding", {}),
        (E.masked_fill(E > 2, float("nan")), "not_finite", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pattern(actual: Tensor, kind: str, told: dict[str, object]) -> None:
    found = pattern_of(actual, E, TOLERANCE, SIZES)
    assert found.kind == kind
    for name, value in told.items():
        assert getattr(found, name) == (
            value if name in ("order", "dim") or value == (1, None) else pytest.approx(value, rel=1e-6)
        )


def test_noise_in_a_gradient_that_is_zero_is_the_same() -> None:
    noise = 1e-12 * torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert pattern_of(noise[0], noise[1], tolerance_of(["float64"], 1.0), SIZES).same


@pytest.mark.parametrize(
    ("parts", "kind", "note"),
    [
        ([E, E + 1e-13], "same", "last bits"),
        ([0.3 * E, 0.7 * E], "summands", ""),
        ([1.5 * E, 0.5 * E], "unaveraged", ""),
        ([E, 2 * E], "some_ranks", ""),
        ([E.sin(), E.cos()], "replicas", ""),
        ([*E.chunk(2, 0)], "same", "along dim 0"),
        ([*E.chunk(4, 1)], "same", "along dim 1"),
        ([E[:5], E[5:7], E[7:]], "same", "along dim 0"),
        ([*reversed(E.chunk(2, 0))], "order", "along dim 0"),
        ([2 * part for part in E.chunk(2, 1)], "scaled", "along dim 1"),
        ([E.flatten()[:100], E.flatten()[100:]], "same", "flat shards"),
        ([E.chunk(2, 0)[1]], "one_share", ""),
        ([E[:5]], "shape", ""),
        ([E[:, :5].T, E[:, :3]], "shape", ""),
    ],
)
def test_values_of_several_ranks(parts: list[Tensor], kind: str, note: str) -> None:
    found = assemble([RankValue((rank,), part) for rank, part in enumerate(parts)], E, TOLERANCE, SIZES)
    assert found.pattern.kind == kind and note in found.note


def test_the_transpose_of_a_tensor_that_is_no_square() -> None:
    wide = E[:5]
    assert assemble([RankValue((0, 1), wide.T)], wide, TOLERANCE, SIZES).pattern.kind == "transposed"


@pytest.mark.parametrize(
    ("factor", "axes", "every", "key"),
    [
        (4.0, {"dp": 4}, True, "summed_over_data"),
        (0.25, {"fsdp": 4}, False, "averaged_twice"),
        (2.0, {"tp": 2}, True, "counted_over_tensor"),
        (2.0, {"dp": 2, "tp": 2}, True, "summed_over_data"),
        (2.0, {"dp": 2, "tp": 2}, False, "counted_over_tensor"),
        (0.5, {"dp": 2, "tp": 2}, False, "divided_over_tensor"),
        (2.01, {"ranks": 2}, True, "summed_over_data"),
        (8.0, {"dp": 2, "tp": 4, "dp × tp": 8}, True, "summed_over_data"),
        (0.9, {"dp": 2}, True, "scaled_alike"),
        (0.9, {"dp": 2}, False, "scaled"),
        (-1.0, {"dp": 2}, True, "negated"),
    ],
)  # fmt: skip
def test_the_meaning_of_a_factor(factor: float, axes: dict[str, int], every: bool, key: str) -> None:
    wrong = [TensorDifference("gradients", name, Pattern("scaled", 1.0, factor)) for name in "ab"]
    [group] = grouped("gradients", wrong, 2 if every else 5, Facts(axes))
    assert group.key == key and group.says


def test_factors_that_noise_moves_are_one_cause() -> None:
    wrong = [
        TensorDifference("gradients", name, Pattern("scaled", 1.0, k)) for name, k in (("a", 0.1244), ("b", 0.1256))
    ]
    [group] = grouped("gradients", wrong, 2, Facts({"dp": 8}))
    assert len(group.wrong) == 2


# --- the table --------------------------------------------------------------------------------------------------------

TESTS = Path(__file__).parent
ROOT = TESTS.parents[1]
WORDS = {
    "factor": "k", "axis": "an axis", "size": "n", "ranks": "ranks 0, 1", "blocks": "1 : k", "dim": "d", "order": "1 0",
    "share": "1 of n along dim d", "counts": "5, 3",
}  # fmt: skip


def line(key: str) -> str:
    """A cause's line in the document."""
    cause = CAUSES[key]
    return f"| `{key}` | {cause.says.format_map(WORDS)} | {'; '.join(cause.look)} |"


@pytest.mark.parametrize("key", CAUSES)
def test_every_cause_is_shown_by_a_test_and_explained(key: str) -> None:
    told = "".join(file.read_text(encoding="utf-8") for file in TESTS.glob("test_*.py"))
    assert f'"{key}"' in told
    assert line(key) in (ROOT / PAGE).read_text(encoding="utf-8").splitlines(), line(key)
