"""``Request``: the options of a command line that name a model and its plan, as typed. No file is read yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """The options that several commands share. None means that the option is absent.

    Attributes:
        target: the model, as ``meshwright.target`` reads it.
        mesh: axes and their sizes, such as ``dp_shard=2,tp=2``.
        plan: the path of a YAML file.
        sets: ``key=value`` settings of the plan, which override ``mesh`` and ``plan``, and settings of the target.
        loss: a function of the model's output, as ``file.py:function`` or ``package.module:function``.
        seq: number of tokens in each row of a generated batch.
        ranks: number of processes, if the mesh is auto or the plan has several meshes.
        device: ``cpu`` or ``cuda``.
        hardware: a profile of devices.
        network: the network of that profile that connects the nodes.
        global_batch: number of rows in a step, over all ranks.
        nodes: number of nodes of these ranks.
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
    nodes: int | None = None
