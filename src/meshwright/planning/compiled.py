"""Parts of a model that ``torch.compile`` made: whether they stay compiled is said in the recipe's notes.

They do if the mesh has data axes alone: the forward is torch's own then. Where tensors are cut or a forward is followed
call by call (tp, pp, branches), a function mode of ours is on, and they run as the plain functions that they were made of.
"""

from __future__ import annotations

from torch import nn

from meshwright.mesh import Mesh
from meshwright.names import fold_names
from meshwright.private import compiles


def compiled_notes(model: nn.Module, mesh: Mesh, branches: bool) -> tuple[str, ...]:
    """One note for the parts of ``model`` that are compiled; none if there is none. ``branches``: whether there are any."""
    names = [name or "the model" for name, module in model.named_modules() if compiles(module)]
    if not names:
        return ()
    parts = ", ".join(map(str, fold_names(names)))
    axes = [axis for axis in ("tp", "pp") if mesh.axis_size(axis) > 1]
    if axes or branches:
        return (f"torch.compile is off, as the forward is followed over {' and '.join(axes) or 'branches'}: {parts}",)
    return (f"stays compiled, but for steps in which rows have unlike numbers of labels: {parts}",)


__all__ = ["compiled_notes"]
