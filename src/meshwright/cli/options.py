"""The arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

_TARGET = "file.py:function, package.module:function (returns model, batch), or hf:<model type or config.json>"
_SET = "key=value: of the plan (recompute=blocks), else of the target (hidden_size=64). Several with commas, or again"
_LOSS = "file.py:function or package.module:function, of the model's output; default output.loss"

TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help=_TARGET, show_default=False)]
MeshOption = Annotated[str | None, typer.Option("--mesh", help="The axes and their sizes: dp_shard=2,tp=2")]
PlanOption = Annotated[str | None, typer.Option("--plan", help="A plan, as a YAML file")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help=_SET)]
LossOption = Annotated[str | None, typer.Option("--loss", help=_LOSS)]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; default cuda where there is one")]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", help="Local processes, where the mesh is auto or one of several", min=1)
]
SeqOption = Annotated[int | None, typer.Option("--seq", help="Tokens a row of the batch that hf: makes up", min=1)]
