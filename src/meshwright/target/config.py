"""The config of a model of transformers: a model type or a ``config.json``, with settings over it."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import Findings
from meshwright.target.catalog import files_mention
from meshwright.target.function import short, told
from meshwright.target.settings import HF, unknown_key, unknown_type


def is_path(model: str) -> bool:
    return "/" in model or os.sep in model or model.endswith(".json") or os.path.exists(model)


def json_of(model: str) -> str:
    """A folder stands for the config in it."""
    return os.path.join(model, "config.json") if os.path.isdir(model) else model


def read_config(model: str, settings: Mapping[str, Any], findings: Findings) -> Any:
    """The config of a model type or file, with settings; None where something is wrong, which is in ``findings``."""
    values = _values(model, findings)
    if values is None:
        return None
    from transformers import CONFIG_MAPPING

    kind = str(values.pop("model_type", ""))
    if kind not in CONFIG_MAPPING:
        unknown_type(model, kind, list(CONFIG_MAPPING.keys()), findings)
        return None
    for key, value in settings.items():
        _set(values, key, value)
    try:
        default = CONFIG_MAPPING[kind]()
        _check_keys(default, settings, findings)
        if findings:
            return None
        _keep_special_tokens(values, default)
        return _without_caches(_settled(CONFIG_MAPPING[kind].from_dict(values), values), settings)
    except Exception as error:  # each config of transformers checks its values in its own way
        said = ", ".join(f"{key}={value}" for key, value in settings.items())
        given = " ".join(str(error).split())
        findings.add(where=f"{HF}{model} {said}".strip(), given=given, required="values that fit each other")
        return None


def check_names(model: str, settings: Mapping[str, Any], findings: Findings) -> None:
    """Notes a model type or file that is not there, and keys that no config has; without transformers, whose import takes
    seconds."""
    values = _values(model, findings)
    if values is not None:
        files_mention(model, str(values.get("model_type", "")), settings, findings)


def _values(model: str, findings: Findings) -> dict[str, Any] | None:
    """What a target says of its config: its type, or the values of a file; None where that cannot be read."""
    return _config_file(json_of(model), findings) if is_path(model) else {"model_type": model}


def _keep_special_tokens(values: dict[str, Any], default: Any) -> None:
    """Special tokens that a smaller vocabulary would leave out move to its end, unless they are said."""
    text = values.get("text_config")
    whole = values.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    for name, part in _parts(default):
        said = values.get(name) if name else values
        size = said.get("vocab_size", None if name else whole) if isinstance(said, dict) else None
        if not isinstance(said, dict) or not isinstance(size, int):
            continue
        ids = {key: value for key, value in vars(part).items() if is_token(key, value) and key not in said}
        outside = sorted({value for value in ids.values() if value >= size})
        moved = {value: max(size - len(outside) + i, 0) for i, value in enumerate(outside)}
        said.update({key: moved[value] for key, value in ids.items() if value in moved})


def is_token(key: str, value: Any) -> bool:
    """Whether a key of a config says which token is special."""
    return key.endswith(("token_id", "token_index")) and isinstance(value, int)


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """A config, and those within it by their keys."""
    yield "", config
    yield from ((key, value) for key, value in vars(config).items() if hasattr(value, "to_dict"))


def _settled(config: Any, said: Mapping[str, Any]) -> Any:
    """What a config leaves to a checkpoint or to whoever trains, unless it is said."""
    if config.is_encoder_decoder:
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = config.decoder_start_token_id
    if hasattr(config, "mask_time_prob") and "apply_spec_augment" not in said:
        config.apply_spec_augment = (
            False  # parts of a sound masked at random: by numpy, which differs from rank to rank
        )
    return config


def _without_caches(config: Any, settings: Mapping[str, Any]) -> Any:
    """The same; its model keeps no keys and values for tokens to come, unless ``use_cache`` is set: a step generates none.

    A block that fills such a cache holds memory for nothing, and has no recorded program. Each config.json says ``use_cache``,
    as its model generates too.
    """
    for name, part in _parts(config):
        key = f"{name}.use_cache" if name else "use_cache"
        if getattr(part, "use_cache", None) and key not in settings:
            part.use_cache = False
    return config


def _config_file(path: str, findings: Findings) -> dict[str, Any] | None:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        given = f"no file {short(path)}" if isinstance(error, FileNotFoundError) else told(error)
        required = "a config.json on this machine (nothing is downloaded), or a model type"
        findings.add(where=f"{HF}{short(path)}", given=given, required=required, fix=f"{HF}llama")
        return None
    if not isinstance(values, dict):
        findings.add(where=short(path), given=type(values).__name__, required="the keys of a config", fix=f"{HF}llama")
        return None
    return values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """``text_config.hidden_size`` goes into the config within."""
    first, dot, rest = key.partition(".")
    if not dot:
        values[key] = value
        return
    inner = values.setdefault(first, {})
    if isinstance(inner, dict):
        _set(inner, rest, value)


def _check_keys(default: Any, settings: Mapping[str, Any], findings: Findings) -> None:
    """A config takes any key without a word; a misspelt one would be lost."""
    for key, value in settings.items():
        config, parts = default, key.split(".")
        for part in parts[:-1]:
            config = getattr(config, part, None)
        if config is None or not (hasattr(config, parts[-1]) or _is_read(config, parts[-1])):
            known = sorted(k for k in {*vars(config or default), *default.attribute_map} if not k.startswith("_"))
            unknown_key(key, value, known, type(default).__name__, findings)


def _is_read(config: Any, key: str) -> bool:
    """Whether a model's code asks for a key that its config does not declare: ``head_dim`` of some."""
    asked = re.compile(rf"""config\.{re.escape(key)}\b|config, ["']{re.escape(key)}["']""")
    folder = Path(inspect.getfile(type(config))).parent
    return any(asked.search(file.read_text(encoding="utf-8")) for file in folder.glob("modeling_*.py"))
