"""What all tests share: one pool of worker processes, which start when a test first needs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.run.workers import LocalWorkers, local_workers


@pytest.fixture(scope="session")
def workers() -> Iterator[LocalWorkers]:
    with local_workers(8) as pool:
        yield pool
