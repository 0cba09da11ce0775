"""Reads the config of a transformers model: from a model type or a ``config.json``, with settings that override it."""

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
from meshwright.target.function import error_text, short_path
from meshwright.target.settings import EXAMPLES, HF, unknown_key, unknown_type


def is_path(model: str) -> bool:
    """Whether the model of an ``hf:`` target is a path, and not a model type."""
    return "/" in model or os.sep in model or model.endswith(".json") or os.path.exists(model)


def json_of(model: str) -> str:
    """The path of the config.json, if the model is a folder; else the path itself."""
    return os.path.join(model, "config.json") if os.path.isdir(model) else model


def read_config(model: str, settings: Mapping[str, Any], findings: Findings) -> Any:
    """The config of a model type or file, with settings. None if there is a problem, which is added to ``findings``."""
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
        config = CONFIG_MAPPING[kind].from_dict(values)
        _fill_in(config, values)
        _disable_caches(config, settings)
        return config
    except Exception as error:  # each config class of transformers checks its values in its own way
        texts = ", ".join(f"{key}={value}" for key, value in settings.items())
        given = " ".join(str(error).split())
        findings.add(where=f"{HF}{model} {texts}".strip(), given=given, required="values that fit each other")
        return None


def check_names(model: str, settings: Mapping[str, Any], findings: Findings) -> None:
    """Adds a finding for a model type or file that does not exist, and for keys that no config has.

    Does not import transformers, which takes seconds.
    """
    values = _values(model, findings)
    if values is not None:
        files_mention(model, str(values.get("model_type", "")), settings, findings)


def _values(model: str, findings: Findings) -> dict[str, Any] | None:
    """The values of a config.json, or the model type as the only value. None if the file cannot be read, with a finding."""
    return _config_file(json_of(model), findings) if is_path(model) else {"model_type": model}


def _keep_special_tokens(values: dict[str, Any], default: Any) -> None:
    """Moves the ids of special tokens into a vocabulary that is smaller than the default: to its end.

    Args:
        values: of the config; changed. An id that they set stays as it is.
        default: the config of the model type without settings.
    """
    text_config = values.get("text_config")
    text_size = text_config.get("vocab_size") if isinstance(text_config, dict) else None
    vocab_size = values.get("vocab_size") or text_size
    for name, part in _parts(default):
        part_values = values.get(name) if name else values
        if not isinstance(part_values, dict):
            continue
        size = part_values.get("vocab_size", None if name else vocab_size)
        if not isinstance(size, int):
            continue
        ids = {key: value for key, value in vars(part).items() if is_token(key, value) and key not in part_values}
        outside = sorted({value for value in ids.values() if value >= size})
        new_ids = {value: max(size - len(outside) + i, 0) for i, value in enumerate(outside)}
        part_values.update({key: new_ids[value] for key, value in ids.items() if value in new_ids})


def is_token(key: str, value: Any) -> bool:
    """Whether a key of a config has the id of a special token."""
    return key.endswith(("token_id", "token_index")) and isinstance(value, int)


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """("", the config) and (key, config) of each config within it."""
    yield "", config
    yield from ((key, value) for key, value in vars(config).items() if hasattr(value, "to_dict"))


def _fill_in(config: Any, values: Mapping[str, Any]) -> None:
    """Sets values that training needs and that a config may leave open, unless ``values`` has them."""
    if config.is_encoder_decoder:
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = config.decoder_start_token_id
    if hasattr(config, "mask_time_prob") and "apply_spec_augment" not in values:
        config.apply_spec_augment = False  # it masks audio at random with numpy, which differs from rank to rank


def _disable_caches(config: Any, settings: Mapping[str, Any]) -> None:
    """Sets ``use_cache`` to False, unless a setting has it: training does not generate tokens, so no cache of keys and values
    is needed.

    A block that fills a cache wastes memory, and cannot be recorded as a program. The value of a config.json is ignored, since
    it is meant for generation.
    """
    for name, part in _parts(config):
        key = f"{name}.use_cache" if name else "use_cache"
        if getattr(part, "use_cache", None) and key not in settings:
            part.use_cache = False


def _config_file(path: str, findings: Findings) -> dict[str, Any] | None:
    """The values of a config.json. None if it cannot be read, with a finding."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        given = f"no file {short_path(path)}" if isinstance(error, FileNotFoundError) else error_text(error)
        required = "a config.json on this machine (nothing is downloaded), or a model type"
        findings.add(where=f"{HF}{short_path(path)}", given=given, required=required, fix=f"{HF}{EXAMPLES[0]}")
        return None
    if not isinstance(values, dict):
        given, fix = type(values).__name__, f"{HF}{EXAMPLES[0]}"
        findings.add(where=short_path(path), given=given, required="the keys of a config", fix=fix)
        return None
    return values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets a value by its dotted key: ``text_config.hidden_size`` goes into the dict ``text_config``."""
    first, dot, rest = key.partition(".")
    if not dot:
        values[key] = value
        return
    inner = values.setdefault(first, {})
    if isinstance(inner, dict):
        _set(inner, rest, value)


def _check_keys(default: Any, settings: Mapping[str, Any], findings: Findings) -> None:
    """Adds a finding for each key that the config does not have: transformers accepts any key, and ignores a misspelt one."""
    for key, value in settings.items():
        config, parts = default, key.split(".")
        for part in parts[:-1]:
            config = getattr(config, part, None)
        if config is None or not (hasattr(config, parts[-1]) or _is_read(config, parts[-1])):
            known = sorted(k for k in {*vars(config or default), *default.attribute_map} if not k.startswith("_"))
            unknown_key(key, value, known, type(default).__name__, findings)


def _is_read(config: Any, key: str) -> bool:
    """Whether a model's code reads a key that its config does not declare, such as ``head_dim`` in some models."""
    reading = re.compile(rf"""config\.{re.escape(key)}\b|config, ["']{re.escape(key)}["']""")
    folder = Path(inspect.getfile(type(config))).parent
    return any(reading.search(file.read_text(encoding="utf-8")) for file in folder.glob("modeling_*.py"))
