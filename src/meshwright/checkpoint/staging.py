"""``Staging``: copies of the tensors to save, so that training continues while a thread writes the copies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from meshwright.checkpoint.pieces import LocalPiece


class Staging:
    """Copies pieces to the CPU with DCP's stager. Each call reuses the memory of the previous one.

    The copies are valid until the next call. With a GPU the memory is pinned, and the host waits once for all copies. Before
    torch 2.13 a stager can be called once only: then each call makes a new stager, with new memory.
    """

    def __init__(self) -> None:
        self._stager = _new_stager()

    def __call__(self, pieces: Sequence[LocalPiece]) -> list[LocalPiece]:
        copies = self._stager.stage({"pieces": [piece.local for piece in pieces]})
        assert isinstance(copies, dict)  # not a future, since the stager is not asynchronous
        if not _stager_is_reusable():
            self._stager = _new_stager()
        return [replace(piece, local=copy) for piece, copy in zip(pieces, copies["pieces"], strict=True)]


def _new_stager() -> DefaultStager:
    gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
        )
    )


@functools.cache
def _stager_is_reusable() -> bool:
    """Whether a stager can be called twice. Torch 2.11 and 2.12 close a stager after each call, without documenting it."""
    stager = _new_stager()
    try:
        for _ in range(2):
            stager.stage({})
    except KeyError:
        return False
    return True
