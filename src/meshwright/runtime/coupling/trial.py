"""Does the loss of a batch follow from the losses of its pieces? Found out by trying, before the first step.

Data parallelism and microbatches give a rank some of the rows. For most models the loss of all rows is the mean over
pieces, weighed by rows or labels. Not for all: batch statistics, losses that compare rows with each other, sums. So a few
rows are run whole and in two parts, without gradients and without dropout, the parts with the random numbers that the
whole has drawn for their rows, and compared:

    mean       the whole is the weighed mean of the parts       each rank runs its rows
    sum        the whole is the sum of the parts                each rank runs its rows; losses are added
    ratio      the same as mean, for a mean that is divided     each rank runs its rows
               by another, of the mask (runtime/rows/loss_weights.py)
    coupled    neither, or the parts cannot be run              every rank runs all rows: right, though no faster

There is no backward. Whether that of a single row would find what it needs written over is seen from what the forward saves.

The trial computes in float64, at weights moved off their values (runtime/coupling/float64.py): at initial weights, in
the precision of the plan, a batch norm can look like rounding, and a loss that balances experts like a constant. It
leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.blame import line_of
from meshwright.generators import Generators
from meshwright.private import has_backward_hooks, python_body
from meshwright.runtime.coupling.attributes import VALUES, Name, differing, moved
from meshwright.runtime.coupling.float64 import wide
from meshwright.runtime.coupling.paths import Found, outside_of_parts
from meshwright.runtime.coupling.saved import written_after_saved
from meshwright.runtime.coupling.untouched import Slot, untouched
from meshwright.runtime.rows.batch import doubled, reversed_rows, rolled_rows
from meshwright.runtime.rows.loss_weights import MEAN, RATIO, SUM
from meshwright.runtime.rows.microbatches import rows_of, take_rows
from meshwright.spmd.autograd_functions import FunctionMode

COUPLED = "coupled"
MOST_ROWS = 8

# By how much two ways to the same loss may differ, of the loss, by the type that it is computed in; and by how much at
# most, if measured noise is larger. In float64 the first is near to rounding (1e-15, as models go): a maximum over all
# rows may couple them by 1e-11.
_TOLERANCE = {torch.float64: (1e-12, 1e-7), torch.float32: (2e-5, 1e-3)}
_HALF = (2e-2, 2e-2)

Trial = Callable[[], AbstractContextManager[None]]
Losses = Callable[[list[Any], str, Trial], tuple[list[float], list[float], list[Found]]]
Agreed = Callable[[int], tuple[int, int]]


@dataclass(frozen=True)
class Verdict:
    """What a trial came to.

    Attributes:
        kind: mean, sum or coupled.
        why: what ended the trial, with the model's line; empty if it did not fail.
        kept: attributes of modules that are other ones after a part of the rows.
    """

    kind: str
    why: str = ""
    kept: tuple[str, ...] = ()


# What an attempt comes to, the worst last.
_KINDS = (MEAN, SUM, RATIO, COUPLED)
_NOT_FINITE, _FAILED = 4, 5


@dataclass(frozen=True)
class _Computing:
    """The type that an attempt computes in, and what makes it so."""

    dtype: torch.dtype
    on: Trial
    wide: bool


def how_rows_combine(
    batch: Any,
    model: nn.Module,
    random: Generators,
    changed: Sequence[Slot],
    losses: Losses,
    dtype: torch.dtype,
    agreed: Agreed,
    fatal: tuple[type[Exception], ...] = (),
    single: bool = False,
) -> Verdict:
    """How the rows of a batch combine into its loss; the same verdict on every rank.

    Args:
        batch: at least two rows; as many on every rank.
        random: the generators that a forward may draw from.
        changed: what a forward may change, buffers, parameters that it writes: by where its module keeps it.
        losses: pieces of a batch, how they combine, and a context for each forward → (the loss of each piece, what it is
            multiplied by, what was read of it).
        dtype: what the model computes in.
        agreed: a number → the smallest and the largest of all ranks.
        single: whether a piece may be a single row. Then one of the trial is: a dim of size 1 is another shape to a model
            (``squeeze``), and memory that is contiguous where it was not (``transpose(0, 1).contiguous()`` copies nothing).
        fatal: errors that come up on one rank while others wait for what it would send: no agreement can follow.
    """
    rows = take_rows(batch, 0, min(rows_of(batch), MOST_ROWS))
    native = _Computing(dtype, nullcontext, wide=False)
    for computing in (
        _Computing(torch.float64, partial(wide, perturbed=True), wide=True),
        _Computing(torch.float64, partial(wide, perturbed=False), wide=True),
        native,
    ):
        attempt = _Attempt(rows, model, random, changed, losses, computing, first=int(single))
        found = _tried(attempt, agreed, fatal)
        if found.most < _NOT_FINITE:
            break
    if found.most >= _NOT_FINITE:
        return Verdict(COUPLED, found.why if found.most == _FAILED else "")
    kind = found.kind
    if kind != COUPLED and agreed(attempt.weighs_nothing(kind))[1]:
        # Rows that weigh nothing show nothing of what others do to them; backwards, they stand first.
        other = _Attempt(
            reversed_rows(rows, rows_of(rows)), model, random, changed, losses, computing, first=int(single)
        )
        kind = kind if _tried(other, agreed, fatal).kind == kind else COUPLED
    if kind != COUPLED and rows_of(rows) > 2:
        # Parts of which as many elements are masked make the whole by chance; divided elsewhere, they do not.
        rolled = rolled_rows(rows, rows_of(rows))
        other = attempt.divided_elsewhere() or _Attempt(
            rolled, model, random, changed, losses, computing, first=int(single)
        )
        kind = kind if _tried(other, agreed, fatal).kind == kind else COUPLED
    if kind == COUPLED:
        return Verdict(kind, attempt.outside and f"it acts on a number of all rows at {attempt.outside}")
    if single:
        alone = _Attempt(rows, model, random, changed, losses, native, first=1)
        written, line = alone.written_in_single_row(fatal)
        if agreed(written)[1]:
            why = f"in a single row it writes in place to what its backward needs, unlike in several{line}"
            return Verdict(COUPLED, why)
    return _with_what_is_kept(kind, attempt, agreed, fatal)


@dataclass(frozen=True)
class _Found:
    """What an attempt came to, on the ranks where it came to least and most; and what ended it."""

    fewest: int
    most: int
    why: str = ""

    @property
    def kind(self) -> str:
        return _KINDS[self.most] if self.fewest == self.most < _NOT_FINITE else COUPLED


def _tried(attempt: _Attempt, agreed: Agreed, fatal: tuple[type[Exception], ...]) -> _Found:
    """How rows combine in an attempt: the first way in which they do. Agreed on after each: every rank runs as many forwards,
    which have collectives."""
    found = _Found(_FAILED, _FAILED)
    ways: list[Callable[[], str]] = [partial(attempt.compared, way) for way in (MEAN, SUM, RATIO)]
    for compared in (*ways, attempt.compared_by_noise):
        why = found.why
        try:
            number = _KINDS.index(compared())
        except _NotFiniteError:
            number = _NOT_FINITE
        except fatal:
            raise
        except Exception as error:  # rows that cannot be divided: a model that has the batch's size as a number
            cause = error.__cause__ or error  # the model's own error, not what a recording made of it
            number, why = _FAILED, _told(cause)
        found = _Found(*agreed(number), why)
        if found.most != _KINDS.index(COUPLED):
            break
    return found


def combine_as(
    way: str,
    rows: Any,
    first: int,
    model: nn.Module,
    random: Generators,
    changed: Sequence[Slot],
    losses: Losses,
    agreed: Agreed,
    fatal: tuple[type[Exception], ...] = (),
) -> bool:
    """Whether the loss of all rows is what the first of them, and the rest, make in this way; the same on every rank.

    It is tried at the model's own weights, at which these rows took their paths, and at others, as what a path does may be
    behind a gate that is zero. Arguments as of ``how_rows_combine``.
    """
    for perturbed in (False, True):
        computing = _Computing(torch.float64, partial(wide, perturbed=perturbed), wide=True)
        attempt = _Attempt(rows, model, random, changed, losses, computing, first=first)
        for compared in (partial(attempt.compared, way), attempt.compared_by_noise):
            try:
                fits = compared() == way
            except _NotFiniteError:
                fits = perturbed  # other weights tell nothing then
            except fatal:
                raise
            except Exception:  # rows that cannot be run so
                fits = False
            fits = bool(agreed(fits)[0])
            if fits:
                break
        if not fits:
            return False
    return True


def _with_what_is_kept(kind: str, attempt: _Attempt, agreed: Agreed, fatal: tuple[type[Exception], ...]) -> Verdict:
    """The verdict on rows whose losses combine, by what they leave in attributes of modules."""
    kept = attempt.kept_otherwise(kind)
    names = tuple(f"{path}.{key}" if path else key for (path, key), how in kept.items() if how == VALUES)
    if not agreed(bool(kept))[1]:
        return Verdict(kind)
    if agreed(attempt.computes_with(kept, kind, fatal) or (bool(names) and attempt.has_backward_hooks()))[1]:
        of = f" ({', '.join(names[:3])})" if names else ""
        return Verdict(
            COUPLED,
            f"it computes with what earlier forwards left in attributes of its modules{of}, which follows from the rows",
        )
    return Verdict(kind, kept=names)


def _told(error: BaseException) -> str:
    """An error's type, its first line, and the model's line that it went through last."""
    text, line = f"{type(error).__name__}: {error}".split("\n", 1)[0], line_of(error)
    return f"{text} ({line})" if line else text


class _NotFiniteError(Exception):
    """A loss of the trial is not finite: at weights moved off their values, say."""


@dataclass
class _Outcome:
    """What came of forwards of some pieces."""

    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of the pieces, in their mean
    left: list[list[Tensor]] = field(default_factory=list)  # what each made of what it may change
    reads: list[Found] = field(default_factory=list)  # what each read of its rows
    attributes: list[dict[Name, Any]] = field(default_factory=list)  # plain ones of modules, that each changed


class _Attempt:
    """One comparison of the whole with its parts."""

    def __init__(
        self,
        rows: Any,
        model: nn.Module,
        random: Generators,
        changed: Sequence[Slot],
        losses: Losses,
        computing: _Computing,
        *,
        first: int,
    ) -> None:
        self._rows, self._count = rows, rows_of(rows)
        # Uneven, as even halves may happen to be alike.
        self._first = first or self._count // 2 - (self._count > 5)
        self.outside = ""  # the line of a number of all rows that lies outside of those of the parts
        self._model, self._random, self._changed = model, random, changed
        self._losses, self._computing = losses, computing
        self._tolerance, self._largest = _TOLERANCE.get(computing.dtype, _HALF)
        self._whole, self._parts, self._draws = _Outcome(), dict[str, _Outcome](), Draws(self._count)

    def compared(self, way: str) -> str:
        """The way, if the parts make the whole in it, by the tolerance of the type; else coupled. Raises _NotFiniteError."""
        self._without_gradients(partial(self._try, way))
        if not all(map(isfinite, (*self._whole.losses, *self._parts[way].losses))):
            raise _NotFiniteError
        return way if self._agrees(way, self._tolerance) else COUPLED

    def divided_elsewhere(self) -> _Attempt | None:
        """The same comparison with rows divided at another place, if there is one that leaves no single row."""
        places = {self._count // 2, self._first + 1, self._first - 1} - {self._first}
        place = min((p for p in places if 1 < p < self._count - 1), default=None)
        if place is None:
            return None
        other = copy(self)
        other.divide(place)
        return other

    def divide(self, place: int) -> None:
        """The first part ends there."""
        self._first, self._parts = place, {}

    def weighs_nothing(self, way: str) -> bool:
        """Whether a part adds nothing to the loss of all rows: its labels are all ignored, say."""
        parts = self._parts[way]
        return any(w * x == 0 for w, x in zip(parts.weights, parts.losses, strict=True))

    def compared_by_noise(self) -> str:
        """The same, if what seemed coupled may be noise, with that measured."""
        noise = min(self._without_gradients(self._noise), self._largest)
        ways = (way for way in self._parts if self._agrees(way, max(noise, self._tolerance)))
        return next(ways, COUPLED)

    def written_in_single_row(self, fatal: tuple[type[Exception], ...]) -> tuple[bool, str]:
        """Whether a forward of one row writes to what it has saved for the backward, and one of all rows does not; and where
        it was saved. Torch saves a copy of rows that it has to lay out anew, and a single row is saved itself."""
        lines: list[set[str]] = []
        try:
            for span in ((0, self._count), (0, 1)):
                lines.append(set())
                trial = partial(self._trial_with_saved, _Trial(self._draws, *span), lines[-1])
                self._losses([take_rows(self._rows, *span)], MEAN, trial)
        except fatal:
            raise
        except RuntimeError:  # a forward of which torch does not tell what is saved (torch.func)
            return False, ""
        found = sorted(lines[1] - lines[0])
        return bool(found), f" ({found[0]})" if found and found[0] else ""

    @contextmanager
    def _trial_with_saved(self, trial: _Trial, lines: set[str]) -> Iterator[None]:
        with self._trial(trial, _Outcome()), written_after_saved(lines):
            yield

    def has_backward_hooks(self) -> bool:
        """Whether something computes in a backward, with what a forward left, which the trial does not see."""
        return any(map(has_backward_hooks, self._model.modules()))

    def kept_otherwise(self, way: str) -> dict[Name, str]:
        """Attributes that a forward of all rows leaves otherwise than one of the first part."""
        return differing(self._whole.attributes[0], self._parts[way].attributes[0])

    def computes_with(self, kept: Mapping[Name, str], way: str, fatal: tuple[type[Exception], ...]) -> bool:
        """Whether the next forward computes with attributes that are kept: it begins with those of all rows, and with the
        part's, if they have the same shape, or else with other values in them."""
        whole, part = self._whole.attributes[0], self._parts[way].attributes[0]
        other = {
            n: part[n] if how == VALUES else moved(whole[n]) for n, how in kept.items() if n in whole and n in part
        }
        losses = []
        try:
            for begin in (whole, {**whole, **other}):
                losses.append(self._without_gradients(partial(self._loss_after, begin)))
        except fatal:
            raise
        except Exception:  # a forward that cannot be followed by another
            return False
        return all(map(isfinite, losses)) and abs(losses[0] - losses[1]) > self._tolerance * max(1.0, abs(losses[0]))

    def _loss_after(self, begin: Mapping[Name, Any]) -> float:
        """The loss of all rows in a forward that begins with other attributes."""
        trial = partial(self._trial, _Trial(self._draws, 0, self._count), _Outcome(), begin)
        return self._losses([self._rows], MEAN, trial)[0][0]

    def _try(self, way: str) -> None:
        if not self._whole.losses:
            self._whole = self._outcome([(0, self._count)], [self._rows], MEAN, self._draws)
        spans = [(0, self._first), (self._first, self._count)]
        pieces = [take_rows(self._rows, *span) for span in spans]
        self._parts[way] = self._outcome(spans, pieces, way, self._draws)

    def _noise(self) -> float:
        """By how much a loss differs, of itself, for the same rows once and twice: rounding alone, for a model whose rows
        do not meet one by one."""
        count = self._count // 2
        once, draws = take_rows(self._rows, 0, count), Draws(count)
        twice = doubled(once, count)
        a = self._outcome([(0, count)], [once], MEAN, draws).losses[0]
        b = self._outcome([(0, 2 * count)], [twice], MEAN, draws).losses[0]
        return 8 * min(abs(b - a), abs(b - 2 * a)) / max(1.0, abs(a))

    def _outcome(self, spans: list[tuple[int, int]], pieces: list[Any], way: str, draws: Draws) -> _Outcome:
        found = _Outcome()
        trials = (self._trial(_Trial(draws, *span), found) for span in spans)
        found.losses, found.weights, found.reads = self._losses(pieces, way, partial(next, trials))
        return found

    @contextmanager
    def _trial(
        self, trial: _Trial, found: _Outcome, begin: Mapping[Name, Any] = MappingProxyType({})
    ) -> Iterator[None]:
        left, attributes, is_wide = found.left, found.attributes, self._computing.wide
        with (
            untouched(self._model, self._random, self._changed, left, attributes, begin=begin, wide=is_wide),
            self._computing.on(),
            trial,
        ):
            yield

    def _without_gradients(self, run: Callable[[], Any]) -> Any:
        try:
            with torch.no_grad():
                return run()
        except _GradientsAskedError:
            with torch.enable_grad():
                return run()

    def _agrees(self, way: str, tolerance: float) -> bool:
        """Whether the parts make the whole."""
        whole, parts = self._whole, self._parts[way]
        if any(not _alike(a, b, tolerance) for a, b in zip(whole.left[0], parts.left[0], strict=True)):
            return False  # what a forward leaves in a buffer, a running mean, follows from the rows that it sees
        self.outside = outside_of_parts(whole.reads[0], parts.reads)
        if self.outside:
            return False
        together = sum(w * x for w, x in zip(parts.weights, parts.losses, strict=True))
        return abs(whole.losses[0] - together) <= tolerance * max(1.0, abs(whole.losses[0]))


