"""``resolve``: any module + a plan → a recipe. Every decision is made here, with its reason.

1  names          every parameter once, with its tied names
2  units          repeated blocks and what the plan names; only modules whose parameters nobody else uses
3  cuts           what tensor parallelism cuts, from the forward itself (planning/tensor.py)
4  recipe         a line a parameter; or one error with everything that is wrong
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import is_ours
from meshwright.calls.sequence import cutting_inputs
from meshwright.chance import WAYS, Draws, drawing
from meshwright.errors import Findings, PlanError, nearest
from meshwright.graph import ModelGraph
from meshwright.layout import REPLICATE
from meshwright.plan import Entry, Plan
from meshwright.planning.branch import (
    Branches,
    buffer_place,
    find_branches,
    place_of,
    read_places,
)
from meshwright.planning.capture import capture, computing_in
from meshwright.planning.compiled import compiled_notes
from meshwright.planning.concurrent import place_concurrent, wants_branches
from meshwright.planning.memory import undisturbed
from meshwright.planning.pipeline import choose_cuts, cut_places, make_stages, no_cuts, stage_of
from meshwright.planning.rows import events_by_rows
from meshwright.planning.shadow import Meeting, Shadow
from meshwright.planning.tensor import Cuts, Style, cuts_as_said, infer_cuts
from meshwright.planning.units import Uses, called_modules, repeated_blocks
from meshwright.private import pytree
from meshwright.recipe import ParameterRecipe, Recipe, Stage, Unit
from meshwright.regions import Regions
from meshwright.submesh import Submesh, Submeshes, trunk

Run = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Names:
    """The model's parameters: first name → (parameter, its other names)."""

    parameters: Mapping[str, tuple[nn.Parameter, tuple[str, ...]]]

    @staticmethod
    def of(model: nn.Module) -> Names:
        found: dict[int, tuple[str, nn.Parameter, list[str]]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            if id(p) in found:
                found[id(p)][2].append(name)
            else:
                found[id(p)] = (name, p, [])
        return Names({name: (p, tuple(aliases)) for name, p, aliases in found.values()})


def resolve(model: nn.Module, plan: Plan, run: Run, batch: Any = None, *, whole_batch: bool = False) -> Recipe:
    """The recipe for ``model`` (parameters on meta) under ``plan``.

    Args:
        model: with parameters on the meta device, buffers real.
        run: runs the model's forward on the sample batch, and the loss on its output.
        batch: the sample, for its number of rows.
        whole_batch: whether these are the rows of all data ranks together.

    Raises:
        PlanError: with every problem.
    """
    findings = Findings()
    names = Names.of(model)
    plan, entries, of_branches = _all_said(model, names, plan, run, findings)
    if whole_batch:
        _check_rows(plan, batch, findings)
    _check_cuts(plan, names, findings)
    _check_scripted(model, findings)
    branches = read_places(model, plan, entries, findings)
    findings.raise_if_any()
    blocks = repeated_blocks(model)
    graph = _checked_graph(model, plan, run, branches, findings)
    if graph is not None:
        branches, more = find_branches(model, plan, branches, graph, findings)
        of_branches += more
        findings.raise_if_any()
    units, recompute = _units(model, blocks, plan, entries, branches.placed)
    sequence = blocks if plan.sequence_parallel and plan.mesh.axis_size("tp") > 1 else ()
    cuts, uses, notes = _cuts(model, plan, names, entries, units, sequence, run, branches)
    notes += of_branches
    _check_refused(cuts, names, findings)
    findings.raise_if_any()
    data = plan.mesh.data_size * max((p.data for p in branches.places), default=1)
    routed = data > 1 and (cuts is None or uses is None or cuts.reads > 0 or uses.draws)
    skipped = _sometimes_skipped(model, uses, run) if routed and uses is not None else set()
    units, more = _closed_units(units, uses, skipped)
    written = uses.written if uses is not None else set()
    more += _told_of_writes(written, plan)
    stages, schedule = tuple[Stage, ...](), plan.schedule
    buffers: tuple[tuple[str, int, int], ...] = ()
    homes: dict[str, tuple[int, ...]] = dict.fromkeys(names.parameters, (0,))
    if graph is not None and plan.mesh.axis_size("pp") > 1:
        stages, homes = _stages(plan, names, entries, blocks, graph, branches.regions, findings)
        findings.raise_if_any()
        schedule, why = _schedule(plan, graph)
        units, recompute, parted = _whole_in_stages(units, recompute, graph, stages)
        more += why + parted + _shared(homes)
    if graph is not None:
        buffers = _buffer_homes(model, graph, stages, branches)
    if graph is not None and branches.regions is not None:
        recompute, parted = _recomputed_whole(recompute, graph, branches, names)
        more += parted
        if data > 1:
            units, parted = _answering_units(
                units, graph, branches, Submeshes(plan.mesh, (trunk(plan.mesh), *branches.places))
            )
            more += parted
        _check_shared(homes, branches, findings)
        findings.raise_if_any()
    owners = _owners(model, units)
    loose = {**dict.fromkeys(written, ""), **_of_other_types(names, owners, plan, data, findings)}
    lines = tuple(
        _line(name, p, aliases, cuts, units, owners.get(id(p), ""), loose, homes[name], branches.home(name))
        for name, (p, aliases) in names.parameters.items()
    )
    return Recipe(
        mesh=plan.mesh,
        parameters=lines,
        units=units,
        recompute=recompute,
        sequence=sequence,
        microbatches=plan.microbatches or _microbatches(plan, rows_of(batch) or 1, whole_batch),
        precision=plan.precision,
        reshard_after_forward=_reshards(plan),
        rows=plan.rows,
        stages=stages,
        schedule=schedule,
        buffers=buffers,
        branches=branches.places,
        placed=branches.placed,
        streams=branches.streams,
        routed=routed,
        seed=plan.seed,
        nonfinite=plan.nonfinite,
        verify=plan.verify,
        notes=(*notes, *more, *compiled_notes(model, plan.mesh, bool(branches.places or branches.streams))),
        plan=plan.dump(),
    )


def _all_said(
    model: nn.Module, names: Names, plan: Plan, run: Run, findings: Findings
) -> tuple[Plan, dict[str, Entry], list[str]]:
    """The plan, with the branches that it leaves to be found; what it says of each module and parameter; what was found."""
    entries = _entries(model, names, plan, findings)
    if findings or not wants_branches(plan):
        return plan, entries, []
    plan, notes = place_concurrent(plan, entries, _captured(model, plan, run))
    return plan, _entries(model, names, plan, findings), notes


# --- what the plan's globs name ---------------------------------------------------------------------------------------


def _entries(model: nn.Module, names: Names, plan: Plan, findings: Findings) -> dict[str, Entry]:
    """For each module and parameter that a glob names: what the plan says of it; later globs win."""
    modules = [n for n, _ in model.named_modules()]
    parameters = [n for name, (_, aliases) in names.parameters.items() for n in (name, *aliases)]
    found: dict[str, Entry] = {}
    for glob, entry in plan.modules.items():
        matched = [n for n in (*modules, *parameters) if _named(n, glob)]
        if not matched:
            known = [n for n in (*modules, *parameters) if n]
            near = nearest(glob, known) or tuple(known[:3])
            findings.add(
                where=f"modules.{glob}",
                given="a glob that matches no module and no parameter",
                required=f"the name of one, such as {', '.join(near)}",
                fix=f"{near[0] if near else '*'}: {entry.settings()}",
            )
        for name in matched:
            found[name] = found.get(name, Entry()) | entry
    return found


def _named(name: str, glob: str) -> bool:
    """Whether a glob names it; ``layers.0-5`` is layers.0 to layers.5."""
    if fnmatchcase(name, glob):
        return True
    parts, patterns = name.split("."), glob.split(".")
    if len(parts) != len(patterns) or not any(map(_RANGE.fullmatch, patterns)):
        return False
    return all(_in_range(part, pattern) for part, pattern in zip(parts, patterns, strict=True))


_RANGE = re.compile(r"(\d+)-(\d+)")


def _in_range(part: str, pattern: str) -> bool:
    ends = _RANGE.fullmatch(pattern)
    if ends is None:
        return fnmatchcase(part, pattern)
    return part.isdigit() and int(ends[1]) <= int(part) <= int(ends[2])


def _styles(names: Names, entries: Mapping[str, Entry], soft: Mapping[str, Style]) -> dict[str, Style]:
    """For each parameter, what the plan (else the model's own tp plan) says of its cut."""
    styles = {}
    for name, (_p, aliases) in names.parameters.items():
        said = Entry()
        for n in (name, *aliases):
            scopes = [n[:i] for i, c in enumerate(n) if c == "."]
            for scope in (*scopes, n):  # what is said of a module holds for its parameters
                said = said | entries.get(scope, Entry())
        if said.tp in (None, "auto") and said.parts is None and said.units is None:
            styles[name] = soft.get(name, Style()) if said.tp is None else Style()
            continue
        kind = "shard" if said.shard_dim is not None else (said.tp or "auto")
        dim = said.shard_dim
        styles[name] = Style(kind, dim, said.parts, said.units, forced=said.tp not in (None, "auto"))
    return styles


_TP_PLAN = {
    "colwise": "column", "colwise_rep": "column", "colwise_gather_output": "column", "packed_colwise": "column",
    "rowwise": "row", "rowwise_rep": "row", "embedding_rowwise": "row", "packed_rowwise": "row", "rowwise_split_input": "row",
    "replicated_with_grad_allreduce": "replicate", "replicate": "replicate",
}  # fmt: skip


def _model_tp_plan(model: nn.Module, names: Names) -> tuple[dict[str, Style], list[str]]:
    """The styles of a Hugging Face ``tp_plan``, read as data; an unknown style leaves its coupled group whole."""
    given = getattr(model, "_tp_plan", None)
    styles: dict[str, Style] = {}
    notes: list[str] = []
    if not isinstance(given, Mapping):
        return styles, notes
    unknown = {pattern: style for pattern, style in given.items() if style not in _TP_PLAN}
    groups = {pattern.rpartition(".")[0]: style for pattern, style in unknown.items()}
    for name in names.parameters:
        module = name.rpartition(".")[0]
        for pattern, style in given.items():
            if style in _TP_PLAN and (fnmatchcase(module, pattern) or fnmatchcase(name, pattern)):
                styles[name] = Style(_TP_PLAN[style], reason=f"the model's tp_plan: {style}")
        for group, style in groups.items():
            if group and fnmatchcase(name, f"{group}.*"):
                styles[name] = Style("replicate", reason=f"the model's tp_plan has a style not known here: {style}")
    for group, style in groups.items():
        notes.append(f"{group or 'a group'} is left whole over tp: its tp_plan has the style {style!r}, not known here")
    return styles, notes


# --- units ------------------------------------------------------------------------------------------------------------


def _units(
    model: nn.Module,
    blocks: tuple[str, ...],
    plan: Plan,
    entries: Mapping[str, Entry],
    placed: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[Unit, ...], tuple[str, ...]]:
    """Wrap units, innermost first and the root last; and the modules to recompute.

    A module that stands in a place of its own is a unit, as a unit lives on one mesh. What the plan says of a container
    that is never called is said of the modules in it.
    """
    modules = dict(model.named_modules())
    chosen = {b: Unit(b) for b in blocks if entries.get(b, Entry()).unit is not False}
    recompute = [b for b in blocks if plan.recompute == "blocks" and entries.get(b, Entry()).recompute != "none"]
    for name, entry in entries.items():
        if name not in modules:
            continue
        called = called_modules(name, modules[name]) if name else ()
        if entry.unit or entry.dp is not None or name in placed:
            chosen |= {n: Unit(n, entry.dp or "shard") for n in called if n == name or n not in chosen}
        if entry.recompute == "block":
            recompute += [n for n in called if n not in recompute]
    for name, unit in chosen.items():
        if entries.get(name, Entry()).dp is None:  # a unit within a module that the plan names follows that module
            above = [n for n, entry in entries.items() if entry.dp is not None and name.startswith(n + ".")]
            if above:
                chosen[name] = replace(unit, data=entries[max(above, key=len)].dp or unit.data)
    chosen |= {n: Unit(n) for n in placed if n and n not in chosen}
    held = {n: u for n, u in chosen.items() if any(True for _ in modules[n].parameters())}
    order = sorted(held, key=lambda n: -n.count("."))
    held = {n: replace(u, place=place_of(n, placed)[0]) for n, u in held.items()}
    return (*(held[n] for n in order), Unit("", entries.get("", Entry()).dp or "shard")), tuple(recompute)


def _closed_units(units: tuple[Unit, ...], uses: Uses | None, skipped: set[str]) -> tuple[tuple[Unit, ...], list[str]]:
    """Units whose parameters are used inside their own forward only, and which run on every rank.

    FSDP2 gathers a unit when its forward starts: a rank that skips it would leave the others waiting. And it frees what it
    gathered when a backward has gone through a unit, though the forward that asked for that backward may go on.
    """
    if uses is None:
        return units, []
    if uses.differentiates and len(units) > 1:
        note = "the forward asks for gradients itself: the root is the only unit, gathered for the time of a step"
        return tuple(u for u in units if not u.name), [note]
    why = {u: f"{name} is used outside its forward" for u, name in sorted(uses.outside)}
    again = "is used within a custom autograd.Function, whose backward may compute with it again"
    why |= {u: f"{name} {again}" for u, name in sorted(uses.again) if u not in why}
    why |= dict.fromkeys(sorted(skipped - set(why)), "whether it runs depends on values")
    notes = [f"{unit} is no unit of its own: {reason}" for unit, reason in why.items()]
    return tuple(u for u in units if u.name not in why), notes


def _answering_units(
    units: tuple[Unit, ...], graph: ModelGraph, branches: Branches, places: Submeshes
) -> tuple[tuple[Unit, ...], list[str]]:
    """Units of which every rank that has them has what they give: FSDP2 gathers a unit for its backward when a gradient comes
    to its result, which it does not on a rank where that is made in another branch."""
    assert branches.regions is not None
    at, parted = branches.regions.places, list[str]()
    for call in graph.calls.values():
        unit = next((u for u in units if u.name and u.name == call.module), None)
        if unit is None or unit.name in parted:
            continue
        made = {n for p in range(call.start, call.stop) for n in graph.made(p) if graph.values[n].requires_grad}
        given = {n for n in made if n in call.outputs or any(p >= call.stop for p in graph.consumers.get(n, ()))}
        if any(at[graph.values[n].position] not in places.chain(unit.place) for n in given):
            parted.append(unit.name)
    more = f" and {len(parted) - 3} more" if len(parted) > 3 else ""
    note = f"no units of their own, as what they give is made in a branch within: {', '.join(parted[:3])}{more}"
    return tuple(u for u in units if u.name not in parted), [note] if parted else []


def _sometimes_skipped(model: nn.Module, uses: Uses, run: Run) -> set[str]:
    """Units that a forward does not call when every question it asks of values is answered the other way, or when it draws
    other random numbers."""
    always = set(uses.called)
    for contrary, way in ((True, None), *((False, way) for way in WAYS if uses.draws)):
        other = Uses(model, uses.candidates)
        try:
            with torch.no_grad(), Shadow(contrary=contrary), Meeting(), other.watching(), drawing(way, model):
                undisturbed(model, run)(model)
        except Exception as error:
            # The other answers need not make sense to the model. What it had not come to is taken to be skipped: a unit that a
            # rank skips would leave the others waiting.
            if is_ours(error):
                raise
        always &= other.called
    return set(uses.candidates) - always


def _checked_graph(model: nn.Module, plan: Plan, run: Run, branches: Branches, findings: Findings) -> ModelGraph | None:
    """The forward, recorded, if there are stages or branches. Each runs a part of it, so random numbers must not decide what
    it calls."""
    if not branches and plan.mesh.axis_size("pp") == 1:
        return None
    graph = _captured(model, plan, run, branches.places)
    for way in WAYS if graph.draws else ():
        with drawing(way, model):
            try:
                other = _captured(model, plan, run, branches.places)
            except PlanError:  # with these numbers it cannot be followed
                other = ModelGraph()
        if other.signature != graph.signature:
            pairs = zip(graph.events, other.events, strict=False)
            apart = next((a.line for a, b in pairs if (a.path, a.function) != (b.path, b.function)), "")
            findings.add(
                where="the model's forward",
                given="random numbers of Python's or NumPy's decide what it computes"
                + (f": with others it does not come to {apart} next" if apart else ""),
                required="for a pipeline or branches, a forward that calls the same functions in every step",
                fix="mesh: {dp_shard: 2}",
            )
            break
    return graph


def _owners(model: nn.Module, units: tuple[Unit, ...]) -> dict[int, str]:
    """``id(parameter)`` → the unit that gathers it: the innermost that holds every place of it, as FSDP2 assigns."""
    modules = dict(model.named_modules())
    owners: dict[int, str] = {}
    for unit in units:
        for p in modules[unit.name].parameters():
            owners.setdefault(id(p), unit.name)
    return owners


# --- cuts -------------------------------------------------------------------------------------------------------------


def _cuts(
    model: nn.Module,
    plan: Plan,
    names: Names,
    entries: Mapping[str, Entry],
    units: tuple[Unit, ...],
    sequence: tuple[str, ...],
    run: Run,
    branches: Branches,
) -> tuple[Cuts | None, Uses | None, list[str]]:
    """The cuts over tp, and which units are used as units, from the model's own forward; a branch's over its own tp."""
    modules, draws = dict(model.named_modules()), Draws(model)
    run = undisturbed(model, draws.noted(run))
    soft, notes = _model_tp_plan(model, names)
    styles = _styles(names, entries, soft)
    ids = {id(p): name for name, (p, _) in names.parameters.items()}
    uses = Uses(model, {u.name: modules[u.name] for u in units if u.name})
    size = plan.mesh.axis_size("tp")
    if size == 1:
        styles = {name: Style("replicate", reason="the mesh has no tp axis") for name in names.parameters}
    seeds = (lambda work: cutting_inputs(work, [modules[n] for n in sequence])) if sequence else None
    try:
        outer = _styles_in(0, styles, branches)
        cuts = infer_cuts(model, run, axis="tp", size=size, styles=outer, names=ids, seeds=seeds, uses=uses)
        uses.draws = draws.of_host or (cuts.reads > 0 and draws.of_torch)
    except Exception as error:  # whatever a model may raise on tensors without values
        if is_ours(error):
            raise
        notes.append(
            f"the forward could not be followed without values ({type(error).__name__}: {str(error)[:200]}): "
            "over tp is cut what the plan names, and nothing else"
        )
        said = cuts_as_said(model, size=size, styles=styles, names=ids) if size > 1 else None
        return said, None, notes
    if size > 1 and not cuts.layouts:
        reasons = sorted({r for n, r in cuts.reasons.items() if r and branches.home(n) == (0,)})
        what = "no parameter outside branches" if branches.places else "no parameter"
        notes.append(
            f"{what} is sharded over tp={size}: every rank of it does the same work. " + "; ".join(reasons[:3])
        )
    cuts = _branch_cuts(model, run, names, styles, ids, cuts, branches)
    notes += [f"{p} is not used by the forward" for p in names.parameters if p not in uses.seen]
    return cuts, uses, notes


def _branch_cuts(
    model: nn.Module,
    run: Run,
    names: Names,
    styles: Mapping[str, Style],
    ids: Mapping[int, str],
    cuts: Cuts,
    branches: Branches,
) -> Cuts:
    """The cuts of the trunk, with those of each branch over its own tp axis."""
    for number, place in enumerate(branches.places, 1):
        own = [n for n in names.parameters if branches.home(n) == (number,)]
        found = replace(cuts, layouts={}, reasons=dict.fromkeys(own, "its place has no tp axis"), refused={})
        if place.tp > 1:
            alone = _styles_in(number, styles, branches)
            found = infer_cuts(model, run, axis="tp", size=place.tp, styles=alone, names=ids)
        cuts = _with_place(cuts, found, own)
    return cuts


def _styles_in(place: int, styles: Mapping[str, Style], branches: Branches) -> dict[str, Style]:
    """The styles of a place's own parameters; those of others stay whole."""
    other = Style("replicate", forced=True, reason="used in another place")
    return {name: style if branches.home(name) == (place,) else other for name, style in styles.items()}


def _with_place(cuts: Cuts, found: Cuts, own: list[str]) -> Cuts:
    """The cuts, with those of a place's own parameters as they were found over its tp axis."""
    return replace(
        cuts,
        layouts={**cuts.layouts, **{n: found.layouts[n] for n in own if n in found.layouts}},
        reasons={**cuts.reasons, **{n: found.reasons[n] for n in own if n in found.reasons}},
        refused={**cuts.refused, **{n: found.refused[n] for n in own if n in found.refused}},
    )


def _line(
    name: str,
    p: Tensor,
    aliases: tuple[str, ...],
    cuts: Cuts | None,
    units: tuple[Unit, ...],
    owner: str,
    loose: Mapping[str, str],
    stages: tuple[int, ...],
    places: tuple[int, ...],
) -> ParameterRecipe:
    tp = cuts.layouts.get(name, REPLICATE) if cuts and len(places) == 1 else REPLICATE
    unit = next(u for u in units if u.name == owner)
    is_loose = not p.dim() or name in loose or places != (unit.place,)  # a unit lives on one mesh
    reason = (cuts.reasons.get(name, "") if cuts else "") or loose.get(name, "")
    return ParameterRecipe(
        name=name,
        shape=tuple(p.shape),
        dtype=str(p.dtype).removeprefix("torch."),
        requires_grad=p.requires_grad,
        aliases=aliases,
        tp=tp,
        data="loose" if is_loose else unit.data,
        unit=owner,
        stages=stages,
        places=places,
        reason="used in several places" if len(places) > 1 else reason,
    )


_HALF = ("bfloat16", "float16")


def _of_other_types(
    names: Names, owners: Mapping[int, str], plan: Plan, data: int, findings: Findings
) -> dict[str, str]:
    """Trainable parameters that are not of the type that most of their unit has → why they stay out of it: FSDP2 reduces
    the gradients of a unit as one tensor. In a half type it would also cast them, which nothing else does."""
    if data == 1 and plan.precision not in _HALF:
        return {}
    sizes: dict[str, Counter[torch.dtype]] = defaultdict(Counter)
    for p, _ in names.parameters.values():
        if p.requires_grad and p.dim():
            sizes[owners.get(id(p), "")][p.dtype] += p.numel()
    found = {}
    for name, (p, _) in names.parameters.items():
        types = sizes[owners.get(id(p), "")]
        if p.requires_grad and p.dim() and p.dtype != (most := types.most_common(1)[0][0]):
            found[name] = f"{str(p.dtype).removeprefix('torch.')} in a unit of {str(most).removeprefix('torch.')}"
    if found and plan.precision in _HALF:
        told = ", ".join(f"{name} ({why})" for name, why in [*found.items()][:3])
        findings.add(
            where="precision", given=f"{plan.precision}, with {told}{' …' * (len(found) > 3)}",
            required="parameters of one type in each unit, which FSDP2 casts", fix="precision: float32",
        )  # fmt: skip
        findings.raise_if_any()
    return found


def _told_of_writes(written: set[str], plan: Plan) -> list[str]:
    if not written or plan.mesh.data_size == 1:
        return []
    names = f"{', '.join(sorted(written)[:3])}{' …' * (len(written) > 3)}"
    return [f"the forward writes {names}: whole on every data rank"]


def _microbatches(plan: Plan, rows: int, whole_batch: bool) -> int:
    """What the plan says, or else as many as are of use, with a row each."""
    return plan.microbatches or max(1, min(plan.pieces, rows // (plan.mesh.data_size if whole_batch else 1)))


def _reshards(plan: Plan) -> bool:
    if plan.mesh.axis_size("pp") == 1:
        return plan.reshard_after_forward is not False
    # A backward in halves needs what its forward gathered.
    return bool(plan.reshard_after_forward) and plan.schedule != "zero_bubble"


# --- stages -----------------------------------------------------------------------------------------------------------


def _captured(model: nn.Module, plan: Plan, run: Run, places: Sequence[Submesh] = ()) -> ModelGraph:
    """The forward on the sample, recorded; and where data ranks of a branch may run their own rows, of which functions."""
    with computing_in(model, plan.precision):
        graph = capture(model, run, staged=plan.mesh.axis_size("pp") > 1, follow=True)
        by_rows = any(p.data > 1 for p in places)
        return replace(graph, by_rows=events_by_rows(model, undisturbed(model, run), graph)) if by_rows else graph


def _stages(
    plan: Plan,
    names: Names,
    entries: Mapping[str, Entry],
    blocks: tuple[str, ...],
    graph: ModelGraph,
    regions: Regions | None,
    findings: Findings,
) -> tuple[tuple[Stage, ...], dict[str, tuple[int, ...]]]:
    """The stages of the pipeline, and those that use each parameter."""
    ranks = plan.mesh.axis_size("pp")
    count = ranks * (plan.stages_per_rank or (2 if plan.schedule == "interleaved" else 1))
    sizes = {name: p.numel() * p.element_size() for name, (p, _) in names.parameters.items()}
    pinned = _pinned(graph, plan, entries, ranks, count, findings)
    places = cut_places(graph, blocks, regions.spans if regions is not None else ())
    cuts = choose_cuts(graph, places.between_blocks, count, sizes, pinned)
    if cuts is None:
        cuts = choose_cuts(graph, places.anywhere, count, sizes, pinned)
    if cuts is None:
        no_cuts(findings, graph, places, count, ranks, bool(pinned))
        findings.raise_if_any()
        cuts = []
    stages = make_stages(graph, cuts, {name: p.shape for name, (p, _) in names.parameters.items()})
    homes = {
        name: tuple(sorted({stage_of(cuts, p) for p in positions}))
        for name, positions in graph.uses.items()
    }  # fmt: skip
    for event in graph.events:
        if event.reads and not event.inputs:
            homes |= {name: tuple(range(count)) for name in event.parameters}
    called: dict[str, set[int]] = {}
    for call in graph.calls.values():
        # If values of the batch decide the path, another may use a parameter wherever its module runs.
        last = max(call.start, call.stop - 1) if graph.of_this_batch else call.start
        called.setdefault(call.module, set()).update(range(stage_of(cuts, call.start), stage_of(cuts, last) + 1))
    for event in graph.events:  # what a value decides about runs where it is read
        if event.reads and event.inputs:
            called[event.path[-1][0] if event.path else ""] = {stage_of(cuts, graph.positions[event.path, event.index])}
    for name in names.parameters:
        scope = name
        while name not in homes and scope:  # one that this forward did not use stays where its module runs
            scope = scope.rpartition(".")[0]
            if scope in called:
                homes[name] = tuple(sorted(called[scope])) if scope or graph.of_this_batch else (min(called[scope]),)
        homes.setdefault(name, (0,))
    return stages, homes


def _buffer_homes(
    model: nn.Module,
    graph: ModelGraph,
    stages: tuple[Stage, ...],
    branches: Branches,
) -> tuple[tuple[str, int, int], ...]:
    """For each buffer, the stage that changes it, else the last that takes it, or the first that runs its module; its place."""
    cuts = [graph.positions[s.first] for s in stages[1:]]
    found = {name: stage_of(cuts, p) for p, event in enumerate(graph.events) for name in event.buffers}
    found |= {f"{m}.{n}" if m else n: stage_of(cuts, p) for (m, n), p in graph.changes.items()}
    runs: dict[str, int] = {}
    for call in graph.calls.values():
        runs.setdefault(call.module, stage_of(cuts, call.start))
    names = (name for name, _ in model.named_buffers())
    return tuple(
        (name, found.get(name, runs.get(name.rpartition(".")[0], 0)), buffer_place(name, graph, branches))
        for name in names
    )


def _recomputed_whole(
    recompute: tuple[str, ...], graph: ModelGraph, branches: Branches, names: Names
) -> tuple[tuple[str, ...], list[str]]:
    """The modules to recompute, without those in which a region is, or a parameter that several places use."""
    assert branches.regions is not None
    shared = {name for name in names.parameters if len(branches.home(name)) > 1}
    parted = {
        c.module for c in graph.calls.values()
        if len(set(branches.regions.places[c.start : c.stop])) > 1
        or any(shared & set(e.parameters) for e in graph.events[c.start : c.stop])
    }  # fmt: skip
    notes = [f"{r} keeps its activations: branches part or meet in it" for r in recompute if r in parted]
    return tuple(r for r in recompute if r not in parted), notes


def _check_shared(homes: Mapping[str, tuple[int, ...]], branches: Branches, findings: Findings) -> None:
    """What several stages share stands on the same ranks of each."""
    for name, stages in homes.items():
        if len(stages) > 1 and branches.home(name) != (0,):
            findings.add(
                where=f"the model's {name}",
                given="a parameter of a branch that several stages of the pipeline use",
                required="parameters of branches that one stage uses",
                fix="leave out on: for the module that uses it",
            )


def _pinned(
    graph: ModelGraph, plan: Plan, entries: Mapping[str, Entry], ranks: int, count: int, findings: Findings
) -> dict[int, frozenset[int]]:
    """Positions of events of modules that the plan places → the stages they may be on."""
    found: dict[int, frozenset[int]] = {}
    for name, entry in entries.items():
        if entry.pp_rank is None:
            continue
        if entry.pp_rank >= ranks:
            findings.add(
                where=f"modules.{name}.on",
                given=f"pp[{entry.pp_rank}]",
                required=f"a rank of pp={ranks}, from 0 to {ranks - 1}",
                fix=f"on: pp[{ranks - 1}]",
            )
            continue
        stages = frozenset(range(entry.pp_rank, count, ranks))
        for call in graph.calls.values():
            if call.module == name:
                found |= {p: found.get(p, stages) & stages for p in range(call.start, call.stop)}
    findings.raise_if_any()
    return found


def _whole_in_stages(
    units: tuple[Unit, ...], recompute: tuple[str, ...], graph: ModelGraph, stages: tuple[Stage, ...]
) -> tuple[tuple[Unit, ...], tuple[str, ...], list[str]]:
    """Units and modules to recompute, without those that a cut goes through.

    A module is not recomputed either if its stage looks into its calls, for what they change outside: what is run again is
    not looked into.
    """
    cuts = [graph.positions[s.first] for s in stages[1:]]
    parted = {c.module for c in graph.calls.values() if c.module and any(c.start < b < c.stop for b in cuts)}
    notes = [f"{u.name} is no unit of its own: a cut between stages goes through it" for u in units if u.name in parted]
    followed = {c.module for c in graph.calls.values() if c.visible}
    notes += [f"{r} is not recomputed: its stage follows what it changes outside" for r in recompute if r in followed]
    again = tuple(r for r in recompute if r not in parted | followed)
    return tuple(u for u in units if u.name not in parted), again, notes


def _schedule(plan: Plan, graph: ModelGraph) -> tuple[str, list[str]]:
    """The schedule, and why it is another than the plan's."""
    inner = [e for e in graph.events if e.function in ("grad", "backward")]
    if plan.schedule != "zero_bubble" or not inner:
        return plan.schedule, []
    return "1f1b", [
        f"schedule: 1f1b, not zero_bubble: the forward takes gradients itself ({inner[0].line}), which cannot wait"
    ]


def _shared(homes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Says which parameters several stages hold."""
    names = [name for name, stages in homes.items() if len(stages) > 1]
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"held by several stages, their gradients summed: {', '.join(names[:3])}{more}"]


# --- checks -----------------------------------------------------------------------------------------------------------


def rows_of(batch: Any) -> int | None:
    """Rows of a batch: dim 0 of its first tensor that has dims."""
    sizes = [t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
    return sizes[0] if sizes else None


def _check_rows(plan: Plan, batch: Any, findings: Findings) -> None:
    rows, pieces = rows_of(batch), plan.mesh.data_size * (plan.microbatches or 1)
    if rows is not None and rows < pieces:
        findings.add(
            where="batch",
            given=f"{rows} rows",
            required=f"at least one row for each of {plan.mesh.data_size} data ranks × {plan.microbatches or 1} microbatches",
            fix=f"a batch of {pieces} rows or a multiple",
        )


def _check_cuts(plan: Plan, names: Names, findings: Findings) -> None:
    size = plan.mesh.axis_size("tp")
    largest = max((max(p.shape, default=0) for p, _ in names.parameters.values()), default=0)
    if size > max(largest, 1):
        findings.add(
            where="mesh.tp",
            given=f"tp={size}, larger than every dim that could be cut: the largest dim of a parameter is {largest}",
            required=f"tp of at most {largest}",
            fix=f"mesh: {{dp_shard: {plan.mesh.size}}}",
        )


def _check_refused(cuts: Cuts | None, names: Names, findings: Findings) -> None:
    for name, reason in (cuts.refused if cuts else {}).items():
        shape = tuple(names.parameters[name][0].shape)
        findings.add(
            where=f"modules, what is said of {name}",
            given=f"a sharded over tp of a parameter of shape {shape}: {reason}",
            required="at least one piece for each rank of tp",
            fix=f"{name}: {{tp: replicate}}",
        )


def _check_scripted(model: nn.Module, findings: Findings) -> None:
    """A scripted module's parameters cannot be replaced by parts of them."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(recurse=False), None) is not None:
            findings.add(
                where=f"the model's {name or 'root'}",
                given="a module of torch.jit.script or trace, with parameters of its own",
                required="a module in Python",
                fix="build the model without torch.jit",
            )
