"""``Source``: plain values with their positions; and how values are written in a fix."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import TypeAlias

import yaml

from meshwright.errors import Findings

KeyPath: TypeAlias = tuple[str, ...]

SET, MESH = "--set ", "--mesh"
WIDE = 10**6  # columns: YAML must not break our lines


class Source:
    """Plain values with their positions (``plan.yaml:3:5``, ``--mesh``).

    Attributes:
        values: the outermost value; None if nothing could be read.
        keys: path of a value → the position of its key.
        places: path of a value → its position.
        findings: the problems so far.
    """

    def __init__(self, values: object, findings: Findings | None = None) -> None:
        self.values = values
        self.keys: dict[KeyPath, str] = {}
        self.places: dict[KeyPath, str] = {}
        self.findings = Findings() if findings is None else findings

    def put(self, key: str, value: object, place: str) -> None:
        """Sets a key of the plan, in place of any value that it has. ``place``: the position of the new value."""
        if self.values is None or isinstance(self.values, Mapping):
            self.values = {**(self.values or {}), key: value}
            for table in (self.keys, self.places):
                for path in [path for path in table if path[:1] == (key,)]:
                    del table[path]
            self.places[key,] = place

    def where(self, path: KeyPath, *, key: bool = False) -> str:
        """The position of a value, or of its key, for a finding: ``plan.yaml:3:5 (modules."*.fc".tp)``."""
        dotted = ".".join(part if re.fullmatch(r"\w+", part) else f'"{part}"' for part in path)
        tables = [self.keys, self.places] if key else [self.places, self.keys]
        for length in range(len(path), -1, -1):
            for table in tables:
                if place := table.get(path[:length]):
                    return f"{place} ({dotted})" if dotted else place
        return dotted or "plan"

    def fix(self, path: KeyPath, value: str, key: str | None = None) -> str:
        """The text to paste so that the value at ``path`` is ``value``, and its key ``key`` if given."""
        key = path[-1] if key is None else key
        if self.where(path).startswith(SET):
            return SET + shlex.quote(f"{'.'.join((*path[:-1], key))}={value}")
        return f"{key}: {value}"

    def mesh_fix(self) -> str:
        """The text to paste if there is no mesh."""
        return f"{MESH} dp_shard=2,tp=2" if self.where(()) == MESH else example()


def flow(value: object) -> str:
    """A value as YAML writes it on one line, also within braces: ``'tp[0:2]'`` needs its quotes there."""
    try:
        if isinstance(value, str) and "[" in value:
            return yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=WIDE).strip()[1:-1]
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=WIDE)
    except yaml.YAMLError:
        return repr(value)
    except RecursionError:
        return "brackets within brackets"
    return text.strip().removesuffix("...").strip()


def example() -> str:
    return "mesh: {dp_shard: 2, tp: 2}"
