"""The plan: what a person writes. Short; only the mesh is required, the rest is decided where left out.

    mesh: {dp_shard: 2, tp: 2}
    recompute: blocks
    modules:                                   # by glob, of a module's or a parameter's name
      "*.c_attn": {tp: column, parts: 3}
      encoder.norm: {dp: replicate}

A plan comes from Python, a dict or YAML, and goes back to YAML. However it comes, one pass reads it and
reports every problem at once, with the line and column where there are lines:

    text ──compose──► Source (plain values, and the place of each) ──read──► Plan, or one PlanError

YAML is read with the safe loader, node by node: no tag constructs an object, no alias unfolds without end.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from meshwright.errors import Finding, Findings, PlanError, listing, nearest
from meshwright.mesh import ALIASES, Mesh, MeshLike, read_mesh
from meshwright.schedule import NAMES as SCHEDULES

_Path: TypeAlias = tuple[str, ...]


class _Dumper(yaml.SafeDumper):
    """Line separators of Unicode are escaped: read back unquoted, they would be spaces."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if any(c in text for c in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


@dataclass(frozen=True)
class Entry:
    """What a plan says about the modules or parameters that one glob names. None: left to be decided.

    Attributes:
        dp: over the data axes, ``shard`` (FSDP) or ``replicate`` (DDP).
        tp: over ``tp``: ``column`` (cut the output features), ``row`` (cut the input features), ``cut:<dim>``
            (cut that dim, from 0), ``whole`` (leave it), ``auto`` (decide, whatever an earlier entry says).
        parts: the cut dim is this many equal fused blocks, each cut (a fused QKV: 3); or the blocks' sizes.
        units: the cut dim is this many equal pieces that may not be broken (attention heads).
        recompute: ``block`` computes this module again in backward, instead of keeping its activations;
            ``none`` keeps them.
        unit: whether this module is gathered, and freed, as one unit of FSDP.
        on: where on the pipeline axis this module runs: ``pp[1]``, its second rank.
    """

    dp: str | None = None
    tp: str | None = None
    parts: int | tuple[int, ...] | None = None
    units: int | None = None
    recompute: str | None = None
    unit: bool | None = None
    on: str | None = None

    @property
    def pp_rank(self) -> int | None:
        """The rank of ``on: pp[<rank>]``."""
        return int(self.on[len("pp[") : -1]) if self.on else None

    @property
    def cut_dim(self) -> int | None:
        """The dim of ``tp: cut:<dim>``; None for another style."""
        return int(self.tp[len("cut:") :]) if self.tp and self.tp.startswith("cut:") else None

    def settings(self) -> dict[str, Any]:
        """The keys that are said, as plain YAML values."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in said.items()}

    def __or__(self, later: Entry) -> Entry:
        """Both entries, where both apply: key by key, ``later`` wins."""
        return replace(self, **{f.name: v for f in fields(later) if (v := getattr(later, f.name)) is not None})


class Entries(Mapping[str, Entry]):
    """The entries of a plan by their globs: a mapping that cannot change, and whose order counts."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, glob: str) -> Entry:
        return self._entries[glob]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Entries):
            return tuple(self.items()) == tuple(other.items())
        return self._entries == other

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return repr(self._entries)


