"""A program over the stages of a pipeline, all in this process (tests/spmd/staged.py), against one device.

Without a pool a program takes some hundredths of a second. What the job adds around a pipeline (its groups, the trial of
rows, data parallelism) is not in it: `judge` has that.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from judge import ERROR, REFUSED, SKIPPED, Differences, Verdict, model_class, one_device, optimizer_of, sample
from layouts import case
from program import Case, Run
from torch import nn

from meshwright.errors import PlanError, UncutPathError
from meshwright.parity.preparation import perturbed
from meshwright.private import hooked

sys.path.insert(0, str(Path(__file__).parent.parent / "spmd"))

from staged import Staged, cut_at


def judge_stages(run: Run, cuts: int | None = None) -> Verdict:
    """The verdict on a run whose mesh has ``pp`` alone.

    Args:
        cuts: seed of where the stages are cut; None: where planning cuts them.
    """
    default, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64 if run.precise else torch.float32)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _judged(run, cuts)
    finally:
        torch.set_default_dtype(default)
        torch.set_num_threads(threads)


def _judged(run: Run, cuts: int | None) -> Verdict:
    try:
        facts = one_device(run)
    except Exception as error:
        return Verdict(SKIPPED, "one device", f"{type(error).__name__}: {error}".split("\n", 1)[0])
    if any(map(hooked, _built(run).parameters())):
        return Verdict(SKIPPED, "a job's", "hooks of a constructor are called by a job, at the end of a step")
    try:
        with cutting(run, cuts):
            staged = Staged(lambda: _built(run), dict(run.plan), sample(run, run.rows[0][0], 1))
        found, count = _Compared(run, facts), 0
        optimizers = [
            optimizer_of([p for p in m.parameters() if not p.is_meta] or [nn.Parameter(torch.empty(0))])
            for m in staged.models
        ]
        for step, rows in enumerate(run.rows):
            for i, n in enumerate(rows):
                count += 1
                torch.manual_seed(count)
                found.loss(step, i, staged.step(sample(run, n, count)))
            for name, g in staged.gradients().items():
                found.compare("gradients", step, name, facts.gradients[step][name], g)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found.states(step, staged)
    except (PlanError, UncutPathError) as error:
        return Verdict(REFUSED, type(error).__name__, str(error))
    except Exception as error:
        told = "cannot be made again: it differentiates" in str(error)  # a limit of torch's (see ``judge``)
        return Verdict(
            REFUSED if told else ERROR,
            re.sub(r"'[^']*'|\"[^\"]*\"|\d+|\[[^]]*\]|\([^)]*\)", "#", f"{type(error).__name__}: {error}")[:120],
            f"{error}",
        )
    return found.verdict()


def _built(run: Run) -> nn.Module:
    model = model_class(run.source)()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_meta:
                p.copy_(perturbed(name, p))
    return model


@contextmanager
def cutting(run: Run, seed: int | None) -> Iterator[None]:
    """Stages begin at random, of the positions where they may."""
    if seed is None:
        yield
        return
    stages = run.plan["mesh"]["pp"] * (2 if run.plan.get("schedule") in ("interleaved",) else 1)

    def choose(places: Sequence[int]) -> list[int]:
        draw = random.Random(seed)
        return sorted(draw.sample(list(places), stages - 1)) if len(places) >= stages - 1 else []

    with cut_at(choose):
        yield


class _Compared(Differences):
    def states(self, step: int, staged: Staged) -> None:
        named = [dict(m.named_parameters()) for m in staged.models]
        for line in staged.recipe.parameters:
            for rank in staged.recipe.owners(line):
                self.compare(
                    "parameters",
                    step,
                    line.name,
                    self._facts.parameters[step][line.name],
                    named[rank][line.name].detach(),
                )
        for name, _ in staged.models[0].named_buffers():
            owner = staged.models[staged.recipe.buffer_owner(name)]
            self.compare(
                "buffers", step, name, self._facts.buffers[step][name], dict(owner.named_buffers())[name].detach()
            )


# What the trial of rows finds to couple them, or may: such programs run in one microbatch here.
_COUPLES = frozenset([
    "coupled", "unused", "buffers", "shared buffers", "kept tensors", "counter dropout", "assigned buffers", "input writes", "masked mean", "dropout",
    "of all rows", "gradients", "picked", "written parameters",
])  # fmt: skip


def staged_cases(
    mesh: str, count: int, seed: int, kinds: frozenset[str], options: frozenset[str]
) -> Iterator[tuple[Case, int | None]]:
    """Cases over ``pp`` alone, each with a seed of where to cut (None: where planning does)."""
    for number in range(count):
        draw = random.Random(f"{mesh} {seed} {number}")
        made = case(draw, mesh, kinds, options)
        plan = dict(made.plan)
        if made.program.kinds & _COUPLES or len(made.program.kinds & {"mean", "sum"}) == 2:
            plan["microbatches"] = 1
        if "sum" in made.program.kinds:
            plan["microbatches"] = 1
        yield replace(made, plan=plan), draw.choice([None, *range(9)])
