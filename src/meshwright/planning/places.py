"""The places (slices of the tp axis) and streams on which a plan's ``on:`` puts modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from meshwright.errors import Findings, listing
from meshwright.mesh import Mesh
from meshwright.plan import Entry, Plan
from meshwright.regions import Regions
from meshwright.submesh import INNER, Submesh, read_slice, trunk


@dataclass(frozen=True)
class Branches:
    """The branches of a plan, over a recorded forward.

    Attributes:
        places: the submeshes of branches, without the trunk. Place number i is ``places[i - 1]``; 0 is the trunk.
        placed: module → the places of its first, second, … call.
        streams: module → the number of the stream on which it runs, on every rank.
        regions: where branches part from the trunk and join it; None before the forward is recorded.
        homes: parameter → the places that use it; None before the forward is recorded.
    """

    places: tuple[Submesh, ...] = ()
    placed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)
    regions: Regions | None = None
    homes: Mapping[str, tuple[int, ...]] | None = None

    def __bool__(self) -> bool:
        return bool(self.places or self.streams)

    def home(self, name: str) -> tuple[int, ...]:
        return (0,) if self.homes is None else self.homes[name]


def read_places(model: nn.Module, plan: Plan, entries: Mapping[str, Entry], findings: Findings) -> Branches:
    """The places that a plan's entries name, with the modules on them. Adds problems to ``findings``."""
    modules = {name: order for order, (name, _) in enumerate(model.named_modules())}
    with_slice = {n: e for n, e in entries.items() if n in modules and any(read_slice(on) for on in e.places)}
    _check_meshes(entries, with_slice, findings)
    _check_parameters(entries, modules, findings)
    _check_plan(plan, with_slice, findings)
    outer_first = sorted(with_slice, key=lambda n: (n.count("."), modules[n]))
    places, placed = _tree(trunk(plan.mesh), {name: with_slice[name] for name in outer_first if name}, findings)
    return Branches(places, placed, read_streams(model, entries))


def _tree(
    whole: Submesh, entries: Mapping[str, Entry], findings: Findings
) -> tuple[tuple[Submesh, ...], dict[str, tuple[int, ...]]]:
    """The places besides the trunk, and module → the places of its calls.

    Args:
        whole: the trunk.
        entries: module → the plan's entry for it, which names slices; outer modules first.
    """
    tree, at, placed = [whole], {"": 0}, dict[str, tuple[int, ...]]()
    numbers: dict[tuple[int, int, int, Mesh], int] = {}
    for name, entry in entries.items():
        around = max((n for n in at if not n or name.startswith(n + ".")), key=len)
        if around and (entries[around].on, entries[around].mesh) == (entry.on, entry.mesh):
            continue  # one glob matches a module and the modules within it
        parent = at[around]
        for on in entry.places:
            place = _place(name, on, entry, parent, tree[parent], findings)
            if place is None:
                continue
            number = numbers.setdefault((parent, place.start, place.stop, place.mesh), len(tree))
            if number == len(tree):
                tree.append(place)
            tree[number] = replace(tree[number], modules=(*tree[number].modules, name))
            at[name] = number
            placed[name] = (*placed.get(name, ()), number)
    return tuple(tree[1:]), placed


def _check_meshes(entries: Mapping[str, Entry], with_slice: Mapping[str, Entry], findings: Findings) -> None:
    """Adds a finding for each entry that has ``mesh:`` without ``on:``: a module's own mesh needs the ranks of a slice."""
    for name, entry in entries.items():
        within = any(
            (e.on, e.mesh) == (entry.on, entry.mesh) for m, e in with_slice.items() if name.startswith(f"{m}.")
        )
        if entry.mesh is not None and name not in with_slice and not within:
            findings.add(
                where=f"modules.{name}.mesh",
                given="a mesh of its own, without the ranks that form it",
                required="on: a slice of the tp axis",
                fix=f"{name}: {{on: 'tp[0:{Mesh(entry.mesh).size}]', mesh: {_flow(entry.mesh)}}}",
            )


