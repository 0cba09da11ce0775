"""A model of transformers by its type or its ``config.json``, with random weights and a made-up batch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.errors import Findings, PlanError
from meshwright.target.config import check_names, is_path, json_of, read_config
from meshwright.target.function import told
from meshwright.target.heads import head
from meshwright.target.sample import sample
from meshwright.target.settings import BATCH, HF
from meshwright.target.written import TARGET

if TYPE_CHECKING:
    from torch import nn


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
        config = read_config(self.model, dict(self.settings), findings)
        findings.raise_if_any()
        return config

    def __call__(self) -> nn.Module:
        config = self.config()
        chosen = head(config)
        if chosen is None:
            raise PlanError(_no_head(self.model, config), "this target")
        config.dtype = None  # a config may ask for bfloat16; here the plan says what is computed in
        model = chosen[0](config)
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # the class's name says none: transformers takes this one, and warns
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
    model = os.path.abspath(json_of(model)) if is_path(model) else model
    config = read_config(model, settings, findings)
    findings.raise_if_any()
    chosen = head(config)
    if chosen is None:
        raise PlanError(_no_head(model, config), "this target")
    build = HFTarget(model, tuple(settings.items()))
    try:
        batch = sample(config, *chosen, build, rows=rows, length=tokens, default=length)
    except Exception as error:  # the model's own, on every batch that might be meant
        given = f"{chosen[0].__name__} runs with no batch that could be made up: {told(error)[:300]}"
        required = "values that fit each other; or a function that returns the model and its batch"
        findings.add(where=spec, given=given, required=required, fix=TARGET.code.format(name=TARGET.name))
        findings.raise_if_any()
    return build, batch


def check_spec(spec: str, settings: Mapping[str, Any]) -> None:
    """Raises PlanError with what can be known to be wrong with a target and its settings before transformers is imported."""
    findings, rest = Findings("this target"), dict(settings)
    for key in BATCH:
        _size(key, rest, findings)
    if importlib.util.find_spec("transformers") is not None:
        check_names(spec[len(HF) :], rest, findings)
    findings.raise_if_any()


def _size(key: str, settings: dict[str, Any], findings: Findings) -> int | None:
    """A size of the made-up batch, taken out of the settings; None where they do not say it."""
    value = settings.pop(key, None)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    required = "a whole number of at least 1"
    findings.add(where=f"--set {key}={value}", given=repr(value), required=required, fix=f"--set {key}=8")
    return None


def _no_head(model: str, config: Any) -> tuple[Any, ...]:
    findings = Findings()
    required = "a model that has a loss of its own on tokens, sounds, images or pairs of these, with labels row by row"
    given = f"{type(config).__name__}: no such class of it is known to transformers"
    findings.add(where=f"{HF}{model}", given=given, required=required, fix=TARGET.code.format(name=TARGET.name))
    return tuple(findings)
