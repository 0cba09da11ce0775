"""A block's recorded program gives what its eager forward gives, bit for bit; what no program can hold stays eager."""

from __future__ import annotations

import contextlib
import contextvars
import cProfile
import functools
import itertools
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
import standin
from meshwright.replay.recording import Recording
from meshwright.runtime.rows.loss import output_loss
from meshwright.workers.pool import LocalWorkers
from zoo import ZOO

WIDTH, HEADS, LENGTH, ROWS = 24, 3, 5, 4
SCALE = 2.0  # a global of the code
LOG: list[float] = []
COUNTED = contextvars.ContextVar("counted", default=2.0)
NUMBERS = itertools.cycle([1.0, 2.0, 3.0])


def scaling(by: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    """A function that is closed over a number, and what gives it another."""

    def scaled(h: Tensor) -> Tensor:
        return h * by

    def change(other: float) -> None:
        nonlocal by
        by = other

    return scaled, change


def counted(h: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006
    calls.append(1)
    return h * len(calls)


def switched(h: Tensor, table: dict[str, float] = {"by": 2.0}) -> Tensor:  # noqa: B006
    return h * table["by"]


class Scaling:
    """An object that is called."""

    by = 2.0

    def __init__(self) -> None:
        self.own = 1.5

    def __call__(self, h: Tensor) -> Tensor:
        return h * self.own * Scaling.by


class Slotted:
    """An object without a dict."""

    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 2.0


class Makers(OrderedDict[str, Any]):
    """A dict of functions, which gives what they make, as that of activations in a package does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / 2


class Unmeasured(tuple[float, ...]):
    """A tuple that has no length, as the representations of a group in a package have none."""

    def __len__(self) -> int:
        raise NotImplementedError


FACTORS = Unmeasured([2.0, 3.0])
MAKERS = Makers(two=lambda: float("2"), tanh=nn.Tanh)
closed, reopen = scaling(2.0)
ACTIVATION: Callable[[Tensor], Tensor] = F.gelu
ELEMENTS, SLOTTED, TABLE = numpy.full(2, 2.0), Slotted(), dict.fromkeys(range(300), 2.0)
standin.FACTOR = 2.0  # type: ignore[attr-defined]


@torch.jit.script
def shifted_gelu(h: Tensor, by: Tensor) -> Tensor:
    y = h + by
    return y * 0.5 * (1.0 + torch.tanh(0.8 * y))


doubled_rows = torch.func.vmap(lambda row: 2 * row)
slope = torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))


def multiplied(h: Tensor, *, by: float) -> Tensor:
    return h * by


class Block(nn.Module):
    """Attention and an MLP; ``does`` says what else."""

    def __init__(self, does: str = "") -> None:
        super().__init__()
        self.does = does
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2 if does == "drops" else 0.0)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.scale, self.calls, self.history, self.notes = 1.0, 0, [], SimpleNamespace(table={"last": 0})
        self.partial, self.scaling = functools.partial(multiplied, by=2.0), Scaling()
        self.bound = Scaling().__call__
        self.factors = Unmeasured([1.5, Unmeasured([2.0])])  # type: ignore[list-item]
        self.around: list[nn.Module] = []

    activation = staticmethod(F.gelu)

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        b, t, _ = x.shape
        if self.does == "writes to its input":
            x.mul_(1.1)
        q, k, v = (h.view(b, t, HEADS, -1).transpose(1, 2) for h in self.qkv(self.norm1(x)).split(WIDTH, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.drop(self.o(a))
        return x + self._more(self.down(F.gelu(self.up(self.norm2(x)))), x) + shift

    def _more(self, h: Tensor, x: Tensor) -> Tensor:
        does = self.does
        if does == "reads a value" and bool(h.sum() > 0):
            h = 2 * h
        elif does == "counts in a buffer":
            with torch.no_grad():
                self.seen.add_(h.mean((0, 1)))
            h = h * (1 + self.seen)
        elif does == "assigns a buffer":
            self.seen = self.seen + h.detach().mean((0, 1))
        elif does == "counts calls":
            self.calls += 1
            h = h * self.calls
        elif does == "appends":
            self.history.append(float(len(self.history)))
            h = h * (1 + len(self.history))
        elif does == "keeps deep":
            h = h * (1 + self.notes.table["last"])
            self.notes.table["last"] += 1
        elif does == "draws for the host":
            h = h * random.random()
        elif does == "appends to a global":
            LOG.append(1.0)
            h = h * len(LOG)
        elif does == "masks":
            h = h[..., h[0, 0] > 0].sum(-1, keepdim=True) + h
        elif does == "uses a global":
            h = h * SCALE
        elif does == "uses an attribute":
            h = h * self.scale
        elif does == "writes a slice":
            h = h.clone()
            h[..., :7] *= 0.5
        elif does == "listens":
            h = h * 1.0
            h.register_hook(lambda g: 2 * g)
        elif does == "takes powers":
            h = 1 + h**2 - 2**h
            h **= 2
        elif does == "runs forward-mode AD":
            h = h + torch.func.jvp(torch.tanh, (h,), (torch.ones_like(h),))[1]
        elif does == "keeps a dual number":
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(h, torch.ones_like(h))
                h = h + torch.autograd.forward_ad.unpack_dual(dual.tanh()).tangent
        elif does == "maps rows":
            h = h + doubled_rows(h)
        elif does == "takes a slope":
            h = h + slope(h)
        elif does == "is scripted in part":
            h = shifted_gelu(h, self.norm2.bias)
        elif does == "prints":
            print("", end="")
        elif does == "leaves gradients out":
            with torch.no_grad():
                weight = torch.sigmoid(h)
            h = h * weight
        elif does == "drops":
            h = self.drop(h)
        elif does in FUNCTIONS:
            h = FUNCTIONS[does](self, h)
        return h


def calls_functions_behind_functions(self: Any, h: Tensor) -> Tensor:
    """Functions of Python in torch that call ones of C with the same name and other arguments."""
    h = torch.tanh(h + torch.tensordot(h, self.o.weight, dims=([2], [0])))
    distances = torch.cdist(h, torch.cos(h)).mean(-1, keepdim=True)
    spectrum = torch.stft(h.flatten(0, 1), 8, 4, window=torch.hann_window(8, dtype=h.dtype), return_complex=True)
    norm = torch.norm(h, p=2, dim=-1, keepdim=True)  # type: ignore[no-untyped-call]
    return torch.tanh(h + distances + spectrum.real.mean() + norm) + torch.split(h, [3, WIDTH - 3], -1)[1].mean()


FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "calls functions behind functions": calls_functions_behind_functions,
    "is closed over a number": lambda self, h: closed(h),
    "has a default that changes": lambda self, h: switched(h),
    "counts in a default": lambda self, h: counted(h),
    "calls a partial": lambda self, h: self.partial(h),
    "calls an object": lambda self, h: self.scaling(h),
    "calls a bound method": lambda self, h: self.bound(h),
    "reads a class by name": lambda self, h: h * Scaling.by,
    "reads a module by name": lambda self, h: h * standin.FACTOR,
    "calls a function of its class": lambda self, h: self.activation(h),
    "calls a global function": lambda self, h: ACTIVATION(h),
    "reads an array": lambda self, h: h * float(ELEMENTS[0]),
    "may call a Function": lambda self, h: Halved.apply(h) if WIDTH < 2 else h * 0.5,
    "reads a dict that makes its values": lambda self, h: h * MAKERS["two"],
    "reads tuples without a length": lambda self, h: h * self.factors[0] * FACTORS[1],
    "reads slots": lambda self, h: h * SLOTTED.by,
    "reads a large table": lambda self, h: h * TABLE[0],
    "asks the model around it": lambda self, h: h * self.around[0].by,
    "asks a context variable": lambda self, h: h * COUNTED.get(),
    "asks an iterator": lambda self, h: h * next(NUMBERS),
}


class Model(nn.Module):
    def __init__(self, does: str = "", blocks: int = 2) -> None:
        super().__init__()
        self.inner = nn.Linear(6, WIDTH)
        self.blocks, self.by = nn.ModuleList(Block(does) for _ in range(blocks)), 2.0
        self.head = nn.Linear(WIDTH, 1)
        for block in self.blocks if does == "asks the model around it" else ():
            block.around.append(self)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h).square().mean()


def batch() -> Tensor:
    return torch.randn(ROWS, LENGTH, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


Change = Callable[[Any, int], None]
"""A job, and the number of the step that comes next: what a person does in between."""


def trained(
    build: Callable[[], nn.Module], plan: dict[str, Any], eager: bool, steps: int, change: Change | None
) -> tuple[list[float], dict[str, Any], list[Any], dict[str, bool]]:
    """Runs on every rank: losses, parameters, what was moved, and which blocks have a program."""
    random.seed(0)
    LOG.clear()
    counted.__defaults__[0].clear()  # type: ignore[index]
    globals()["NUMBERS"] = itertools.cycle([1.0, 2.0, 3.0])
    rows = batch()
    job = mw.parallelize(lambda: build().double(), plan | {"eager": eager}, batch=rows)
    optimizer = torch.optim.SGD(job.parameters(), lr=1e-3)
    mine = rows.chunk(job.recipe.mesh.data_size)[job.recipe.mesh.data_index(job.rank)]
    losses = []
    for step in range(steps):
        if change is not None:
            change(job, step)
        losses.append(float(job.step(mine)))
        optimizer.step()
        optimizer.zero_grad()
    values = {line.name: value for line, value in job.full_parameters()}
    values |= dict(job.full_buffers())
    moved = [dict(job.ledger.calls), dict(job.ledger.bytes), dict(job.ledger.fallbacks)]
    return losses, values, moved, {n: has_program(job, n) for n in ("blocks.0", "blocks.1")}


def has_program(job: Any, name: str) -> bool:
    try:
        return bool(job.program(name).nodes)
    except LookupError:
        return False


def both(
    workers: LocalWorkers,
    build: Callable[[], nn.Module],
    plan: dict[str, Any],
    *,
    steps: int = 5,
    change: Change | None = None,
) -> list[bool]:
    """Whether ranks ended with programs, having seen that eager and replayed steps are the same."""
    ranks = mw.Plan(plan["mesh"]).mesh.size
    sides = [workers.run(trained, build, plan, eager, steps, change, ranks=ranks) for eager in (True, False)]
    programs = []
    for (losses, values, moved, none), (others, found, told, has) in zip(*sides, strict=True):
        assert losses == others
        assert all(torch.equal(v, found[n]) for n, v in values.items() if v is not None)
        assert moved == told
        assert not any(none.values())
        programs.append(any(has.values()))
    return programs


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "uneven": {"mesh": {"tp": 3}, "microbatches": 2},
    "sequence": {"mesh": {"tp": 2}, "sequence_parallel": True},
    "recompute": {"mesh": {"tp": 2}, "recompute": "blocks"},
    "fsdp": {"mesh": {"dp_shard": 2, "tp": 2}},
    "pipeline": {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2},
    "half": {"mesh": {"tp": 2}, "modules": {"blocks.0.up": {"tp": "replicate"}}},
}


@pytest.mark.parametrize("layout", [pytest.param(k, marks=pytest.mark.proof) if k == "fsdp" else k for k in LAYOUTS])
def test_a_replay_is_the_eager_forward(layout: str, workers: LocalWorkers) -> None:
    assert all(both(workers, Model, LAYOUTS[layout]))


HELD = (
    "counts in a buffer",
    "writes a slice",
    "leaves gradients out",
    "drops",
    "uses a global",
    "uses an attribute",
    "takes powers",
    "reads tuples without a length",
    "may call a Function",
    "reads a dict that makes its values",
    "calls functions behind functions",
)
REFUSED = {
    "reads a value": "Python reads a value",
    "assigns a buffer": "it changes what its modules keep",
    "writes to its input": "it writes to what it is given",
    "counts calls": "it changes what its modules keep",
    "appends": "it changes what its modules keep",
    "keeps deep": "it changes what its modules keep",
    "draws for the host": "it draws random numbers of the host",
    "appends to a global": "it changes what its code keeps",
    "masks": "follows from values",
    "listens": "register_hook changes what autograd knows",
    "prints": "it calls print",
    "is scripted in part": "it calls what torch.jit made",
    "runs forward-mode AD": "a transform of torch.func is used",
    "keeps a dual number": "forward-mode AD is used",
    "maps rows": "a transform of torch.func is used",
    "takes a slope": "a transform of torch.func is used",
    "counts in a default": "it changes what its code keeps",
    "asks a context variable": "it calls ContextVar.get",
    "asks an iterator": "NUMBERS is an iterator",
}


@pytest.mark.parametrize("does", HELD)
def test_what_a_program_holds(does: str, workers: LocalWorkers) -> None:
    assert all(both(workers, lambda: Model(does), {"mesh": {"tp": 2}}))


@pytest.mark.parametrize("does", REFUSED)
def test_what_no_program_holds_stays_eager(does: str, workers: LocalWorkers) -> None:
    assert not any(both(workers, lambda: Model(does), {"mesh": {"tp": 2}}))


class Plain(nn.Module):
    """No block is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 9), nn.Linear(9, 4), nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x)))).square().mean()


