"""Blocks that leave values in containers and objects among their arguments, as a cache of keys, over two stages, in one process."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import WIDTH
from staged import Staged, alone, cut_at, differences
from test_staged_programs import batches, one_thread
from torch import Tensor, nn

from meshwright.calls.changes import Holders, make_changes
from meshwright.calls.stage import RUN, STUB, StageProgram
from meshwright.errors import PlanError


class Layer:
    """What a cache has of a block."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.length = 0

    def update(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 0)
        self.length += len(keys)
        return self.keys


class Cache:
    def __init__(self, depth: int) -> None:
        self.layers = [Layer() for _ in range(depth)]
        self.others: list[Any] = []
        self.by_name: dict[Any, Any] = {"spare": 1.5}
        self.queue: deque[Any] = deque()
        self.kinds: set[str] = set()
        self.seen = 0


class Block(nn.Module):
    def __init__(self, number: int, kind: str) -> None:
        super().__init__()
        self.number, self.kind = number, kind
        self.key, self.out = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, batch: Tensor, cache: Any) -> Tensor:
        keys = torch.tanh(self.key(x))
        keys = getattr(self, self.kind)(keys, batch, cache)
        return x + self.out(keys)

    def layer(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        """As transformers' caches: each block has a layer of its own."""
        return cache.layers[self.number].update(keys)

    def earlier_layer(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        """Each block uses what the block before left."""
        keys = cache.layers[self.number].update(keys)
        return keys if self.number == 0 else keys * cache.layers[self.number - 1].keys

    def new_layer(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        cache.others.append(Layer())
        keys = cache.others[-1].update(keys)
        return keys + len(cache.others) + cache.others[0].keys

    def list_of_all(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        cache.others.append(keys)
        return torch.stack(list(cache.others)).sum(0)

    def replaced_item(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        cache.others[:] = [keys, *cache.others[:1]]
        return cache.others[-1] * keys

    def last_of_all(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        """Each block replaces the tensor that the block before left."""
        before, cache.by_name["last"] = cache.by_name.get("last", 1.0), keys
        return keys * before

    def dict_of_all(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        cache.by_name[self.number] = {"keys": keys, "squares": (keys * keys, keys)}
        cache.by_name.pop("spare", None)
        return keys * cache.by_name[0]["squares"][0] + len(cache.by_name)

    def count(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        cache.seen += 1
        return keys * cache.seen if cache.seen != 2 else keys.sin()

    def queue(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        cache.queue.append(keys)
        return keys * (cache.queue.popleft() if len(cache.queue) > 1 else 1)

    def kinds(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        cache.kinds.add(f"block {self.number}")
        return keys * len(cache.kinds)

    def of_batch(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        """Leaves what follows from the batch alone."""
        cache.by_name["mask"] = cache.by_name.get("mask", 0) + (batch > 0)
        return keys * cache.by_name["mask"]

    def batch_itself(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        """Leaves a tensor of the batch, which is a value by its type only."""
        cache.by_name[self.number] = batch.type_as(keys)
        return keys * cache.by_name[0] + batch

    def written_later(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        """Each block writes to what the first one left."""
        if self.number == 0:
            cache.layers[0].keys = keys.detach().clone()
        cache.layers[0].keys.mul_(0.5).add_(keys.detach())
        return keys * cache.layers[0].keys.clone()

    def parameter(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        """Leaves a parameter, which the next block uses."""
        cache.by_name[self.number] = self.out.weight
        return keys @ cache.by_name[max(0, self.number - 1)]

    def shared_object(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        """An object in two places."""
        layer = Layer()
        cache.by_name["last"] = layer
        cache.others.append(layer)
        cache.by_name["last"].update(keys)
        return keys * cache.others[-1].keys

    def older_object(self, keys: Tensor, batch: Tensor, cache: Cache) -> Tensor:
        """An object of the cache in another place: writes to one are writes to the other."""
        cache.by_name["last"] = cache.layers[self.number]
        cache.layers[self.number].update(keys)
        before = cache.by_name.get("before", cache.by_name["last"])
        cache.by_name["before"] = cache.by_name["last"]
        return keys * before.keys


class Decoder(nn.Module):
    """Three blocks with one cache, new in each forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(n, kind) for n in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache, h = Cache(3), x
        for block in self.blocks:
            h = block(h, batch=x, cache=cache)
        left = [layer.keys for layer in cache.layers if layer.keys is not None]
        return (
            h.square().mean()
            + sum((t.mean() for t in left), start=torch.zeros((), dtype=x.dtype)) * cache.layers[1].length
        )


class UsesBatch(Decoder):
    """Uses its batch after blocks that left it in their cache."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x * 2).tanh().square().mean() * self.blocks[2].out.bias.sum()


class Stateful(nn.Module):
    """Three blocks with one object that lasts from forward to forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(n, kind) for n in range(3))
        self.state = Cache(3)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.blocks:
            h = block(h, batch=x, cache=self.state)
        return h.square().mean() * (1 + self.state.seen / 10)


KINDS = [name for name in vars(Block) if not name.startswith("_") and name != "forward"]


def judged(build: Any, microbatches: int = 1) -> list[str]:
    """For each place of a cut: ``equal``, ``refused``, or what differs."""
    results, places = [], [1]
    with one_thread():
        one = alone(build, batches())
        for cut in range(100):
            if cut >= places[0]:
                return results

            def choose(positions: Any, cut: int = cut) -> list[int]:
                places[0] = len(positions)
                return [positions[cut]] if positions else []

            try:
                with cut_at(choose):
                    staged = Staged(build, "pp=2", batches()[0], microbatches=microbatches)
            except PlanError:
                results.append("refused")
                continue
            results.append("; ".join(differences(one, staged.train(batches()))) or "equal")
    raise AssertionError("more than a hundred places")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_block_leaves_in_its_arguments_is_there_on_other_stages(kind: str) -> None:
    results = judged(lambda: Decoder(kind))
    assert {*results} <= {"equal", "refused"}, results
    assert "equal" in results


@pytest.mark.parametrize("kind", ["layer", "list_of_all", "dict_of_all", "count"])
def test_a_block_that_leaves_values_is_followed_by_no_stage(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own stage runs it as a whole, and other stages call none of its functions."""
    treatments: set[str] = set()
    made = StageProgram.__init__

    def noted(program: StageProgram, *args: Any, **kwargs: Any) -> None:
        made(program, *args, **kwargs)
        outside = {path: p for path, p in program.graph.calls.items() if path[-1][0] == "blocks.1"}
        treatments.update(program.treatments[path] for path, p in outside.items() if p.stop <= program.cuts[0])

    monkeypatch.setattr(StageProgram, "__init__", noted)
    assert "equal" in judged(lambda: Decoder(kind))
    assert treatments == {RUN, STUB}


def test_what_lasts_from_forward_to_forward_is_not_taken_for_new() -> None:
    results = judged(lambda: Stateful("count"))
    assert {*results} <= {"equal", "refused"}, results


def test_a_tensor_of_the_batch_that_is_left_stays_no_value() -> None:
    assert {*judged(lambda: UsesBatch("batch_itself"))} == {"equal"}


def number(t: Tensor) -> int:
    return 7


def test_changes_are_found_and_made_again() -> None:
    def call(cache: Any, states: list[Any]) -> None:
        cache.layers[1].keys = torch.ones(2)
        cache.layers[1].length += 3
        cache.by_name["new"] = [1, (2.5, torch.zeros(1))]
        del cache.by_name["spare"]
        states.append("end")

    recorded, here = (((Cache(2), ["begin"]), {}) for _ in range(2))
    holders = Holders(recorded)
    call(*recorded[0])
    changes, complete, repeatable = holders.changes(number, set())
    assert complete and repeatable and sorted(len(change.values) for change in changes) == [0, 1, 1]
    make_changes(changes, here, {})
    cache, states = here[0]
    assert states == ["begin", "end"] and cache.layers[1].length == 3 and "spare" not in cache.by_name
    assert torch.equal(cache.layers[1].keys, torch.ones(2)) and cache.layers[0].keys is None
    assert cache.by_name["new"][1][0] == 2.5
    with pytest.raises(LookupError):  # the length is not what it was before the recorded call
        make_changes(changes, here, {})


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.queue.append(1),
        lambda cache: cache.kinds.add("a"),
        lambda cache: cache.others.insert(0, 1),
        lambda cache: cache.by_name.update(last=cache.layers[0]),
        lambda cache: cache.by_name.update(code=lambda: cache),
        lambda cache: cache.layers.pop(),
    ],
)
def test_changes_that_cannot_be_made_again_are_told(change: Any) -> None:
    cache = Cache(2)
    cache.others.append(SimpleNamespace(a=1))
    holders = Holders(((cache,), {}))
    change(cache)
    _, complete, repeatable = holders.changes(number, set())
    assert not complete and not repeatable


def test_a_change_of_what_is_older_than_the_forward_is_told() -> None:
    cache = Cache(2)
    holders = Holders(((cache,), {}))
    cache.seen += 1
    assert holders.changes(number, set())[1:] == (True, True)
    assert holders.changes(number, {id(cache)})[1:] == (False, True)