def _alike(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))


class _GradientsAskedError(BaseException):
    """The forward asks for gradients (a penalty on them, a hook). Not an Exception, so that a model lets it through."""


_OF_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.register_hook, Tensor.retain_grad)
_DROPOUTS = {
    getattr(functional, name)
    for name in "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split()
}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class _Trial(FunctionMode):
    """The rows from ``start`` to ``stop``: no dropout, their own random numbers of all rows'; and without gradients, an
    error where the forward asks for them."""

    def __init__(self, draws: Draws, start: int, stop: int) -> None:
        super().__init__()
        self._draws, self._span, self._drawn = draws, (start, stop), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in _OF_GRADIENTS and not torch.is_grad_enabled():
            raise _GradientsAskedError
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, kwargs
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        if name in _RECURRENT:
            args = tuple(0.0 if isinstance(a, float) else a for a in args)  # the one is of their dropout
        if getattr(func, "__module__", "") == functional.__name__ and (body := python_body(func)) is not None:
            with self:  # the dropout in an attention of torch's
                return body(*args, **kwargs)
        result = func(*args, **kwargs)
        if name in _DRAWING and isinstance(result, Tensor) and not result.is_meta:
            self._drawn += 1
            self._draws.align(self._drawn, result, _kind(name, args, kwargs), self._span)
        return result


