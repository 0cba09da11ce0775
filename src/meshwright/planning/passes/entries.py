"""The plan's settings for each module and parameter, by its globs; and the branches for ``auto``."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase

from meshwright.errors import Findings, nearest
from meshwright.plan import Entry
from meshwright.planning.concurrent import place_concurrent, wants_branches
from meshwright.planning.draft import Draft
from meshwright.planning.passes.program import recorded

_RANGE = re.compile(r"(\d+)-(\d+)")


def read_entries(draft: Draft) -> Draft:
    """Adds ``entries``: module or parameter → its settings, from all globs that match. Later globs win. A glob without a match
    is a problem."""
    modules = [n for n, _ in draft.model.named_modules()]
    parameters = [n for name, (_, aliases) in draft.names.parameters.items() for n in (name, *aliases)]
    findings, entries = Findings(), dict[str, Entry]()
    for glob, entry in draft.plan.modules.items():
        matched = [n for n in (*modules, *parameters) if _is_named(n, glob)]
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
            entries[name] = entries.get(name, Entry()) | entry
    return replace(draft, entries=entries).wrong(findings)


def find_concurrent(draft: Draft) -> Draft:
    """If the plan says ``auto``, finds branches and writes them into the plan."""
    if draft.findings or not wants_branches(draft.plan):
        return draft
    plan, notes = place_concurrent(draft.plan, draft.entries, recorded(draft))
    return read_entries(replace(draft, plan=plan).noted(notes))


def _is_named(name: str, glob: str) -> bool:
    """Whether a glob matches ``name``. ``layers.0-5`` matches layers.0 to layers.5."""
    if fnmatchcase(name, glob):
        return True
    parts, patterns = name.split("."), glob.split(".")
    if len(parts) != len(patterns) or not any(map(_RANGE.fullmatch, patterns)):
        return False
    return all(_in_range(part, pattern) for part, pattern in zip(parts, patterns, strict=True))


def _in_range(part: str, pattern: str) -> bool:
    ends = _RANGE.fullmatch(pattern)
    if ends is None:
        return fnmatchcase(part, pattern)
    return part.isdigit() and int(ends[1]) <= int(part) <= int(ends[2])
