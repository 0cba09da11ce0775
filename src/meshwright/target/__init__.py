"""TARGET: the name of a model on a command line. ``load_target`` returns its build and its batch.

    file.py:function             a function of a file: returns (module or build, batch), or (…, batch, dataset)
    package.module:function      a function of a module that can be imported
    hf:llama                     a model type of transformers, with random weights and a generated batch
    hf:path/to/config.json       a transformers model with the sizes of that file

    function     finds a function by its name: ``file.py:function``, ``package.module:function``
    written      calls functions that a person wrote: ``TargetBuild``, ``TargetLoss``
    hf           builds a transformers model: ``HFTarget``
    config       reads its config
    catalog      checks names against the source files of transformers, without importing them
    heads        finds its class with a loss
    sample       generates its batch
    shapes       runs the model without values, if the config does not determine the batch's shapes
    rows         enlarges a batch
    settings     findings for unknown names

A build must reach worker processes, but most modules cannot be pickled and would be large. So only the name is sent:
`TargetBuild`, `TargetLoss` and `HFTarget` are values that load the function or the model again in the process that calls
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.garbage import rare_garbage_collection
from meshwright.target.function import absolute
from meshwright.target.heads import head
from meshwright.target.hf import HFTarget, check_spec, hf_target
from meshwright.target.rows import with_rows
from meshwright.target.settings import HF
from meshwright.target.written import TARGET, TargetBuild, TargetLoss, call_target

if TYPE_CHECKING:
    from meshwright.deferred import Build

__all__ = [
    "HF",
    "HFTarget",
    "Target",
    "TargetBuild",
    "TargetLoss",
    "check_target",
    "head",
    "load_target",
    "with_rows",
]


@dataclass(frozen=True)
class Target:
    """A model and its data.

    Attributes:
        spec: the text of the TARGET; a path in it is absolute.
        build: returns the model. It can be pickled.
        batch: a sample batch: a dict of keyword arguments, or a tuple.
        dataset: rows to train on, as ``job.batches`` takes them; None if the target has none.
    """

    spec: str
    build: Build
    batch: Any
    dataset: Any = None


def check_target(spec: str, settings: Mapping[str, Any]) -> None:
    """Raises PlanError with problems of a TARGET that can be seen before transformers is imported, which takes seconds."""
    if spec.startswith(HF):
        check_spec(spec, settings)


def load_target(spec: str, settings: Mapping[str, Any] | None = None, *, rows: int = 8, length: int = 16) -> Target:
    """Loads the model that a TARGET names.

    Args:
        spec: the TARGET.
        settings: for ``hf:``, keys of the config, and ``batch_size`` and ``seq_len`` of the generated batch; for a function,
            its keyword arguments.
        rows: ``batch_size``, if the settings do not have it.
        length: ``seq_len``, if the settings do not have it.

    Raises:
        PlanError: with every problem of the target.
    """
    settings = dict(settings or {})
    if spec.startswith(HF):
        with rare_garbage_collection():  # transformers is imported, thousands of classes and functions
            build, batch = hf_target(spec, settings, rows, length)
        return Target(spec, build, batch)
    spec = absolute(spec, TARGET)
    model_or_build, *batch_and_dataset = call_target(spec, settings, seeded=True)
    if isinstance(model_or_build, _module_class()):
        return Target(spec, TargetBuild(spec, settings, "module"), *batch_and_dataset)
    return Target(spec, TargetBuild(spec, settings, "build", model_or_build), *batch_and_dataset)


def _module_class() -> type:
    from torch import nn  # imported here, so that a wrong target is reported before torch is imported

    return nn.Module
