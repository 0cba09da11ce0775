"""A model of transformers by its type or its ``config.json``, with random weights and a made-up batch."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import Findings, PlanError, listing, nearest
from meshwright.plan import KEYS
from meshwright.target.function import short, told
from meshwright.target.heads import head
from meshwright.target.sample import sample
from meshwright.target.settings import unknown_setting
from meshwright.target.written import TARGET

if TYPE_CHECKING:
    from torch import nn

HF = "hf:"


@dataclass(frozen=True)
class HFTarget:
    """``build`` of a model of transformers, with random weights in float32.

    Attributes:
        model: a model type (``llama``), or the path of a ``config.json``.
        settings: keys of the config; of a part of it, dotted: ``text_config.hidden_size``.
    """

    model: str
    settings: tuple[tuple[str, Any], ...] = ()

    def config(self) -> Any:
        """The config of transformers. Raises PlanError."""
        findings = Findings("this target")
        config = _config(self.model, dict(self.settings), findings)
        findings.raise_if_any()
        return config

    def __call__(self) -> nn.Module:
        config = self.config()
        found = head(config)
        if found is None:
            raise PlanError(_no_head(self.model, config), "this target")
        config.dtype = None  # a config may ask for bfloat16; here the plan says what is computed in
        model = found[0](config)
        if (
            getattr(model, "loss_type", "") is None
        ):  # the class's name says none: transformers takes this one, and warns
            model.loss_type = "ForCausalLM"
        return model


def hf_target(spec: str, settings: dict[str, Any], rows: int, length: int) -> tuple[HFTarget, dict[str, Any]]:
    """The build and the made-up batch that ``hf:…`` names. Raises PlanError.

    Args:
        settings: keys of the config; ``batch_size`` and ``seq_len`` of the batch.
        rows, length: those two, where the settings do not say them.
    """
    findings = Findings("this target")
    model = spec[len(HF) :]
    if importlib.util.find_spec("transformers") is None:
        fix = 'pip install "meshwright[hf]"'
        findings.add(where=spec, given="transformers is not installed", required="transformers, an extra", fix=fix)
        findings.raise_if_any()
    rows = _size("batch_size", settings, findings) or rows
    tokens = _size("seq_len", settings, findings)
    model = os.path.abspath(_json_of(model)) if _is_path(model) else model
    config = _config(model, settings, findings)
    findings.raise_if_any()
    found = head(config)
    if found is None:
        raise PlanError(_no_head(model, config), "this target")
    batch = sample(config, *found, rows=rows, length=tokens, default=length)
    return HFTarget(model, tuple(settings.items())), batch


def _size(key: str, settings: dict[str, Any], findings: Findings) -> int | None:
    """A size of the made-up batch, taken out of the settings; None where they do not say it."""
    value = settings.pop(key, None)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    required = "a whole number of at least 1"
    findings.add(where=f"--set {key}={value}", given=repr(value), required=required, fix=f"--set {key}=8")
    return None


def _is_path(model: str) -> bool:
    return "/" in model or os.sep in model or model.endswith(".json") or os.path.exists(model)


def _json_of(model: str) -> str:
    """A folder stands for the config in it."""
    return os.path.join(model, "config.json") if os.path.isdir(model) else model


def _config(model: str, settings: Mapping[str, Any], findings: Findings) -> Any:
    """The config of a model type or file, with settings; None where something is wrong, which is in ``findings``."""
    from transformers import CONFIG_MAPPING

    values = _config_file(model, findings) if _is_path(model) else {"model_type": model}
    if values is None:
        return None
    kind = str(values.pop("model_type", ""))
    kinds = list(CONFIG_MAPPING.keys())
    if kind not in kinds:
        near = nearest(kind, kinds) or ("llama", "gpt2", "bert")
        required = f"a model type of transformers, such as {listing(near)}, or the path of a config.json"
        findings.add(where=f"{HF}{model}", given=f"the model type {kind!r}", required=required, fix=f"{HF}{near[0]}")
        return None
    for key, value in settings.items():
        _set(values, key, value)
    try:
        _check_keys(CONFIG_MAPPING[kind](), settings, findings)
        return None if findings else _started(CONFIG_MAPPING[kind].from_dict(values))
    except Exception as error:  # each config of transformers checks its values in its own way
        said = ", ".join(f"{key}={value}" for key, value in settings.items())
        given = " ".join(str(error).split())
        findings.add(where=f"{HF}{model} {said}".strip(), given=given, required="values that fit each other")
        return None


def _started(config: Any) -> Any:
    """Some configs leave it to a checkpoint with which token a decoder starts."""
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
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
        if config is None or not hasattr(config, parts[-1]):
            known = sorted(k for k in {*vars(config or default), *default.attribute_map} if not k.startswith("_"))
            prefix = key.rpartition(".")[0]
            known = [f"{prefix}.{k}" if prefix else k for k in known]
            words = [*known, "batch_size", "seq_len", *KEYS]
            unknown_setting(key, value, words, f"a key of {type(default).__name__}, batch_size, seq_len", findings)


def _no_head(model: str, config: Any) -> tuple[Any, ...]:
    findings = Findings()
    required = "a model that has a loss of its own on tokens, on images with classes, or on pairs of both"
    given = f"{type(config).__name__}: no such class of it is known to transformers"
    findings.add(where=f"{HF}{model}", given=given, required=required, fix=TARGET.code.format(name=TARGET.name))
    return tuple(findings)