@dataclass(frozen=True, init=False)
class Plan:
    """How a model is to be laid out over a mesh, as far as a person cares to say.

    Args:
        mesh: the axes and their sizes, outermost first: ``{"fsdp": 2, "tp": 2}`` or ``"fsdp=2,tp=2"``.
        modules: for each glob an `Entry`, or a dict of its keys. Where several globs match, the later
            wins, key by key.
        parameters: another place to write entries of ``modules``; they come after those.
        sequence_parallel: keep activations between tensor-parallel regions cut along the sequence.
        recompute: ``blocks`` computes every repeated block again in backward; ``none`` keeps all activations.
        microbatches: into how many pieces a step divides its rows, whose gradients add up; left out: 1, and with a
            pipeline twice as many as it has ranks, or as many as there are rows.
        schedule: of a pipeline: ``1f1b``, ``gpipe``, ``interleaved`` (1F1B with several stages a rank), ``zero_bubble``.
        stages_per_rank: of a pipeline; left out: 2 for ``interleaved``, else 1.
        precision: ``float32``; ``bfloat16``: computes in it, and keeps parameters and reductions in float32;
            ``float64``: everything in it.
        reshard_after_forward: free a gathered FSDP unit after its forward; its backward gathers it again. Left out: true, and
            with a pipeline false, which would gather it for each microbatch.
        rows: ``split``: data ranks and microbatches each see their own rows of a batch, whatever the model makes of it;
            ``whole``: every data rank runs all rows; ``auto``: split, unless the model's loss couples rows (statistics
            of the batch, losses that compare rows), which is tried out before the first step.
        seed: of the initial values and of dropout.

    Raises:
        PlanError: with every problem of the arguments.

    Example:
        >>> plan = Plan({"fsdp": 2, "tp": 2}, {"*.c_attn": {"tp": "column", "parts": 3}})
        >>> print(plan.dump(), end="")
        mesh: {dp_shard: 2, tp: 2}
        modules:
          '*.c_attn': {tp: column, parts: 3}
    """

    mesh: Mesh
    modules: Entries
    sequence_parallel: bool
    recompute: str
    microbatches: int | None
    schedule: str
    stages_per_rank: int | None
    precision: str
    reshard_after_forward: bool | None
    rows: str
    seed: int

    def __init__(
        self,
        mesh: MeshLike,
        modules: Mapping[str, Entry | Mapping[str, object]] | None = None,
        *,
        parameters: Mapping[str, Entry | Mapping[str, object]] | None = None,
        sequence_parallel: bool = False,
        recompute: str = "none",
        microbatches: int | None = None,
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        precision: str = "float32",
        reshard_after_forward: bool | None = None,
        rows: str = "auto",
        seed: int = 0,
    ) -> None:
        given = {
            "mesh": mesh,
            "modules": modules,
            "parameters": parameters,
            "sequence_parallel": sequence_parallel,
            "recompute": recompute,
            "microbatches": microbatches,
            "schedule": schedule,
            "stages_per_rank": stages_per_rank,
            "precision": precision,
            "reshard_after_forward": reshard_after_forward,
            "rows": rows,
            "seed": seed,
        }
        for name, value in _Reader(Source(given)).plan().items():
            object.__setattr__(self, name, value)

    @property
    def pieces(self) -> int:
        """Into how many microbatches a data rank's rows are divided, where there are as many rows."""
        pipeline = self.mesh.axis_size("pp")
        return self.microbatches or (2 * pipeline if pipeline > 1 else 1)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in a YAML file. Raises PlanError with every problem, each with ``file:line:column``."""
        return cls(**_Reader(_file(os.fspath(path))).plan())

    @classmethod
    def from_yaml(cls, text: str, name: str = "plan") -> Plan:
        """The plan in a YAML text; errors call it ``name``. Raises PlanError with every problem."""
        return cls(**_Reader(compose(text, name)).plan())

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Plan:
        """The plan in plain values, as YAML would give them. Raises PlanError with every problem."""
        return cls(**_Reader(Source(settings)).plan())

    @classmethod
    def parse(cls, spec: PlanLike) -> Plan:
        """A plan from whatever stands for one.

        A plan; a mesh; a dict; the path of a YAML file; or text: YAML (if it has a line break or ``": "``), a
        mesh (``"dp_shard=2,tp=2"``), else a path. Raises PlanError with every problem.
        """
        if isinstance(spec, Plan):
            return spec
        if isinstance(spec, Mesh):
            return cls(spec)
        if isinstance(spec, Mapping):
            return cls.from_dict(spec)
        text = os.fspath(spec)
        if isinstance(spec, str) and not text.endswith((".yaml", ".yml")):
            if "\n" in text or ": " in text:
                return cls.from_yaml(text)
            if "=" in text:
                return cls(text)
        return cls.load(text)

    @classmethod
    def from_command(cls, path: str | None = None, mesh: str | None = None, settings: Iterable[str] = ()) -> Plan:
        """The plan that a command line says: a file, the mesh over its own, settings over both.

        Raises PlanError with every problem of all three.

        >>> Plan.from_command(mesh="dp_shard=2,tp=2", settings=["mesh.tp=4", "recompute=blocks"]).settings()
        {'mesh': {'dp_shard': 2, 'tp': 4}, 'recompute': 'blocks'}
        """
        first = Source({}) if path is None else _file(path)
        if mesh is not None:
            first.put("mesh", mesh, _MESH)
        values = _Reader(first).right()
        then = Source(values, first.findings)
        then.places[()] = _MESH if path is None else first.where(())
        for setting in settings:
            _apply(setting, values, then)
        return cls(**_Reader(then).plan())

    def settings(self) -> dict[str, Any]:
        """The plan as plain YAML values, without its defaults. The inverse of `from_dict`."""
        said: dict[str, Any] = {"mesh": dict(self.mesh.axes)}
        said |= {name: getattr(self, name) for name in _PLAN if getattr(self, name) != _DEFAULTS[name]}
        if self.modules:
            said["modules"] = {glob: entry.settings() for glob, entry in self.modules.items()}
        return said

    def dump(self, path: str | os.PathLike[str] | None = None) -> str:
        """The plan as YAML, also written to ``path`` where one is given. `load` gives an equal plan."""
        text = yaml.dump(
            self.settings(), Dumper=_Dumper, default_flow_style=None, sort_keys=False, allow_unicode=True, width=_WIDE
        )
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def replace(self, **changes: Any) -> Plan:
        """This plan with some settings changed. Raises PlanError, also for a setting that plans lack."""
        return Plan.from_dict({**self.settings(), **changes})

    def with_settings(self, settings: Iterable[str]) -> Plan:
        """This plan with ``key=value`` settings, as the command line takes them; a later one wins.

        The key is dotted, ``recompute`` or ``mesh.tp`` or ``modules.<glob>.dp`` (a glob may have dots of its
        own); the value is YAML. An entry of ``modules`` that is set comes after all others, so that it wins.
        Raises PlanError with every problem of all settings.

        >>> Plan("tp=2").with_settings(["recompute=blocks", "modules.h.0.attn.tp=whole"]).modules
        {'h.0.attn': Entry(dp=None, tp='whole', parts=None, units=None, recompute=None, unit=None, on=None)}
        """
        values = self.settings()
        source = Source(values)
        for setting in settings:
            _apply(setting, values, source)
        return Plan(**_Reader(source).plan())


PlanLike: TypeAlias = Plan | Mesh | Mapping[str, Any] | str | os.PathLike[str]


# -- what each key takes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """What one key takes."""

    accepts: Callable[[Any], bool]
    required: str  # in words, for a person
    example: object  # stands in a fix
    words: tuple[str, ...] = ()  # where the value is one of a few words: a misspelt one has a nearest


def _choice(*words: str) -> _Kind:
    return _Kind(lambda v: isinstance(v, str) and v in words, listing(words), words[0], words)


def _flag() -> _Kind:
    return _Kind(lambda v: isinstance(v, bool), "true or false", True)


def _number(least: int, example: int) -> _Kind:
    return _Kind(lambda v: _is_int(v, least), f"a whole number of at least {least}", example)


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _is_style(value: object) -> bool:
    return isinstance(value, str) and (value in _STYLES or re.fullmatch("cut:[0-9]{1,3}", value) is not None)


def _is_parts(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(_is_int(size, 1) for size in value)
    return _is_int(value, 1)


def _is_place(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"pp\[[0-9]{1,4}\]", value) is not None


_STYLES = ("column", "row", "whole", "auto")

_PLAN = {
    "sequence_parallel": _flag(),
    "recompute": _choice("none", "blocks"),
    "microbatches": _number(1, 4),
    "schedule": _choice(*SCHEDULES),
    "stages_per_rank": _number(1, 2),
    "precision": _choice("float32", "bfloat16", "float64"),
    "reshard_after_forward": _flag(),
    "rows": _choice("auto", "split", "whole"),
    "seed": _number(0, 0),
}
_DEFAULTS = {name: signature(Plan).parameters[name].default for name in _PLAN}

_ENTRY = {
    "dp": _choice("shard", "replicate"),
    "tp": _Kind(_is_style, f"{', '.join(_STYLES)} or cut:<dim>", "column", words=(*_STYLES, "cut:0", "cut:1")),
    "parts": _Kind(_is_parts, "how many equal fused blocks, or a list of their sizes", 3),
    "units": _number(1, 8),
    "recompute": _choice("none", "block"),
    "unit": _flag(),
    "on": _Kind(_is_place, "a rank of the pipeline axis: pp[<rank>]", "pp[0]"),
}

SECTIONS = ("modules", "parameters")
KEYS = ("mesh", *SECTIONS, *_PLAN)
"""The keys of a plan, as a command line may need to tell them from others."""


# -- reading: plain values with their places, into a plan or findings ----------------------------------------


class Source:
    """Plain values, and where each stands.

    Attributes:
        values: the outermost value; None where nothing could be read.
        keys: for the path of a value, the place of its key.
        places: for the path of a value, its own place.
        findings: the problems so far.
    """

    def __init__(self, values: object, findings: Findings | None = None) -> None:
        self.values = values
        self.keys: dict[_Path, str] = {}
        self.places: dict[_Path, str] = {}
        self.findings = Findings() if findings is None else findings

    def put(self, key: str, value: object, place: str) -> None:
        """Say a key of the plan from elsewhere, whatever is said of it here."""
        if self.values is None or isinstance(self.values, Mapping):
            self.values = {**(self.values or {}), key: value}
            for table in (self.keys, self.places):
                for path in [path for path in table if path[:1] == (key,)]:
                    del table[path]
            self.places[key,] = place

    def where(self, path: _Path, *, key: bool = False) -> str:
        """The place of a value, or of its key, as findings say it: ``plan.yaml:3:5 (modules."*.fc".tp)``."""
        dotted = ".".join(part if re.fullmatch(r"\w+", part) else f'"{part}"' for part in path)
        places = [self.keys, self.places] if key else [self.places, self.keys]
        for length in range(len(path), -1, -1):
            for table in places:
                if place := table.get(path[:length]):
                    return f"{place} ({dotted})" if dotted else place
        return dotted or "plan"

    def fix(self, path: _Path, value: str, key: str | None = None) -> str:
        """What to paste where the value at ``path`` is to be ``value``, or its key too another."""
        key = path[-1] if key is None else key
        if self.where(path).startswith(_SET):
            return _SET + shlex.quote(f"{'.'.join((*path[:-1], key))}={value}")
        return f"{key}: {value}"

    def mesh_fix(self) -> str:
        """What to paste where there is no mesh."""
        return f"{_MESH} dp_shard=2,tp=2" if self.where(()) == _MESH else _example()


class _Reader:
    """One pass over a source that notes every problem; at its end it gives a plan's fields, or what is right of them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.findings = source.findings

    def plan(self) -> dict[str, Any]:
        """The fields of a plan. Raises PlanError with every problem, also those that were noted before."""
        values = self.source.values
        if values is None:  # not even YAML: what follows from that is no news
            self.findings.raise_if_any()
        found = self.fields()
        if "mesh" not in found and (values is None or isinstance(values, Mapping)):
            given = "no mesh" if values else "no plan"
            where = self.source.where(())
            self.findings.add(where=where, given=given, required="a mesh", fix=self.source.mesh_fix())
        if self.findings:
            raise PlanError(sorted(self.findings, key=_line_and_column), self.findings.subject)
        return {**_DEFAULTS, **found, "modules": Entries(found["modules"])}

    def right(self) -> dict[str, Any]:
        """The fields as plain values, but for those that are wrong: whatever is said over them can be read too."""
        unread = bool(self.findings) if self.source.values is None else not isinstance(self.source.values, Mapping)
        found = self.fields()
        values = {key: value for key, value in found.items() if value is not None}
        values["modules"] = {glob: entry.settings() for glob, entry in found["modules"].items()}
        if found.get("mesh"):
            values["mesh"] = dict(found["mesh"].axes)
        elif unread or "mesh" in found:
            values["mesh"] = {"dp_shard": 1}  # a stand-in: what is wrong with the mesh has been noted
        return values

    def fields(self) -> dict[str, Any]:
        """What is said, each thing as a plan keeps it; None where it is wrong."""
        found: dict[str, Any] = {"modules": {}}
        for key, value in self.section(self.source.values, (), KEYS, "a plan").items():
            if key == "mesh":
                found["mesh"] = read_mesh(value, self.findings, lambda axis: self.mesh_place(axis))
            elif key in SECTIONS:
                self.entries(value, key, found["modules"])
            else:
                found[key] = self.value(_PLAN[key], value, (key,))
        return found

    def mesh_place(self, axis: str) -> str:
        return self.source.where(("mesh", axis) if axis else ("mesh",))

    def section(self, values: object, path: _Path, keys: Iterable[str], owner: str) -> dict[str, Any]:
        """The known keys of a mapping that are said. Null is as good as left out."""
        keys = tuple(keys)
        if values is not None and not isinstance(values, Mapping):
            fix = f"{path[-1] if path else 'mesh'}: {{{'dp: shard' if path else 'dp_shard: 2, tp: 2'}}}"
            required = f"the keys of {owner}: {', '.join(keys)}"
            self.findings.add(where=self.source.where(path), given=_flow(values), required=required, fix=fix)
        if not isinstance(values, Mapping):
            return {}
        for key in values:
            if key not in keys:
                self.unknown_key(key, values[key], path, keys, owner)
        return {key: values[key] for key in keys if values.get(key) is not None}

    def unknown_key(self, key: object, value: object, path: _Path, keys: Sequence[str], owner: str) -> None:
        word, *rest = str(key).split(" ", 1)
        near = nearest(word, keys)
        hint = f"; did you mean {near[0]}?" if near else ""
        fix = self.source.fix((*path, str(key)), _flow(value), near[0]) if near else f"leave out {key}"
        if near and rest:  # "mesh {tp: 2}" reads as the key "mesh {tp" and the value "2}": the colon was forgotten
            fix = f"{near[0]}: {rest[0]}: {value}"
        where = self.source.where((*path, str(key)), key=True)
        required = f"a key of {owner}: {', '.join(keys)}{hint}"
        self.findings.add(where=where, given=f"the key {key}", required=required, fix=fix)

    def entries(self, values: object, section: str, found: dict[str, Entry]) -> None:
        """The entries of ``modules`` or ``parameters``, added to those found before."""
        if not isinstance(values, Mapping):
            example = f'{section}:\n  "*.c_attn": {{tp: column, parts: 3}}'
            where = self.source.where((section,))
            self.findings.add(
                where=where, given=_flow(values), required="a glob with its entry, a line each", fix=example
            )
            return
        for glob, value in values.items():
            path = (section, str(glob))
            if not isinstance(glob, str) or not glob.strip():
                required = "the name of a module or parameter, or a glob of such names"
                fix = f'"{str(glob).strip() or "*"}": {_flow(value)}'
                self.findings.add(
                    where=self.source.where(path, key=True), given=_flow(glob), required=required, fix=fix
                )
                continue
            entry = self.entry(value, path)
            if before := found.get(glob):
                self.both(before, entry, path)
                entry = before | entry
            found[glob] = entry

    def entry(self, value: object, path: _Path) -> Entry:
        values = value.settings() if isinstance(value, Entry) else value
        said = {
            key: self.value(_ENTRY[key], item, (*path, key))
            for key, item in self.section(values, path, _ENTRY, "an entry").items()
        }
        if isinstance(said.get("parts"), list):
            said["parts"] = tuple(said["parts"])
        return Entry(**said)

    def both(self, before: Entry, entry: Entry, path: _Path) -> None:
        """A glob that stands in both sections may not be said two things."""
        for key, value in entry.settings().items():
            first = before.settings().get(key, value)
            if first != value:
                given = f"{key}: {_flow(value)}, and {key}: {_flow(first)} under modules"
                where = self.source.where((*path, key))
                self.findings.add(where=where, given=given, required="one of them", fix=f"{key}: {_flow(first)}")

    def value(self, kind: _Kind, value: Any, path: _Path) -> Any:
        if not kind.accepts(value):
            near = nearest(value, kind.words, most=1) if isinstance(value, str) else ()
            required = kind.required + "".join(f"; did you mean {word}?" for word in near)
            fix = self.source.fix(path, _flow(near[0] if near else _meant(value, kind)))
            where = self.source.where(path)
            self.findings.add(where=where, given=_flow(value), required=required, fix=fix)
            return None
        return value


