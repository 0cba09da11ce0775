"""What there is to save: of a job or of a plain module, and of its optimizers; under the names of one device.

model.<name>                        parameters and persistent buffers
optimizer.state.<name>.<key>        tensors of the optimizer's state, cut as their parameter is
rng.<rank>.<kind>                   generators
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.checkpoint.pieces import Piece
from meshwright.errors import Findings
from meshwright.recipe import Slices
from meshwright.runtime.weights.parameters import local_tensor

if TYPE_CHECKING:
    from meshwright.runtime.held import HeldModel

Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclass(frozen=True)
class Held:
    """A parameter of which this rank holds a part.

    Attributes:
        name: its first name on one device; aliases: its others.
        p: as the optimizer has it.
        shape: of the whole.
        slices: what of it is here.
    """

    name: str
    aliases: tuple[str, ...]
    p: nn.Parameter
    shape: tuple[int, ...]
    slices: Slices

    def piece(self) -> Piece:
        return Piece(f"model.{self.name}", self.shape, local_tensor(self.p).detach(), self.slices)

    def state(self, key: str, value: Tensor) -> Piece | None:
        """A tensor of the optimizer's state: cut as the parameter is, where it is of its shape; whole, where it has no dims,
        or all of the parameter is here. None where it is a part of what is not known."""
        name, local = f"optimizer.state.{self.name}.{key}", local_tensor(value).detach()
        if local.dim() == 0 and not isinstance(value, DTensor):
            return Piece.whole(name, local)
        if local.shape == local_tensor(self.p).shape:
            return Piece(name, self.shape, local, self.slices)
        return Piece.whole(name, local) if self.is_whole else None

    @property
    def is_whole(self) -> bool:
        return tuple(local_tensor(self.p).shape) == self.shape


@dataclass(frozen=True)
class Contents:
    """Everything of a model that is saved, on this rank.

    Attributes:
        parameters: those of which a part is here.
        buffers: (name, module, name in it, whether this rank's copy is the one that counts): persistent ones.
        extra: ``get_extra_state()`` of modules that have it, by their names.
    """

    parameters: tuple[Held, ...]
    buffers: tuple[tuple[str, nn.Module, str, bool], ...]
    extra: dict[str, Any]

    def pieces(self) -> Iterator[Piece]:
        """Parameters, and the buffers that are this rank's to save."""
        yield from (held.piece() for held in self.parameters)
        for name, module, key, counts in self.buffers:
            if counts:
                yield Piece.whole(f"model.{name}", getattr(module, key).detach())


def of_job(held: HeldModel) -> Contents:
    """What this rank holds of a job, at rest."""
    recipe, rank = held.recipe, held.rank
    named = dict(held.module.named_parameters(remove_duplicate=False))
    parameters = [
        Held(line.name, line.aliases, named[line.name], line.shape, recipe.held(line, rank))
        for line in recipe.parameters
        if recipe.holds(line, rank)
    ]
    buffers = [(n, m, k, recipe.buffer_owner(n) == rank) for n, m, k in _buffers(held.module)]
    return Contents(tuple(parameters), tuple(buffers), _extra(held.module))


def of_module(module: nn.Module) -> Contents:
    """What a plain module holds: all."""
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    parameters = []
    for _, p in module.named_parameters():
        first, *aliases = names[id(p)]
        whole = Piece.whole(first, p)
        parameters.append(Held(first, tuple(aliases), p, whole.shape, whole.slices))
    return Contents(tuple(parameters), tuple((n, m, k, True) for n, m, k in _buffers(module)), _extra(module))


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, module, name in it) of each persistent buffer, each once."""
    seen: set[int] = set()
    persistent = model.state_dict().keys()
    for prefix, module in model.named_modules():
        for key, value in module.named_buffers(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            if name in persistent and id(value) not in seen:
                seen.add(id(value))
                yield name, module, key


def _extra(model: nn.Module) -> dict[str, Any]:
    has = [(n, m) for n, m in model.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state]
    return {name: module.get_extra_state() for name, module in has}


# --- optimizers ---------------------------------------------------------------------------------------------------------


def as_optimizers(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """None, one or several, as several."""
    if optimizers is None:
        return ()
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


@dataclass(frozen=True)
class OptimizerContents:
    """What an optimizer has, on this rank.

    Attributes:
        pieces: tensors of its state.
        scalars: name of a parameter → what else its state has.
        groups: settings of each group, and the names of its parameters that are here, under ``names``.
    """

    pieces: tuple[Piece, ...]
    scalars: dict[str, dict[str, Any]]
    groups: tuple[dict[str, Any], ...]


def of_optimizer(optimizer: Optimizer, contents: Contents, findings: Findings) -> OptimizerContents:
    """Its state by the names of parameters; adds to ``findings`` what cannot be saved for every layout."""
    held = {id(h.p): h for h in contents.parameters}
    pieces: list[Piece] = []
    scalars: dict[str, dict[str, Any]] = {}
    for p, state in optimizer.state.items():
        if (line := held.get(id(p))) is None:
            continue
        for key, value in state.items():
            if not isinstance(value, Tensor):
                scalars.setdefault(line.name, {})[key] = value
            elif (piece := line.state(key, value)) is not None:
                pieces.append(piece)
            else:
                findings.add(
                    where=f"optimizer.state[{line.name}][{key!r}]",
                    given=f"{type(optimizer).__name__} keeps a tensor of shape {tuple(value.shape)} for it",
                    required=f"the parameter's shape here, {tuple(local_tensor(line.p).shape)}, as it is cut ({line.shape})",
                    fix="save without the optimizer: job.save(folder, step=step)",
                )
    groups = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "names": [held[id(p)].name for p in group["params"] if id(p) in held],
        }
        for group in optimizer.param_groups
    ]
    strange = sum(p.numel() > 0 and id(p) not in held for g in optimizer.param_groups for p in g["params"])
    if strange:
        findings.add(
            where=type(optimizer).__name__,
            given=f"{strange} parameters that are not the job's",
            required="parameters of job.parameters()",
            fix=f"torch.optim.{type(optimizer).__name__}(job.parameters(), …)",
        )
    return OptimizerContents(tuple(pieces), scalars, tuple(groups))
