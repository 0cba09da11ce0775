"""Plain values, and where each stands; and how they are written in a fix."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import TypeAlias

import yaml

from meshwright.errors import Findings

KeyPath: TypeAlias = tuple[str, ...]

SET, MESH = "--set ", "--mesh"
WIDE = 10**6  # columns: YAML is not to break our lines


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
        self.keys: dict[KeyPath, str] = {}
        self.places: dict[KeyPath, str] = {}
        self.findings = Findings() if findings is None else findings

    def put(self, key: str, value: object, place: str) -> None:
        """Say a key of the plan from elsewhere, whatever is said of it here."""
        if self.values is None or isinstance(self.values, Mapping):
            self.values = {**(self.values or {}), key: value}
            for table in (self.keys, self.places):
                for path in [path for path in table if path[:1] == (key,)]:
                    del table[path]
            self.places[key,] = place

    def where(self, path: KeyPath, *, key: bool = False) -> str:
        """The place of a value, or of its key, as findings say it: ``plan.yaml:3:5 (modules."*.fc".tp)``."""
        dotted = ".".join(part if re.fullmatch(r"\w+", part) else f'"{part}"' for part in path)
        places = [self.keys, self.places] if key else [self.places, self.keys]
        for length in range(len(path), -1, -1):
            for table in places:
                if place := table.get(path[:length]):
                    return f"{place} ({dotted})" if dotted else place
        return dotted or "plan"

    def fix(self, path: KeyPath, value: str, key: str | None = None) -> str:
        """What to paste where the value at ``path`` is to be ``value``, or its key too another."""
        key = path[-1] if key is None else key
        if self.where(path).startswith(SET):
            return SET + shlex.quote(f"{'.'.join((*path[:-1], key))}={value}")
        return f"{key}: {value}"

    def mesh_fix(self) -> str:
        """What to paste where there is no mesh."""
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
