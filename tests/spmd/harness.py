"""One function under the view against the same function on one device: on random shapes, in many layouts.

A case makes plain float64 inputs and names a function. A trial gives each input a layout (whole, cut along a dim in
equal, uneven or fused pieces, or a partial sum), runs the function on both sides from the same seed, and compares

    the result       structure, shapes, dtypes, values
    the inputs       so that what is written in place is seen
    the gradients    of every input, for a random cotangent; the result used whole, or used in more cut work
    the generator    the same state afterwards as on one device, on every rank

A ``Guise`` says in which types and strides the inputs come, and whether autocast is on. In half types a value may differ
from one device's by a rounding of the result's type; where it differs by more, it must be as near to the float64 result
as one device's value is.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from meshwright.layout import PARTIAL, REPLICATE, Layout, Shard, even_shard
from meshwright.spmd import dispatcher
from meshwright.spmd.comm import Axis, Ledger
from meshwright.spmd.decide import ANSWERS, DECIDERS
from meshwright.spmd.decision import Gather
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.tensor import GlobalTensor
from meshwright.workers.pool import report

KINDS = ("even", "uneven", "fused", "uneven fused")
Build = Callable[["Make"], "tuple[list[Any], Callable[..., Any]]"]


@dataclass(frozen=True)
class Case:
    """A function to try. ``build`` gives its inputs and the function of them; the options say what differs.

    Attributes:
        rounds: how many random shapes.
        most: how many trials of each at most, drawn at random; None for all.
        same: whether the result is that of one device. Not where ranks draw numbers of their own, or for memory that
            nobody has written; then structure, shapes and the generator's step are compared alone.
        cuts: which inputs to cut (by position); None for all of them.
        fallback: the function that must have fallen back, in each trial with a cut input.
        rough: whether gradients pass through a narrower dtype.
        kinds: of cuts; the first is tried of every dim.
        partial: whether to try partial sums.
        gradients: whether the gradients are compared; not where torch itself has none for some of its results.
    """

    name: str
    build: Build
    line: int = 0
    rounds: int = 1
    most: int | None = None
    same: bool = True
    cuts: tuple[int, ...] | None = None
    fallback: str | None = None
    rough: bool = False
    kinds: tuple[str, ...] = KINDS
    partial: bool = True
    gradients: bool = True


@dataclass(frozen=True)
class Guise:
    """How the inputs of a trial come.

    Attributes:
        dtypes: of the floating-point inputs, in turn: of two types, the first input has the first.
        autocast: the type of ``torch.autocast`` around the function; None where it is off.
        strided: whether the memory of inputs, and so of local tensors, has its dims in the reverse order.
        empty: whether to try dims of size 1, and ranks that hold one element of a dim, or none.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float64,)
    autocast: torch.dtype | None = None
    strided: bool = False
    empty: bool = False

    @property
    def plain(self) -> bool:
        """Whether all is computed in float64, where values are compared sharply."""
        return self.dtypes == (torch.float64,) and self.autocast is None

    def of(self, tensors: list[Tensor]) -> list[Tensor]:
        """The inputs of a case in this guise."""
        dtypes = itertools.cycle(self.dtypes)
        inputs = [x.to(next(dtypes)) if x.is_floating_point() else x for x in tensors]
        return [strided(x) for x in inputs] if self.strided else inputs

    def around(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None)


PLAIN = Guise()
GUISES = {
    "float32": Guise((torch.float32,)),
    "float16": Guise((torch.float16,)),
    "bfloat16": Guise((torch.bfloat16,)),
    "mixed": Guise((torch.float32, torch.bfloat16)),
    "mixed, the narrow first": Guise((torch.float16, torch.float32)),
    "autocast": Guise((torch.float32,), torch.bfloat16),
    "autocast of bfloat16": Guise((torch.bfloat16,), torch.bfloat16),
    "autocast to float16 of both": Guise((torch.float16, torch.float32), torch.float16),
    "strided": Guise(strided=True),
    "empty": Guise(empty=True),
}


def strided(x: Tensor) -> Tensor:
    """The same values, in memory of their own whose order of dims is the reverse."""
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order).clone()


