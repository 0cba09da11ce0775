"""``job.load_pretrained``: loads a Hugging Face folder into a job. Each rank reads its own slices only.

    folder ─► headers ─► names ─► every problem at once ─► this rank's slices, one parameter at a time

Beyond its parameters, a rank needs memory for the one slice that is being copied. If transformers' conversion of a tensor
does not work on slices (most do, see lazy_tensor.py), a rank needs memory for that full tensor.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwright.checkpoint.conversion import MatchedTensors, SourceTensor, Values, matched
from meshwright.checkpoint.folder import OnProgress, ignore_progress
from meshwright.checkpoint.lazy_tensor import LazyTensor, read_slices
from meshwright.checkpoint.rank_agreement import RankAgreement
from meshwright.checkpoint.tensorfiles import open_folder
from meshwright.errors import Finding, Findings, nearest
from meshwright.names import fold_names
from meshwright.recipe import ParameterRecipe, Slices
from meshwright.runtime.weights.parameters import local_tensor

if TYPE_CHECKING:
    from meshwright.runtime.sharded_model import ShardedModel

Targets: TypeAlias = dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]]
"""All names of a parameter or buffer → its shape and dtype."""


@dataclass(frozen=True)
class Pretrained:
    """The result of ``load_pretrained``.

    Attributes:
        folder: the folder that was read.
        missing: names of the model that the folder lacks. Their values have not changed.
        unexpected: names of the folder that the model lacks. They were not read.
    """

    folder: Path
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each group of missing or unexpected names."""
        missing = [f"{names}: not in {self.folder}; left as initialised" for names in fold_names(self.missing)]
        unexpected = [
            f"{names}: in {self.folder}, but not in the model; not read" for names in fold_names(self.unexpected)
        ]
        return (*missing, *unexpected)


@torch.no_grad()
def load_pretrained(
    model: ShardedModel, folder: str | os.PathLike[str], *, strict: bool = True,
    on_progress: OnProgress = ignore_progress,
) -> Pretrained:  # fmt: skip
    """Fills a job's parameters and persistent buffers from safetensors. See ``Job.load_pretrained``.

    Args:
        model: this rank's model. Its parameters must be at rest: sharded, not gathered by FSDP2.
        on_progress: called whenever a parameter has been read.
    """
    path, agreement = Path(folder), RankAgreement(model.groups.files, "this folder")
    failed = Finding(str(path), "it was not read", "files that every rank can read, and memory")
    targets, match = agreement.do(lambda: _matched(model, path, strict), failed)
    agreement.do(lambda: _read(model, match, on_progress), failed)
    missing = tuple(names[0] for names in targets if _name_in(match, names) is None)
    return Pretrained(path, missing, tuple(match.unexpected))


def _matched(model: ShardedModel, path: Path, strict: bool) -> tuple[Targets, MatchedTensors]:
    """The names of the model, and the tensor of the folder for each. Raises PlanError with every problem on this rank."""
    findings = Findings("this folder")
    findings.extend(_prerequisites(path))
    findings.raise_if_any()
    targets = _targets(model)
    match = matched(model.module, (name for names in targets for name in names), open_folder(path))
    _add_problems(model, targets, match, path, strict, findings)
    findings.raise_if_any()
    return targets, match


def _read(model: ShardedModel, match: MatchedTensors, on_progress: OnProgress) -> None:
    """Reads this rank's slices into its parameters, and all of its buffers."""
    lazy_tensors = _LazyTensors()
    for line, local in _local_tensors(model):
        if (name := _name_in(match, (line.name, *line.aliases))) is not None:
            lazy = lazy_tensors.get(match.sources[name], name)
            read_slices(lazy, model.recipe.held(line, model.rank), local)
            on_progress()
    for name, buffer in _buffers(model.module).items():
        if name in match.sources:
            read_slices(lazy_tensors.get(match.sources[name], name), _all_of(buffer), buffer)


class _LazyTensors:
    """Caches the lazy tensors of the last conversion: the tensors that one conversion makes are read one after another."""

    def __init__(self) -> None:
        self._last: tuple[Values | None, Any] = (None, {})

    def get(self, source: SourceTensor, name: str) -> LazyTensor:
        """The lazy tensor of a source. ``name``: of the tensor in the model."""
        if self._last[0] is not source.values:
            self._last = (None, {})  # free the last result before the next one is made
            self._last = (source.values, source.values())
        return self._last[1][name]


# --- the model's side ------------------------------------------------------------------------------------------------


def _targets(model: ShardedModel) -> Targets:
    """Every parameter and persistent buffer of the model, on any rank."""
    targets: Targets = {}
    for line in model.recipe.parameters:
        targets[(line.name, *line.aliases)] = (line.shape, getattr(torch, line.dtype))
    for name, buffer in _buffers(model.module).items():
        targets[(name,)] = (tuple(buffer.shape), buffer.dtype)
    return targets


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers by name."""
    persistent = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def _local_tensors(model: ShardedModel) -> Iterator[tuple[ParameterRecipe, Tensor]]:
    """The recipe's line and the local tensor of each parameter of which this rank holds a part."""
    named = dict(model.module.named_parameters(remove_duplicate=False))
    for line in model.recipe.parameters:
        if model.recipe.holds(line, model.rank):
            yield line, local_tensor(named[line.name])


