"""The style in which each parameter is to be sharded over tp: the plan's, else that of the model's own ``tp_plan``."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from meshwright.plan import Entry
from meshwright.planning.draft import Draft, Names
from meshwright.planning.parameter_shards import Style

# Styles of transformers → ours.
_TP_PLAN = {
    "colwise": "column", "colwise_rep": "column", "colwise_gather_output": "column", "packed_colwise": "column",
    "rowwise": "row", "rowwise_rep": "row", "embedding_rowwise": "row", "packed_rowwise": "row", "rowwise_split_input": "row",
    "replicated_with_grad_allreduce": "replicate", "replicate": "replicate",
}  # fmt: skip


def plan_styles(draft: Draft, of_model: Mapping[str, Style]) -> dict[str, Style]:
    """Parameter → its style by the plan; if the plan names none, its style in ``of_model``."""
    if draft.plan.mesh.axis_size("tp") == 1:
        return {name: Style("replicate", reason="the mesh has no tp axis") for name in draft.names.parameters}
    return {
        name: _style(_entry_for(draft, (name, *aliases)), of_model.get(name, Style()))
        for name, (_, aliases) in draft.names.parameters.items()
    }


def _entry_for(draft: Draft, names: tuple[str, ...]) -> Entry:
    """The plan's settings for a parameter under any of its names. Settings of the modules around it hold for it too."""
    merged = Entry()
    for name in names:
        scopes = [name[:i] for i, c in enumerate(name) if c == "."]
        for scope in (*scopes, name):
            if scope in draft.entries:
                merged = merged | draft.entries[scope]
    return merged


def _style(settings: Entry, of_model: Style) -> Style:
    if settings.tp in (None, "auto") and settings.parts is None and settings.units is None:
        return of_model if settings.tp is None else Style()
    kind = "shard" if settings.shard_dim is not None else (settings.tp or "auto")
    return Style(kind, settings.shard_dim, settings.parts, settings.units, forced=settings.tp not in (None, "auto"))


def model_styles(model: nn.Module, names: Names) -> tuple[dict[str, Style], list[str]]:
    """(parameter → its style in a Hugging Face ``tp_plan``, notes). An unknown style replicates all parameters of its group,
    since their styles depend on each other."""
    tp_plan = getattr(model, "_tp_plan", None)
    if not isinstance(tp_plan, Mapping):
        return {}, []
    styles: dict[str, Style] = {}
    unknown = {pattern: style for pattern, style in tp_plan.items() if style not in _TP_PLAN}
    groups = {pattern.rpartition(".")[0]: style for pattern, style in unknown.items()}
    for name in names.parameters:
        module = name.rpartition(".")[0]
        for pattern, style in tp_plan.items():
            if style in _TP_PLAN and (fnmatchcase(module, pattern) or fnmatchcase(name, pattern)):
                styles[name] = Style(_TP_PLAN[style], reason=f"the model's tp_plan: {style}")
        for group, style in groups.items():
            if group and fnmatchcase(name, f"{group}.*"):
                styles[name] = Style(
                    "replicate", reason=f"the model's tp_plan has a style not known here: {_style_name(style)}"
                )
    return styles, [
        f"{group or 'a group'} is left whole over tp: its tp_plan has the style {_style_name(style)!r}, not known here"
        for group, style in groups.items()
    ]


def _style_name(style: Any) -> str:
    """A style as text; for an object (diffusers has such styles) its class, since an address differs between ranks."""
    return style if isinstance(style, str) else type(style).__name__