class Make:
    """Random sizes and tensors of a case, the same on every rank."""

    def __init__(self, seed: str) -> None:
        self.choose = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(self.choose.randrange(2**31))

    def sizes(self, count: int, least: int = 2, most: int = 6) -> list[int]:
        return [self.choose.randint(least, most) for _ in range(count)]

    def __call__(self, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        return torch.rand(shape, generator=self.numbers, dtype=torch.float64) * (high - low) + low

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.numbers, dtype=torch.float64)

    def ints(self, stop: int, *shape: int) -> Tensor:
        return torch.randint(stop, shape, generator=self.numbers)

    def bools(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.numbers) < 0.5

    def distinct(self, *shape: int) -> Tensor:
        """Values no two of which are near each other: an order that rounding does not change."""
        count = torch.Size(shape).numel()
        return (torch.randperm(count, generator=self.numbers).double() / count - 0.4).reshape(shape)

    def layout(self, shape: Sequence[int], dim: int, ranks: int, kind: str, empty: bool = False) -> Shard:
        """A cut of the dim; every rank holds something of it, unless ``empty``."""
        while True:
            layout = self._layout(shape, dim, ranks, kind)
            if empty or shape[dim] < ranks or all(layout.local(r) for r in range(ranks)):
                return layout
            kind = "uneven" if kind == "fused" else kind

    def _layout(self, shape: Sequence[int], dim: int, ranks: int, kind: str) -> Shard:
        if kind == "even":
            return even_shard(dim, shape[dim], ranks)
        blocks = [shape[dim]]
        if kind in ("fused", "uneven fused") and shape[dim] >= 2:
            parts = self.choose.randint(2, min(3, shape[dim]))
            borders = sorted(self.choose.sample(range(1, shape[dim]), parts - 1))
            blocks = [b - a for a, b in zip([0, *borders], [*borders, shape[dim]], strict=True)]
        if kind == "fused":
            return even_shard(dim, blocks, ranks)
        return Shard(dim, tuple(self._shares(block, ranks) for block in blocks))

    def _shares(self, size: int, ranks: int) -> tuple[int, ...]:
        borders = sorted(self.choose.randint(0, size) for _ in range(ranks - 1))
        return tuple(b - a for a, b in zip([0, *borders], [*borders, size], strict=True))


