"""Which tests `make test` leaves to `make proof`: those that are marked `proof`, and those of `proof.txt`."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def long_tests() -> list[str]:
    """The lines of ``proof.txt``: tests, and cases of tests, that take long."""
    lines = (TESTS / "proof.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def line_of(item: pytest.Item) -> str:
    """The line by which ``proof.txt`` names a case of a test."""
    place = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else item.path.name
    return f"{place}::{item.nodeid.partition('::')[2]}"


def mark_long_tests(items: list[pytest.Item]) -> None:
    """Marks the tests of ``proof.txt`` `proof`."""
    long = set(long_tests())
    for item in items:
        if not long.isdisjoint((line_of(item), line_of(item).partition("[")[0])):
            item.add_marker(pytest.mark.proof)
