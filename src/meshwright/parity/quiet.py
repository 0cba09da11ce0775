"""``Quiet``: a model as it is compared: without dropout, and with values that hide no mistake."""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.calls.hook import ModuleCalls
from meshwright.deferred import Build
from meshwright.parity.widened import widened

NOISE = 0.02
_CONFIGS = ("config", "cfg", "args", "hparams")


def perturbed(name: str, whole: Tensor) -> Tensor:
    """A parameter's value plus noise that follows from its name: fresh zeros and ones hide mistakes."""
    if not (whole.is_floating_point() or whole.is_complex()):
        return whole
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    wide = torch.complex128 if whole.is_complex() else torch.float64
    return whole + NOISE * torch.randn(whole.shape, generator=generator, dtype=wide).to(whole.dtype)


@dataclass(frozen=True)
class Quiet:
    """A build of the model as it is compared.

    Attributes:
        training: False: the model is in eval mode.
        dropout: whether it keeps its dropout.
        dtype: of the check. The forward is ``widened`` wherever it runs, in planning too: what does not fit into float32 there
            (``finfo(x.dtype).min``) would else keep it from being followed.
    """

    build: Build
    training: bool = True
    dropout: bool = False
    dtype: torch.dtype = torch.float32

    def __call__(self) -> nn.Module:
        model = self.build()
        if not self.dropout:
            silence(model)
        if self.dtype is torch.float64:
            ModuleCalls(model, within={"": partial(widened, self.dtype)})
        return model if self.training else model.eval()


def silence(model: nn.Module) -> int:
    """Sets every probability of dropout to zero: ``p`` of dropout modules, and numbers that are called some kind of
    drop on modules and on their configurations. Returns how many."""
    count = 0
    copies: dict[int, Any] = {}  # several modules share one configuration, and go on sharing it
    for module in model.modules():
        names = _drops(module) + ["p"] * ("Dropout" in type(module).__name__ and _is_on(getattr(module, "p", None)))
        for name in names:
            setattr(module, name, 0.0)
        count += len(names)
        for place in _CONFIGS:
            config = vars(module).get(place)
            if config is None or isinstance(config, (dict, list, tuple)) or not hasattr(config, "__dict__"):
                continue
            if id(config) not in copies and (names := _drops(config)):
                # A copy: the configuration may be a global of the model's file, which later runs read.
                copies[id(config)] = quiet = copy.copy(config)
                for name in names:
                    object.__setattr__(quiet, name, 0.0)  # frozen ones too
                count += len(names)
            if id(config) in copies:
                setattr(module, place, copies[id(config)])
    return count


def _drops(x: Any) -> list[str]:
    return [name for name, value in vars(x).items() if "drop" in name.lower() and _is_on(value)]


def _is_on(value: Any) -> bool:
    return isinstance(value, float) and 0 < value <= 1
