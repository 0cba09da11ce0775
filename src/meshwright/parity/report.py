"""``Report``: the verdict of a check, as data and as text for a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from rich.text import Text

from meshwright.names import few, fold_names
from meshwright.parity.compare import KINDS, Errors, Kind
from meshwright.plan import Plan
from meshwright.recipe import Recipe

_MOST = 10  # most lines of a list
_FEW = 4  # most branches in the title, and most modules of a branch


@dataclass(frozen=True)
class Report:
    """The result of a check. It is true if the check has passed.

    Attributes:
        passed: whether every error is at most ``tolerance``.
        plan: the plan that was checked.
        tolerance: largest relative error; see ``meshwright.parity.compare``.
        dtype: the type of the computation.
        steps: number of optimizer steps.
        seconds: duration of the check, including the start of workers.
        errors: ``loss``, and name → error for ``gradients``, ``parameters`` and ``buffers``; empty if a side failed.
        recipe: every decision of the plan, on rank 0; None if the job failed.
        fallbacks: (count, text) of functions that ran whole in the first step, on rank 0.
        collectives: kind → (calls, bytes) of the SPMD mode in the first step, on rank 0.
        words: (kind, name) → text, for errors that a number does not describe, such as another shape.
        hints: likely causes.
        notes: of the recipe and of the check, for a reader.
        failure: if a side failed or hung, the reason and the traceback; else empty.
    """

    passed: bool
    plan: Plan
    tolerance: float
    dtype: str
    steps: int
    seconds: float
    errors: Errors = field(default_factory=lambda: Errors(loss=inf, gradients={}, parameters={}, buffers={}))
    recipe: Recipe | None = None
    fallbacks: tuple[tuple[int, str], ...] = ()
    collectives: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    words: Mapping[tuple[str, str], str] = field(default_factory=dict)
    hints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    failure: str = ""

    def __bool__(self) -> bool:
        return self.passed

    @property
    def worst(self) -> tuple[str, str, float]:
        """(kind, name, error) of the largest error."""
        if self.failure:
            return "failure", "", inf
        errors = [("loss", "", self.errors["loss"])]
        errors += [(kind, name, error) for kind in KINDS for name, error in self.errors[kind].items()]
        return max(errors, key=lambda f: f[2])

    def layout(self, name: str) -> str:
        """A parameter's layout on each axis, such as ``dp_shard: Shard(0), tp: replicate``. Empty for other names."""
        line = self.recipe.by_name.get(name) if self.recipe else None
        if self.recipe is None or line is None:
            return ""
        return ", ".join(f"{axis}: {layout}" for axis, layout in self.recipe.layouts(line).items())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON. An infinite error is the text ``inf``."""
        kind, name, error = self.worst
        return {
            "passed": self.passed,
            "worst": {"kind": kind, "name": name, "error": _plain(error)},
            "errors": {"loss": _plain(self.errors["loss"])}
            | {k: {n: _plain(e) for n, e in self.errors[k].items()} for k in KINDS},
            "tolerance": self.tolerance,
            "dtype": self.dtype,
            "steps": self.steps,
            "plan": self.plan.settings(),
            "layouts": {line.name: self.layout(line.name) for line in self.recipe or ()},
            "fallbacks": [list(f) for f in self.fallbacks],
            "collectives": {kind: list(count) for kind, count in self.collectives.items()},
            "words": [[*key, text] for key, text in self.words.items()],
            "hints": list(self.hints),
            "notes": list(self.notes),
            "failure": self.failure,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        settings = f"{self.dtype}, tolerance {self.tolerance:.0e}, {self.steps} steps, {self.seconds:.1f} s"
        head = f"{'PASSED' if self.passed else 'FAILED'}  {self._verdict()}  ({settings})"
        if self.failure:
            return "\n\n".join([head, self.failure, *_block("Notes", self.notes)])
        blocks = [head, "\n".join(self._summary()), *_block("Differ", self._failing())]
        blocks += _block("Likely", self.hints)
        blocks += _block("Ran whole, in one step of rank 0", _most([f"{n} × {text}" for n, text in self.fallbacks]))
        blocks += _block("Notes", self.notes)
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        from meshwright.draw.notebook import as_html  # imported here, as few callers draw

        head, *rest = str(self).split("\n", 1)
        return as_html(
            Text.assemble((head, "bold green" if self.passed else "bold red"), *(f"\n{text}" for text in rest))
        )

    def _verdict(self) -> str:
        layout = f"{self.plan.mesh}{_branches_text(self.recipe)}"
        if self.failure:
            return f"{layout} did not come to an end"
        if self.passed:
            return f"{layout} is one device"
        wrong = [f"{self._count(kind)} of {len(self.errors[kind])} {kind}" for kind in KINDS if self._count(kind)]
        loss = ["the loss"] * (not self.errors["loss"] <= self.tolerance)
        return f"{layout} is not one device: {', '.join(loss + wrong)}"

    def _count(self, kind: Kind) -> int:
        return len(self._over(kind))

    def _over(self, kind: Kind) -> dict[str, float]:
        """Name → error, for errors above the tolerance (or nan), the largest first."""
        over = {name: error for name, error in self.errors[kind].items() if not error <= self.tolerance}
        return dict(sorted(over.items(), key=lambda item: -item[1]))

    def _summary(self) -> list[str]:
        """A table with the worst error of each kind."""
        rows = [("", "worst error", "of", "layout"), ("loss", f"{self.errors['loss']:.1e}", "", "")]
        for kind in KINDS:
            errors: dict[str, float] = self.errors[kind]
            if errors:
                name = max(errors, key=lambda n: errors[n])
                rows.append((kind, f"{errors[name]:.1e}", name, self.layout(name)))
        return _table(rows)

    def _failing(self) -> list[str]:
        """A table of the errors above the tolerance."""
        rows = []
        for kind in KINDS:
            over = self._over(kind)
            for name, error in list(over.items())[:_MOST]:
                rows.append((kind, f"{error:.1e}", name, self.layout(name), self.words.get((kind, name), "")))
            if len(over) > _MOST:
                rows.append((kind, "", f"… and {len(over) - _MOST} more", "", ""))
        return _table(rows)


def _branches_text(recipe: Recipe | None) -> str:
    """The submesh of each branch: ``, block_a on tp[0:2] | block_b on tp[2:8] as dp_replicate=3 × tp=2``."""
    if recipe is None or not (recipe.branches or recipe.streams):
        return ""
    branches = []
    for number, branch in enumerate(recipe.branches, 1):
        mesh = f" as {branch.mesh}" if branch.data > 1 else ""
        branches.append(f"{_modules_text(branch.modules)} on {recipe.places.spelled(number)}{mesh}")
    for stream in sorted(set(recipe.streams.values())):
        modules = [name for name, its_stream in recipe.streams.items() if its_stream == stream]
        branches.append(f"{_modules_text(modules)} on stream[{stream}]")
    more = f" | {len(branches) - _FEW} more branches" if len(branches) > _FEW else ""
    return f", {' | '.join(branches[:_FEW])}{more}"


def _modules_text(modules: Iterable[str]) -> str:
    return few([folded.label for folded in fold_names(modules)], _FEW)


def _plain(error: float) -> float | str:
    return error if isfinite(error) else "inf"


def _most(lines: list[str]) -> list[str]:
    return [*lines[:_MOST], f"… and {len(lines) - _MOST} more"] if len(lines) > _MOST else lines


def _block(title: str, lines: list[str] | tuple[str, ...]) -> list[str]:
    return ["\n".join([f"{title}:", *(f"  {line}" for line in lines)])] if lines else []


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with aligned columns. The second column has numbers and is right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i == 1 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
