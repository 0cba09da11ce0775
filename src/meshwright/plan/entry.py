"""``Entry``: a plan's settings for the modules or parameters of one glob; ``Entries``: all of them, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A plan's settings for the modules or parameters of one glob. None: Meshwright decides.

    Attributes:
        dp: over the data axes, ``shard`` (FSDP) or ``replicate`` (DDP).
        tp: over ``tp``: ``column`` (shard the output features), ``row`` (shard the input features), ``shard:<dim>``
            (shard that dim, from 0), ``replicate`` (do not shard), ``auto`` (Meshwright decides, whatever an earlier entry
            says).
        parts: the sharded dim consists of this many equal fused blocks, each sharded (a fused QKV: 3); or the blocks' sizes.
        units: the sharded dim consists of this many equal pieces that no shard may divide (attention heads).
        recompute: ``block`` recomputes this module in the backward, instead of keeping its activations; ``none`` keeps them.
        unit: whether this module is gathered, and freed, as one unit of FSDP.
        on: where this module runs. ``pp[1]``: on the second rank of the pipeline axis. ``tp[2:8]``: on those ranks of the tp
            axis (a branch; within a branch, of its own tp axis). Several: one for each call, for a module that is called
            several times. ``stream[0]``: on every rank, at the same time as the modules on ``stream[1]``. ``auto``: modules
            within it that can run at the same time are found, and placed on slices of tp.
        mesh: pairs of name and size: the axes that the ranks of a slice form. Default: ``tp`` alone.
    """

    dp: str | None = None
    tp: str | None = None
    parts: int | tuple[int, ...] | None = None
    units: int | None = None
    recompute: str | None = None
    unit: bool | None = None
    on: str | tuple[str, ...] | None = None
    mesh: tuple[tuple[str, int], ...] | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """The values of ``on``, one for each call."""
        return (self.on,) if isinstance(self.on, str) else self.on or ()

    @property
    def pp_rank(self) -> int | None:
        """The rank of ``on: pp[<rank>]``."""
        return int(self.on[len("pp[") : -1]) if isinstance(self.on, str) and self.on.startswith("pp") else None

    @property
    def stream(self) -> int | None:
        """The stream of ``on: stream[<n>]``."""
        return int(self.on[len("stream[") : -1]) if isinstance(self.on, str) and self.on.startswith("stream") else None

    @property
    def shard_dim(self) -> int | None:
        """The dim of ``tp: shard:<dim>``; None for another style."""
        return int(self.tp[len("shard:") :]) if self.tp and self.tp.startswith("shard:") else None

    def settings(self) -> dict[str, Any]:
        """The keys that are set, as plain YAML values."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if self.mesh is not None:
            settings["mesh"] = dict(self.mesh)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}

    def __or__(self, later: Entry) -> Entry:
        """Both entries as one: key by key, ``later`` wins."""
        return replace(self, **{f.name: v for f in fields(later) if (v := getattr(later, f.name)) is not None})


class Entries(Mapping[str, Entry]):
    """The entries of a plan: glob → entry, an immutable mapping whose order counts."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, glob: str) -> Entry:
        return self._entries[glob]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Entries):
            return tuple(self.items()) == tuple(other.items())
        return self._entries == other

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return repr(self._entries)
