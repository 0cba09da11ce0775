"""``job.load_pretrained``: a Hugging Face folder into a job; each rank reads its own slices and nothing else.

    folder ─► headers ─► names ─► every problem at once ─► this rank's slices, a parameter at a time

What a rank needs beyond its share is the one slice that is being copied. Where transformers converts a tensor in a way
that cannot be done slice by slice (most can, see unread.py), it is the whole of that one tensor.
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

from meshwright.checkpoint.conversion import Matched, Source, Values, matched
from meshwright.checkpoint.folder import Moved, nobody
from meshwright.checkpoint.talk import RankAgreement
from meshwright.checkpoint.tensorfiles import open_folder
from meshwright.checkpoint.unread import LazyTensor, read_slices
from meshwright.errors import Finding, Findings, nearest
from meshwright.names import fold_names
from meshwright.recipe import ParameterRecipe, Slices
from meshwright.runtime.weights.parameters import local_tensor

if TYPE_CHECKING:
    from meshwright.runtime.held import HeldModel

Targets: TypeAlias = dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Pretrained:
    """What was read.

    Attributes:
        folder: where it was read.
        missing: the model's names that the folder lacks; they are as they were.
        unexpected: the folder's names that the model lacks; they were not read.
    """

    folder: Path
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The same, for a person."""
        missing, unexpected = fold_names(self.missing), fold_names(self.unexpected)
        left = [f"{folded}: not in {self.folder}; left as initialised" for folded in missing]
        return (*left, *(f"{folded}: in {self.folder}, but not in the model; not read" for folded in unexpected))


@torch.no_grad()
def load_pretrained(
    held: HeldModel, folder: str | os.PathLike[str], *, strict: bool = True, moved: Moved = nobody
) -> Pretrained:
    """Fills a job's parameters and persistent buffers from safetensors. See ``Job.load_pretrained``.

    Args:
        held: what this rank holds, at rest.
        moved: is called whenever a parameter has been read.
    """
    path, talk = Path(folder), RankAgreement(held.groups.files, "this folder")
    failed = Finding(str(path), "it was not read", "files that every rank can read, and memory")
    targets, match = talk.do(lambda: _found(held, path, strict), failed)
    talk.do(lambda: _read(held, match, moved), failed)
    missing = tuple(names[0] for names in targets if _name_in(match, names) is None)
    return Pretrained(path, missing, tuple(match.unexpected))


def _found(held: HeldModel, path: Path, strict: bool) -> tuple[Targets, Matched]:
    """The model's names, and where each is in the folder. Raises PlanError with every problem of this rank's slices."""
    findings = Findings("this folder")
    findings.extend(_prerequisites(path))
    findings.raise_if_any()
    targets = _targets(held)
    match = matched(held.module, (n for names in targets for n in names), open_folder(path))
    _add_problems(held, targets, match, path, strict, findings)
    findings.raise_if_any()
    return targets, match


def _read(held: HeldModel, match: Matched, moved: Moved) -> None:
    """Fills this rank's slices, and its buffers."""
    reading = _Reading()
    for line, local in _held(held):
        if (name := _name_in(match, (line.name, *line.aliases))) is not None:
            read_slices(reading.of(match.sources[name], name), held.recipe.held(line, held.rank), local)
            moved()
    for name, buffer in _buffers(held.module).items():
        if name in match.sources:
            read_slices(reading.of(match.sources[name], name), _all_of(buffer), buffer)


class _Reading:
    """Gives tensors by name; of conversions the last is kept, since what comes from one comes one after the other."""

    def __init__(self) -> None:
        self._last: tuple[Values | None, Any] = (None, {})

    def of(self, source: Source, name: str) -> LazyTensor:
        if self._last[0] is not source.values:
            self._last = (None, {})  # before the next is made
            self._last = (source.values, source.values())
        return self._last[1][name]


# --- the model's side ------------------------------------------------------------------------------------------------