def whole_model(eager: bool) -> tuple[list[float], bool]:
    """Runs on every rank: losses, and whether the model as a whole has a program."""
    job = mw.parallelize(lambda: Plain().double(), {"mesh": {"tp": 2}, "eager": eager}, batch=batch())
    return [float(job.step(batch())) for _ in range(4)], has_program(job, "")


def test_a_model_without_repeated_blocks_is_one_block(workers: LocalWorkers) -> None:
    eager, replayed = (workers.run(whole_model, e, ranks=2) for e in (True, False))
    assert [losses for losses, _ in eager] == [losses for losses, _ in replayed]
    assert [has for _, has in replayed] == [True, True]


class Cache:
    """Where blocks of a decoder leave keys and values."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []


class Caching(Block):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:  # type: ignore[override]
        cache.values.append(x)
        return super().forward(x) + sum(v.mean() for v in cache.values)


class Decoder(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, cache = self.inner(x), Cache()
        for block in self.blocks:
            h = block(h, cache)
        return self.head(h).square().mean()


def test_a_block_that_is_given_an_object_stays_eager(workers: LocalWorkers) -> None:
    assert not any(both(workers, Decoder, {"mesh": {"tp": 2}}))


def told(does: str) -> tuple[str, ...]:
    """Runs on every rank: the notes of a job."""
    job = mw.parallelize(lambda: Model(does, blocks=1).double(), {"mesh": {"tp": 2}}, batch=batch())
    for _ in range(3):
        job.step(batch())
    return job.notes


@pytest.mark.parametrize("does", ["reads a value", "counts calls", "appends to a global"])
def test_a_note_says_why(does: str, workers: LocalWorkers) -> None:
    for notes in workers.run(told, does, ranks=2):
        (note,) = (n for n in notes if REFUSED[does] in n)
        blocks, _, why = note.partition(": ")
        assert "the model" in blocks and why.startswith("no recorded program, as")


SWITCHES: dict[str, Callable[[Any, float], Any]] = {
    "is closed over a number": lambda model, by: reopen(by),
    "has a default that changes": lambda model, by: switched.__defaults__[0].update(by=by),  # type: ignore[index]
    "calls a partial": lambda model, by: model.blocks[0].partial.keywords.update(by=by),
    "calls an object": lambda model, by: setattr(model.blocks[0].scaling, "own", by),
    "calls a bound method": lambda model, by: setattr(model.blocks[0].bound.__self__, "own", by),
    "reads a class by name": lambda model, by: setattr(Scaling, "by", by),
    "reads a module by name": lambda model, by: setattr(standin, "FACTOR", by),
    "calls a function of its class": lambda model, by: setattr(
        Block, "activation", staticmethod(F.gelu if by == 2.0 else torch.tanh)
    ),
    "calls a global function": lambda model, by: globals().update(ACTIVATION=F.gelu if by == 2.0 else torch.tanh),
    "reads an array": lambda model, by: ELEMENTS.fill(by),
    "reads slots": lambda model, by: setattr(SLOTTED, "by", by),
    "reads a large table": lambda model, by: TABLE.update({0: by}),
    "asks the model around it": lambda model, by: setattr(model, "by", by),
}


def between(change: str) -> Change:
    def changed(job: Any, step: int) -> None:
        module = job.module
        if change == "modes":
            module.train(step % 2 == 0)
        elif change == "attribute" and step == 4:
            module.blocks[0].scale = 3.0
        elif change == "global" and step == 4:
            globals()["SCALE"] = 5.0
        elif change == "frozen" and step == 4:
            module.blocks[0].up.weight.requires_grad_(False)
        elif change == "replaced" and step == 4:
            module.blocks[0].drop = nn.Dropout(0.0)
            module.blocks[1].register_buffer("seen", torch.ones(WIDTH, dtype=torch.float64))
        elif change == "hook" and step == 4:
            module.blocks[0].up.register_forward_hook(lambda m, args, out: 2 * out)
        if change in SWITCHES and step in (0, 4):
            SWITCHES[change](module, 2.0 if step == 0 else 5.0)
        if step == 0:
            globals()["SCALE"] = 2.0

    return changed


@pytest.mark.parametrize(
    ("change", "does"),
    [
        ("modes", "drops"),
        ("attribute", "uses an attribute"),
        ("global", "uses a global"),
        ("frozen", ""),
        ("replaced", "counts in a buffer"),
        ("hook", ""),
        *((does, does) for does in SWITCHES),
    ],
)
def test_what_changes_between_steps_is_seen(change: str, does: str, workers: LocalWorkers) -> None:
    both(workers, lambda: Model(does), {"mesh": {"tp": 2}}, steps=8, change=between(change))


PROFILERS: dict[str, Callable[[], Any]] = {
    "no profiler": contextlib.nullcontext,
    "cProfile": cProfile.Profile,
    "torch.profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True),
    "a function": lambda: profiling(lambda frame, event, arg: None),
}


@contextlib.contextmanager
def profiling(function: Any) -> Iterator[None]:
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(None)


def profiled(kind: str) -> tuple[list[float], bool, bool, set[str]]:
    """Runs on every rank. Losses of steps under a profiler, and of one after it; whether it stayed on, and blocks had programs
    while it was on; what cProfile saw."""
    job = mw.parallelize(lambda: Model().double(), {"mesh": {"tp": 2}}, batch=batch())
    with PROFILERS[kind]() as profiler:
        before = sys.getprofile()
        losses = [float(job.step(batch())) for _ in range(4)]
        stayed, recorded = sys.getprofile() is before, has_program(job, "blocks.0")
    seen = {f.code.co_name for f in profiler.getstats() if hasattr(f.code, "co_name")} if kind == "cProfile" else set()
    losses += [float(job.step(batch())) for _ in range(4)]
    assert has_program(job, "blocks.0")
    return losses, stayed, recorded, seen


@pytest.mark.parametrize("kind", [k for k in PROFILERS if k != "no profiler"])
def test_a_profiler_stays_on(kind: str, workers: LocalWorkers) -> None:
    plain, found = (workers.run(profiled, k, ranks=2) for k in ("no profiler", kind))
    for (losses, _, _, _), (others, stayed, recorded, seen) in zip(plain, found, strict=True):
        assert losses == others
        assert stayed
        assert recorded is (kind != "torch.profiler")
        assert kind != "cProfile" or {"step", "_call", "forward"} <= seen


def text() -> tuple[str, bool]:
    """Runs on every rank: a program to read; whether two blocks of a kind share it."""
    job = mw.parallelize(lambda: Model().double(), {"mesh": {"tp": 2}}, batch=batch())
    for _ in range(3):
        job.step(batch())
    return job.program("blocks.0").text(), job.program("blocks.0") is job.program("blocks.1")


def source(line: str) -> str:
    """The model's line that a line of a program names."""
    return Path(__file__).read_text().splitlines()[int(line.rpartition(":")[2]) - 1]