def _check_parameters(entries: Mapping[str, Entry], modules: Iterable[str], findings: Findings) -> None:
    """Adds a finding for each parameter with a place of its own: only modules have places, parameters go with them."""
    outer = {m: entries[m] for m in modules if m in entries}
    for name, entry in entries.items():
        around = [e for m, e in outer.items() if name.startswith(f"{m}.")]
        if entry.on is not None and name not in outer and all(e.on != entry.on for e in around):
            findings.add(
                where=f"modules.{name}.on",
                given=f"a place for a parameter, {_places(entry)}",
                required="a place for a module: its parameters go with it",
                fix=f"{name.rpartition('.')[0] or '*'}: {{on: {_places(entry)}}}",
            )


def _check_plan(plan: Plan, with_slice: Mapping[str, Entry], findings: Findings) -> None:
    """Adds findings for a place of the whole model, and for places together with ``sequence_parallel``."""
    if "" in with_slice:
        findings.add(
            where="modules, of the whole model",
            given=f"on: {_places(with_slice[''])}, by a glob that matches the model itself",
            required="modules within it; the model itself runs on all ranks",
            fix="mesh: {tp: …}, with as many ranks as the model is to have; or name modules",
        )
    if any(with_slice) and plan.sequence_parallel:
        findings.add(
            where="sequence_parallel",
            given="true, in a plan that places modules on a slice of tp",
            required="one of them: a sequence that is sharded over all of tp has no slice in a branch",
            fix="sequence_parallel: false",
        )


def _places(entry: Entry) -> str:
    quoted = [f"'{on}'" for on in entry.places]
    return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"


def _place(name: str, on: str, entry: Entry, number: int, parent: Submesh, findings: Findings) -> Submesh | None:
    """The submesh for one slice of ``parent``; None, with a finding, if the slice or its mesh is not possible.

    Args:
        on: the slice, as the plan has it (``tp[0:2]``).
        number: the number of the parent place.
    """
    start, stop = read_slice(on) or (0, 0)
    where = f"modules.{name}"
    if not start < stop <= parent.tp:
        within = f"of tp={parent.tp}" + (f" of {parent.on}" if number else "")
        last, first = parent.tp - 1, start if start < min(stop, parent.tp) else 0
        findings.add(
            where=f"{where}.on",
            given=f"{on}, {within}",
            required=f"at least one of its ranks, which are 0 to {last}" if last else "a tp axis of several ranks",
            fix=f"on: 'tp[{first}:{min(max(stop, first + 1), parent.tp)}]'"
            if last
            else f"mesh: {{tp: {max(stop, 2)}}}",
        )
        return None
    mesh = Mesh((("tp", stop - start),)) if entry.mesh is None else Mesh(entry.mesh)
    others = [axis for axis in mesh.names if axis not in INNER]
    if others:
        findings.add(
            where=f"{where}.mesh",
            given=f"the axis {listing(others, 'and')} within a branch",
            required=f"axes of {listing(INNER)}: a pipeline goes around branches, not into one",
            fix=f"mesh: {{tp: {stop - start}}}",
        )
        return None
    if mesh.size != stop - start:
        findings.add(
            where=f"{where}.mesh",
            given=f"{mesh}: {mesh.size} ranks, on {on}, which has {stop - start}",
            required="a mesh of as many ranks as the slice has",
            fix=f"mesh: {{tp: {stop - start}}}"
            + (f", or on: 'tp[{start}:{start + mesh.size}]'" if start + mesh.size <= parent.tp else ""),
        )
        return None
    return Submesh(on, number, start, stop, mesh)


def _flow(mesh: Iterable[tuple[str, int]]) -> str:
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in mesh) + "}"


def read_streams(model: nn.Module, entries: Mapping[str, Entry]) -> dict[str, int]:
    """Module → the number of its stream. If modules with streams are nested, only the outermost is listed."""
    streams = {n: e.stream for n, e in entries.items() if e.stream is not None}
    names = [n for n, _ in model.named_modules() if n in streams]
    return {n: streams[n] for n in names if not any(n.startswith(f"{other}.") for other in streams)}


def place_of(name: str, placed: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The places of the innermost placed module that contains ``name``; the trunk if there is none."""
    while name:
        if name in placed:
            return tuple(sorted(set(placed[name])))
        name = name.rpartition(".")[0]
    return placed.get("", (0,))
