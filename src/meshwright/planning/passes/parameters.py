"""A line of the recipe for each parameter: its shards, its unit, its stages and places, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from meshwright.errors import Finding
from meshwright.layout import REPLICATE
from meshwright.names import few
from meshwright.planning.draft import Draft
from meshwright.recipe import ParameterRecipe, Unit

_HALF = ("bfloat16", "float16")


def keep_written(draft: Draft) -> Draft:
    """Keeps parameters that the forward writes out of their units. In a half type they are a problem: it would write to a
    copy."""
    written = draft.uses.written if draft.uses is not None else draft.written
    if written and draft.plan.precision in _HALF:
        finding = Finding(
            where="precision",
            given=f"{draft.plan.precision}, and a forward that writes {few(sorted(written))}",
            required="parameters that the forward leaves as they are: it computes with copies of them in a half type",
            fix="precision: float32",
        )
        draft = draft.wrong([finding])
    names = f"{', '.join(sorted(written)[:3])}{' …' * (len(written) > 3)}"
    draft = replace(draft, loose=dict.fromkeys(written, ""))
    if not written or draft.plan.mesh.data_size == 1:
        return draft
    return draft.noted([f"the forward writes {names}: whole on every data rank"])


def keep_objects(draft: Draft) -> Draft:
    """Keeps parameters out of their units if the model also reaches the Parameter object outside its modules (in a list
    ``self.scales = [layer.scale, …]``, or in a closure): FSDP2 replaces the objects only in modules."""
    outside = sorted(draft.uses.referenced_outside) if draft.uses is not None else []
    if not outside:
        return draft
    note = f"used from elsewhere than the modules that hold them: {few(outside)}: whole on every data rank"
    draft = replace(draft, loose={**draft.loose, **dict.fromkeys(outside, "")}, referenced_outside=tuple(outside))
    return draft.noted([note] if draft.data > 1 else [])


def keep_shared_by_units(draft: Draft) -> Draft:
    """Keeps parameters that are in a unit and also outside it out of all units: FSDP2 would shard such a parameter twice.

    Example: two blocks share a rotary embedding. If both use it, ``close_units`` has handled it. If only the first uses it (and
    keeps the angles), this pass does.
    """
    if draft.data == 1:
        return draft
    units = [u.name for u in draft.units]  # innermost first, the root last
    shared = {}
    for name, (_, aliases) in draft.names.parameters.items():
        holders = dict.fromkeys(_unit_around(place, units) for place in (name, *aliases))
        if len(holders) > 1:
            first_two = " and ".join(unit or "the root" for unit in [*holders][:2])
            shared[name] = f"held by {first_two}{' …' if len(holders) > 2 else ''}"
    return replace(draft, loose={**draft.loose, **shared})


def _unit_around(parameter: str, units: Sequence[str]) -> str:
    """The innermost unit that contains the parameter of this name. ``units``: innermost first, the root last."""
    return next(unit for unit in units if not unit or parameter.startswith(unit + "."))


def keep_other_types(draft: Draft) -> Draft:
    """Keeps trainable parameters out of their unit if their dtype differs from that of most of the unit: FSDP2 reduces the
    gradients of a unit as one tensor. With half precision this is a problem: only FSDP2 casts parameters."""
    precision = draft.plan.precision
    if draft.data == 1 and precision not in _HALF:
        return draft
    others = _of_other_types(draft)
    if not others or precision not in _HALF:
        return replace(draft, loose={**draft.loose, **others})
    examples = ", ".join(f"{name} ({why})" for name, why in [*others.items()][:3])
    finding = Finding(
        where="precision",
        given=f"{precision}, with {examples}{' …' * (len(others) > 3)}",
        required="parameters of one type in each unit, which FSDP2 casts",
        fix="precision: float32",
    )
    return draft.wrong([finding])


def _of_other_types(draft: Draft) -> dict[str, str]:
    """Parameter → text with its dtype and its unit's most frequent dtype, for trainable parameters where they differ."""
    owners, sizes = _owners(draft), defaultdict[str, Counter[torch.dtype]](Counter)
    trained = {n: p for n, (p, _) in draft.names.parameters.items() if p.requires_grad and _fits_a_unit(p)}
    for p in trained.values():
        sizes[owners[id(p)]][p.dtype] += p.numel()
    most = {unit: types.most_common(1)[0][0] for unit, types in sizes.items()}
    return {
        name: f"{_spelled(p.dtype)} in a unit of {_spelled(most[owners[id(p)]])}"
        for name, p in trained.items() if p.dtype != most[owners[id(p)]]
    }  # fmt: skip


def parameter_lines(draft: Draft) -> tuple[ParameterRecipe, ...]:
    """The recipe's line for each parameter."""
    owners, units = _owners(draft), {u.name: u for u in draft.units}
    return tuple(
        _line(draft, name, p, aliases, units[owners[id(p)]]) for name, (p, aliases) in draft.names.parameters.items()
    )


def _line(draft: Draft, name: str, p: nn.Parameter, aliases: tuple[str, ...], unit: Unit) -> ParameterRecipe:
    shards, places = draft.shards, draft.branches.home(name)
    is_loose = not _fits_a_unit(p) or name in draft.loose or places != (unit.place,)  # a unit lives on one mesh
    reason = (shards.reasons.get(name, "") if shards is not None else "") or draft.loose.get(name, "")
    return ParameterRecipe(
        name=name,
        shape=tuple(p.shape),
        dtype=_spelled(p.dtype),
        requires_grad=p.requires_grad,
        aliases=aliases,
        tp=shards.layouts.get(name, REPLICATE) if shards is not None and len(places) == 1 else REPLICATE,
        data="loose" if is_loose else unit.data,
        unit=unit.name,
        stages=draft.homes[name],
        places=places,
        reason="used in several places" if len(places) > 1 else reason,
    )


def _fits_a_unit(p: nn.Parameter) -> bool:
    """Whether FSDP2 can shard a parameter: not one without dims, nor one without elements, whose shape it changes."""
    return p.dim() > 0 and p.numel() > 0


def _owners(draft: Draft) -> dict[int, str]:
    """``id(parameter)`` → the unit that gathers it: the innermost unit with it, as FSDP2 assigns parameters."""
    modules, owners = dict(draft.model.named_modules()), dict[int, str]()
    for unit in draft.units:
        for p in modules[unit.name].parameters():
            owners.setdefault(id(p), unit.name)
    return owners


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