def test_a_program_can_be_read(workers: LocalWorkers) -> None:
    for code, shared in workers.run(text, ranks=2):
        assert shared
        lines = code.splitlines()
        assert lines[0].startswith("def forward(self, x0")
        (reduced, *_) = (line for line in lines if "all_reduce_tp" in line and "bytes over tp" in line)
        assert f"{ROWS * LENGTH * WIDTH * 8} bytes over tp" in reduced and "test_replayed.py:" in reduced
        (attention,) = (i for i, line in enumerate(lines) if "scaled_dot_product_attention(" in line)
        assert "test_replayed.py:" in lines[attention] and "is_causal" in source(lines[attention])
        assert all("#" in line for line in lines[1:-1] if "[" not in line.partition("=")[2][:20])


def without_program(name: str) -> tuple[str, ...]:
    entry = ZOO[name]
    job = mw.parallelize(entry.build, {"mesh": "tp=2"}, batch=entry.batch(), loss=output_loss)
    for _ in range(3):
        job.step(entry.batch())
    return tuple(note for note in job.notes if "no recorded program" in note)


@pytest.mark.parametrize("name", ["llama", "t5", pytest.param("bert", marks=pytest.mark.proof)])
def test_blocks_of_a_library_have_programs(name: str, workers: LocalWorkers) -> None:
    """Their code logs, reads the environment, and finds its functions in tables: none of it may keep them eager."""
    assert workers.run(without_program, name, ranks=2)[0] == ()


