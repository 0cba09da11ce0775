"""Copies of what is saved, so that training goes on while they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from meshwright.checkpoint.pieces import Piece


class Staging:
    """Copies pieces to the CPU with DCP's stager, into memory that the next copies are written to again.

    On a GPU the memory is pinned, and the host waits once for all copies. What was copied lasts until the next call.
    """

    def __init__(self) -> None:
        gpu = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
            )
        )

    def __call__(self, pieces: Sequence[Piece]) -> list[Piece]:
        copies = self._stager.stage({"pieces": [piece.local for piece in pieces]})
        assert isinstance(copies, dict)  # not a future: it is not asynchronous
        return [replace(piece, local=copy) for piece, copy in zip(pieces, copies["pieces"], strict=True)]
