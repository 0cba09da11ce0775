"""What is done around a module's call is done once, in one order, and leaves the module what it is."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread, get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.calls.hook import Forward, ModuleCalls, wrapped


class Block(nn.Module):
    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.linear, self.told = nn.Linear(2, 2), told

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.told.append("own")
        return self.linear(x) * scale


class Walk:
    """Does with every call of ``block`` what it is told to; runs all others."""

    def __init__(self, told: list[str], does: str) -> None:
        self.thread, self.told, self.does = get_ident(), told, does

    @contextmanager
    def on(self) -> Iterator[None]:
        yield

    def call(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        if not isinstance(forward.module, Block):
            return forward.run(*args, **kwargs)
        self.told.append(f"walk: {self.does} {forward.name}")
        return args[0] if self.does == "stub" else getattr(forward, self.does)(*args, **kwargs)


def layers(told: list[str]) -> dict[str, Any]:
    """All that there is, around a module that is called ``0``."""

    def shard(block: str, args: Any, kwargs: Any) -> Any:
        told.append("shard")
        return (args[0][:1], *args[1:]), kwargs

    def recompute(forward: Callable[..., Any]) -> Callable[..., Any]:
        def again(*args: Any, **kwargs: Any) -> Any:
            told.append("recompute")
            return forward(*args, **kwargs)

        return again

    @contextmanager
    def within() -> Iterator[None]:
        told.append("within")
        yield

    return {"blocks": ["0"], "shard_inputs": shard, "recomputed": {"0": recompute}, "within": {"0": within}}


INNER = ["within", "own"]


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        (None, ["shard", "recompute", *INNER]),
        ("run", ["shard", "walk: run 0", "recompute", *INNER]),
        ("open", ["shard", "walk: open 0", *INNER]),
        ("stub", ["shard", "walk: stub 0"]),
    ],
)
def test_what_is_done_around_a_call_is_done_in_one_order(does: str | None, expected: list[str]) -> None:
    told: list[str] = []
    model = nn.Sequential(Block(told), nn.Linear(2, 2))
    seen: list[int] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    calls = ModuleCalls(model, followed=True, **layers(told))
    model[0].register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    if does is None:
        result = model(torch.ones(3, 2))
    else:
        with calls.following(Walk(told, does)):
            result = model(torch.ones(3, 2))
    assert told == expected
    assert len(result) == 1 and seen == [3, 3]  # hooks are outside, whenever they were registered
    told.clear()
    model(torch.ones(3, 2))
    assert told == ["shard", "recompute", *INNER]  # nothing follows it any more


def test_a_call_in_another_thread_is_not_followed() -> None:
    told: list[str] = []
    model = nn.Sequential(Block(told))
    calls = ModuleCalls(model, followed=True)
    with calls.following(Walk(told, "stub")):
        thread = Thread(target=model, args=(torch.ones(1, 2),))
        thread.start()
        thread.join()
    assert told == ["own"]


def test_a_module_around_which_nothing_is_done_keeps_its_forward() -> None:
    told: list[str] = []
    model = nn.Sequential(Block(told), nn.Linear(2, 2))
    ModuleCalls(model, **layers(told))
    assert [name for name, m in model.named_modules() if "forward" in vars(m)] == ["0"]


def test_names_values_and_signatures_stay_as_they_are() -> None:
    plain, model = (nn.Sequential(Block([]), nn.Linear(2, 2)) for _ in range(2))
    ModuleCalls(model, followed=True, **layers([]))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    assert inspect.signature(model[0].forward) == inspect.signature(plain[0].forward)
    assert model[0].forward.__name__ == "forward"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_forwards_of_its_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    told: list[str] = []
    model = nn.Sequential(Block(told), nn.Linear(2, 2))
    calls = ModuleCalls(model, followed=True)
    other = copied(model)
    assert isinstance(other, nn.Sequential)
    with torch.no_grad():
        other[0].linear.weight.zero_()
        other[0].linear.bias.zero_()
    x = torch.ones(1, 2)
    with calls.following(Walk(told, "stub")):
        assert torch.equal(model[0](x), x)
        assert torch.equal(other[0](x), torch.zeros(1, 2))  # its own parameters; and no walk follows it


def test_a_wrapped_model_is_afterwards_what_it_was() -> None:
    model = nn.Sequential(Block([]), nn.Linear(2, 2))
    ModuleCalls(model, within=layers([])["within"])
    before = {name: vars(m).get("forward") for name, m in model.named_modules()}
    with pytest.raises(ValueError, match="a model's own"), wrapped(model, followed=True, blocks=["0"]):
        assert all("forward" in vars(m) for m in model.modules())
        raise ValueError("a model's own")
    assert {name: vars(m).get("forward") for name, m in model.named_modules()} == before
