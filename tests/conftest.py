"""What all tests share: one pool of worker processes, which start when a test first needs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from meshwright.run.workers import LocalWorkers, local_workers

# The same examples on every run: what passes on one machine passes on the next, which
# may be slower. `--hypothesis-seed` tries others.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def workers() -> Iterator[LocalWorkers]:
    with local_workers(8) as pool:
        yield pool