# --- random numbers ---------------------------------------------------------------------------------------------------

_DRAWING = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ multinomial normal normal_ uniform_ \
     exponential_ geometric_ log_normal_ cauchy_ random_ poisson".split()
)
_WHOLE_NUMBERS = ("randint", "randint_like", "random_", "randperm")


def _kind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same for numbers to be of the same kind: with whole ones their bounds, as they may be of rows."""
    if name == "multinomial":
        return name, (args[0] if args else kwargs["input"]).shape[-1]
    if name not in _WHOLE_NUMBERS:
        return (name,)
    return name, *(a for a in args if isinstance(a, int)), *(kwargs.get(k) for k in ("low", "high", "n", "from", "to"))


class Draws:
    """The random numbers that a forward of all rows drew, in order: a half of them takes those of its rows.

    Numbers of its own would change its loss, and look as though rows were coupled.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._known: dict[int, tuple[tuple[Any, ...], Tensor]] = {}

    @torch.no_grad()
    def align(self, i: int, drawn: Tensor, kind: tuple[Any, ...], span: tuple[int, int]) -> None:
        """The i-th draw of the rows in ``span``: kept where these are all rows, else overwritten with what was kept."""
        if span == (0, self._rows):
            self._known[i] = kind, drawn.clone()
        elif i in self._known and self._known[i][0] == kind:
            own = self._of(self._known[i][1], drawn.shape, *span)
            if own is not None:
                drawn.copy_(own)

    def _of(self, every: Tensor, shape: torch.Size, start: int, stop: int) -> Tensor | None:
        """The part of rows ``start`` to ``stop``, of this shape; all of what does not differ with the rows."""
        if every.shape == shape or every.dim() != len(shape):
            return every if every.shape == shape else None
        d, *others = (d for d, size in enumerate(shape) if size != every.shape[d])
        if not others and stop == 2 * self._rows and shape[d] == 2 * every.shape[d]:
            return torch.cat([every, every], d)
        each = every.shape[d] // self._rows
        if others or every.shape[d] != each * self._rows or shape[d] != each * (stop - start):
            return None
        return every.narrow(d, start * each, shape[d])


def note(found: Verdict) -> str:
    """What a person should know of it; empty for the usual case."""
    if found.kind != COUPLED and found.kept:
        return (
            f"{', '.join(found.kept[:3])}{f' and {len(found.kept) - 3} more' if len(found.kept) > 3 else ''}: what a forward "
            "leaves there follows from its rows, and after a step it is what this rank's first microbatch left. If it is to be "
            "that of the batch, make it a buffer: rows are then run together"
        )
    if found.kind != COUPLED:
        return ""
    if found.why:
        return (
            f"this model's rows cannot be run apart: {found.why}: every data rank runs all rows at once, in one microbatch, "
            "which is right, and saves memory but no time"
        )
    return (
        "this model's loss couples the rows of a batch (batch statistics, rows compared with rows): "
        "every data rank runs all rows at once, which is right, and saves memory but no time; "
        "rows: split in the plan gives each its own rows instead"
    )


__all__ = ["COUPLED", "MEAN", "RATIO", "SUM", "Trial", "Verdict", "combine_as", "how_rows_combine", "note"]
