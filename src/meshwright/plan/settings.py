"""``key=value`` settings, as a command line takes them."""

from __future__ import annotations

import shlex
from typing import Any

from meshwright.mesh import ALIASES
from meshwright.plan.keys import SECTIONS
from meshwright.plan.source import SET, KeyPath, Source, flow
from meshwright.plan.text import compose


def put_setting(setting: str, values: dict[str, Any], source: Source) -> None:
    """Put one ``key=value`` into ``values``, and its place and problems into ``source``."""
    key, sign, text = (part.strip() for part in setting.partition("="))
    place = SET + setting
    if not (sign and key):
        fix = f"{SET}{key or 'recompute'}=blocks"
        source.findings.add(where=place, given=setting, required="key=value", fix=fix)
        return
    said = compose(text, key)
    for finding in said.findings:
        fix = SET + shlex.quote(f'{key}="{text}"')
        source.findings.add(where=place, given=text, required=finding.required, fix=fix)
    *outer, last = path = _setting_path(key, said.values)
    table = values
    for part in outer:
        inner = table.get(part) or {}
        if not isinstance(inner, dict):
            fix = SET + shlex.quote(f"{part}={flow(inner)}")
            given = f"{part}={flow(inner)}, and a part of it"
            source.findings.add(where=place, given=given, required="all of it in one setting", fix=fix)
            return
        table.pop(part, None)  # put back last: what is set comes after all others
        table[part] = inner
        table = inner
    table[last] = said.values
    source.places[path] = source.keys[path] = place


def _setting_path(key: str, value: object) -> KeyPath:
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
