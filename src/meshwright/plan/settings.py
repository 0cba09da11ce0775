"""``key=value`` settings, as a command line takes them."""

from __future__ import annotations

import shlex
from typing import Any

from meshwright.mesh import ALIASES
from meshwright.plan.keys import SECTIONS
from meshwright.plan.source import SET, KeyPath, Source, flow
from meshwright.plan.text import compose


def put_setting(setting: str, values: dict[str, Any], source: Source) -> None:
    """Puts one ``key=value`` into ``values``, and its position and problems into ``source``."""
    key, sign, text = (part.strip() for part in setting.partition("="))
    position = SET + setting
    if not (sign and key):
        fix = f"{SET}{key or 'recompute'}=blocks"
        source.findings.add(where=position, given=setting, required="key=value", fix=fix)
        return
    value_source = compose(text, key)
    for finding in value_source.findings:
        fix = SET + shlex.quote(f'{key}="{text}"')
        source.findings.add(where=position, given=text, required=finding.required, fix=fix)
    *outer, last = path = _setting_path(key, value_source.values)
    table = values
    for part in outer:
        inner = table.get(part) or {}
        if not isinstance(inner, dict):
            fix = SET + shlex.quote(f"{part}={flow(inner)}")
            given = f"{part}={flow(inner)}, and a part of it"
            source.findings.add(where=position, given=given, required="one setting for all of it", fix=fix)
            return
        table.pop(part, None)  # and inserted again, as the last: a setting comes after all others
        table[part] = inner
        table = inner
    table[last] = value_source.values
    source.places[path] = source.keys[path] = position


def _setting_path(key: str, value: object) -> KeyPath:
    """``modules.h.0.attn.tp`` as (section, glob, key); as (section, glob) if the setting is a whole entry."""
    section, dot, glob = key.partition(".")
    if section == "mesh" and dot:
        return (section, ALIASES.get(glob, glob))
    if section not in SECTIONS or not dot:
        return (key,)
    if isinstance(value, dict) or "." not in glob:
        return ("modules", glob)
    glob, _, last = glob.rpartition(".")
    return ("modules", glob, last)
