"""The arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

_TARGET = "file.py:function, package.module:function (returns model, batch), or hf:<model type or config.json>"
_SET = "key=value: a setting of the plan (recompute=blocks) or of the target (hidden_size=64); several with commas, or again"
_LOSS = "file.py:function or package.module:function, called with the model's output; default: output.loss"

TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help=_TARGET, show_default=False)]
MeshOption = Annotated[
    str | None, typer.Option("--mesh", help="Axes of the mesh and their sizes, such as dp_shard=2,tp=2")
]
PlanOption = Annotated[str | None, typer.Option("--plan", help="A YAML file with a plan")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help=_SET)]
LossOption = Annotated[str | None, typer.Option("--loss", help=_LOSS)]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; default: cuda, if there is a GPU")]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", help="Number of local processes, if the mesh is auto or one of several", min=1)
]
SeqOption = Annotated[
    int | None, typer.Option("--seq", help="Tokens in each row of the batch that an hf: target makes up", min=1)
]
