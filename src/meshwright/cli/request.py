"""``Request``: what a command line says of a model and of its plan, as typed; nothing is read yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """The options that several commands share; None: not given.

    Attributes:
        target: the model, as ``meshwright.target`` reads it.
        mesh, plan: axes and sizes; the path of a YAML file. ``sets``: settings over both, and of the target.
        loss: a function of the model's output.
        seq: tokens in each row of a made-up batch.
        ranks: processes, if the mesh is auto or one of several.
        device: ``cpu`` or ``cuda``.
        hardware, network: a profile of devices, and which of its networks joins the nodes.
        global_batch: rows of a step, over all ranks.
    """

    target: str
    mesh: str | None = None
    plan: str | None = None
    sets: Sequence[str] | None = None
    loss: str | None = None
    seq: int | None = None
    ranks: int | None = None
    device: str | None = None
    hardware: str | None = None
    network: str | None = None
    global_batch: int | None = None
