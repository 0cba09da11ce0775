"""Parameters by the names that they have on one device, whatever wraps their modules.

module.layers.0._orig_mod.up.weight              DDP, torch.compile
_fsdp_wrapped_module.layers.0.up.weight   ──►    layers.0.up.weight
layers.0._checkpoint_wrapped_module.up.weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from meshwright.errors import Findings

Rename = Callable[[str], str]

# What torch's wrappers put into the names of what they wrap.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_FLAT = "_flat_param"  # FSDP1 without use_orig_params: many parameters in one, without their names
_HOLDERS = (DistributedDataParallel, DataParallel)  # these hold what they wrap as ``module``


@dataclass(frozen=True)
class Named:
    """A parameter.

    Attributes:
        name: as on one device.
        aliases: its other names, if it is tied.
    """

    name: str
    parameter: nn.Parameter
    aliases: tuple[str, ...] = ()


def named_parameters(models: Iterable[nn.Module], rename: Rename | None = None) -> list[Named]:
    """Each parameter of some modules once, in their order.

    Args:
        models: the parts of a model that this rank holds.
        rename: gives the name on one device of a name here, such as that of a stage which counts its layers anew.

    Raises PlanError: two parameters have the same name, or FSDP1 has put several into one.
    """
    findings = Findings("this recording")
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    taken: dict[str, int] = {}
    for name, parameter in _all(models):
        if _FLAT in name:
            findings.add(
                where=name, given="one flat parameter in place of a module's", required="parameters with names",
                fix="FullyShardedDataParallel(..., use_orig_params=True)",
            )  # fmt: skip
            continue
        known = rename(name) if rename is not None else name
        if taken.setdefault(known, id(parameter)) != id(parameter):
            findings.add(
                where=known, given="two parameters of this rank", required="one parameter of each name",
                fix="mw.record(..., names=lambda name: ...)  # the name on one device",
            )  # fmt: skip
        parameters[id(parameter)] = parameter
        names.setdefault(id(parameter), [])
        if known not in names[id(parameter)]:
            names[id(parameter)].append(known)
    findings.raise_if_any()
    return [Named(own[0], parameters[key], tuple(own[1:])) for key, own in names.items()]


def plain_name(parts: Sequence[str], held: frozenset[int] = frozenset()) -> str:
    """A name without what wrappers put into it. ``held``: positions of what stands for the module of a wrapper."""
    return ".".join(part for at, part in enumerate(parts) if part not in _WRAPPERS and at not in held)


def _all(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for model in models:
        wrappers = {
            name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, _HOLDERS)
        }
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parts = name.split(".")
            held = frozenset(at for at in range(len(parts)) if ".".join(parts[:at]) in wrappers)
            yield plain_name(parts, held), parameter
