"""Notes of the recipe on compilation: which parts of a model that ``torch.compile`` made stay compiled, and whether the
plan's ``compile: true`` has an effect.

Compiled parts stay compiled if the mesh has data axes only: then the forward is torch's own. With tp, pp or branches, a
function mode of ours is on, and compiled parts run as their plain functions.
"""

from __future__ import annotations

from torch import nn

from meshwright.mesh import Mesh
from meshwright.names import fold_names
from meshwright.plan import Plan
from meshwright.private import compiles


def compiled_notes(model: nn.Module, mesh: Mesh, branches: bool) -> tuple[str, ...]:
    """One note for the compiled parts of ``model``; none if no part is compiled. ``branches``: whether the plan has any."""
    names = [name or "the model" for name, module in model.named_modules() if compiles(module)]
    if not names:
        return ()
    parts = ", ".join(map(str, fold_names(names)))
    axes = [axis for axis in ("tp", "pp") if mesh.axis_size(axis) > 1]
    if axes or branches:
        return (f"torch.compile is off, as the forward is followed over {' and '.join(axes) or 'branches'}: {parts}",)
    return (f"stays compiled, but for steps in which rows have unlike numbers of labels: {parts}",)


def compile_notes(plan: Plan) -> tuple[str, ...]:
    """A note if a plan's ``compile: true`` has nothing to compile: blocks have recorded programs only over tp."""
    if not plan.compile or plan.mesh.axis_size("tp") > 1:
        return ()
    return (
        "compile: true has no effect without tp: blocks have recorded programs over tp alone; torch.compile the model",
    )


__all__ = ["compile_notes", "compiled_notes"]
