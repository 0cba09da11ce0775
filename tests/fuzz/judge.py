"""One run in a layout against one device in float64: what is right, refused or wrong.

    worker   one device: Model(), steps ─► losses, gradients, parameters, buffers after each step ─┐ each rank compares
             the job:    parallelize(Model, plan), the same steps ─────────────────────────────────┘ what it holds
    pool     one pool run a program: an error, a hang or a death ends this program alone

Each rank runs the one device's side for itself: it takes milliseconds, and nothing has to be sent.
"""

from __future__ import annotations

import linecache
import math
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from program import Run
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.calls.structure import snapshot
from meshwright.errors import PlanError, RowsError, UncutPathError
from meshwright.parity.preparation import perturbed
from meshwright.recipe import take_slices
from meshwright.runtime.job import Job
from meshwright.runtime.rows.microbatches import take_rows
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.submesh import bounds
from meshwright.workers.pool import LocalWorkers, WorkerError

VOCABULARY = 11
NAMES = {
    "torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "dataclass": dataclass, "partial": partial, "Any": Any,
    "NamedTuple": NamedTuple,
}  # fmt: skip
TIMEOUT = 40.0  # seconds a program may take: some hundred times what it needs
RIGHT, SKIPPED, REFUSED, WRONG, ERROR = "right", "skipped", "refused", "wrong", "error"
FAILED = (WRONG, ERROR)


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    kind: ``right``; ``skipped``, as one device raises, or its own rounding changes the result; ``refused`` with a
        PlanError, a RowsError or an UncutPathError; ``wrong``; ``error``: any other error, a hang or a death.
    sort: what fails, without numbers and names: what a smaller program must have in common.
    text: what was seen.
    """

    kind: str
    sort: str = ""
    text: str = ""
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.kind in FAILED


# --- in a worker ------------------------------------------------------------------------------------------------------


def model_class(source: str) -> Callable[[], nn.Module]:
    """The class ``Model`` of a text. Tracebacks show its lines."""
    name = f"<program {zlib.crc32(source.encode()):x}>"  # the same in every process
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {**NAMES, "__name__": name}
    exec(compile(source, name, "exec", dont_inherit=True), namespace)
    return namespace["Model"]


def sample(run: Run, rows: int, seed: int) -> dict[str, Tensor]:
    """A batch: floats ``x``, token ids, and labels of which some are ignored, unevenly over the rows. ``seed``: from 1."""
    draw = torch.Generator().manual_seed(seed)
    shape = (rows, run.tokens + (seed - 1) % run.lengths)
    labels = torch.randint(VOCABULARY, shape, generator=draw)
    ignored = torch.rand(shape, generator=draw) < torch.linspace(0.1, 0.8, rows)[:, None]
    return {
        "x": torch.randn((*shape, run.width), generator=draw, dtype=torch.float64 if run.precise else torch.float32),
        "ids": torch.randint(VOCABULARY, shape, generator=draw),
        "labels": torch.where(ignored, -100, labels),
    }


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """With weight decay, so that a gradient of zeros for none is seen in the parameter too."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False)


