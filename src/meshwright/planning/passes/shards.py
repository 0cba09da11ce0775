"""Shards over tp: found by running the model's own forward (planning/tensor.py), for the trunk and for each branch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.blame import is_ours
from meshwright.calls.hook import wrapped
from meshwright.calls.sequence import InputSharder
from meshwright.chance import LARGEST, SMALLEST, GeneratorUse, drawing
from meshwright.errors import Finding, PlanError, source_place
from meshwright.names import few
from meshwright.planning.draft import Draft, Run
from meshwright.planning.meta_functions import MetaFunctions
from meshwright.planning.module_state import undisturbed
from meshwright.planning.parameter_shards import ParameterShards, Style, shards_as_said
from meshwright.planning.passes.styles import model_styles, plan_styles
from meshwright.planning.places import Branches
from meshwright.planning.shadow import Shadow
from meshwright.planning.tensor import infer_shards
from meshwright.planning.units import ParameterUses
from meshwright.private import storage_of
from meshwright.spmd.dispatcher import Dispatcher


def shard_over_tp(draft: Draft) -> Draft:
    """Adds the shards over tp (in a branch, over its own tp axis), and where the forward uses each parameter."""
    of_model, unknown = model_styles(draft.model, draft.names)
    styles, generators = plan_styles(draft, of_model), GeneratorUse(draft.model)
    modules, run = dict(draft.model.named_modules()), undisturbed(draft.model, generators.noted(draft.run))
    units, recomputed = (u.name for u in draft.units if u.name), {name: modules[name] for name in draft.recompute}
    uses = ParameterUses(draft.model, {name: modules[name] for name in units}, recomputed)
    run = _every_way(draft, run, generators, uses)
    try:
        shards, writing = _trunk_shards(draft, run, styles, uses)
        if writing:
            draft = replace(draft, writing=draft.writing | writing)
            return shard_over_tp(draft.noted([_of_writing(writing)]))
    except Exception as error:  # a model may raise anything on tensors without values
        if is_ours(error) or isinstance(error, PlanError):
            raise
        return _shards_of_plan_only(draft.wrong(_assigned(draft, uses)), styles, error, unknown)
    draft = draft.wrong(_assigned(draft, uses))
    drawn = generators.of_host or (shards.reads > 0 and generators.of_torch)
    notes = [*unknown, *_same_work(draft, shards), *_unused(draft, uses)]
    return replace(
        draft,
        shards=_branch_shards(draft, run, styles, shards),
        uses=uses,
        drawn=drawn,
        notes=(*notes, *draft.notes),  # notes on shards come before notes on branches
    )


def _every_way(draft: Draft, run: Run, generators: GeneratorUse, uses: ParameterUses) -> Run:
    """``run``; if the forward draws random numbers and does not use all parameters, then also with the smallest and the largest
    random numbers, so that a layer that is skipped by chance (``if torch.rand([]) < 0.1: continue``) runs as well."""
    names, skips_some = set(draft.names.parameters), False

    def every_way(model: nn.Module) -> Any:
        nonlocal skips_some  # once True, it holds for every later pass over the forward
        result = run(model)
        skips_some |= (generators.of_host or generators.of_torch) and not names <= uses.seen
        for way in (SMALLEST, LARGEST) if skips_some else ():
            with drawing(way, model), _given_up_by_the_model():
                run(model)
        return result

    return every_way


@contextmanager
def _given_up_by_the_model() -> Iterator[None]:
    """Suppresses errors of the model: it may fail with such random numbers. Its uses up to the error are recorded."""
    try:
        yield
    except Exception as error:
        if is_ours(error):
            raise


def _assigned(draft: Draft, uses: ParameterUses) -> Iterator[Finding]:
    """A problem for each assignment of a parameter's data (``p.data = …``) after which it cannot be kept in parts."""
    yield from _casts(draft, uses)
    for (name, other), line in uses.joined.items():
        yield Finding(
            where=f"the model's {line or 'forward'}",
            given=f"a forward that gives {name} the memory of {other}: what an optimizer does to one changes the other",
            required="parameters in memory of their own: each rank holds a part of each",
            fix=f"with torch.no_grad(): {name}.copy_(value)  # in place of {name}.data = value",
        )


