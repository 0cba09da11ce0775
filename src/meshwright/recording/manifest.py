"""What a recording says of itself, beside its tensors: what each rank tells, and the manifest that is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.recording.folder import FORMAT
from meshwright.recording.named import Named
from meshwright.recording.taken import Copied, Step
from meshwright.recording.views import Views


def told_of(
    named: Sequence[Named], start: Mapping[str, Copied], steps: Sequence[Step], count: int, axes: Mapping[str, int]
) -> dict[str, Any]:
    """What this rank tells: axes and where it stands on them, its parameters, and its steps.

    Args:
        start: every parameter before the first step; empty on a rank whose optimizers never stepped.
        count: steps of the rank that has most.
        axes: those that a person named.
    """
    here: dict[str, tuple[int, int]] = {}
    for copy in start.values():
        here |= copy.layout.axes
    stepped = {name for step in steps for name in step.stepped}
    return {
        "axes": {**axes, **{axis: size for axis, (_, size) in here.items()}},
        "coordinate": {axis: at for axis, (at, _) in here.items()},
        "parameters": {
            one.name: _about(one, start[one.name], one.name in stepped)
            for one in named
            if one.name in start and start[one.name].layout.holds
        },
        "steps": [_of_step(steps[at]) if at < len(steps) else {} for at in range(count)],
    }


def manifest_of(told: Sequence[Mapping[str, Any]], tensors: Mapping[str, Views]) -> dict[str, Any]:
    """The manifest. ``told``: by every rank; ``tensors``: what is in each file."""
    import meshwright

    axes: dict[str, int] = {}
    parameters: dict[str, Any] = {}
    for of_rank in told:
        axes |= of_rank["axes"]
        for name, about in of_rank["parameters"].items():
            parameters.setdefault(name, about)
    return {
        "format": FORMAT,
        "meshwright": meshwright.__version__,
        "torch": torch.__version__,
        "world_size": len(told),
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "axes": axes,
        "coordinates": [of_rank["coordinate"] for of_rank in told],
        "parameters": parameters,
        "steps": [{"ranks": list(of_ranks)} for of_ranks in zip(*(rank["steps"] for rank in told), strict=True)],
        "tensors": {file: _plain(views) for file, views in tensors.items()},
        "uneven": {file: views.uneven for file, views in tensors.items() if views.uneven},
        "strange": {file: views.strange for file, views in tensors.items() if views.strange},
    }


def _about(named: Named, start: Copied, stepped: bool) -> dict[str, Any]:
    return {
        "shape": list(start.layout.shape),
        "dtype": str(start.dtype).removeprefix("torch."),
        "layout": start.layout.text,
        "aliases": list(named.aliases),
        "trained": named.parameter.requires_grad,
        "stepped": stepped,
    }


def _of_step(step: Step) -> dict[str, Any]:
    return {
        "losses": [[loss.value, loss.dtype, loss.rows] for loss in step.losses],
        "rows": step.rows,
        "settings": step.settings,
        "notes": list(step.notes),
    }


def _plain(views: Views) -> dict[str, Any]:
    return {
        name: [{"key": v.key, "ranks": list(v.ranks), "shape": list(v.shape), "dtype": v.dtype} for v in of]
        for name, of in views.views.items()
    }