@dataclass
class Facts:
    """What one device found, a list a step; a loss for each backward."""

    losses: list[list[float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    carried: list[dict[str, Any]] = field(default_factory=list)

    def value(self, what: str, step: int, name: Any) -> Tensor:
        """What is called ``name`` of these facts, after a step; float64."""
        if what == "evaluations":
            found: Any = self.evaluated[step]
        elif what == "carried":
            found = tree_leaves(self.carried[step])[name]
        else:
            found = getattr(self, what.partition(",")[0])[step][name]
        return torch.as_tensor(0.0 if found is None else found, dtype=torch.float64)


class Batches:
    """The batches of a run, one after another. All batches of as many rows, and of the same length, carry the same dict, if the
    program uses one: what a forward leaves there is what the next begins with."""

    def __init__(self, run: Run) -> None:
        self._run, self._count = run, 0
        self._carried: dict[tuple[int, int], dict[str, Any]] = {}

    def next(self, rows: int) -> dict[str, Any]:
        """A new batch, for whose forward torch is seeded."""
        self._count += 1
        return self.last(rows)

    def last(self, rows: int) -> dict[str, Any]:
        """The last batch again, but for what has been left in its dict."""
        torch.manual_seed(self._count)
        batch = sample(self._run, rows, self._count)
        return {**batch, "carried": self.carried(rows)} if "carried" in self._run.source else batch

    def carried(self, rows: int) -> dict[str, Any]:
        """What batches of this number of rows carry."""
        return self._carried.setdefault((rows, (self._count - 1) % self._run.lengths), {})


class RankBatches(Batches):
    """The rows of this rank of the batches of a run."""

    def last(self, rows: int) -> dict[str, Any]:
        batch = super().last(rows)
        return {**batch, **self.own({name: t for name, t in batch.items() if name != "carried"}, rows)}

    def own(self, values: Any, rows: int) -> Any:
        """This rank's rows of values of all rows."""
        mesh = mw.Plan.parse(self._run.plan).mesh
        first, last = bounds(rows, mesh.data_size)[mesh.data_index(dist.get_rank())]
        return take_rows([torch.empty(rows), values], first, last)[1]  # the first tensor says what rows are


def evaluates(run: Run) -> bool:
    """Whether each step is followed by an evaluation of its last rows: if the program does something else there."""
    return "self.training" in run.source


def one_device(run: Run, noise: float = 0.0) -> Facts:
    """``noise``: relative, on the parameters: what rounding may do to the result."""
    torch.manual_seed(0)
    model = model_class(run.source)()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(perturbed(name, p))
            if noise:
                p.mul_(1 + noise * torch.sin(torch.arange(p.numel(), dtype=p.dtype)).reshape(p.shape))
    optimizer, facts, batches = optimizer_of(model.parameters()), Facts(), Batches(run)
    for rows in run.rows:
        facts.losses.append([])
        for n in rows:
            loss = model(**batches.next(n))["loss"]
            loss.backward()
            facts.losses[-1].append(loss.item())
        facts.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        if evaluates(run):
            model.eval()
            with torch.no_grad():
                facts.evaluated.append(model(**batches.last(rows[-1]))["loss"].item())
            model.train()
        facts.parameters.append({n: p.detach().clone() for n, p in model.named_parameters()})
        facts.buffers.append({n: b.detach().clone() for n, b in model.named_buffers()})
        facts.carried.append(snapshot(batches.carried(rows[-1]), torch.clone))
    return facts


def judged(run: Run, timeout: float) -> Verdict:
    """On every rank, each for what it holds. Raises what the job raises, unless it is a PlanError."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64 if run.precise else torch.float32)
    try:
        facts = one_device(run)
    except Exception as error:
        return Verdict(SKIPPED, "one device", f"{type(error).__name__}: {error}".split("\n", 1)[0])
    try:
        job = mw.parallelize(
            model_class(run.source), run.plan, batch=RankBatches(run).next(run.rows[0][0]),
            transform=perturbed, timeout=timeout / 2,
        )  # fmt: skip
    except PlanError as error:
        return Verdict(REFUSED, "PlanError", str(error))
    differences = Differences(run, facts)
    optimizer, batches = optimizer_of(job.parameters()), RankBatches(run)
    for step, rows in enumerate(run.rows):
        for i, n in enumerate(rows):
            try:
                loss = job.step(batches.next(n)).item()
            except (RowsError, UncutPathError) as error:
                return Verdict(REFUSED, type(error).__name__, str(error))
            differences.loss(step, i, loss)
        differences.gradients(step, job)
        optimizer.step()
        optimizer.zero_grad()
        if evaluates(run):
            job.module.eval()
            try:
                loss = job.evaluate(batches.last(rows[-1])).item()
            except (PlanError, RowsError, UncutPathError) as error:
                return Verdict(REFUSED, type(error).__name__, str(error))
            differences.compare("evaluations", step, 0, torch.tensor(facts.evaluated[step]), torch.tensor(loss))
            job.module.train()
        differences.state(step, job)
        differences.carried(step, batches, rows[-1])
    for name, value in job.full_buffers():
        if value is not None:
            differences.compare("buffers, gathered,", len(run.rows) - 1, name, facts.buffers[-1].get(name), value)
    return differences.verdict(job.notes)


class Differences:
    """Between one device's facts and what this rank holds."""

    def __init__(self, run: Run, facts: Facts) -> None:
        self._run, self._facts = run, facts
        self._found: list[tuple[str, str, float]] = []

    @cached_property
    def _noisy(self) -> Facts:
        """One device's facts, if its parameters have rounding errors."""
        return one_device(self._run, 1e-13 if self._run.precise else 1e-3)

    def loss(self, step: int, i: int, found: float) -> None:
        self.compare("losses", step, i, torch.tensor(self._facts.losses[step][i]), torch.tensor(found))

    def gradients(self, step: int, job: Job) -> None:
        for name, p in job.named_parameters():
            expected = self._facts.gradients[step][name]
            part = self._part(job, name, self._facts.parameters[step][name])
            if part.numel():
                expected = None if expected is None else self._part(job, name, expected)
                self.compare("gradients", step, name, expected, None if p.grad is None else local_tensor(p.grad))

    def state(self, step: int, job: Job) -> None:
        for name, p in job.named_parameters():
            expected = self._part(job, name, self._facts.parameters[step][name])
            self.compare("parameters", step, name, expected, local_tensor(p.detach()))
        for name, b in job.module.named_buffers():
            if job.recipe.owns_buffer(name, job.rank):
                self.compare("buffers", step, name, self._facts.buffers[step][name], b)

    def carried(self, step: int, batches: RankBatches, rows: int) -> None:
        """Compares what forwards left in what the batches carry."""
        expected, found = batches.own(self._facts.carried[step], rows), batches.carried(rows)
        if tree_structure(expected) != tree_structure(found):
            self._found.append(("carried: structure", f"carried in step {step}: {found}, not {expected}", 0.0))
            return
        for i, (a, b) in enumerate(zip(tree_leaves(expected), tree_leaves(found), strict=True)):
            self.compare("carried", step, i, torch.as_tensor(a), torch.as_tensor(b))

    def compare(self, what: str, step: int, name: Any, expected: Tensor | None, found: Tensor | None) -> None:
        where = f"{what} of step {step}: {name}"
        if expected is None or found is None:
            if expected is not found:
                said = f"{_brief(found)}, not {_brief(expected)}"
                self._found.append((f"{what}: None", f"{where}: {said}", 0.0))
            return
        if type(found) is not Tensor:
            self._found.append((f"{what}: type", f"{where}: is a {type(found).__name__}", 0.0))
            return
        if expected.shape != found.shape or expected.dtype != found.dtype:
            said = f"{tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} {expected.dtype}"
            self._found.append((f"{what}: shape", f"{where}: {said}", 0.0))
            return
        allowed = self._allowed(what, step, name, expected)
        if not torch.allclose(expected, found, rtol=0, atol=allowed, equal_nan=True):
            off = float((expected.double() - found.double()).abs().max()) if expected.numel() else 0.0
            self._found.append((what, f"{where}: {_brief(found)}, not {_brief(expected)} (off by {off:.1e})", off))

    def _allowed(self, what: str, step: int, name: Any, expected: Tensor) -> float:
        if not self._run.precise:
            return self._rounded(what, step, name)
        scale = max(1.0, float(expected.abs().max())) if expected.numel() and expected.is_floating_point() else 1.0
        if what == "gradients":
            scale = max(
                [
                    scale,
                    *(
                        float(g.abs().max())
                        for g in self._facts.gradients[step].values()
                        if g is not None and g.numel()
                    ),
                ]
            )
        return scale * (1e-9 if expected.dtype == torch.float64 else 5e-2)

    def _rounded(self, what: str, step: int, name: Any) -> float:
        """What half types may round away: a share of the tensor's own size, and what noise on the parameters does to it."""
        one, other = (facts.value(what, step, name) for facts in (self._facts, self._noisy))
        own = _largest(one)
        noise = _largest(one - other) if one.shape == other.shape else own
        allowed = 5e-2 * own + 5 * noise + 1e-6
        return allowed if math.isfinite(allowed) else 0.0  # (nan and inf are compared as they are)

    @staticmethod
    def _part(job: Job, name: str, whole: Tensor) -> Tensor:
        return take_slices(whole, job.recipe.held(job.recipe.by_name[name], job.rank))

    def verdict(self, notes: tuple[str, ...] = ()) -> Verdict:
        if not self._found:
            return Verdict(RIGHT, notes=notes)
        sort, text, off = self._found[0]
        if off and self._rounding_may_do(10 * off):
            return Verdict(SKIPPED, "rounding", text)
        if any("how many elements a mask picked" in said for said in notes):
            return Verdict(REFUSED, "a note", text)  # which numbers a model compares Python does not tell
        return Verdict(WRONG, sort, text, notes)

    def _rounding_may_do(self, off: float) -> bool:
        """Whether a last bit of the parameters changes one device's own result by as much: a kink, a tie."""
        noisy = self._noisy
        pairs = [
            (a, b) for x, y in zip(self._facts.losses, noisy.losses, strict=True) for a, b in zip(x, y, strict=True)
        ]
        furthest = max(abs(a - b) for a, b in pairs)
        for ours, theirs in zip(
            [*self._facts.gradients, *self._facts.parameters, *self._facts.buffers],
            [*noisy.gradients, *noisy.parameters, *noisy.buffers],
            strict=True,
        ):
            for name, a in ours.items():
                b = theirs[name]
                if a is not None and b is not None and a.numel() and a.shape == b.shape:
                    furthest = max(furthest, float((a.double() - b.double()).abs().max()))
        return furthest * 100 >= off


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _brief(x: Tensor | None) -> str:
    return (
        "None"
        if x is None
        else str([v if isinstance(v, complex) else float(f"{v:.6g}") for v in x.detach().flatten().tolist()[:4]])
    )


# --- in the pool's own process ----------------------------------------------------------------------------------------


def judge(run: Run, workers: LocalWorkers, timeout: float = TIMEOUT) -> Verdict:
    """The first rank's verdict that is not ``right``."""
    ranks = prod(run.plan["mesh"].values())
    try:
        found = workers.run(judged, run, timeout - 1, ranks=ranks, timeout=timeout)
    except WorkerError as error:
        # A limit of torch's, whose error says what to write in the plan.
        told = "cannot be made again: it differentiates" in error.reason
        return Verdict(REFUSED if told else ERROR, _sort(error), f"{error.reason}\n{_short(error.details)}")
    order = (WRONG, REFUSED, SKIPPED, RIGHT)
    return min(found, key=lambda v: order.index(v.kind))


def _sort(error: WorkerError) -> str:
    """What an error is, without numbers, names and quoted text."""
    line = re.sub(r"rank \d+ of \d+ (failed: )?", "", error.reason)
    if "no answer" in line:
        return "hang"
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+|\[[^]]*\]|\([^)]*\)", "#", line)[:90]


def _short(details: str) -> str:
    lines = details.strip().splitlines()
    return "\n".join(lines if len(lines) < 40 else [*lines[:4], "    ...", *lines[-24:]])


@dataclass
class Tally:
    """Verdicts by kind, and what was refused or skipped for which reason."""

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> None:
        self.kinds[verdict.kind] += 1
        if verdict.kind in (SKIPPED, REFUSED):
            self.reasons[f"{verdict.kind}: {verdict.text.strip().splitlines()[-1][:110]}"] += 1

    def __str__(self) -> str:
        return ", ".join(f"{n} {kind}" for kind, n in self.kinds.most_common())