def _targets(held: HeldModel) -> Targets:
    """All names of each parameter and persistent buffer → its shape and type."""
    targets: Targets = {}
    for line in held.recipe.parameters:
        targets[(line.name, *line.aliases)] = (line.shape, getattr(torch, line.dtype))
    for name, buffer in _buffers(held.module).items():
        targets[(name,)] = (tuple(buffer.shape), buffer.dtype)
    return targets


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers by name."""
    persistent = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def _held(held: HeldModel) -> Iterator[tuple[ParameterRecipe, Tensor]]:
    """What this rank holds of each parameter."""
    named = dict(held.module.named_parameters(remove_duplicate=False))
    for line in held.recipe.parameters:
        if held.recipe.holds(line, held.rank):
            yield line, local_tensor(named[line.name])


def _all_of(value: Tensor) -> Slices:
    return tuple(((0, n),) if n else () for n in value.shape)


def _name_in(match: Matched, names: Iterable[str]) -> str | None:
    return next((name for name in names if name in match.sources), None)


# --- problems --------------------------------------------------------------------------------------------------------


def _prerequisites(path: Path) -> Iterator[Finding]:
    if importlib.util.find_spec("safetensors") is None:
        fix = 'pip install "meshwright[hf]"'
        yield Finding(str(path), "safetensors is not installed", "safetensors, which comes with an extra", fix)


def _add_problems(held: HeldModel, targets: Any, match: Matched, path: Path, strict: bool, findings: Findings) -> None:
    """Everything that keeps a folder from being loaded; a folder's name that is known to be of no use is dropped."""
    for name, why in match.failed.items():
        findings.add(where=name, given=f"transformers' conversion fails: {why}", required="tensors that it can convert")
    for names, (shape, dtype) in targets.items():
        if (there := _name_in(match, names)) is not None:
            _check(there, match.sources[there], shape, dtype, findings)
    findings.extend(_untied(held, match))
    match.unexpected[:] = _counting(held.module, match.unexpected)
    if strict:
        _check_names(held.module, targets, match, path, findings)


def _check(name: str, source: Source, shape: tuple[int, ...], dtype: torch.dtype, findings: Findings) -> None:
    if source.shape != shape:
        fix = "build the model from the folder's own config.json"
        findings.add(where=name, given=f"shape {list(source.shape)}", required=f"shape {list(shape)}", fix=fix)
    elif not _converts(source.dtype, dtype):
        given, required = f"{_text(source.dtype)} values", f"values that become {_text(dtype)} without more"
        findings.add(where=name, given=given, required=required, fix="save the weights unquantised")


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    if stored.is_floating_point or wanted.is_floating_point:  # 8 bits are quantised: a scale belongs to them
        return stored.is_floating_point and wanted.is_floating_point and (stored.itemsize > 1 or stored == wanted)
    return stored == wanted or not (
        stored.is_complex or wanted.is_complex or stored == torch.bool or wanted == torch.bool
    )


def _check_names(module: nn.Module, targets: Any, match: Matched, path: Path, findings: Findings) -> None:
    lost = {names[0]: shape for names, (shape, _) in targets.items() if _name_in(match, names) is None}
    optional = _any_of(getattr(module, "_keys_to_ignore_on_load_missing", None))
    lost = {name: shape for name, shape in lost.items() if not optional.search(name) and name not in match.failed}
    leave = "strict=False leaves what is missing as it is, and what is not expected unread"
    for folded in fold_names(lost):
        near = nearest(folded.names[0], match.unexpected)
        given = f"not in {path}" + (f"; near: {', '.join(near)}" if near else "")
        required = f"shape {list(lost[folded.names[0]])}" + (f", {len(folded.names)} times" * (len(folded.names) > 1))
        findings.add(where=str(folded), given=given, required=required, fix=leave)
    for folded in fold_names(match.unexpected):
        findings.add(where=str(folded), given=f"in {path}", required="a name of the model", fix=leave)


def _counting(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Without the names that count for nothing: of buffers that are computed, and those that the model says to ignore."""
    ignored = _any_of(getattr(module, "_keys_to_ignore_on_load_unexpected", None))
    computed = {name for name, _ in module.named_buffers()}
    prefix = f"{base}." if (base := getattr(module, "base_model_prefix", "")) else ""
    return [n for n in names if not ignored.search(n) and not {n, prefix + n, n.removeprefix(prefix)} & computed]


def _any_of(patterns: Iterable[str] | None) -> re.Pattern[str]:
    """What a model of transformers lists of names; fits nothing where it lists none."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns or ()) or r"(?!)")


def _untied(held: HeldModel, match: Matched) -> Iterator[Finding]:
    """Parameters that are one in the model and two, of unlike values, in the folder. A rank looks at its own slices."""
    for line, local in _held(held):
        there = [name for name in (line.name, *line.aliases) if name in match.sources]
        if any(match.sources[name].shape != line.shape for name in there):
            continue
        read: list[Tensor] = []
        for name in there if len(there) > 1 else ():
            read.append(torch.empty_like(local))
            read_slices(match.sources[name].values()[name], held.recipe.held(line, held.rank), read[-1])
            if not torch.equal(read[0], read[-1]):
                required = "one parameter: the model has them tied"
                yield Finding(
                    name, f"other values than {there[0]}", required, "tie_word_embeddings=False in its config"
                )
            del read[1:]


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
