"""Address space without memory, and storages that return their memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

LARGE = 1 << 18  # bytes: larger storages get their own mapping


def reserve(nbytes: int) -> mmap.mmap:
    """Address space without memory: a page is allocated when it is first touched."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        flags |= 0x4000  # MAP_NORESERVE, which old Pythons do not define: it does not count against memory and swap
    return mmap.mmap(-1, nbytes, flags=flags)


def storage_over(memory: mmap.mmap) -> torch.UntypedStorage:
    """A storage over `memory`, which it keeps alive."""
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def allocate(nbytes: int) -> torch.UntypedStorage:
    """A real storage. A large one returns its memory to the system when it is freed; malloc would leave holes in the heap."""
    if nbytes < LARGE:
        return torch.UntypedStorage(nbytes, device="cpu")
    return storage_over(reserve(nbytes))


def trim() -> None:
    """Returns free memory of the heap to the system: glibc does not reuse the holes that large tensors leave."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def address_of(tensor: Tensor) -> int:
    """The address of a tensor's storage, by which storages are identified; 0 if there is none."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested or is_lazy(tensor):
        return 0
    return tensor.untyped_storage().data_ptr()
