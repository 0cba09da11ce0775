"""How each parameter is to be sharded over tp, as the plan says, else as the model's own ``tp_plan`` does."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from meshwright.plan import Entry
from meshwright.planning.cuts import Style
from meshwright.planning.draft import Draft, Names

# Styles of transformers → ours.
_TP_PLAN = {
    "colwise": "column", "colwise_rep": "column", "colwise_gather_output": "column", "packed_colwise": "column",
    "rowwise": "row", "rowwise_rep": "row", "embedding_rowwise": "row", "packed_rowwise": "row", "rowwise_split_input": "row",
    "replicated_with_grad_allreduce": "replicate", "replicate": "replicate",
}  # fmt: skip


def said_styles(draft: Draft, of_model: Mapping[str, Style]) -> dict[str, Style]:
    """For each parameter, what the plan (else ``of_model``) says of its shards."""
    if draft.plan.mesh.axis_size("tp") == 1:
        return {name: Style("replicate", reason="the mesh has no tp axis") for name in draft.names.parameters}
    return {
        name: _style(_said(draft, (name, *aliases)), of_model.get(name, Style()))
        for name, (_, aliases) in draft.names.parameters.items()
    }


def _said(draft: Draft, names: tuple[str, ...]) -> Entry:
    """What the plan says of a parameter, by any of its names, and of the modules around it."""
    said = Entry()
    for name in names:
        scopes = [name[:i] for i, c in enumerate(name) if c == "."]
        for scope in (*scopes, name):  # what is said of a module holds for its parameters
            if scope in draft.entries:
                said = said | draft.entries[scope]
    return said


def _style(said: Entry, of_model: Style) -> Style:
    if said.tp in (None, "auto") and said.parts is None and said.units is None:
        return of_model if said.tp is None else Style()
    kind = "shard" if said.shard_dim is not None else (said.tp or "auto")
    return Style(kind, said.shard_dim, said.parts, said.units, forced=said.tp not in (None, "auto"))


def model_styles(model: nn.Module, names: Names) -> tuple[dict[str, Style], list[str]]:
    """The styles of a Hugging Face ``tp_plan``, read as data; an unknown style leaves its coupled group whole."""
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
                    "replicate", reason=f"the model's tp_plan has a style not known here: {_named(style)}"
                )
    return styles, [
        f"{group or 'a group'} is left whole over tp: its tp_plan has the style {_named(style)!r}, not known here"
        for group, style in groups.items()
    ]


def _named(style: Any) -> str:
    """A style as it is written; of an object (as diffusers has them) its class, as an address is another on each rank."""
    return style if isinstance(style, str) else type(style).__name__