@dataclass
class Outcome:
    """What a worker found: per case the failed trials, the functions whose rules were asked and which answered."""

    failures: dict[str, list[str]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    trials: int = 0


def rule_name(function: Any) -> str:
    """``linear``, or ``T.get`` for a property of Tensor."""
    name: str = function.__name__
    return f"{function.__self__.__name__}.get" if name == "__get__" else name


def run_cases(cases: Sequence[Case], *, guise: Guise = PLAIN, rounds: int = 3, most: int = 1000) -> Outcome:
    """On every rank: all cases, at most so many shapes and trials of each."""
    outcome, bench = Outcome(), Bench()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with recorded(outcome):
        for number, case in enumerate(cases):
            report(number)
            for turn in range(min(case.rounds, rounds)):
                seed = f"{case.name} {turn}"
                try:
                    tensors, _ = case.build(Make(seed))
                    plain = _one_device(case, seed, guise)
                except Exception:
                    if guise != PLAIN:
                        continue  # not a function of these types
                    outcome.failures.setdefault(case.name, []).append(f"the case itself: {traceback.format_exc()}")
                    continue
                make = Make(f"layouts {seed}")
                tried = list(trials(case, tensors, make, bench.ranks, guise))
                for layouts in make.choose.sample(tried, min(case.most or most, most, len(tried))):
                    outcome.trials += 1
                    if problem := bench.trial(case, seed, layouts, plain, guise):
                        outcome.failures.setdefault(case.name, []).append(f"{_show(tensors, layouts)}: {problem}")
                        report((case.name, outcome.failures[case.name][-1]))
                        if len(outcome.failures[case.name]) >= 6:
                            break
    return outcome


def trials(case: Case, tensors: list[Tensor], make: Make, ranks: int, guise: Guise) -> Iterator[list[Layout]]:
    """Layouts of the inputs: each input alone in each way, and some of all of them together."""
    whole: list[Layout] = [REPLICATE] * len(tensors)
    empty = guise.empty
    tried = [i for i in range(len(tensors)) if case.cuts is None or i in case.cuts]
    places = [
        (i, dim) for i in tried for dim in range(tensors[i].dim()) if tensors[i].shape[dim] >= (1 if empty else ranks)
    ]

    def alone(i: int, layout: Layout) -> list[Layout]:
        return [*whole[:i], layout, *whole[i + 1 :]]

    for i, dim in places:
        for kind in dict.fromkeys([case.kinds[0], make.choose.choice(case.kinds)]):
            yield alone(i, make.layout(tensors[i].shape, dim, ranks, kind, empty))
    # In half types, summands that add up to the very input are not to be had.
    summed = [i for i in tried if case.partial and guise == PLAIN and tensors[i].is_floating_point()]
    for i in summed:
        yield alone(i, PARTIAL)
    if len(tried) > 1:
        for _ in range(4):
            layouts = list(whole)
            for i in tried:
                options = [dim for j, dim in places if j == i]
                draw = make.choose.random()
                if options and draw < 0.7:
                    dim, kind = make.choose.choice(options), make.choose.choice(case.kinds)
                    layouts[i] = make.layout(tensors[i].shape, dim, ranks, kind, empty)
                elif i in summed and draw < 0.85:
                    layouts[i] = PARTIAL
            if any(layout != REPLICATE for layout in layouts):
                yield layouts


class Bench:
    """Runs trials on this rank, in step with the others even after one of them failed."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.group = self._group()

    def _group(self) -> Any:
        return dist.new_group(timeout=timedelta(seconds=15))

    def dispatcher(self) -> Dispatcher:
        ledger = Ledger()
        return Dispatcher(Axis("tp", self.ranks, self.rank, self.group, ledger), ledger)

    def trial(self, case: Case, seed: str, layouts: list[Layout], plain: Result, guise: Guise = PLAIN) -> str | None:
        """What is wrong on any rank, or None."""
        problem = None
        try:
            self._compare(case, seed, layouts, plain, guise)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)
            lines = [f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in where]
            problem = f"rank {self.rank}: {type(error).__name__}: {str(error)[:600]} ({' '.join(lines[-5:])})"
        # One reduction tells both whether a rank failed and whether the ranks' generators are in step.
        step = int(torch.get_rng_state().view(torch.int64).sum())
        state = torch.tensor([problem is not None, step, -step], dtype=torch.int64)
        dist.all_reduce(state, dist.ReduceOp.MAX)
        if problem is None and state[1] != -state[2]:
            problem = "the generators of the ranks are not in step"
        if state[0] or state[1] != -state[2]:
            everyone: list[Any] = [None] * self.ranks
            dist.all_gather_object(everyone, problem)
            self.group = self._group()  # a rank may have been left waiting in a collective
            found = [p for p in everyone if p is not None]
            return min(found, key=lambda p: "Timed out" in p)  # the cause, rather than who waited for it
        return None

    def _compare(self, case: Case, seed: str, layouts: list[Layout], plain: Result, guise: Guise) -> None:
        tensors, function = case.build(Make(seed))
        tensors = guise.of(tensors)
        dispatcher = self.dispatcher()
        leaves, inputs = zip(
            *[self._input(dispatcher, x, layout) for x, layout in zip(tensors, layouts, strict=True)],
            strict=True,
        )
        judge = _Judge(case, seed, guise)
        torch.manual_seed(1)
        with SpmdMode(dispatcher, lambda p: None).on():
            with guise.around():
                result = function(*inputs)
            found = pytree.tree_leaves(result)
            if case.same:
                found_structure = pytree.tree_structure(result)
                assert found_structure == plain.structure, f"structure {found_structure}, not {plain.structure}"
            _same_facts(plain.flat, found, self.rank)
            after = torch.get_rng_state()
            cut_use = Make(seed).choose.random() < 0.5  # by sharded work, while the view is on
            used = [
                _times(x, c) if cut_use and c is not None else x for x, c in zip(found, plain.cotangents, strict=True)
            ]
        whole = [dispatcher.full_tensor(x) for x in found]
        used = [dispatcher.full_tensor(x) for x in used]
        if case.same:
            assert torch.equal(after, plain.generator), "the generator is not where it is on one device"
            for i, (a, b) in enumerate(zip(plain.flat, whole, strict=True)):
                judge("flat", i, a, b, f"result {i}")
            for i, (a, b) in enumerate(zip(plain.inputs, inputs, strict=True)):
                judge("inputs", i, a, dispatcher.full_tensor(b), f"input {i} afterwards")
        if case.gradients:
            loss = _loss([(x if cut_use else _times(x, c), c) for x, c in zip(used, plain.cotangents, strict=True)])
            if loss is not None and plain.differentiable:
                assert loss.requires_grad, "the result has no gradient, as it has on one device"
                loss.backward()
            for i, (a, b) in enumerate(zip(plain.gradients, leaves, strict=True)):
                got = b.grad if b.grad is not None or a is None else torch.zeros_like(b)
                if case.same:
                    judge(
                        "gradients",
                        i,
                        torch.zeros_like(b) if a is None else a,
                        torch.zeros_like(b) if got is None else got,
                        f"gradient {i}",
                    )
        if case.fallback and any(isinstance(layout, Shard) for layout in layouts):
            self._fell_back(case, dispatcher)

    def _fell_back(self, case: Case, dispatcher: Dispatcher) -> None:
        assert dispatcher.ledger.fallbacks, "no fallback was counted"
        for place in dispatcher.ledger.fallbacks:
            assert place.function == case.fallback, f"counted for {place.function}, not {case.fallback}"
            file, _, line = place.line.rpartition(":")
            assert file.endswith("_cases.py") and abs(int(line) - case.line) < 30, f"counted at {place.line!r}"

    def _input(self, dispatcher: Dispatcher, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """(the leaf whose gradient is the whole input's, the input as the model sees it)."""
        if layout == PARTIAL:
            share = [0.5 + r for r in range(self.ranks)]
            rest = torch.sin(torch.arange(x.numel(), dtype=torch.float64)).reshape(x.shape)
            shift = rest * (self.ranks - 1 if self.rank == 0 else -1)
            leaf = (x * (share[self.rank] / sum(share)) + shift).requires_grad_()
            return leaf, dispatcher.global_tensor(leaf.clone(), PARTIAL)
        leaf = x.clone().requires_grad_(x.is_floating_point() or x.is_complex())
        if isinstance(layout, Shard):
            cut = dispatcher.global_tensor(dispatcher.shard(leaf.clone(), layout), layout)
            assert isinstance(cut, GlobalTensor)
            dispatcher.set_strides(cut, x.stride())  # the full tensor lies so on one device
            cut._mw_local = cut._mw_local.clone()  # no view to autograd
            return leaf, cut
        return leaf, leaf.clone()


@dataclass
class Result:
    """A case on one device."""

    structure: Any
    flat: list[Any]
    inputs: list[Tensor]
    gradients: list[Tensor | None]
    cotangents: list[Tensor | None]
    differentiable: bool
    generator: Tensor


def _one_device(case: Case, seed: str, guise: Guise, exact: bool = False) -> Result:
    """The case on one device; ``exact``: in float64, of the values that the inputs have in their own types."""
    tensors, function = case.build(Make(seed))
    tensors = guise.of(tensors)
    if exact:
        tensors, guise = [x.double() if x.is_floating_point() else x for x in tensors], PLAIN
    leaves = [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in tensors]
    inputs = [x.clone() for x in leaves]
    torch.manual_seed(1)
    with guise.around():
        result = function(*inputs)
    generator = torch.get_rng_state()
    flat = pytree.tree_leaves(result)
    make = Make(f"cotangents {seed}")
    cotangents = [make(*x.shape) if _has_gradient(x) and case.gradients else None for x in flat]
    loss = _loss([(_times(x, c), c) for x, c in zip(flat, cotangents, strict=True)])
    if loss is not None:
        loss.backward()
    values = [x.detach() if isinstance(x, Tensor) else x for x in flat]
    return Result(
        pytree.tree_structure(result),
        values,
        [x.detach() for x in inputs],
        [x.grad for x in leaves],
        cotangents,
        loss is not None,
        generator,
    )


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _times(x: Any, cotangent: Tensor | None) -> Any:
    if cotangent is None:
        return x
    return torch.nan_to_num(x.real if x.is_complex() else x) * cotangent


def _loss(products: list[tuple[Any, Tensor | None]]) -> Tensor | None:
    terms = [product.sum() for product, cotangent in products if cotangent is not None]
    return sum(terms[1:], terms[0]) if terms else None


def _same_facts(expected: list[Any], found: list[Any], rank: int) -> None:
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if not isinstance(a, Tensor):
            continue
        assert isinstance(b, Tensor), f"result {i} is {b!r}"
        assert a.shape == b.shape, f"result {i}: shape {tuple(b.shape)}, not {tuple(a.shape)} ({b!r:.200})"
        assert a.dtype == b.dtype, f"result {i}: {b.dtype}, not {a.dtype}"
        if isinstance(b, GlobalTensor) and isinstance(layout := b._mw_layout, Shard):
            assert layout.local(rank) == b._mw_local.shape[layout.dim], f"result {i}: {b!r} is not its own layout"


@dataclass
class _Judge:
    """Compares one value of a trial with that of one device.

    The value must have the type and shape of one device's, and differ by rounding alone: by two roundings of its own
    type, or it is as near to the value in float64 as one device's is.
    """

    case: Case
    seed: str
    guise: Guise
    reference: Result | None = None

    def __call__(self, of: str, i: int, expected: Any, found: Any, what: str) -> None:
        if not isinstance(expected, Tensor):
            one = 2 * max(map(self._tolerance, (*self.guise.dtypes, self.guise.autocast or torch.float64)))
            close = isinstance(expected, float) and math.isclose(expected, found, rel_tol=one)
            assert type(expected) is type(found) and (close or expected == found), (
                f"{what}: {found!r}, not {expected!r}"
            )
            return
        assert expected.dtype == found.dtype, f"{what}: {found.dtype}, not {expected.dtype}"
        assert expected.shape == found.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        near = torch.allclose(expected, found, equal_nan=True, **self._precise(expected, of))  # type: ignore[arg-type]
        same = near or (not self.guise.plain and self._no_less_exact(of, i, expected, found))
        assert same, f"{what}: {found.flatten().tolist()[:6]}, not {expected.flatten().tolist()[:6]}"

    def _precise(self, expected: Tensor, of: str) -> dict[str, float]:
        if self.guise.plain:
            rough = self.case.rough or expected.dtype in (torch.float16, torch.bfloat16, torch.float32)
            return {"rtol": 1e-2, "atol": 1e-2} if rough else {"rtol": 1e-9, "atol": 1e-10}
        dtypes = (expected.dtype, *self.guise.dtypes) if of == "gradients" else (expected.dtype,)
        one = max(map(self._tolerance, dtypes))
        return {"rtol": one, "atol": one * _largest(expected)}

    def _tolerance(self, dtype: torch.dtype) -> float:
        if not dtype.is_floating_point and not dtype.is_complex:
            return 0.0
        return 1e-9 if self.guise.plain else 2 * torch.finfo(dtype).eps

    def _no_less_exact(self, of: str, i: int, expected: Tensor, found: Tensor) -> bool:
        if not expected.is_floating_point():
            return False
        if self.reference is None:
            state = torch.get_rng_state()
            self.reference = _one_device(self.case, self.seed, self.guise, exact=True)
            torch.set_rng_state(state)
        exact = getattr(self.reference, of)[i]
        exact = torch.zeros(expected.shape) if exact is None else exact
        ours, theirs = (_largest(x.double() - exact) for x in (found, expected))
        one = self._tolerance(expected.dtype if self.guise.autocast is None else self.guise.autocast)
        return ours <= 4 * theirs + one * _largest(exact)


def _largest(x: Tensor) -> float:
    x = x.detach()
    finite = torch.nan_to_num((x if x.is_complex() else x.double()).abs(), posinf=0.0)
    return float(finite.max()) if x.numel() else 0.0


def _show(tensors: list[Tensor], layouts: list[Layout]) -> str:
    pieces = [
        f"{tuple(x.shape)} {layout}" + (f" {layout.pieces}" if isinstance(layout, Shard) else "")
        for x, layout in zip(tensors, layouts, strict=True)
    ]
    return ", ".join(pieces)


class recorded:
    """For the time of a ``with``: which rules are asked, and which of them answer."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome, self.before = outcome, (dict(ANSWERS), dict(DECIDERS))

    def __enter__(self) -> None:
        rules, deciders = self.before
        ANSWERS.update(
            {f: self._watched(rule_name(f), rule, lambda out: out is not NotImplemented) for f, rule in rules.items()}
        )
        DECIDERS.update(
            {
                f: self._watched(rule_name(f), decide, lambda out: not isinstance(out, Gather))
                for f, decide in deciders.items()
            }
        )

    def __exit__(self, *_: object) -> None:
        ANSWERS.update(self.before[0])
        DECIDERS.update(self.before[1])

    def _watched(self, name: str, rule: Any, answers: Callable[[Any], bool]) -> Any:
        def watched(*call: Any) -> Any:
            self.outcome.asked.add(name)
            out = rule(*call)
            if answers(out):
                self.outcome.answered.add(name)
            return out

        return watched


assert dispatcher.ANSWERS is ANSWERS and dispatcher.DECIDERS is DECIDERS  # or else nothing would be recorded


class Table(dict[str, Case]):
    """Cases by name."""

    def add(self, name: str, **options: Any) -> Callable[[Build], Build]:
        def register(build: Build) -> Build:
            assert name not in self, f"two cases {name!r}"
            line = inspect.getsourcelines(build)[1]
            self[name] = Case(name, build, line, **options)
            return build

        return register
