"""Maps the tensors of a Hugging Face folder to the names of a model: by name, by a prefix, or by transformers' conversions.

    names of the folder ─► transformers' own renamings and converters ─► a base model's prefix ─► names of the model

The folder of a transformers model may have other names than the model has now, or other tensors, such as one for each
expert's weight. Transformers' own table of conversions is then applied to lazy tensors (lazy_tensor.py). For any other model,
names are compared directly; if they differ by a prefix, the prefix that makes the most names match is added or removed.
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

from meshwright.checkpoint.lazy_tensor import InMemory, LazyTensor

Values = Callable[[], Mapping[str, LazyTensor]]


@dataclass(frozen=True)
class SourceTensor:
    """The source of one of the model's tensors.

    Attributes:
        shape: of the full tensor.
        dtype: in the folder.
        values: returns lazy tensors by the model's names: this tensor, and others that the same conversion makes. Reads from
            files only if a conversion needs values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Values


@dataclass(frozen=True)
class MatchedTensors:
    """The tensors of a folder, mapped to the names of a model.

    Attributes:
        sources: name of the model → source. A tied parameter has an entry for each of its names that the folder has.
        unexpected: names of the folder that match no name of the model.
        failed: name of the model → why its conversion failed.
    """

    sources: dict[str, SourceTensor] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def matched(module: nn.Module, names: Iterable[str], files: Mapping[str, LazyTensor]) -> MatchedTensors:
    """Maps each tensor of a folder to a name of the model.

    Args:
        module: the model.
        names: of the model's parameters (a tied one by each of its names) and persistent buffers.
        files: name in the folder → lazy tensor.
    """
    model_names = dict.fromkeys(names, True)
    match = MatchedTensors()
    rename = _transformers_renaming(module, model_names, list(files)) or _prefix_renaming(model_names, list(files))
    conversions: dict[str, _Conversion] = {}
    for name in files:
        model_name, pattern, converter = rename(name)
        if model_name not in model_names:
            match.unexpected.append(name)
        elif converter is None:
            value = files[name]
            match.sources[model_name] = SourceTensor(
                tuple(value.shape), value.dtype, partial(dict, {model_name: value})
            )
        else:
            conversion = conversions.setdefault(model_name, _Conversion(module, converter, model_name))
            conversion.tensors.append((model_name, name, pattern))
    for conversion in conversions.values():
        _add_sources(conversion, files, match)
    return match


# --- models of transformers ------------------------------------------------------------------------------------------

Rename = Callable[[str], tuple[str, str, Any]]
"""Name in the folder → (name of the model, pattern of the converter or "", converter or None)."""


def _transformers_renaming(module: nn.Module, model_names: Mapping[str, Any], files: list[str]) -> Rename | None:
    """Transformers' own renaming. None if the module is not a transformers model, or transformers is older than 5.0, which
    introduced conversions."""
    models = sys.modules.get("transformers.modeling_utils")  # a program that has a transformers model has imported it
    if models is None or not isinstance(module, models.PreTrainedModel):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return None
    mapping = get_model_conversion_mapping(_without_fsdp(module))
    renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    renamed: dict[str, tuple[str, str, Any]] = {}
    for name in sorted(files, key=dot_natural_key):  # in transformers' order: some renamings depend on an earlier name
        new_name, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, model_names)
        if new_name not in model_names and name in model_names:
            new_name, pattern = name, None
        renamed[name] = (new_name, pattern or "", by_pattern[pattern] if pattern else None)
    return renamed.__getitem__


def _without_fsdp(module: nn.Module) -> Any:
    """A stand-in for the model, with the two attributes that transformers' conversions read.

    Transformers looks conversions up by a module's class. ``fully_shard`` replaces the class of a module by a subclass; here
    each module has its original class.
    """

    def with_original_class(sharded: nn.Module) -> nn.Module:
        if not isinstance(sharded, FSDPModule):
            return sharded
        original_class: Any = next(c for c in type(sharded).__mro__ if not issubclass(c, FSDPModule))
        twin: nn.Module = original_class.__new__(original_class)
        twin.__dict__.update(sharded.__dict__)
        return twin

    def named_modules() -> Iterator[tuple[str, nn.Module]]:
        return ((name, with_original_class(m)) for name, m in module.named_modules())

    return SimpleNamespace(named_modules=named_modules, base_model_prefix=module.base_model_prefix)


