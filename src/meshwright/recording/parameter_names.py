"""``named_parameters``: parameters by their names on one device, without the prefixes of wrappers.

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

# Names under which torch's wrappers hold the module that they wrap.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_FLAT = "_flat_param"  # of FSDP1 without use_orig_params: one parameter in place of many
_MODULE_HOLDERS = (DistributedDataParallel, DataParallel)  # these hold it as ``module``, also a usual name in models


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with its names on one device.

    Attributes:
        name: its first name.
        tensor: the parameter itself.
        aliases: its other names, if it is tied.
    """

    name: str
    tensor: nn.Parameter
    aliases: tuple[str, ...] = ()


def named_parameters(models: Iterable[nn.Module], rename: Rename | None = None) -> list[NamedParameter]:
    """The parameters of a model's modules, in order. A tied parameter comes once, with its aliases.

    Args:
        models: the parts of a model that this rank holds.
        rename: local name → name on one device. Needed, for example, for a pipeline stage that numbers its layers from 0.

    Raises:
        PlanError: two parameters have the same name, or FSDP1 has flattened several into one.
    """
    findings = Findings("this recording")
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    owners: dict[str, int] = {}  # name → id of its parameter
    for name, parameter in _all_parameters(models):
        if _FLAT in name:
            findings.add(
                where=name, given="one flat parameter in place of a module's", required="parameters with names",
                fix="FullyShardedDataParallel(..., use_orig_params=True)",
            )  # fmt: skip
            continue
        full_name = rename(name) if rename is not None else name
        if owners.setdefault(full_name, id(parameter)) != id(parameter):
            findings.add(
                where=full_name, given="two parameters of this rank", required="one parameter of each name",
                fix="mw.record(..., names=lambda name: ...)  # the name on one device",
            )  # fmt: skip
        parameters[id(parameter)] = parameter
        names.setdefault(id(parameter), [])
        if full_name not in names[id(parameter)]:
            names[id(parameter)].append(full_name)
    findings.raise_if_any()
    return [NamedParameter(first, parameters[key], tuple(aliases)) for key, (first, *aliases) in names.items()]


def plain_name(parts: Sequence[str], wrapped: frozenset[int] = frozenset()) -> str:
    """A name without the parts that wrappers add. ``wrapped``: positions of the name ``module`` of a wrapped module."""
    return ".".join(part for i, part in enumerate(parts) if part not in _WRAPPERS and i not in wrapped)


def _all_parameters(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """(name without parts of wrappers, parameter), for every name of every parameter."""
    for model in models:
        wrappers = {
            name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, _MODULE_HOLDERS)
        }
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parts = name.split(".")
            wrapped = frozenset(i for i in range(len(parts)) if ".".join(parts[:i]) in wrappers)
            yield plain_name(parts, wrapped), parameter
