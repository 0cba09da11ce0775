"""``HFTarget``: a transformers model by its type or its ``config.json``, with random weights; and its generated batch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.errors import Findings, PlanError
from meshwright.target.config import check_names, is_path, json_of, read_config
from meshwright.target.function import error_text
from meshwright.target.heads import head
from meshwright.target.sample import sample
from meshwright.target.settings import BATCH, HF
from meshwright.target.written import TARGET

if TYPE_CHECKING:
    from torch import nn


_WIDTH = 300  # most characters of an exception's text in an error


@dataclass(frozen=True)
class HFTarget:
    """A ``build`` function for a transformers model, with random weights in float32.

    Attributes:
        model: a model type, such as ``llama``, or the path of a ``config.json``.
        settings: keys of the config and their values; dotted for a config within it, such as ``text_config.hidden_size``.
    """

    model: str
    settings: tuple[tuple[str, Any], ...] = ()

    def config(self) -> Any:
        """The transformers config, with the settings. Raises PlanError."""
        findings = Findings("this target")
        config = read_config(self.model, dict(self.settings), findings)
        findings.raise_if_any()
        return config

    def __call__(self) -> nn.Module:
        config = self.config()
        class_and_labels = head(config)
        if class_and_labels is None:
            raise PlanError(_no_head(self.model, config), "this target")
        config.dtype = None  # a config may ask for bfloat16, but here the plan decides the precision
        model = class_and_labels[0](config)
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # transformers' own default, which it uses with a warning if this is None
        return model


def hf_target(spec: str, settings: dict[str, Any], rows: int, length: int) -> tuple[HFTarget, dict[str, Any]]:
    """The build and the generated batch of an ``hf:`` target.

    Args:
        settings: keys of the config; ``batch_size`` and ``seq_len`` of the batch, which are removed.
        rows: ``batch_size``, if the settings do not have it.
        length: ``seq_len``, if the settings do not have it.

    Raises:
        PlanError: with every problem of the target.
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
    class_and_labels = head(config)
    if class_and_labels is None:
        raise PlanError(_no_head(model, config), "this target")
    build = HFTarget(model, tuple(settings.items()))
    try:
        batch = sample(config, *class_and_labels, build, rows=rows, length=tokens, default=length)
    except Exception as error:  # the model's own, with every batch that was tried
        name = class_and_labels[0].__name__
        given = f"{name} runs with no batch that could be generated: {error_text(error)[:_WIDTH]}"
        required = "values that fit each other; or a function that returns the model and its batch"
        findings.add(where=spec, given=given, required=required, fix=TARGET.code.format(name=TARGET.name))
        findings.raise_if_any()
    return build, batch


def check_spec(spec: str, settings: Mapping[str, Any]) -> None:
    """Raises PlanError with problems of a target and its settings that can be seen before transformers is imported."""
    findings, config_settings = Findings("this target"), dict(settings)
    for key in BATCH:
        _size(key, config_settings, findings)
    if importlib.util.find_spec("transformers") is not None:
        check_names(spec[len(HF) :], config_settings, findings)
    findings.raise_if_any()


def _size(key: str, settings: dict[str, Any], findings: Findings) -> int | None:
    """Removes a size of the generated batch from the settings. None if they do not have it, or if it is not valid: then it adds
    a finding."""
    value = settings.pop(key, None)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    required = "a whole number of at least 1"
    findings.add(where=f"--set {key}={value}", given=repr(value), required=required, fix=f"--set {key}=8")
    return None


def _no_head(model: str, config: Any) -> tuple[Any, ...]:
    """The findings for a model that has no class with a loss."""
    findings = Findings()
    required = "a model that has a loss of its own on tokens, sounds, images or pairs of these, with labels row by row"
    given = f"{type(config).__name__}: transformers has no such class for it"
    findings.add(where=f"{HF}{model}", given=given, required=required, fix=TARGET.code.format(name=TARGET.name))
    return tuple(findings)
