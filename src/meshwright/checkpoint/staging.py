"""Copies of what is saved, so that training goes on while they are written."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from meshwright.checkpoint.pieces import Piece


class Staging:
    """Copies pieces to the CPU with DCP's stager, into memory that the next copies are written to again.

    On a GPU the memory is pinned, and the host waits once for all copies. What was copied lasts until the next call. Before
    torch 2.13 a stager serves one call: each call has a new one, and memory of its own.
    """

    def __init__(self) -> None:
        self._stager = _stager()

    def __call__(self, pieces: Sequence[Piece]) -> list[Piece]:
        copies = self._stager.stage({"pieces": [piece.local for piece in pieces]})
        assert isinstance(copies, dict)  # not a future: it is not asynchronous
        if not _serves_again():
            self._stager = _stager()
        return [replace(piece, local=copy) for piece, copy in zip(pieces, copies["pieces"], strict=True)]


def _stager() -> DefaultStager:
    gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
        )
    )


@functools.cache
def _serves_again() -> bool:
    """Whether a stager can be called again: torch 2.11 and 2.12 close it after each call, and do not say so."""
    stager = _stager()
    try:
        for _ in range(2):
            stager.stage({})
    except KeyError:
        return False
    return True
