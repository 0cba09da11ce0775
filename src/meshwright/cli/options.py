"""Arguments and options of the commands: those that several commands share, and the long lists of single commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_TARGET = "file.py:function, package.module:function (returns model, batch), or hf:<model type or config.json>"
_SET = "key=value: a setting of the plan (recompute=blocks) or of the target (hidden_size=64); separate by commas, or repeat"
_LOSS = "file.py:function or package.module:function, called with the model's output; default: output.loss"

TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help=_TARGET, show_default=False)]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Axes of the mesh and their sizes, such as dp_shard=2,tp=2; auto: the fastest mesh found for --ranks",
    ),
]
PlanOption = Annotated[str | None, typer.Option("--plan", help="A YAML file with a plan")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help=_SET)]
LossOption = Annotated[str | None, typer.Option("--loss", help=_LOSS)]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; default: cuda, if there is a GPU")]
RanksOption = Annotated[
    int | None,
    typer.Option("--ranks", help="Number of local processes, if the mesh is auto or the plan has several", min=1),
]
SeqOption = Annotated[
    int | None, typer.Option("--seq", help="Tokens in each row of the batch that an hf: target generates", min=1)
]
GlobalBatchOption = Annotated[int | None, typer.Option(help="Rows of a step, over all ranks", min=1)]
JSONOption = Annotated[bool, typer.Option("--json", help="Print JSON")]


def written(help_: str, metavar: str | None = None) -> Any:
    """The option that names a file for a command to write."""
    return typer.Option(help=help_, metavar=metavar, dir_okay=False, show_default=False)


# Options of ``show`` and ``report``.

HTMLOption = Annotated[
    Path | None, written("Write all pictures to this one file, which a browser opens from disk", "FILE")
]
RunHTMLOption = Annotated[Path | None, written("The HTML file to write; default: report.html in the folder", "FILE")]
ObservedStepOption = Annotated[
    int | None,
    typer.Option("--step", help="The observed step to show first; default: the last", show_default=False),
]

# Options of ``show`` alone.

ShownRankOption = Annotated[int | None, typer.Option(help="The rank whose shards to show; default: 0")]
ParameterOption = Annotated[str | None, typer.Option(help="Show only parameters that match this glob, with pictures")]
PicturesOption = Annotated[
    int | None,
    typer.Option(help="Number of pictures of which rank holds which part; default: 3 with --parameter", min=0),
]
PredictedHardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        show_default=False,
        help="With --html: also predict the step on these devices, as predict does (h100, a YAML file, cpu-local)",
    ),
]
OtherPlansOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--compare",
        metavar="FILE",
        show_default=False,
        help="With --hardware: also predict this plan; may be repeated",
    ),
]

OnNodesOption = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        help="Also draw the ranks on this many nodes, and the links of each axis; mesh: auto is searched for them",
        min=1,
    ),
]

# Options of ``plan`` alone.

DevicesOption = Annotated[
    int | None, typer.Option(help="Number of devices to plan for: the ranks of the mesh", min=1, show_default=False)
]
NodesOption = Annotated[
    int | None, typer.Option(help="Number of nodes of these devices; default: as few as the profile allows", min=1)
]
PrecisionOption = Annotated[
    str | None, typer.Option(help="bfloat16, float32 or float64; default: bfloat16, and float32 on a CPU")
]
TopOption = Annotated[int, typer.Option(help="Number of plans to show", min=1)]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Rehearse the plans that are found, as predict does: more accurate, and slower")
]
BestPlanOption = Annotated[Path | None, written("Write the best plan to this file, for train")]
MeasureOption = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS",
        show_default=False,
        min=2,
        help="Also run this many steps of each plan in local processes, sort the plans by the measured time, and correct "
        "the profile by it",
    ),
]
TwoPlansOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="FILE FILE",
        show_default=False,
        help="Compare two plans instead of a search",
    ),
]

# Options of ``predict``, ``dryrun`` and other commands that predict.

HardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        help="Profile of the devices: h100 or another built-in one, a YAML file, or cpu-local, which calibrate measures; "
        "default: cpu-local",
    ),
]
NetworkOption = Annotated[
    str | None, typer.Option("--network", help="The network of the profile that connects the nodes; default: its first")
]

# Options of ``calibrate`` alone.

CalibratedOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="The file to write; default: the place in which other commands look for cpu-local",
        show_default=False,
        dir_okay=False,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(help="Threads of each process: as many as the ranks of your runs have; default: 1", min=1),
]
RunsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="RUN",
        show_default=False,
        help="Correct a profile by the steps of this folder of train; may be repeated",
    ),
]
CorrectedOption = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        show_default=False,
        help="With --from: the profile of the devices of the runs, as predict takes it; default: cpu-local",
    ),
]

# Options of ``train`` alone.

StepsOption = Annotated[
    int, typer.Option(help="Total number of optimizer steps, including those before a resume", min=1)
]
RateOption = Annotated[float, typer.Option("--lr", help="Learning rate of AdamW")]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder for checkpoints and metrics; default: runs/ and the name of the target")
]
SaveEveryOption = Annotated[
    int | None, typer.Option(help="Save a checkpoint every this many steps, and at the end", min=1)
]
KeepOption = Annotated[
    int | None, typer.Option(help="Keep only this many checkpoints, the newest; default: all", min=1)
]
AsyncSaveOption = Annotated[bool, typer.Option("--async-save", help="Continue to train while a checkpoint is written")]
FreshOption = Annotated[
    bool, typer.Option("--fresh", help="Start a new run; a run that is in --out is renamed, not deleted")
]
TensorboardOption = Annotated[
    bool, typer.Option("--tensorboard", help="Also write events for TensorBoard (needs the tensorboard extra)")
]
ObserveEveryOption = Annotated[
    int | None,
    typer.Option(
        help="From the third step on, record one step in this many: begin and end of each action, transfer and collective; "
        "meshwright report draws them",
        min=1,
    ),
]
TimeoutOption = Annotated[
    float, typer.Option(help="Abort with a report of every rank after this many seconds without progress", min=1)
]
NumWorkersOption = Annotated[
    int, typer.Option(help="Number of processes of each rank that read rows of the dataset ahead of the steps", min=0)
]
