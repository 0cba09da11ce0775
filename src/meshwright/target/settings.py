"""Settings that a target lacks."""

from __future__ import annotations

from typing import Any

from meshwright.errors import Findings, nearest
from meshwright.plan import KEYS


def unknown_setting(key: str, value: Any, known: list[str], required: str, findings: Findings) -> None:
    """Notes a setting that neither the target nor a plan has; ``required`` says what the target has."""
    near = nearest(key, known)
    hint = f"; did you mean {near[0]}?" if near else ""
    fix = f"--set {near[0]}={value}" if near else f"leave out --set {key}"
    said = f"{required}, or a key of the plan ({', '.join(KEYS)}){hint}"
    findings.add(where=f"--set {key}={value}", given=f"the key {key}", required=said, fix=fix)
