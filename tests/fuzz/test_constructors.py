"""Random constructors, recorded without memory for their weights: each value is that of plain torch."""

from __future__ import annotations

import pytest
import torch
from constructors import REFUSED, Constructor
from torch import Tensor, nn

from meshwright.deferred import record

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of functions that do not fit


def values(module: nn.Module) -> dict[str, Tensor]:
    kept = {name: value[0] for name, value in vars(module).items() if name.startswith("kept")}
    return {**dict(module.named_buffers()), **kept}


def same(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding: a sum rounds by how its tensor is aligned in memory."""
    rounding = 2e-3 if a.dtype in (torch.float16, torch.bfloat16) else 1e-5
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=rounding, atol=1e-6, equal_nan=True)


def judge(seed: int, small: int) -> bool:
    """Whether the program could be judged: what torch refuses when it runs, it refuses when it runs in a replay."""
    build = Constructor(seed)
    torch.manual_seed(3)
    plain = build()
    state, refused = torch.get_rng_state(), build.refused
    try:
        recorded = record(build, seed=3, small=small)
    except REFUSED:
        if not refused:
            raise
        return False
    if build.refused != refused:
        return False
    assert torch.equal(torch.get_rng_state(), state), f"seed {seed}, small {small}: other random numbers afterwards"
    found = {
        **values(recorded.module),
        **{n: recorded.value(n) for n, _ in plain.named_parameters(remove_duplicate=False)},
    }
    expected = {**values(plain), **dict(plain.named_parameters(remove_duplicate=False))}
    wrong = [name for name, value in expected.items() if not same(value.detach(), found[name])]
    assert not wrong, f"seed {seed}, small {small}: {wrong}"
    return True


@pytest.mark.parametrize("small", [0, 60])
@pytest.mark.parametrize("begin", range(0, 100, 50))
def test_random_constructors(begin: int, small: int) -> None:
    assert sum(judge(seed, small) for seed in range(begin, begin + 50)) >= 40


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("small", [0, 60, 500])
def test_many_random_constructors(small: int) -> None:
    assert sum(judge(seed, small) for seed in range(1000, 5000)) >= 3200
