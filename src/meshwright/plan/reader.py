"""``Reader``: reads plain values into the fields of a plan, or into findings with their positions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from meshwright.errors import Finding, PlanError, nearest
from meshwright.mesh import ALIASES, Mesh, read_mesh
from meshwright.plan.entry import Entries, Entry
from meshwright.plan.keys import ENTRY, KEYS, PLAN, SECTIONS, Kind
from meshwright.plan.meshes import AUTO, in_order
from meshwright.plan.source import KeyPath, Source, flow


class Reader:
    """One pass over a source. It notes every problem; then it returns the fields of a plan, or those that are right."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.findings = source.findings

    def plan(self) -> dict[str, Any]:
        """The fields that the source sets. Raises PlanError with every problem, including those noted before."""
        values = self.source.values
        if values is None:  # not even YAML: further problems only follow from that
            self.findings.raise_if_any()
        fields = self.fields()
        if "mesh" not in fields and (values is None or isinstance(values, Mapping)):
            given = "no mesh" if values else "no plan"
            where = self.source.where(())
            self.findings.add(where=where, given=given, required="a mesh", fix=self.source.mesh_fix())
        if self.findings:
            raise PlanError(sorted(self.findings, key=_line_and_column), self.findings.subject)
        return {**fields, "modules": Entries(fields["modules"])}

    def right(self) -> dict[str, Any]:
        """The fields that are right, as plain values. So settings that replace some of them can be read too."""
        unread = bool(self.findings) if self.source.values is None else not isinstance(self.source.values, Mapping)
        fields = self.fields()
        values = {key: value for key, value in fields.items() if value is not None}
        values["modules"] = {glob: entry.settings() for glob, entry in fields["modules"].items()}
        if fields.get("mesh"):
            meshes = [dict(mesh.axes) for mesh in in_order(fields["mesh"])]
            values["mesh"] = (meshes[0] if len(meshes) == 1 else meshes) if meshes else AUTO
        elif unread or "mesh" in fields:
            values["mesh"] = {"dp_shard": 1}  # a stand-in: the problem of the mesh has been noted
        return values

    def fields(self) -> dict[str, Any]:
        """The fields that the source sets; None for one that is wrong."""
        fields: dict[str, Any] = {"modules": {}}
        for key, value in self.section(self.source.values, (), KEYS, "a plan").items():
            if key == "mesh":
                fields["mesh"] = self.meshes(value)
            elif key in SECTIONS:
                self.entries(value, key, fields["modules"])
            else:
                fields[key] = self.value(PLAN[key], value, (key,))
        if fields.get("compile") and fields.get("eager"):
            self.findings.add(
                where=self.source.where(("compile",)),
                given="compile: true, beside eager: true",
                required="one of them: compile compiles the recorded programs, which eager leaves out",
                fix="eager: false",
            )
        return fields

    def meshes(self, value: object) -> Mesh | tuple[Mesh, ...] | str | None:
        """One mesh, several, or ``auto``; None if the value is wrong."""
        if value == AUTO:
            return AUTO
        if not isinstance(value, (list, tuple)):
            return read_mesh(value, self.findings, lambda axis: self.mesh_position(axis))
        if not value:
            where, fix = self.source.where(("mesh",)), self.source.mesh_fix()
            self.findings.add(where=where, given="no mesh", required="at least one mesh in the list", fix=fix)
        meshes = [
            read_mesh(item, self.findings, lambda axis, i=str(i): self.mesh_position(i, axis))  # type: ignore[misc]
            for i, item in enumerate(value)
        ]
        return tuple(mesh for mesh in meshes if mesh is not None) if value and None not in meshes else None

    def mesh_position(self, *parts: str) -> str:
        return self.source.where(("mesh", *filter(None, parts)))

    def section(self, values: object, path: KeyPath, keys: Iterable[str], owner: str) -> dict[str, Any]:
        """The known keys that a mapping sets. Null counts as left out. ``owner``: the mapping's name in errors."""
        keys = tuple(keys)
        if values is not None and not isinstance(values, Mapping):
            fix = f"{path[-1] if path else 'mesh'}: {{{'dp: shard' if path else 'dp_shard: 2, tp: 2'}}}"
            required = f"the keys of {owner}: {', '.join(keys)}"
            self.findings.add(where=self.source.where(path), given=flow(values), required=required, fix=fix)
        if not isinstance(values, Mapping):
            return {}
        for key in values:
            if key not in keys:
                self.unknown_key(key, values[key], path, keys, owner)
        return {key: values[key] for key in keys if values.get(key) is not None}

    def unknown_key(self, key: object, value: object, path: KeyPath, keys: Sequence[str], owner: str) -> None:
        """Notes a key that a mapping may not have; suggests the nearest key."""
        word, *rest = str(key).split(" ", 1)
        near = nearest(word, keys)
        hint = f"; did you mean {near[0]}?" if near else ""
        fix = self.source.fix((*path, str(key)), flow(value), near[0]) if near else f"leave out {key}"
        if near and rest:  # "mesh {tp: 2}" reads as the key "mesh {tp" and the value "2}": the colon was forgotten
            fix = f"{near[0]}: {rest[0]}: {value}"
        where = self.source.where((*path, str(key)), key=True)
        required = f"a key of {owner}: {', '.join(keys)}{hint}"
        self.findings.add(where=where, given=f"the key {key}", required=required, fix=fix)

    def entries(self, values: object, section: str, entries: dict[str, Entry]) -> None:
        """Adds the entries of ``modules`` or ``parameters`` to ``entries``."""
        if not isinstance(values, Mapping):
            example = f'{section}:\n  "*.c_attn": {{tp: column, parts: 3}}'
            where = self.source.where((section,))
            self.findings.add(
                where=where, given=flow(values), required="a glob with its entry, a line each", fix=example
            )
            return
        for glob, value in values.items():
            path = (section, str(glob))
            if not isinstance(glob, str) or not glob.strip():
                required = "the name of a module or parameter, or a glob of such names"
                fix = f'"{str(glob).strip() or "*"}": {flow(value)}'
                self.findings.add(where=self.source.where(path, key=True), given=flow(glob), required=required, fix=fix)
                continue
            entry = self.entry(value, path)
            if before := entries.get(glob):
                self.both(before, entry, path)
                entry = before | entry
            entries[glob] = entry

    def entry(self, value: object, path: KeyPath) -> Entry:
        """The entry of one glob."""
        values = value.settings() if isinstance(value, Entry) else value
        settings = {
            key: self.value(ENTRY[key], item, (*path, key))
            for key, item in self.section(values, path, ENTRY, "an entry").items()
        }
        for key in ("parts", "on"):
            if isinstance(settings.get(key), list):
                settings[key] = tuple(settings[key])
        if settings.get("mesh") is not None:
            settings["mesh"] = self.inner_mesh(settings["mesh"], (*path, "mesh"))
        return Entry(**settings)

    def inner_mesh(self, value: Any, path: KeyPath) -> tuple[tuple[str, int], ...] | None:
        """The axes of a branch's mesh, in which ``dp`` means ``dp_replicate``."""
        value = dict(value) if isinstance(value, tuple) else value
        where = lambda axis: self.source.where((*path, axis) if axis else path)  # noqa: E731
        mesh = read_mesh(value, self.findings, where, {**ALIASES, "dp": "dp_replicate"})
        return None if mesh is None else mesh.axes

    def both(self, before: Entry, entry: Entry, path: KeyPath) -> None:
        """Notes a problem if a glob has different values in the two sections."""
        for key, value in entry.settings().items():
            first = before.settings().get(key, value)
            if first != value:
                given = f"{key}: {flow(value)}, and {key}: {flow(first)} under modules"
                where = self.source.where((*path, key))
                self.findings.add(where=where, given=given, required="one of them", fix=f"{key}: {flow(first)}")

    def value(self, kind: Kind, value: Any, path: KeyPath) -> Any:
        """The value of one key; None, with a finding, if the key does not accept it."""
        if not kind.accepts(value):
            near = nearest(value, kind.words, most=1) if isinstance(value, str) else ()
            required = kind.required + "".join(f"; did you mean {word}?" for word in near)
            fix = self.source.fix(path, flow(near[0] if near else _meant(value, kind)))
            where = self.source.where(path)
            self.findings.add(where=where, given=flow(value), required=required, fix=fix)
            return None
        return value


def _line_and_column(finding: Finding) -> tuple[int, int]:
    """(line, column) of a finding; (0, 0) if it is in no file."""
    match = re.search(r":(\d+):(\d+)(?: \(|$)", finding.where)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _meant(value: object, kind: Kind) -> object:
    """The most likely meaning of a value of the wrong type: ``"4"`` is 4, ``4.0`` is 4, ``"yes"`` is true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError):
            return kind.example
    return value if kind.accepts(value) else kind.example
