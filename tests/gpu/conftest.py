"""Tests on a GPU: ``make gpu``. Where there is none they are collected and skipped.

``MESHWRIGHT_TEST_DEVICE=cpu`` runs on a CPU what does not ask for a GPU, which shows that the tests themselves work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshwright.workers.pool import LocalWorkers, local_workers

DEVICE = os.environ.get("MESHWRIGHT_TEST_DEVICE", "cuda")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are marked ``gpu``."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if DEVICE == "cuda" and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture
def device() -> torch.device:
    """The device of the tests."""
    return torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A GPU, for what a CPU does not have."""
    if device.type == "cpu":
        pytest.skip("asks for a GPU")
    return device


@pytest.fixture(scope="session")
def pool() -> Iterator[LocalWorkers]:
    """Processes that share the GPU, over gloo, where there is one; each has its own where there are four."""
    with local_workers(4, device=DEVICE, timeout=300.0) as workers:
        yield workers


@pytest.fixture(scope="session")
def alone() -> Iterator[LocalWorkers]:
    """One process: a world of one rank, over NCCL on a GPU."""
    with local_workers(1, device=DEVICE, timeout=300.0) as workers:
        yield workers
