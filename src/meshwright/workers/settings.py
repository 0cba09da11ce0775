"""``Settings``: what a process has set of torch, as it was when a worker began, and again before each of its tasks.

A result must not depend on what ran earlier in the same process: not on a type, a mode or a backend that an earlier task chose,
nor on hooks of all modules that it left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""What reads a setting, and what gives it a value."""


class Settings:
    """As they are when this is made. Torch has been imported."""

    def __init__(self) -> None:
        self._settings = [(read(), read, give) for read, give in _settings()]

    def restore(self) -> None:
        """They are so again."""
        import torch

        for before, read, give in self._settings:
            if read() != before:
                give(before)
        if torch.are_deterministic_algorithms_enabled():  # asked first: setting it imports the whole compiler
            torch.use_deterministic_algorithms(False)
        torch.set_default_device(None)
        torch.set_flush_denormal(False)  # which cannot be read
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
    """Private: there is no public way to ask for hooks that were registered for all modules."""
    from torch.nn.modules import module

    for name, value in vars(module).items():
        if name.startswith("_global_") and isinstance(value, dict):
            yield value


__all__ = ["Settings"]
