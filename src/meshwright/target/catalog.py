"""Checks names of model types and config keys against the source files of transformers, read as text.

Importing transformers takes seconds, and a misspelt name should be reported at once. This file reports a model type or key
that no source file mentions. All other checks need the import (``config``).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from glob import escape
from pathlib import Path
from typing import Any

from meshwright.errors import Findings
from meshwright.target.settings import BATCH, unknown_key, unknown_type

_CONFIGS = "models/{}/configuration_*.py"
_TYPE = re.compile(r"""^    model_type\b[^=\n]*=\s*["']([^"'\n]+)["']""", re.MULTILINE)
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_KEY = re.compile(r"^(?:    (\w+)\s*:|        (\w+)\s*[:=]\s|\s+self\.(\w+) =)", re.MULTILINE)


def files_mention(model: str, kind: str, settings: Mapping[str, Any], findings: Findings) -> None:
    """Adds a finding for a model type, and for each key of its config, that no file of transformers mentions.

    Args:
        model: as the target names it: a model type, or a path.
        kind: the model type.
        settings: keys of the config, dotted for a config within it; and settings of the generated batch.
    """
    file, kinds = _file_of(kind)
    if file is None:
        if kinds and not any(_mentions(path, kind) for path in _files("models/auto/*.py")):
            unknown_type(model, kind, kinds, findings)
        return
    patterns = (  # the most likely files first
        _CONFIGS.format(file.parent.name),
        f"models/{file.parent.name}/*.py",
        "*.py",
        "utils/*.py",
        "integrations/**/*.py",
        _CONFIGS.format("*"),
    )
    unknown = [key for key in settings if key not in BATCH]
    for path in _files(*patterns):
        if not unknown:
            return
        text = path.read_text(encoding="utf-8")
        unknown = [key for key in unknown if not _word(key).search(text)]
    for key in unknown:
        name, keys = _class_and_keys(file.read_text(encoding="utf-8"), kind)
        unknown_key(key, settings[key], keys, name, findings)


def _file_of(kind: str) -> tuple[Path | None, list[str]]:
    """(file with the config of a model type, []); or (None, all model types) if no file has it."""
    likely_folder = escape(kind.replace("-", "_"))
    kinds: list[str] = []
    for path in _files(_CONFIGS.format(likely_folder), _CONFIGS.format("*")):
        in_file = _TYPE.findall(path.read_text(encoding="utf-8"))
        if kind in in_file:
            return path, []
        kinds += in_file
    return None, kinds


def _files(*patterns: str) -> Iterator[Path]:
    """The source files of transformers that match glob patterns. Imports none of them."""
    spec = importlib.util.find_spec("transformers")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for pattern in patterns:
            yield from sorted(Path(folder).glob(pattern))


def _mentions(path: Path, key: str) -> bool:
    return _word(key).search(path.read_text(encoding="utf-8")) is not None


def _word(key: str) -> re.Pattern[str]:
    """A pattern that finds the last part of a dotted key as a whole word."""
    return re.compile(rf"(?<!\w){re.escape(key.rpartition('.')[2])}(?!\w)")


def _class_and_keys(text: str, kind: str) -> tuple[str, list[str]]:
    """(class name of the config of a model type, its probable keys), from the source text of its file."""
    match = next((m for m in _TYPE.finditer(text) if m[1] == kind), None)
    assert match is not None  # _file_of has found the model type in this text
    names = _CLASS.findall(text[: match.start()])
    keys = {name for groups in _KEY.findall(text) for name in groups if name and not name.startswith("_")}
    return names[-1] if names else "its config", sorted(keys)
