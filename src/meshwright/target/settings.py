"""Model types and settings that a target lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.errors import Findings, listing, nearest
from meshwright.plan import KEYS

HF = "hf:"
BATCH = ("batch_size", "seq_len")  # settings of the batch that is made up for a model of transformers


def unknown_setting(key: str, value: Any, known: list[str], required: str, findings: Findings) -> None:
    """Notes a setting that neither the target nor a plan has; ``required`` says what the target has."""
    near = nearest(key, known)
    hint = f"; did you mean {near[0]}?" if near else ""
    fix = f"--set {near[0]}={value}" if near else f"leave out --set {key}"
    said = f"{required}, or a key of the plan ({', '.join(KEYS)}){hint}"
    findings.add(where=f"--set {key}={value}", given=f"the key {key}", required=said, fix=fix)


def unknown_key(key: str, value: Any, keys: Sequence[str], config: str, findings: Findings) -> None:
    """Notes a key that a config of transformers lacks; ``keys`` are those that it has."""
    before = key.rpartition(".")[0]
    known = [f"{before}.{name}" if before else name for name in keys]
    unknown_setting(key, value, [*known, *BATCH, *KEYS], f"a key of {config}, {', '.join(BATCH)}", findings)


def unknown_type(model: str, kind: str, kinds: Sequence[str], findings: Findings) -> None:
    """Notes a model type that transformers lacks."""
    near = nearest(kind, kinds) or ("llama", "gpt2", "bert")
    required = f"a model type of transformers, such as {listing(near)}, or the path of a config.json"
    findings.add(where=f"{HF}{model}", given=f"the model type {kind!r}", required=required, fix=f"{HF}{near[0]}")