def _line_and_column(finding: Finding) -> tuple[int, int]:
    """Where in a file a finding is; before everything, if in none."""
    match = re.search(r":(\d+):(\d+)(?: \(|$)", finding.where)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _meant(value: object, kind: _Kind) -> object:
    """What a value of the wrong type most likely meant: ``"4"`` is 4, ``4.0`` is 4, ``"yes"`` is true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError):
            return kind.example
    return value if kind.accepts(value) else kind.example


def _flow(value: object) -> str:
    """A value as YAML writes it on one line."""
    try:
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=_WIDE)
    except yaml.YAMLError:
        return repr(value)
    except RecursionError:
        return "brackets within brackets"
    return text.strip().removesuffix("...").strip()


def _example() -> str:
    return "mesh: {dp_shard: 2, tp: 2}"


_SET, _MESH = "--set ", "--mesh"
_WIDE = 10**6  # columns: YAML is not to break our lines


# -- command-line settings -----------------------------------------------------------------------------------


def _apply(setting: str, values: dict[str, Any], source: Source) -> None:
    """Put one ``key=value`` into ``values``, and its place and problems into ``source``."""
    key, sign, text = (part.strip() for part in setting.partition("="))
    place = _SET + setting
    if not (sign and key):
        fix = f"{_SET}{key or 'recompute'}=blocks"
        source.findings.add(where=place, given=setting, required="key=value", fix=fix)
        return
    said = compose(text, key)
    for finding in said.findings:
        fix = _SET + shlex.quote(f'{key}="{text}"')
        source.findings.add(where=place, given=text, required=finding.required, fix=fix)
    *outer, last = path = _setting_path(key, said.values)
    table = values
    for part in outer:
        inner = table.get(part) or {}
        if not isinstance(inner, dict):
            fix = _SET + shlex.quote(f"{part}={_flow(inner)}")
            given = f"{part}={_flow(inner)}, and a part of it"
            source.findings.add(where=place, given=given, required="all of it in one setting", fix=fix)
            return
        table.pop(part, None)  # put back last: what is set comes after all others
        table[part] = inner
        table = inner
    table[last] = said.values
    source.places[path] = source.keys[path] = place


def _setting_path(key: str, value: object) -> _Path:
    """``modules.h.0.attn.tp`` as section, glob and key; where a whole entry is set, as section and glob."""
    section, dot, glob = key.partition(".")
    if section == "mesh" and dot:
        return (section, ALIASES.get(glob, glob))
    if section not in SECTIONS or not dot:
        return (key,)
    if isinstance(value, dict) or "." not in glob:
        return ("modules", glob)
    glob, _, last = glob.rpartition(".")
    return ("modules", glob, last)


# -- YAML, with the place of everything ----------------------------------------------------------------------


def _file(path: str) -> Source:
    """The plain values in a YAML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        given = error.strerror or str(error) if isinstance(error, OSError) else "bytes that are not UTF-8"
        source = Source(None)
        source.places[()] = path
        source.findings.add(where=path, given=given, required="a YAML file that can be read", fix=_example())
        return source
    return compose(text, path)


