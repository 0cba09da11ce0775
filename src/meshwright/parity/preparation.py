"""``PreparedBuild``: builds a model for a check, without dropout. ``perturbed``: initial values that do not hide mistakes."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.calls.hook import ModuleCalls
from meshwright.deferred import Build
from meshwright.parity.widening import widened

NOISE = 0.02  # standard deviation: the usual scale of initial weights, so that a perturbed model still trains
_CONFIGS = ("config", "cfg", "args", "hparams")  # usual names of the attribute that holds a module's configuration


def starting_value(start: Mapping[str, Tensor] | None, name: str, built: Tensor) -> Tensor:
    """A parameter's value before the first step: that of ``start``, if it has one; else ``built``, perturbed."""
    return perturbed(name, built) if start is None or name not in start else start[name].to(built)


def perturbed(name: str, whole: Tensor) -> Tensor:
    """A parameter's value plus noise, which is seeded by its name. Biases of zero and norms of one would hide mistakes."""
    if not (whole.is_floating_point() or whole.is_complex()):
        return whole
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    wide = torch.complex128 if whole.is_complex() else torch.float64
    return whole + NOISE * torch.randn(whole.shape, generator=generator, dtype=wide).to(whole.dtype)


@dataclass(frozen=True)
class PreparedBuild:
    """A function that builds the model for the job's side of a check.

    Attributes:
        build: returns the model.
        training: False: the model is put in eval mode.
        dropout: whether the model keeps its dropout.
        dtype: of the check. In float64 each forward is ``widened``, in planning too. Otherwise planning could not follow a
            forward with a value that float32 cannot hold, such as ``finfo(x.dtype).min`` of a float64 tensor.
    """

    build: Build
    training: bool = True
    dropout: bool = False
    dtype: torch.dtype = torch.float32

    def __call__(self) -> nn.Module:
        model = self.build()
        if not self.dropout:
            disable_dropout(model)
        if self.dtype is torch.float64:
            ModuleCalls(model, within={"": partial(widened, self.dtype)})
        return model if self.training else model.eval()


def disable_dropout(model: nn.Module) -> int:
    """Sets every dropout probability of a model to zero.

    These are ``p`` of dropout modules, and numbers whose name contains "drop" on modules and on their configurations.

    Returns:
        How many were set.
    """
    count = 0
    copies: dict[int, Any] = {}  # id of a configuration → its copy; modules that share one go on sharing the copy
    for module in model.modules():
        names = _dropout_attributes(module)
        if "Dropout" in type(module).__name__ and _is_probability(getattr(module, "p", None)):
            names.append("p")
        for name in names:
            setattr(module, name, 0.0)
        count += len(names)
        for attribute in _CONFIGS:
            config = vars(module).get(attribute)
            if config is None or isinstance(config, (dict, list, tuple)) or not hasattr(config, "__dict__"):
                continue
            if id(config) not in copies and (names := _dropout_attributes(config)):
                # A copy: the configuration may be a global of the model's file, which later runs read.
                copies[id(config)] = silent = copy.copy(config)
                for name in names:
                    object.__setattr__(silent, name, 0.0)  # works for frozen dataclasses too
                count += len(names)
            if id(config) in copies:
                setattr(module, attribute, copies[id(config)])
    return count


def _dropout_attributes(x: Any) -> list[str]:
    """Names of attributes that contain "drop" and have a probability."""
    return [name for name, value in vars(x).items() if "drop" in name.lower() and _is_probability(value)]


def _is_probability(value: Any) -> bool:
    return isinstance(value, float) and 0 < value <= 1
