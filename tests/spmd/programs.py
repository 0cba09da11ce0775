"""Small programs of torch functions, as data: a model is made from one, and hypothesis or a seed makes programs.

A program is a sequence of steps. A step is ``(what, a, b, k)``: ``what`` names a function of ``STEPS``, ``a`` and ``b`` choose
among the tensors that there are so far (counted from the newest), ``k`` among the parameters or buffers of the module. A step
``("block", …, steps)`` calls a module of its own, which runs ``steps`` on two of the tensors.

Tensors have 4 rows and 6, 3 or 1 columns. Programs write in place through aliases, to slices, to what follows from the batch
alone, to buffers; they keep things on modules, and append to a list that all blocks are given. Some are errors on one device.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

ROWS, WIDTH = 4, 6
Step = tuple[Any, ...]
STEPS: dict[str, Callable[..., Any]] = {}


def step(fn: Callable[..., Any]) -> Callable[..., Any]:
    STEPS[fn.__name__.rstrip("_") if fn.__name__.startswith("py_") else fn.__name__] = fn
    return fn


def wide(t: Tensor) -> Tensor:
    """A tensor as one of ``WIDTH`` columns."""
    if t.shape[-1] == WIDTH:
        return t
    return t.expand(*t.shape[:-1], WIDTH) if t.shape[-1] == 1 else torch.cat([t] * (WIDTH // t.shape[-1]), -1)


def fit(t: Tensor, target: Tensor) -> Tensor:
    """A tensor as one with the columns, or the shape, of another."""
    if t.dim() > target.dim():
        t = t.mean(0)
    return t if t.shape[-1] in (1, target.shape[-1]) else wide(t)[..., : target.shape[-1]]


class Env:
    """A module at work: its tensors so far."""

    def __init__(self, module: Part, tensors: list[Tensor], kept: list[Tensor]) -> None:
        self.m, self.r, self.kept = module, tensors, kept

    def at(self, i: int) -> Tensor:
        return self.r[-1 - i % len(self.r)]


# --- functions --------------------------------------------------------------------------------------------------------


@step
def linear(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return e.m.linears[k % 2](wide(a))


@step
def scale(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return a * e.m.scale


@step
def tanh(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return a.tanh()


@step
def sin(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return torch.sin(a)


@step
def add(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return wide(a) + wide(b)


@step
def mul(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return wide(a) * wide(b)


@step
def first(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return a[..., :1]


@step
def half(e: Env, a: Tensor, b: Tensor, k: int) -> Any:
    return list(wide(a).chunk(2, -1))


@step
def alias(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return a.view(a.shape) if k % 2 else a.transpose(0, -1).transpose(0, -1)


@step
def detach(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return a.detach()


@step
def attention(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    q, v = wide(a).reshape(1, -1, WIDTH), wide(b).reshape(1, -1, WIDTH)
    return functional.scaled_dot_product_attention(q, v, v).reshape(-1, WIDTH).mean(0, keepdim=True).expand(ROWS, WIDTH)


@step
def without_grad(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        return wide(a) * 2


@step
def fresh(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return torch.zeros(ROWS, WIDTH, dtype=torch.float64)


@step
def batch(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return e.r[0] * 2 if len(e.r) and k % 2 else e.r[0] + 1


@step
def choose(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return torch.where(wide(a) > 0, wide(a), wide(b))


# --- writes in place --------------------------------------------------------------------------------------------------


@step
def add_(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    a.add_(fit(b, a))


@step
def mul_(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    a.mul_(0.5)


@step
def copy_(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    a.copy_(fit(b, a))


@step
def set_first(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    a[..., :1] = fit(b, a[..., :1])


@step
def write_first(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    a[..., :1].copy_(fit(b, a[..., :1]))


@step
def quietly_(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    with torch.no_grad():
        a.mul_(0.5)


# --- buffers and what modules keep ------------------------------------------------------------------------------------


@step
def buffer(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return wide(a) + e.m.buffer(k)


@step
def buffer_itself(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return e.m.buffer(k).expand(ROWS, WIDTH) if k % 2 else e.m.buffer(k) * 2


@step
def average(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    e.m.buffer(k).mul_(0.9).add_(0.1 * wide(a).detach().mean(0))


@step
def count(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    e.m.buffer(k).mul_(0.9).add_(0.1)


@step
def assign(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    setattr(e.m, f"b{k % 2}", 0.9 * e.m.buffer(k) + 0.1 * wide(a).detach().mean(0))


@step
def codebook(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    nearest = (wide(a).unsqueeze(1) - e.m.code).square().sum(-1).argmin(1)
    return wide(a) + e.m.code[nearest]


@step
def learn_codes(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    with torch.no_grad():
        e.m.code.mul_(0.9).add_(0.1 * wide(a)[: len(e.m.code)])


@step
def number(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    if k % 2:
        e.m.number += 1
    return a * e.m.number


@step
def keep(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    e.m.memory = a.detach()


@step
def recall(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return wide(a) + wide(e.m.memory)


@step
def append(e: Env, a: Tensor, b: Tensor, k: int) -> None:
    e.kept.append(wide(a))


@step
def gather(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return sum(e.kept, wide(a)) * len(e.kept)


@step
def read(e: Env, a: Tensor, b: Tensor, k: int) -> Tensor:
    return a * 2 if float(b.detach().sum()) > -1e9 else a


# --- modules ----------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """Runs steps. Has two linears, a parameter without rows, two buffers, a codebook, and attributes that steps set."""

    code: Tensor
    memory: Tensor

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.1, dtype=torch.float64))
        for i in range(2):
            self.register_buffer(f"b{i}", torch.linspace(0.5, 1, WIDTH, dtype=torch.float64) + i)
        self.register_buffer("code", torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH))
        self.number, self.memory = 1, torch.ones(ROWS, WIDTH, dtype=torch.float64)
        self.parts = nn.ModuleList(Part(s[4]) for s in steps if s[0] == "block")

    def buffer(self, k: int) -> Tensor:
        found: Tensor = getattr(self, f"b{k % 2}")
        return found

    def run(self, tensors: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
        e, parts = Env(self, tensors, kept), iter(self.parts)
        for what, a, b, k, *_ in self.steps:
            if what == "block":
                made = next(parts)(e.at(a), e.at(b), kept)
            else:
                made = STEPS[what](e, e.at(a), e.at(b), k)
            if made is not None:
                e.r += made if isinstance(made, (list, tuple)) else [made]
        return e.r

    def forward(self, x: Tensor, y: Tensor, kept: list[Tensor]) -> Any:
        found = self.run([x, y], kept)
        return (found[-1], found[-2]) if len(self.steps) % 2 else found[-1]


class Model(Part):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        kept: list[Tensor] = []
        found = self.run([x, x * 2], kept)
        return torch.stack([wide(t).square().mean() for t in (*found[-3:], *kept)]).mean()


# --- making programs --------------------------------------------------------------------------------------------------


def programs(most: int = 12) -> st.SearchStrategy[list[Step]]:
    """Programs for hypothesis."""
    small = st.integers(0, 3)
    plain = st.tuples(st.sampled_from(sorted(STEPS)), small, small, small)
    block = st.tuples(st.just("block"), small, small, small, st.lists(plain, min_size=1, max_size=5))
    return st.lists(st.one_of(plain, plain, block), min_size=3, max_size=most)


def program(seed: int, most: int = 12) -> list[Step]:
    """The program of a seed."""
    r = random.Random(seed)
    names = r.sample(sorted(STEPS), r.randint(5, len(STEPS)))

    def plain() -> Step:
        what = "linear" if r.random() < 0.25 else r.choice(names)
        return (what, *(min(3, int(r.expovariate(0.9))) for _ in range(2)), r.randrange(4))

    def item() -> Step:
        if r.random() < 0.25:
            return ("block", r.randrange(3), r.randrange(3), 0, [plain() for _ in range(r.randint(1, 5))])
        return plain()

    return [item() for _ in range(r.randint(4, most))]


def smaller(steps: list[Step]) -> list[list[Step]]:
    """Programs with one step less, or with a block's steps in its place."""
    found = []
    for i, s in enumerate(steps):
        found.append(steps[:i] + steps[i + 1 :])
        if s[0] == "block":
            found += [[*steps[:i], (*s[:4], inner), *steps[i + 1 :]] for inner in smaller(s[4]) if inner]
            found.append([*steps[:i], *s[4], *steps[i + 1 :]])
    return found
