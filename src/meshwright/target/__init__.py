"""TARGET: what a command line calls a model: something that gives ``(build, batch)``; and a loss, named likewise.

    file.py:function             a function of a file: returns (module or build, batch), or (…, batch, dataset)
    package.module:function      the same, of a module that can be imported
    hf:llama                     a model type of transformers, with random weights and a made-up batch
    hf:path/to/config.json       the same, sized as that file says

    function     a function by its name: ``file.py:function``, ``package.module:function``
    written      what a person's functions give: ``TargetBuild``, ``TargetLoss``
    hf           a model of transformers: ``HFTarget``
    config       its config
    catalog      what the files of transformers say of names, without importing it
    heads        which class of it has a loss
    sample       its made-up batch
    shapes       the model without values, where the config does not tell the batch's shapes
    rows         a batch with more rows

A build must reach worker processes, and most modules cannot be pickled (nor should they travel). So what travels
is the name: `TargetBuild`, `TargetLoss` and `HFTarget` are values that find the function or the model anew where they
are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.target.function import absolute
from meshwright.target.heads import head
from meshwright.target.hf import HFTarget, check_spec, hf_target
from meshwright.target.rows import with_rows
from meshwright.target.settings import HF
from meshwright.target.written import TARGET, TargetBuild, TargetLoss, make

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
    """What a TARGET gives.

    Attributes:
        spec: the TARGET itself.
        build: makes the model; a value that can be pickled.
        batch: a sample: a dict of keyword arguments, or a tuple.
        dataset: rows to train on, as ``job.batches`` takes them; None where the target has none.
    """

    spec: str
    build: Build
    batch: Any
    dataset: Any = None


def check_target(spec: str, settings: Mapping[str, Any]) -> None:
    """Raises PlanError with what can be known to be wrong with a TARGET before anything is imported that takes seconds."""
    if spec.startswith(HF):
        check_spec(spec, settings)


def load_target(spec: str, settings: Mapping[str, Any] | None = None, *, rows: int = 8, length: int = 16) -> Target:
    """The model that a TARGET names.

    Args:
        settings: of ``hf:``, keys of its config, and ``batch_size`` and ``seq_len`` of the made-up batch; of a
            function, its keyword arguments.
        rows, length: ``batch_size`` and ``seq_len`` where the settings do not say them.

    Raises:
        PlanError: what is wrong with the target, and what to write instead.
    """
    settings = dict(settings or {})
    if spec.startswith(HF):
        build, batch = hf_target(spec, settings, rows, length)
        return Target(spec, build, batch)
    spec = absolute(spec, TARGET)
    made = make(spec, settings, alike=True)
    if isinstance(made[0], _module_class()):
        return Target(spec, TargetBuild(spec, settings, "module"), *made[1:])
    return Target(spec, TargetBuild(spec, settings, "build", made[0]), *made[1:])


def _module_class() -> type:
    from torch import nn  # importing this file starts no torch: a wrong target is told at once

    return nn.Module
