"""What `make test` leaves to `make proof`."""

from __future__ import annotations

import re

import pytest

from selection import TESTS, line_of, long_tests


def test_every_line_of_the_list_is_a_test() -> None:
    for line in long_tests():
        place, _, case = line.partition("::")
        assert re.search(rf"^def {case.partition('[')[0]}\(", (TESTS / place).read_text("utf-8"), re.MULTILINE), line


def test_a_listed_case_is_run_by_the_proof_and_by_nothing_else(request: pytest.FixtureRequest) -> None:
    collected = {line_of(item): item for item in request.session.items}
    tests = {line.partition("[")[0] for line in collected}
    listed = [line for line in long_tests() if line in collected or line in tests]
    if request.config.option.markexpr == "not proof":
        assert not listed
    elif not any("::" in argument for argument in request.config.args):
        assert listed == [line for line in long_tests() if line.partition("[")[0] in tests]  # none has another name now
