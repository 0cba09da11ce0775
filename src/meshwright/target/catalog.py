"""What the files of transformers say of its models, read as text.

To import transformers takes seconds, and a misspelt name should be told at once. So what is certain without the import is
told before it: a model type or a key that none of the files mentions. All else is for transformers itself to say
(``config``).
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
    """Notes a model type, and keys of its config, that no file of transformers mentions; imports nothing.

    Args:
        model: as the target names it.
        kind: its model type.
        settings: keys of the config, of a part of it dotted; and those of the made-up batch.
    """
    file, kinds = _file_of(kind)
    if file is None:
        if kinds and not any(_mentions(path, kind) for path in _files("models/auto/*.py")):
            unknown_type(model, kind, kinds, findings)
        return
    folder = f"models/{file.parent.name}/*.py"
    places = (
        _CONFIGS.format(file.parent.name),
        folder,
        "*.py",
        "utils/*.py",
        "integrations/**/*.py",
        _CONFIGS.format("*"),
    )
    unknown = [key for key in settings if key not in BATCH]
    for path in _files(*places):
        if not unknown:
            return
        text = path.read_text(encoding="utf-8")
        unknown = [key for key in unknown if not _word(key).search(text)]
    for key in unknown:
        name, keys = _described(file.read_text(encoding="utf-8"), kind)
        unknown_key(key, settings[key], keys, name, findings)


def _file_of(kind: str) -> tuple[Path | None, list[str]]:
    """The file with the config of a model type; None, and all model types, if there is none."""
    named = escape(kind.replace("-", "_"))
    kinds: list[str] = []
    for path in _files(_CONFIGS.format(named), _CONFIGS.format("*")):
        in_file = _TYPE.findall(path.read_text(encoding="utf-8"))
        if kind in in_file:
            return path, []
        kinds += in_file
    return None, kinds


def _files(*patterns: str) -> Iterator[Path]:
    """The files of transformers that fit, none of which is imported."""
    spec = importlib.util.find_spec("transformers")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for pattern in patterns:
            yield from sorted(Path(folder).glob(pattern))


def _mentions(path: Path, key: str) -> bool:
    return _word(key).search(path.read_text(encoding="utf-8")) is not None


def _word(key: str) -> re.Pattern[str]:
    """The last part of a key, as a word."""
    return re.compile(rf"(?<!\w){re.escape(key.rpartition('.')[2])}(?!\w)")


def _described(text: str, kind: str) -> tuple[str, list[str]]:
    """The name of the config of a model type, and what seem to be its keys."""
    match = next((m for m in _TYPE.finditer(text) if m[1] == kind), None)
    assert match is not None  # `text` is of the file that has it
    names = _CLASS.findall(text[: match.start()])
    keys = {name for groups in _KEY.findall(text) for name in groups if name and not name.startswith("_")}
    return names[-1] if names else "its config", sorted(keys)
