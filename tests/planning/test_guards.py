"""Guards: a forward without values goes on where the model would end with an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.planning.guards import raises_if
from meshwright.planning.shadow import Shadow
from meshwright.workers.pool import LocalWorkers


def bare(t: Tensor) -> None:
    if t.any():
        raise ValueError


def asserted(t: Tensor) -> None:
    exec('assert not t.any(), "none"')  # as text: pytest rewrites assertions of its own files


def in_words(t: Tensor) -> None:
    if bool(t.any()):
        text = f"one of {t.shape} is set"
        raise ValueError(text)


def either(t: Tensor) -> None:
    if t.isnan().any() or t.isinf().any():
        raise ValueError("not finite")


def both(t: Tensor) -> None:
    if t.dim() == 1 and t.any().item():
        raise ValueError


def within_torch(t: Tensor) -> None:
    nn.functional.gaussian_nll_loss(t, t, t)  # which raises if a variance is below 0


def expected_true(t: Tensor) -> None:
    assert t.all()
    if not t.any():
        raise ValueError


def otherwise(t: Tensor) -> bool:
    """Goes on in both cases."""
    if t.any():
        return True
    raise AssertionError


def later(t: Tensor) -> bool:
    found = t.any()
    seen = bool(found)
    return seen


@pytest.mark.parametrize("guarded", [bare, asserted, in_words, either, both, within_torch, expected_true])
def test_no_answer_ends_a_forward(guarded: Any) -> None:
    with Shadow():
        guarded(torch.empty(3, device="meta"))


@pytest.mark.parametrize("read", [otherwise, later])
def test_other_reads_are_true(read: Any) -> None:
    with Shadow():
        assert read(torch.empty(3, device="meta"))


def test_code_that_reads_nothing_has_no_guard() -> None:
    assert not raises_if(True) and not raises_if(False)


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if torch.isnan(h).any():
            raise FloatingPointError("the first layer")
        loss = self.second(h).square().mean()
        if not torch.isfinite(loss):
            raise FloatingPointError("the loss")
        return loss


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_a_model_that_checks_its_numbers_is_sharded_and_staged_as_any_other(mesh: str, workers: LocalWorkers) -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    recipe = mw.make_recipe(Guarded, {"mesh": mesh}, batch=(x,))
    assert not recipe.notes
    assert len(recipe.stages) == (2 if mesh == "pp=2" else 0)
    assert any(isinstance(line.tp, mw.Shard) for line in recipe.parameters) == (mesh == "tp=2")
    assert mw.check(Guarded, (x,), {"mesh": mesh}, loss=lambda loss: loss, workers=workers, dtype=torch.float64).passed


def not_finite() -> str:
    x = torch.randn(4, 4)
    job = mw.parallelize(Guarded, {"mesh": "pp=2"}, batch=(x,))
    try:
        job.step((x * torch.nan,))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_guard_that_raises_in_a_step_is_an_error_of_all_ranks(workers: LocalWorkers) -> None:
    errors = workers.run(not_finite, ranks=2, timeout=60)
    assert all("FloatingPointError: the first layer" in error for error in errors)
    assert sorted(error.partition(":")[0] for error in errors) == ["RankError", "StageError"]


def test_what_a_model_that_checks_its_numbers_costs_is_predicted() -> None:
    x = torch.randn(4, 4)
    assert float(mw.predict(Guarded, (x,), "tp=2", hardware="a100-80").seconds) > 0