def _casts(draft: Draft, uses: ParameterUses) -> Iterator[Finding]:
    """A problem for each line of the forward that casts parameters.

    On one device, the parameters have the new dtype in the next step. Here they would not: shards, and the parameters that
    FSDP2 gathers from them, keep the dtype that the optimizer has.
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for name, cast in uses.cast.items() if draft.plan.mesh.size > 1 else ():
        lines.setdefault((cast.line, str(cast.dtype)), []).append(name)
    for (line, dtype), names in lines.items():
        file, _, number = line.rpartition(":")
        yield Finding(
            where=f"the model's {source_place(file, int(number)) if file else 'forward'}",
            given=f"a forward that casts parameters to {dtype}: {few(names)}",
            required="parameters that keep their type: each rank holds a part of them in the type that they were built in",
            fix=f"build the module in {dtype}; or cast for the call alone: "
            f"torch.func.functional_call(module, {{n: p.to({dtype}) for n, p in module.named_parameters()}}, x)",
        )


def _of_writing(blocks: Collection[str]) -> str:
    """A note on blocks whose inputs are not sharded over the sequence because the blocks write to them."""
    return f"not sharded over the sequence, as they write to what they are given: {few(sorted(blocks))}"


def check_refused(draft: Draft) -> Draft:
    """A problem for each parameter that cannot be sharded as the plan says, or not with a piece for each rank."""
    refused = draft.shards.refused if draft.shards is not None else {}
    return draft.wrong(
        Finding(
            where=f"modules, what is said of {name}",
            given=f"shards over tp of a parameter of shape {tuple(draft.names.parameters[name][0].shape)}: {reason}",
            required="a parameter that can be sharded, with at least one piece for each rank of tp",
            fix=f"{name}: {{tp: replicate}}",
        )
        for name, reason in refused.items()
    )


def _trunk_shards(
    draft: Draft, run: Run, styles: Mapping[str, Style], uses: ParameterUses
) -> tuple[ParameterShards, set[str]]:
    """(the shards outside branches, over all of tp; the blocks that write to an input that is sharded over the sequence)."""
    input_sharders: list[InputSharder] = []  # one for each pass over the forward
    with wrapped(draft.model, blocks=draft.sequence) as calls:

        def sharding_inputs(dispatcher: Dispatcher) -> AbstractContextManager[None]:
            input_sharders.append(InputSharder(dispatcher, watched=True))
            return calls.sharding_inputs(input_sharders[-1])

        shards = infer_shards(
            draft.model,
            run,
            axis="tp",
            size=draft.plan.mesh.axis_size("tp"),
            styles=_styles_in(0, styles, draft.branches),
            names=_ids(draft),
            seeds=sharding_inputs,
            uses=uses,
        )
    return shards, set[str]().union(*(sharder.written() for sharder in input_sharders))


def _shards_of_plan_only(draft: Draft, styles: Mapping[str, Style], error: Exception, unknown: Sequence[str]) -> Draft:
    """The draft with the shards that the plan names, and no others, because the forward failed on tensors without values."""
    size = draft.plan.mesh.axis_size("tp")
    note = (
        f"the forward could not be followed without values ({type(error).__name__}: {str(error)[:200]}): "
        "over tp only what the plan names is sharded"
    )
    shards = shards_as_said(draft.model, size=size, styles=styles, names=_ids(draft)) if size > 1 else None
    written = _written_alone(draft)
    return replace(draft, shards=shards, written=written, notes=(*unknown, note, *draft.notes))


def _written_alone(draft: Draft) -> frozenset[str]:
    """The parameters that the forward writes, as far as it runs on tensors without values if nothing is sharded."""
    before = {name: (p, storage_of(p)) for name, p in draft.model.named_parameters() if p.is_meta}
    shadow, assigned = Shadow(), set[str]()
    shadow.memory = {memory: name for name, (_, memory) in before.items()}

    def run(model: nn.Module) -> None:
        try:
            draft.run(model)
        finally:  # before the parameters get their memory back
            assigned.update(name for name, (p, memory) in before.items() if storage_of(p) != memory)

    with torch.no_grad(), shadow, MetaFunctions(), _given_up_by_the_model():
        undisturbed(draft.model, run)(draft.model)
    return frozenset(shadow.written | assigned)


def _same_work(draft: Draft, shards: ParameterShards) -> list[str]:
    """A note if tp has several ranks, and nothing is sharded over them."""
    size, branches = draft.plan.mesh.axis_size("tp"), draft.branches
    if size == 1 or shards.layouts:
        return []
    reasons = sorted({r for n, r in shards.reasons.items() if r and branches.home(n) == (0,)})
    subject = "no parameter outside branches" if branches.places else "no parameter"
    return [f"{subject} is sharded over tp={size}: every rank of it does the same work. " + "; ".join(reasons[:3])]


def _unused(draft: Draft, uses: ParameterUses) -> list[str]:
    return [f"{name} is not used by the forward" for name in draft.names.parameters if name not in uses.seen]


def _branch_shards(draft: Draft, run: Run, styles: Mapping[str, Style], trunk: ParameterShards) -> ParameterShards:
    """The shards of the trunk, together with those of each branch over its own tp axis."""
    layouts, reasons, refused = dict(trunk.layouts), dict(trunk.reasons), dict(trunk.refused)
    for number, place in enumerate(draft.branches.places, 1):
        inside = [n for n in draft.names.parameters if draft.branches.home(n) == (number,)]
        if place.tp == 1:
            reasons |= dict.fromkeys(inside, "its place has no tp axis")
            continue
        branch_styles = _styles_in(number, styles, draft.branches)
        shards = infer_shards(draft.model, run, axis="tp", size=place.tp, styles=branch_styles, names=_ids(draft))
        layouts |= {n: shards.layouts[n] for n in inside if n in shards.layouts}
        reasons |= {n: shards.reasons[n] for n in inside if n in shards.reasons}
        refused |= {n: shards.refused[n] for n in inside if n in shards.refused}
    return replace(trunk, layouts=layouts, reasons=reasons, refused=refused)


def _styles_in(place: int, styles: Mapping[str, Style], branches: Branches) -> dict[str, Style]:
    """The styles for planning one place: its own parameters have theirs, parameters of other places are replicated."""
    other = Style("replicate", forced=True, reason="used in another place")
    return {name: style if branches.home(name) == (place,) else other for name, style in styles.items()}


def _ids(draft: Draft) -> dict[int, str]:
    return {id(p): name for name, (p, _) in draft.names.parameters.items()}
