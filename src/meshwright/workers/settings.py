"""``Settings``: saves torch's global settings when a worker starts, and restores them before each of its tasks.

A result must not depend on what ran earlier in the same process: a default dtype, a mode or a backend that an earlier task set,
or global module hooks that it registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""(function that reads a setting, function that sets it)"""


class Settings:
    """The global settings at the time when the object is made. Torch must be imported before."""

    def __init__(self) -> None:
        self._settings = [(read(), read, write) for read, write in _settings()]

    def restore(self) -> None:
        """Restores the settings."""
        import torch

        for saved, read, write in self._settings:
            if read() != saved:
                write(saved)
        if torch.are_deterministic_algorithms_enabled():  # checked first: the setter imports torch's compiler
            torch.use_deterministic_algorithms(False)
        torch.set_default_device(None)
        torch.set_flush_denormal(False)  # torch has no function that reads this setting
        for hooks in _hooks_of_all_modules():
            hooks.clear()


def _settings() -> Iterator[Setting]:
    import torch

    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    for device in ("cpu", "cuda"):
        yield partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        yield partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
    for kernel in ("flash", "mem_efficient", "math", "cudnn"):
        yield (
            getattr(torch.backends.cuda, f"{kernel}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp"),
        )
    yield torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled
    for backend, name in ((torch.backends.cudnn, "deterministic"), (torch.backends.cudnn, "benchmark")):
        yield partial(getattr, backend, name), partial(setattr, backend, name)


def _hooks_of_all_modules() -> Iterator[dict[int, Any]]:
    """The dicts of hooks that are registered for all modules. Private: torch has no public function that returns them."""
    from torch.nn.modules import module

    for name, value in vars(module).items():
        if name.startswith("_global_") and isinstance(value, dict):
            yield value


__all__ = ["Settings"]
