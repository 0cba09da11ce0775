"""The examples in docstrings say what is so. Only modules that have some are imported."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import meshwright

ROOT = Path(meshwright.__file__).parent.parent
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(ROOT.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0, "there are some, and none was found: are they in a docstring?"
    assert result.failed == 0, "see the output"