@dataclass
class _Conversion:
    """One use of a converter: it makes one or several tensors of the model from one or several tensors of the folder.

    Attributes:
        module: the model.
        converter: transformers' ``WeightConverter``.
        model_name: the name of the model that the converter is called with.
        tensors: (name of the model, name in the folder, pattern) of each input.
    """

    module: Any
    converter: Any
    model_name: str
    tensors: list[tuple[str, str, str]] = field(default_factory=list)

    def __call__(self, open_tensor: Callable[[str], Any]) -> dict[str, Any]:
        """Runs the converter. ``open_tensor`` returns the tensor of a name in the folder."""
        converter = deepcopy(self.converter)  # a converter collects its inputs, and drops them in convert()
        for model_name, name, pattern in self.tensors:
            converter.add_tensor(model_name, name, pattern, open_tensor(name))
        converted = converter.convert(self.model_name, model=self.module, config=self.module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def lazy_tensors(self, files: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The converted tensors by the model's names, without reading values if the converter allows that."""
        converted = self(files.__getitem__)
        return {name: value if isinstance(value, LazyTensor) else InMemory(value) for name, value in converted.items()}


def _add_sources(conversion: _Conversion, files: Mapping[str, LazyTensor], match: MatchedTensors) -> None:
    """Adds the sources that a conversion makes. Their shapes and dtypes come from a run of the conversion on meta tensors."""

    def meta_tensor(name: str) -> Tensor:
        return torch.empty(files[name].shape, dtype=files[name].dtype, device="meta")

    try:
        converted = conversion(meta_tensor)
    except Exception as error:  # code and tensors of others may raise anything
        match.failed[conversion.model_name] = f"{type(error).__name__}: {error}"
        return
    values = partial(conversion.lazy_tensors, files)
    match.sources.update({name: SourceTensor(tuple(t.shape), t.dtype, values) for name, t in converted.items()})


# --- any other model --------------------------------------------------------------------------------------------------


def _prefix_renaming(model_names: Mapping[str, Any], files: list[str]) -> Rename:
    """Adds a prefix to names of the folder, or removes one, if the result is a name of the model and the name itself is not."""
    add, remove = _prefix(
        [name for name in model_names if name not in files], [name for name in files if name not in model_names]
    )

    def rename(name: str) -> tuple[str, str, Any]:
        changed = add + name if add else name.removeprefix(remove)
        if name in model_names or changed not in model_names:
            return name, "", None
        return changed, "", None

    return rename


def _prefix(model_names: list[str], files: list[str]) -> tuple[str, str]:
    """(prefix to add, prefix to remove), such that the most names of the folder become names of the model.

    Both are empty if no prefix helps, or if two prefixes help equally.

    Args:
        model_names: names of the model that the folder lacks.
        files: names of the folder that the model lacks.
    """
    adding = _prefix_counts(model_names, set(files))
    removing = _prefix_counts(files, set(model_names))
    choices = [(count, prefix, "") for prefix, count in adding.items()]
    choices += [(count, "", prefix) for prefix, count in removing.items()]
    choices.sort(reverse=True)
    if not choices or (len(choices) > 1 and choices[0][0] == choices[1][0]):
        return "", ""
    return choices[0][1:]


def _prefix_counts(longer: Iterable[str], shorter: set[str]) -> Counter[str]:
    """Prefix that ends in a dot → number of names of ``longer`` that are this prefix plus a name of ``shorter``.

    >>> _prefix_counts(["model.a", "model.b", "c"], {"a", "b"})
    Counter({'model.': 2})
    """
    counts: Counter[str] = Counter()
    for name in longer:
        counts.update(name[: dot.end()] for dot in re.finditer(r"\.", name) if name[dot.end() :] in shorter)
    return counts
