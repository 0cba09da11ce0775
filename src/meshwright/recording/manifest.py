"""The manifest of a recording: facts of each rank, collected on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.recording.copies import CopiedStep, TensorCopy
from meshwright.recording.folder import FORMAT
from meshwright.recording.parameter_names import NamedParameter
from meshwright.recording.views import Views


def facts_of_rank(
    parameters: Sequence[NamedParameter],
    start: Mapping[str, TensorCopy],
    steps: Sequence[CopiedStep],
    count: int,
    axes: Mapping[str, int],
) -> dict[str, Any]:
    """The facts of this rank, as plain values: its axes and coordinate, its parameters, and its steps.

    Args:
        parameters: of the model.
        start: every parameter before the first step; empty on a rank whose optimizers never stepped.
        steps: the recorded steps of this rank.
        count: number of steps of the rank that has the most.
        axes: name → size, given by a person.
    """
    axes_of_layouts: dict[str, tuple[int, int]] = {}  # axis → (coordinate, size)
    for copy in start.values():
        axes_of_layouts |= copy.layout.axes
    stepped = {name for step in steps for name in step.stepped}
    return {
        "axes": {**axes, **{axis: size for axis, (_, size) in axes_of_layouts.items()}},
        "coordinate": {axis: coordinate for axis, (coordinate, _) in axes_of_layouts.items()},
        "parameters": {
            parameter.name: _parameter_facts(parameter, start[parameter.name], parameter.name in stepped)
            for parameter in parameters
            if parameter.name in start and start[parameter.name].layout.holds
        },
        "steps": [_step_facts(steps[i]) if i < len(steps) else {} for i in range(count)],
    }


def manifest_of(facts: Sequence[Mapping[str, Any]], tensors: Mapping[str, Views]) -> dict[str, Any]:
    """The manifest.

    Args:
        facts: of every rank, in rank order.
        tensors: name of a file → the views in it.
    """
    import meshwright

    axes: dict[str, int] = {}
    parameters: dict[str, Any] = {}
    for of_rank in facts:
        axes |= of_rank["axes"]
        for name, about in of_rank["parameters"].items():
            parameters.setdefault(name, about)
    return {
        "format": FORMAT,
        "meshwright": meshwright.__version__,
        "torch": torch.__version__,
        "world_size": len(facts),
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "axes": axes,
        "coordinates": [of_rank["coordinate"] for of_rank in facts],
        "parameters": parameters,
        "steps": [{"ranks": list(of_ranks)} for of_ranks in zip(*(rank["steps"] for rank in facts), strict=True)],
        "tensors": {file: _plain(views) for file, views in tensors.items()},
        "uneven": {file: views.uneven for file, views in tensors.items() if views.uneven},
        "strange": {file: views.strange for file, views in tensors.items() if views.strange},
    }


def _parameter_facts(parameter: NamedParameter, start: TensorCopy, stepped: bool) -> dict[str, Any]:
    """Facts of a parameter. ``stepped``: whether an optimizer holds it."""
    return {
        "shape": list(start.layout.shape),
        "dtype": str(start.dtype).removeprefix("torch."),
        "layout": start.layout.text,
        "aliases": list(parameter.aliases),
        "trained": parameter.tensor.requires_grad,
        "stepped": stepped,
    }


def _step_facts(step: CopiedStep) -> dict[str, Any]:
    return {
        "losses": [[loss.value, loss.dtype, loss.rows] for loss in step.losses],
        "rows": step.rows,
        "settings": step.settings,
        "notes": list(step.notes),
    }


def _plain(views: Views) -> dict[str, Any]:
    return {
        name: [{"key": v.key, "ranks": list(v.ranks), "shape": list(v.shape), "dtype": v.dtype} for v in of_name]
        for name, of_name in views.views.items()
    }
