"""Snapshots of what a module is given: copies that later writes do not reach, however a class wants to be copied."""

from __future__ import annotations

import copyreg
from abc import ABC
from typing import Any

import pytest
import torch

from meshwright.calls.changes import holders_in
from meshwright.calls.structure import snapshot, tensors_of


class Layer:
    """As a layer of a cache: Python decides how it is copied."""

    def __init__(self) -> None:
        self.keys, self.sizes = torch.zeros(2), [1, 2]


class OfAbstract(Layer, ABC):
    """As the layers of transformers' caches."""


class OwnCopy(Layer):
    def __copy__(self) -> OwnCopy:
        new = OwnCopy()
        new.how = "copy"
        return new


class OwnState(Layer):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "how": "copy"}


class OwnReduce(Layer):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self)


class OwnSetState(Layer):
    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, how="copy")


class OwnNew(Layer):
    def __new__(cls) -> OwnNew:
        new = super().__new__(cls)
        new.how = "new"
        return new


class Registered(Layer):
    """How it is copied is registered beside the class."""


def _reduced(value: Any) -> Any:
    return type(value), (), {**vars(value), "how": "copy"}


class Slotted:
    __slots__ = ("keys", "sizes")

    def __init__(self) -> None:
        self.keys, self.sizes = torch.zeros(2), [1, 2]


copyreg.pickle(Registered, _reduced)
KINDS = [Layer, OfAbstract, OwnCopy, OwnState, OwnReduce, OwnSetState, OwnNew, Registered, Slotted]


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_another_object_with_containers_of_its_own(kind: type) -> None:
    layer = kind()
    copied = snapshot({"layers": [layer]}, torch.clone)["layers"][0]
    layer.keys.add_(1)
    layer.sizes.append(3)
    assert type(copied) is kind and copied is not layer
    assert copied.keys.tolist() == [0, 0] and copied.sizes == [1, 2]
    layer.keys = torch.ones(1)
    assert copied.keys.shape == (2,)


@pytest.mark.parametrize("kind", [OwnCopy, OwnState, OwnReduce, OwnSetState, Registered])
def test_a_class_that_says_how_it_is_copied_is_copied_so(kind: type) -> None:
    assert snapshot(kind(), torch.clone).how == "copy"


def test_an_object_at_two_places_is_one_object_in_the_snapshot() -> None:
    layer = Layer()
    first, second = snapshot((layer, {"last": layer}), torch.clone)
    assert first is second["last"] is not layer


@pytest.mark.parametrize("kind", [Layer, OfAbstract])
def test_a_class_that_leaves_copying_to_python_is_not_asked(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = kind()
    monkeypatch.setattr("copy.copy", lambda value: pytest.fail("copy.copy was called"))
    assert snapshot(layer, torch.clone) is not layer


class Names:
    """Holds a Python module, as ``self.np = numpy`` does, whose namespace leads everywhere, and to itself."""

    def __init__(self) -> None:
        self.library, self.x = torch, torch.ones(2)


def test_the_namespace_of_a_python_module_is_not_looked_into() -> None:
    names = Names()
    assert tensors_of(names)[0] is names.x and len(tensors_of(names)) == 1
    assert list(holders_in(names).values()) == [names]