def _all_of(value: Tensor) -> Slices:
    """Slices that cover a full tensor."""
    return tuple(((0, n),) if n else () for n in value.shape)


def _name_in(match: MatchedTensors, names: Iterable[str]) -> str | None:
    """The first of a parameter's names that the folder has; None if it has none of them."""
    return next((name for name in names if name in match.sources), None)


# --- problems --------------------------------------------------------------------------------------------------------


def _prerequisites(path: Path) -> Iterator[Finding]:
    """A finding if safetensors is not installed."""
    if importlib.util.find_spec("safetensors") is None:
        fix = 'pip install "meshwright[hf]"'
        yield Finding(str(path), "safetensors is not installed", "safetensors, which comes with an extra", fix)


def _add_problems(
    model: ShardedModel, targets: Any, match: MatchedTensors, path: Path, strict: bool, findings: Findings
) -> None:
    """Adds a finding for each problem that prevents loading. Removes names from ``match.unexpected`` that may be ignored."""
    for name, why in match.failed.items():
        findings.add(where=name, given=f"transformers' conversion fails: {why}", required="tensors that it can convert")
    for names, (shape, dtype) in targets.items():
        if (present := _name_in(match, names)) is not None:
            _check(present, match.sources[present], shape, dtype, findings)
    findings.extend(_untied(model, match))
    match.unexpected[:] = _without_ignored(model.module, match.unexpected)
    if strict:
        _check_names(model.module, targets, match, path, findings)


def _check(name: str, source: SourceTensor, shape: tuple[int, ...], dtype: torch.dtype, findings: Findings) -> None:
    """Adds a finding if a tensor of the folder has another shape than the model's, or a dtype that cannot be converted."""
    if source.shape != shape:
        fix = "build the model from the folder's own config.json"
        findings.add(where=name, given=f"shape {list(source.shape)}", required=f"shape {list(shape)}", fix=fix)
    elif not _converts(source.dtype, dtype):
        given = f"{_text(source.dtype)} values"
        required = f"values that can be converted to {_text(dtype)} without other tensors"
        findings.add(where=name, given=given, required=required, fix="save the weights unquantised")


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of one dtype can be copied into a tensor of another.

    Floating-point types convert to each other, except 8-bit ones: these are quantised, and their scale is another tensor.
    Integers convert to each other. All other types must be equal.
    """
    if stored == wanted:
        return True
    if stored.is_floating_point or wanted.is_floating_point:
        return stored.is_floating_point and wanted.is_floating_point and stored.itemsize > 1
    return not any(dtype.is_complex or dtype == torch.bool for dtype in (stored, wanted))


def _check_names(module: nn.Module, targets: Any, match: MatchedTensors, path: Path, findings: Findings) -> None:
    """Adds a finding for names of the model that the folder lacks, and for names of the folder that the model lacks."""
    optional = _any_of(getattr(module, "_keys_to_ignore_on_load_missing", None))
    missing = {
        names[0]: shape
        for names, (shape, _) in targets.items()
        if _name_in(match, names) is None and not optional.search(names[0]) and names[0] not in match.failed
    }
    fix = "strict=False leaves missing tensors as they are, and unexpected ones unread"
    for folded in fold_names(missing):
        similar = nearest(folded.names[0], match.unexpected)
        given = f"not in {path}" + (f"; near: {', '.join(similar)}" if similar else "")
        count = len(folded.names)
        required = f"shape {list(missing[folded.names[0]])}" + (f", {count} times" if count > 1 else "")
        findings.add(where=str(folded), given=given, required=required, fix=fix)
    for folded in fold_names(match.unexpected):
        findings.add(where=str(folded), given=f"in {path}", required="a name of the model", fix=fix)


def _without_ignored(module: nn.Module, names: Sequence[str]) -> list[str]:
    """The names without those of buffers, which a model computes itself, and without those that the model says to ignore."""
    ignored = _any_of(getattr(module, "_keys_to_ignore_on_load_unexpected", None))
    buffers = {name for name, _ in module.named_buffers()}
    base = getattr(module, "base_model_prefix", "")
    prefix = f"{base}." if base else ""
    return [
        name
        for name in names
        if not ignored.search(name) and not {name, prefix + name, name.removeprefix(prefix)} & buffers
    ]


def _any_of(patterns: Iterable[str] | None) -> re.Pattern[str]:
    """A pattern that matches if one of ``patterns``, a list of a transformers model, matches; none, if there are none."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns or ()) or r"(?!)")


def _untied(model: ShardedModel, match: MatchedTensors) -> Iterator[Finding]:
    """A finding for each parameter that is tied in the model, but has unequal values under its names in the folder.

    A rank compares its own slices.
    """
    for line, local in _local_tensors(model):
        names = [name for name in (line.name, *line.aliases) if name in match.sources]
        if len(names) < 2 or any(match.sources[name].shape != line.shape for name in names):
            continue
        slices = model.recipe.held(line, model.rank)
        first = torch.empty_like(local)
        read_slices(match.sources[names[0]].values()[names[0]], slices, first)
        for name in names[1:]:
            other = torch.empty_like(local)
            read_slices(match.sources[name].values()[name], slices, other)
            if not torch.equal(first, other):
                required = "one parameter: the model has them tied"
                fix = "tie_word_embeddings=False in its config"
                yield Finding(name, f"other values than {names[0]}", required, fix)
            del other  # before the next one is made


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