def compose(text: str, name: str, findings: Findings | None = None) -> Source:
    """The plain values in a YAML text, and the place of each as ``name:line:column``, both from 1.

    What is not YAML, or not plain, is noted in the findings. Keys are text, whatever they look like.
    """
    source = Source(None, findings)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        source.places[()] = f"{name}:1:1"
        source.values = None if node is None else _Values(name, source).of(node, ())
    except yaml.YAMLError as error:
        _not_yaml(error, text, name, source.findings)
    except RecursionError:
        source.findings.add(where=f"{name}:1:1", given="brackets within brackets", required="a plan", fix=_example())
    return source


class _Values:
    """Builds plain values from YAML nodes. A node that an alias names again is built once."""

    def __init__(self, name: str, source: Source) -> None:
        self.name = name
        self.source = source
        self.built: dict[int, object] = {}

    def of(self, node: yaml.Node, path: _Path) -> object:
        self.source.places[path] = self.place(node)
        if id(node) in self.built:
            return self.built[id(node)]
        self.built[id(node)] = None  # until it is built: an alias within itself finds nothing
        if isinstance(node, yaml.MappingNode):
            value: object = self.mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.of(item, (*path, str(i))) for i, item in enumerate(node.value)]
        else:
            value = self.scalar(node)
        self.built[id(node)] = value
        return value

    def mapping(self, node: yaml.MappingNode, path: _Path) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in node.value:
            place = self.place(key)
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                given = "a merge" if isinstance(key, yaml.ScalarNode) else "a key of several values"
                self.source.findings.add(where=place, given=given, required="a name as key", fix="name: value")
                continue
            here = (*path, key.value)
            if key.value in found:
                given = f"the key {key.value} again, after {self.source.keys[here]}"
                fix = f"leave out one of the two {key.value}"
                self.source.findings.add(where=place, given=given, required="each key once", fix=fix)
                continue
            self.source.keys[here] = place
            found[key.value] = self.of(value, here)
        return found

    def scalar(self, node: yaml.Node) -> object:
        try:
            return yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            given = f"{node.tag} {node.value}" if isinstance(error, yaml.YAMLError) else str(node.value)
            required = "a plain value: text, a number, true or false"
            self.source.findings.add(where=self.place(node), given=given, required=required, fix=f'"{node.value}"')
            return None

    def place(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _not_yaml(error: yaml.YAMLError, text: str, name: str, findings: Findings) -> None:
    """The finding for text that is not YAML: the line that is wrong, and as it was most likely meant."""
    reason, index = str(error), 0
    if isinstance(error, yaml.MarkedYAMLError):
        reason = error.problem or reason
        mark, opened = error.problem_mark or error.context_mark, error.context_mark
        if mark and opened and opened.line < mark.line and _OPENS.search(error.context or ""):
            mark = opened  # what is never closed is noticed lines later: what counts is where it opened
        index = mark.index if mark else 0
    elif isinstance(error, yaml.reader.ReaderError):
        reason, index = error.reason, error.position
    before = text[:index].splitlines(keepends=True) or [""]
    if before[-1].endswith("\n"):
        before.append("")
    line = before[-1] + text[index:].partition("\n")[0]
    given = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line.strip()) or "nothing"
    where = f"{name}:{len(before)}:{len(before[-1]) + 1}"
    findings.add(where=where, given=given, required=f"YAML: {reason}", fix=_mended(line))


_OPENS = re.compile("flow|quoted|simple key")


def _mended(line: str) -> str:
    """A line that is not YAML, as it was most likely meant."""
    if "\t" in line:
        return line.expandtabs(2)
    line = "".join(c for c in line if c.isprintable()).strip()
    if match := re.fullmatch(r"(\*[^:\s]*)(:.*)", line):  # a bare glob reads as an alias
        return f'"{match[1]}"{match[2]}'
    for quote in "\"'":
        if line.count(quote) % 2:
            return line + quote
    for start, end in ("{}", "[]"):
        if (missing := line.count(start) - line.count(end)) > 0:
            return line + end * missing
    if match := re.fullmatch(r"([\w.]+)\s*[:=]?\s*([^:]+)", line):
        return f"{match[1]}: {match[2]}"
    return _example()
