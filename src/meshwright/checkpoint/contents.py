"""The contents of a checkpoint on this rank: of a job or a plain module, and of its optimizers.

Names in a checkpoint do not depend on the layout. ``<name>`` is a parameter's name on one device.

model.<name>                        parameters and persistent buffers
optimizer.state.<name>.<key>        tensors of the optimizer's state, sharded like their parameter
rng.<rank>.<kind>                   states of random generators
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.checkpoint.param_groups import named_group
from meshwright.checkpoint.pieces import LocalPiece
from meshwright.described import dense
from meshwright.errors import Findings
from meshwright.recipe import Slices
from meshwright.runtime.weights.parameters import local_tensor, named_parameters_of

if TYPE_CHECKING:
    from meshwright.runtime.sharded_model import ShardedModel

Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of which this rank holds a part.

    Attributes:
        name: its first name on one device.
        aliases: its other names, if it is tied.
        parameter: as the optimizer has it.
        shape: of the full parameter.
        slices: the part that this rank holds.
    """

    name: str
    aliases: tuple[str, ...]
    parameter: nn.Parameter
    shape: tuple[int, ...]
    slices: Slices

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def piece(self) -> LocalPiece:
        """The piece of the parameter's values."""
        return LocalPiece(f"model.{self.name}", self.shape, local_tensor(self.parameter).detach(), self.slices)

    def state(self, key: str, value: Tensor) -> LocalPiece | None:
        """The piece of a tensor of the optimizer's state.

        A tensor with the shape of the local parameter is sharded as the parameter is. A tensor without dims is a full tensor.
        So is any tensor, if this rank holds the full parameter. None for other shapes: nobody knows of which tensor they are a
        part.
        """
        name, local = f"optimizer.state.{self.name}.{key}", local_tensor(value).detach()
        if local.dim() == 0 and not isinstance(value, DTensor):
            return LocalPiece.of_full_tensor(name, local)
        if local.shape == local_tensor(self.parameter).shape:
            return LocalPiece(name, self.shape, local, self.slices)
        return LocalPiece.of_full_tensor(name, local) if self.is_full else None

    @property
    def is_full(self) -> bool:
        """Whether this rank holds the full parameter."""
        return tuple(local_tensor(self.parameter).shape) == self.shape


@dataclass(frozen=True)
class Contents:
    """The parts of a model that this rank saves.

    Attributes:
        parameters: those of which this rank holds a part.
        buffers: persistent buffers: (full name, module, name in the module, whether this rank saves it).
        extra: name of a module → its ``get_extra_state()``, if it has one.
    """

    parameters: tuple[LocalParameter, ...]
    buffers: tuple[tuple[str, nn.Module, str, bool], ...]
    extra: dict[str, Any]

    def pieces(self) -> Iterator[LocalPiece]:
        """The pieces of the parameters, and of the buffers that this rank saves."""
        yield from (parameter.piece() for parameter in self.parameters)
        for name, module, key, saves in self.buffers:
            if saves:
                yield LocalPiece.of_full_tensor(f"model.{name}", dense(getattr(module, key).detach()))


def of_job(model: ShardedModel) -> Contents:
    """The contents of a job on this rank. Parameters must be at rest: sharded, not gathered by FSDP2."""
    recipe, rank = model.recipe, model.rank
    named = named_parameters_of(model.module, recipe)
    parameters = [
        LocalParameter(line.name, line.aliases, named[line.name], line.shape, recipe.held(line, rank))
        for line in recipe.parameters
        if recipe.holds(line, rank)
    ]
    buffers = [(name, module, key, recipe.buffer_owner(name) == rank) for name, module, key in _buffers(model.module)]
    return Contents(tuple(parameters), tuple(buffers), _extra(model.module))


def of_module(module: nn.Module) -> Contents:
    """The contents of a plain module, in a process that holds all of it."""
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    parameters = []
    for _, p in module.named_parameters():
        first, *aliases = names[id(p)]
        piece = LocalPiece.of_full_tensor(first, p)
        parameters.append(LocalParameter(first, tuple(aliases), p, piece.shape, piece.slices))
    buffers = tuple((name, owner, key, True) for name, owner, key in _buffers(module))
    return Contents(tuple(parameters), buffers, _extra(module))


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, module, name in the module) of each persistent buffer. A buffer with two names comes once."""
    seen: set[int] = set()
    persistent = model.state_dict().keys()
    for prefix, module in model.named_modules():
        for key, value in module.named_buffers(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            if name in persistent and id(value) not in seen:
                seen.add(id(value))
                yield name, module, key


def _extra(model: nn.Module) -> dict[str, Any]:
    """Name of a module → its extra state, for modules whose class defines ``get_extra_state``."""
    return {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


# --- optimizers ---------------------------------------------------------------------------------------------------------


def as_optimizers(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """None, one optimizer, or several, as a tuple."""
    if optimizers is None:
        return ()
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def scheduled_optimizer(scheduler: Any, optimizers: Optimizers) -> int | None:
    """The number of the optimizer whose learning rates a scheduler sets; None if it is none of these."""
    of = getattr(scheduler, "optimizer", None)
    return next((i for i, optimizer in enumerate(as_optimizers(optimizers)) if optimizer is of), None)


@dataclass(frozen=True)
class OptimizerContents:
    """The contents of an optimizer on this rank.

    Attributes:
        pieces: the tensors of its state.
        scalars: name of a parameter → the values of its state that are not tensors.
        groups: the settings of each group; under ``names``, the group's parameters that this rank holds.
    """

    pieces: tuple[LocalPiece, ...]
    scalars: dict[str, dict[str, Any]]
    groups: tuple[dict[str, Any], ...]


def of_optimizer(optimizer: Optimizer, contents: Contents, findings: Findings) -> OptimizerContents:
    """The state and settings of an optimizer, by the names of parameters.

    Adds to ``findings`` the state that cannot be saved independently of the layout, and parameters that are not the model's.
    """
    by_id = {id(local.parameter): local for local in contents.parameters}
    pieces: list[LocalPiece] = []
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        if (local := by_id.get(id(parameter))) is None:
            continue
        for key, value in state.items():
            if not isinstance(value, Tensor):
                scalars.setdefault(local.name, {})[key] = value
            elif (piece := local.state(key, value)) is not None:
                pieces.append(piece)
            else:
                local_shape = tuple(local_tensor(local.parameter).shape)
                findings.add(
                    where=f"optimizer.state[{local.name}][{key!r}]",
                    given=f"{type(optimizer).__name__} keeps a tensor of shape {tuple(value.shape)} for it",
                    required=f"the shape of the parameter's shard, {local_shape} of {local.shape}",
                    fix="save without the optimizer: job.save(folder, step=step)",
                )
    groups = [
        named_group(group, [by_id[id(p)].name for p in group["params"] if id(p) in by_id])
        for group in optimizer.param_groups
    ]
    unknown = sum(p.numel() > 0 and id(p) not in by_id for g in optimizer.param_groups for p in g["params"])
    if unknown:
        findings.add(
            where=type(optimizer).__name__,
            given=f"{unknown} parameters that are not the job's",
            required="parameters of job.parameters()",
            fix=f"torch.optim.{type(optimizer).__name__}(job.parameters(), …)",
        )
    return OptimizerContents(tuple(pieces), scalars, tuple(groups))
