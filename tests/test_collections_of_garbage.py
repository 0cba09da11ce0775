"""Python's collector, while large packages are imported."""

from __future__ import annotations

import gc

import pytest

from meshwright import target
from meshwright.garbage import rare_garbage_collection


def test_the_collector_is_as_it_was_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError), rare_garbage_collection():
        assert gc.get_threshold() > before
        raise ValueError
    assert gc.get_threshold() == before


def test_transformers_is_imported_with_few_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    before, within = gc.get_threshold(), []

    def read(*_: object) -> tuple[object, object]:
        within.append(gc.get_threshold())
        return None, ()

    monkeypatch.setattr(target, "hf_target", read)
    target.load_target("hf:gpt2")
    assert within[0] > before
    assert gc.get_threshold() == before
