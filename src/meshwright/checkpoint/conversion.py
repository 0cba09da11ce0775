"""Which tensor of a folder is which of a model: by its name, by a prefix, or as transformers converts it.

    names of the folder ─► transformers' own renamings and converters ─► a base model's prefix ─► names of the model

A model of transformers may have been saved under other names than it has now, or as other tensors (each expert's weight
for itself): transformers' table of that is used as it is, on tensors that are not read (see unread.py). Any other model
is its names, where a prefix may be missing or too much: the one that makes the most of them fit.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.checkpoint.unread import LazyTensor, Read

Values = Callable[[], Mapping[str, LazyTensor]]


@dataclass(frozen=True)
class Source:
    """Where a tensor of the model comes from.

    Attributes:
        shape, dtype: as it comes.
        values: gives it, and what comes with it, by the model's names; reads what no unread tensor can answer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Values


@dataclass(frozen=True)
class Matched:
    """A folder's tensors by the model's names.

    Attributes:
        sources: by name; a tied parameter's by each of its names that the folder has.
        unexpected: names of the folder that are none of the model's.
        failed: name of the model → why its conversion is not possible.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def matched(module: nn.Module, names: Iterable[str], files: Mapping[str, LazyTensor]) -> Matched:
    """Finds each of a folder's tensors its place in the model.

    Args:
        names: of the model's parameters, tied ones by each name, and persistent buffers.
        files: the folder's tensors.
    """
    model_names = dict.fromkeys(names, True)
    match = Matched()
    rename = _as_transformers_does(module, model_names, list(files)) or _by_prefix(model_names, list(files))
    conversions: dict[str, _Conversion] = {}
    for name in files:
        to, pattern, converter = rename(name)
        if to not in model_names:
            match.unexpected.append(name)
        elif converter is None:
            value = files[name]
            match.sources[to] = Source(tuple(value.shape), value.dtype, partial(dict, {to: value}))
        else:
            conversion = conversions.setdefault(to, _Conversion(module, converter, to))
            conversion.tensors.append((to, name, pattern))
    for conversion in conversions.values():
        _describe(conversion, files, match)
    return match


# --- models of transformers ------------------------------------------------------------------------------------------

Rename = Callable[
    [str], tuple[str, str, Any]
]  # a folder's name → the model's, and the converter it goes through, if any


def _as_transformers_does(module: nn.Module, model_names: Mapping[str, Any], files: list[str]) -> Rename | None:
    """None where the module is no model of transformers, or transformers is older than its conversions (5.0)."""
    models = sys.modules.get("transformers.modeling_utils")  # loaded by whoever has a model of it
    if models is None or not isinstance(module, models.PreTrainedModel):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return None
    mapping = get_model_conversion_mapping(_without_fsdp(module))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    renamed: dict[str, tuple[str, str, Any]] = {}
    for name in sorted(files, key=dot_natural_key):  # in this order: some renamings look out for an earlier name
        to, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, model_names)
        if to not in model_names and name in model_names:
            to, pattern = name, None
        renamed[name] = (to, pattern or "", by_pattern[pattern] if pattern else None)
    return renamed.__getitem__


def _without_fsdp(module: nn.Module) -> Any:
    """The model as transformers looks at it for its conversions: by the classes that FSDP2 has put its own before."""

    def twin(of: nn.Module) -> nn.Module:
        if not isinstance(of, FSDPModule):
            return of
        before: Any = next(c for c in type(of).__mro__ if not issubclass(c, FSDPModule))
        made: nn.Module = before.__new__(before)
        made.__dict__.update(of.__dict__)
        return made

    def named_modules() -> Iterator[tuple[str, nn.Module]]:
        return ((name, twin(m)) for name, m in module.named_modules())

    return SimpleNamespace(named_modules=named_modules, base_model_prefix=module.base_model_prefix)


@dataclass
class _Conversion:
    """One use of a converter: all tensors of the folder that make up one of the model, or several that come together."""

    module: Any
    converter: Any
    to: str
    tensors: list[tuple[str, str, str]] = field(default_factory=list)  # the model's name, the folder's, the pattern

    def __call__(self, open_: Callable[[str], Any]) -> dict[str, Any]:
        converter = deepcopy(self.converter)  # it collects, and gives away, what it is given
        for to, name, pattern in self.tensors:
            converter.add_tensor(to, name, pattern, open_(name))
        made = converter.convert(self.to, model=self.module, config=self.module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def unread(self, files: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        made = self(files.__getitem__)
        return {name: value if isinstance(value, LazyTensor) else Read(value) for name, value in made.items()}


def _describe(conversion: _Conversion, files: Mapping[str, LazyTensor], match: Matched) -> None:
    """What a conversion gives, found out without values."""

    def empty(name: str) -> Tensor:
        return torch.empty(files[name].shape, dtype=files[name].dtype, device="meta")

    try:
        made = conversion(empty)
    except Exception as error:  # a stranger's code, on a stranger's tensors
        match.failed[conversion.to] = f"{type(error).__name__}: {error}"
        return
    values = partial(conversion.unread, files)
    match.sources.update({name: Source(tuple(t.shape), t.dtype, values) for name, t in made.items()})


# --- any other model --------------------------------------------------------------------------------------------------


def _by_prefix(model_names: Mapping[str, Any], files: list[str]) -> Rename:
    add, remove = _prefix(
        [name for name in model_names if name not in files], [name for name in files if name not in model_names]
    )

    def rename(name: str) -> tuple[str, str, Any]:
        other = add + name if add else name.removeprefix(remove)
        return (name if name in model_names or other not in model_names else other), "", None

    return rename


def _prefix(model_names: list[str], files: list[str]) -> tuple[str, str]:
    """What is to be added to, or removed from, names of the folder so that the most are the model's; empty where nothing
    is, or two ways would do."""
    adding = _counted(model_names, set(files))
    removing = _counted(files, set(model_names))
    ways = [(count, add, "") for add, count in adding.items()] + [(count, "", cut) for cut, count in removing.items()]
    ways.sort(reverse=True)
    if not ways or (len(ways) > 1 and ways[0][0] == ways[1][0]):
        return "", ""
    return ways[0][1:]


def _counted(longer: Iterable[str], shorter: set[str]) -> Counter[str]:
    """Prefix → how many of ``longer`` are one of ``shorter`` after it."""
    counts: Counter[str] = Counter()
    for name in longer:
        counts.update(name[: dot.end()] for dot in re.finditer(r"\.", name) if name[dot.end() :] in shorter)
    return counts
