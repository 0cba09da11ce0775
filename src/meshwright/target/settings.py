"""Findings for model types and settings that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.errors import Findings, listing, nearest
from meshwright.plan import KEYS

HF = "hf:"
BATCH = ("batch_size", "seq_len")  # settings of the batch that is generated for a transformers model
EXAMPLES = ("llama", "gpt2", "bert")  # model types that an error shows if no known one is similar


def unknown_setting(key: str, value: Any, known: list[str], required: str, findings: Findings) -> None:
    """Adds a finding for a setting that neither the target nor a plan has.

    Args:
        known: names of all settings, to suggest a similar one.
        required: the settings of the target, as text.
    """
    similar = nearest(key, known)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    fix = f"--set {similar[0]}={value}" if similar else f"leave out --set {key}"
    required = f"{required}, or a key of the plan ({', '.join(KEYS)}){hint}"
    findings.add(where=f"--set {key}={value}", given=f"the key {key}", required=required, fix=fix)


def unknown_key(key: str, value: Any, keys: Sequence[str], config: str, findings: Findings) -> None:
    """Adds a finding for a key that a transformers config lacks.

    Args:
        key: may be dotted, for a config within a config.
        keys: those that the config has.
        config: the class name of the config.
    """
    parent = key.rpartition(".")[0]
    known = [f"{parent}.{name}" if parent else name for name in keys]
    unknown_setting(key, value, [*known, *BATCH, *KEYS], f"a key of {config}, {', '.join(BATCH)}", findings)


def unknown_type(model: str, kind: str, kinds: Sequence[str], findings: Findings) -> None:
    """Adds a finding for a model type that transformers lacks.

    Args:
        model: as the target names it: a model type, or a path.
        kind: the model type.
        kinds: those that transformers has.
    """
    similar = nearest(kind, kinds) or EXAMPLES
    required = f"a model type of transformers, such as {listing(similar)}, or the path of a config.json"
    findings.add(where=f"{HF}{model}", given=f"the model type {kind!r}", required=required, fix=f"{HF}{similar[0]}")