def test_a_module_without_one_says_why(workers: LocalWorkers) -> None:
    def asked() -> str:
        job = mw.parallelize(lambda: Model().double(), {"mesh": {"tp": 2}}, batch=batch())
        with pytest.raises(LookupError) as error:
            job.program("blocks.0")
        return str(error.value)

    assert workers.run(asked, ranks=2) == ["blocks.0 has no recorded program: it has not been called three times"] * 2


class Crossed(nn.Module):
    """A block that is given what all blocks are given, as those of a decoder are."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))) * self.key(memory))


class CrossedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.encoder = nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks, self.head = nn.ModuleList(Crossed() for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        memory = self.encoder(h)
        for block in self.blocks:
            h = block(h, memory)
        return self.head(h).square().mean()


class CheckpointedLayers(CrossedLayers):
    """Recomputes its blocks itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        memory = self.encoder(h)
        for block in self.blocks:
            h = checkpoint(block, h, memory, use_reentrant=False)
        return self.head(h).square().mean()


def recordings(build: Callable[[], nn.Module], recompute: str) -> list[int]:
    """How many blocks are recorded in each step."""
    runs, run = [0], Recording.run

    def counted_run(*args: Any) -> Any:
        runs[-1] += 1
        return run(*args)

    Recording.run = counted_run  # type: ignore[method-assign]
    try:
        job = mw.parallelize(lambda: build().double(), {"mesh": {"tp": 2}, "recompute": recompute}, batch=batch())
        for _ in range(5):
            job.step(batch())
            runs.append(0)
    finally:
        Recording.run = run  # type: ignore[method-assign]
    assert has_program(job, "blocks.2")
    return runs


@pytest.mark.parametrize(("build", "recompute"), [(CrossedLayers, "blocks"), (CheckpointedLayers, "none")])
def test_what_recomputes_is_not_recorded(build: type[nn.Module], recompute: str, workers: LocalWorkers) -> None:
    assert workers.run(recordings, build, recompute, ranks=2) == [[3, 3, 0, 0, 0, 0]] * 2
    assert all(both(workers, build, {"mesh": {"tp": 2}, "recompute": recompute}))
