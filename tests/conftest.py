"""What all tests share: one pool of worker processes, which start when a test first needs them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from meshwright.workers.pool import LocalWorkers, local_workers
from selection import mark_long_tests

# The same examples on every run: what passes on one machine passes on the next, which
# may be slower. `--hypothesis-seed` tries others.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves the tests of ``proof.txt`` to ``make proof``."""
    mark_long_tests(items)


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A test that makes a mesh in this process leaves its process group, and the next may want to be a rank of another world."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def what_lives_on_is_not_looked_through() -> Iterator[None]:
    """Tests and packages are a million objects, which every collection of the garbage collector would look through."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(scope="session")
def workers(request: pytest.FixtureRequest) -> Iterator[LocalWorkers]:
    # Forked workers start sooner. In `make proof` each is an interpreter of its own, as under torchrun: they hash strings
    # differently, so that what follows from the order of a set differs between ranks.
    quick = request.config.option.markexpr == "not proof"
    with local_workers(8, start_method="fork" if quick else "spawn") as pool:
        yield pool


@pytest.fixture(scope="session")
def fresh() -> Iterator[LocalWorkers]:
    """Workers for jobs that change what DTensors do, and that no job of other tests is to live beside: a test's jobs end with
    it."""
    with local_workers(4, start_method="fork") as pool:
        yield pool


@pytest.fixture
def pooled(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the workers of the session."""

    @contextmanager
    def shared(given: object, *, threads: int = 1) -> Iterator[LocalWorkers]:
        yield workers

    monkeypatch.setattr("meshwright.cli.processes.workers", shared)
