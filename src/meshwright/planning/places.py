"""Where a plan wants modules to run: the slices of the tp axis that it names, and the streams of a rank."""

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
        places: besides the trunk.
        placed: module → the places of its calls, in turn.
        streams: module → the stream of each rank that it runs on.
        regions: where they part and meet.
        homes: parameter → the places that use it.
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
    """The places that a plan's entries name, and what stands there; problems go to ``findings``."""
    modules = {name: order for order, (name, _) in enumerate(model.named_modules())}
    said = {n: e for n, e in entries.items() if n in modules and any(read_slice(on) for on in e.places)}
    _check_meshes(entries, said, findings)
    _check_parameters(entries, modules, findings)
    _check_plan(plan, said, findings)
    inner = {name: said[name] for name in sorted(said, key=lambda n: (n.count("."), modules[n])) if name}
    places, placed = _tree(trunk(plan.mesh), inner, findings)
    return Branches(places, placed, read_streams(model, entries))


def _tree(
    whole: Submesh, said: Mapping[str, Entry], findings: Findings
) -> tuple[tuple[Submesh, ...], dict[str, tuple[int, ...]]]:
    """The places besides the trunk, and module → the places of its calls.

    Args:
        whole: the trunk.
        said: module → what the plan says of it; outer modules first.
    """
    tree, at, placed = [whole], {"": 0}, dict[str, tuple[int, ...]]()
    numbers: dict[tuple[int, int, int, Mesh], int] = {}
    for name, entry in said.items():
        around = max((n for n in at if not n or name.startswith(n + ".")), key=len)
        if around and (said[around].on, said[around].mesh) == (entry.on, entry.mesh):
            continue  # the same glob names what is within
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


def _check_meshes(entries: Mapping[str, Entry], said: Mapping[str, Entry], findings: Findings) -> None:
    """A mesh of a module's own is formed by the ranks of a slice."""
    for name, entry in entries.items():
        within = any((e.on, e.mesh) == (entry.on, entry.mesh) for m, e in said.items() if name.startswith(f"{m}."))
        if entry.mesh is not None and name not in said and not within:
            findings.add(
                where=f"modules.{name}.mesh",
                given="a mesh of its own, without the ranks that form it",
                required="on: a slice of the tp axis",
                fix=f"{name}: {{on: 'tp[0:{Mesh(entry.mesh).size}]', mesh: {_flow(entry.mesh)}}}",
            )


def _check_parameters(entries: Mapping[str, Entry], modules: Iterable[str], findings: Findings) -> None:
    """Modules have places; their parameters go with them."""
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


def _check_plan(plan: Plan, said: Mapping[str, Entry], findings: Findings) -> None:
    """The model itself has no place but all ranks; and a sequence that is sharded over all of tp, no slice."""
    if "" in said:
        findings.add(
            where="modules, of the whole model",
            given=f"on: {_places(said[''])}, by a glob that matches the model itself",
            required="modules within it; the model itself runs on all ranks",
            fix="mesh: {tp: …}, with as many ranks as the model is to have; or name modules",
        )
    if any(said) and plan.sequence_parallel:
        findings.add(
            where="sequence_parallel",
            given="true, in a plan that places modules on a slice of tp",
            required="one of them: a sequence that is cut over all of tp has no slice in a branch",
            fix="sequence_parallel: false",
        )


def _places(entry: Entry) -> str:
    quoted = [f"'{on}'" for on in entry.places]
    return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"


def _place(name: str, on: str, entry: Entry, number: int, parent: Submesh, findings: Findings) -> Submesh | None:
    """One slice, with the mesh that its ranks form."""
    start, stop = read_slice(on) or (0, 0)
    where = f"modules.{name}"
    if not start < stop <= parent.tp:
        within = f"of tp={parent.tp}" + (f" of {parent.on}" if number else "")
        last, meant = parent.tp - 1, start if start < min(stop, parent.tp) else 0
        findings.add(
            where=f"{where}.on",
            given=f"{on}, {within}",
            required=f"at least one of its ranks, which are 0 to {last}" if last else "a tp axis of several ranks",
            fix=f"on: 'tp[{meant}:{min(max(stop, meant + 1), parent.tp)}]'"
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
    """Module → its stream; of modules within each other the outermost."""
    said = {n: e.stream for n, e in entries.items() if e.stream is not None}
    return {
        n: said[n] for n, _ in model.named_modules() if n in said and not any(n.startswith(f"{m}.") for m in said)
    }  # fmt: skip


def place_of(name: str, placed: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The places of the innermost placed module that a name is of; the trunk if there is none."""
    while name:
        if name in placed:
            return tuple(sorted(set(placed[name])))
        name = name.rpartition(".")[0]
    return placed.get("", (0,))
