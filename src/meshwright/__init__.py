"""Meshwright: any PyTorch model, one plan, every parallelism.

    errors      PlanError, CheckpointError     every problem of a plan or a checkpoint, at once
                ReplicaError                   ranks that should hold equal values differ
                RowsError                      the values of a step show that its rows cannot be divided
                RankError                      another rank failed, or has ended
                UnfrozenError                  parameters require gradients that did not when a pipeline was planned
    mesh        Mesh                           named axes and their sizes
    layout      Shard, Replicate, Partial      what one rank holds of a tensor along one axis
    plan        Plan                           what a person writes
    recipe      Recipe                         every decision, with its reason
    container   Branches                       a module that calls several modules and joins their results
    checkpoint  save_checkpoint, load_checkpoint   for a plain module; a job has save and load
    api         parallelize                    a model and a plan → a job
    planned     make_recipe                    the first half of parallelize: every decision, without processes
    runtime.job Job                            step, clip, evaluate, batches
    watch.watchdog Watch                       aborts a job that hangs, with a report
    workers.pool local_workers                 a pool of processes on this machine
    workers.launch launch                      runs a function in several local processes
    parity      check, Report                  compares a plan with one device
    prediction  predict, measure, Prediction   memory and time of a step, predicted or measured
                dry_run, DryRun                the step of any one rank, without the others
                correct_profile, MeasuredStep, Correction   a profile, corrected by measured steps
                compare, Difference            how much more or less one plan takes than another
                compare_branches, Comparison   whether it pays to run branches at the same time
    recording   record, compare_recordings     records a step of any script; compares two recordings
                Recording, Verdict
    search      find_plans, SearchResult       the fastest plans that fit a number of devices
    draw.facts  shard_map, ShardMap            which rank holds which part of each parameter
    draw.notebook  html_of                     a plan, recipe, shard map, prediction or verdict as HTML for a notebook
    draw.report  report                        everything about a plan, as data and as one HTML file
    calls.placeholder  RemoteTensor, RowShard  tensors in place of values that this rank lacks, or has in part

Names are imported when they are first used, so that drawing a plan needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api import parallelize
    from meshwright.calls.placeholder import RemoteTensor, RowShard
    from meshwright.checkpoint.jobs import load_checkpoint, save_checkpoint
    from meshwright.checkpoint.load import LoadResult
    from meshwright.container import Branches
    from meshwright.draw.facts import ShardMap, shard_map
    from meshwright.draw.notebook import html_of
    from meshwright.draw.report import report
    from meshwright.errors import (
        CheckpointError,
        Finding,
        PlanError,
        RankError,
        ReplicaError,
        RowsError,
        UnfrozenError,
    )
    from meshwright.hardware.correction import Correction
    from meshwright.layout import Partial, Replicate, Shard
    from meshwright.mesh import Mesh
    from meshwright.parity import Report, check
    from meshwright.plan import Plan
    from meshwright.planned import make_recipe
    from meshwright.prediction.branches.compare import compare_branches
    from meshwright.prediction.branches.comparison import Comparison
    from meshwright.prediction.difference import Difference, compare
    from meshwright.prediction.dryrun import DryRun, dry_run
    from meshwright.prediction.learning import MeasuredStep, correct_profile
    from meshwright.prediction.predict import measure, predict
    from meshwright.prediction.result import Prediction
    from meshwright.recipe import Recipe
    from meshwright.recording.compare import compare_recordings
    from meshwright.recording.record import Recording, record
    from meshwright.recording.verdict import Verdict
    from meshwright.runtime.job import Job
    from meshwright.search.find import find_plans
    from meshwright.search.result import SearchResult
    from meshwright.watch.watchdog import Watch
    from meshwright.workers.launch import launch
    from meshwright.workers.pool import local_workers

__version__ = "0.1.0"

_HOME = {
    "Finding": "errors", "PlanError": "errors", "CheckpointError": "errors", "ReplicaError": "errors",
    "RankError": "errors", "RowsError": "errors",
    "UnfrozenError": "errors",
    "Mesh": "mesh",
    "Shard": "layout", "Replicate": "layout", "Partial": "layout",
    "Plan": "plan",
    "Recipe": "recipe",
    "parallelize": "api", "make_recipe": "planned",
    "Branches": "container",
    "save_checkpoint": "checkpoint.jobs", "load_checkpoint": "checkpoint.jobs", "LoadResult": "checkpoint.load",
    "Job": "runtime.job",
    "local_workers": "workers.pool", "launch": "workers.launch",
    "Watch": "watch.watchdog",
    "check": "parity", "Report": "parity",
    "find_plans": "search.find", "SearchResult": "search.result",
    "predict": "prediction.predict", "measure": "prediction.predict", "Prediction": "prediction.result",
    "dry_run": "prediction.dryrun", "DryRun": "prediction.dryrun",
    "correct_profile": "prediction.learning", "MeasuredStep": "prediction.learning", "Correction": "hardware.correction",
    "compare": "prediction.difference", "Difference": "prediction.difference",
    "record": "recording.record", "Recording": "recording.record",
    "compare_recordings": "recording.compare", "Verdict": "recording.verdict",
    "compare_branches": "prediction.branches.compare", "Comparison": "prediction.branches.comparison",
    "shard_map": "draw.facts", "ShardMap": "draw.facts", "report": "draw.report",
    "html_of": "draw.notebook",
    "RemoteTensor": "calls.placeholder", "RowShard": "calls.placeholder",
}  # fmt: skip

__all__ = [
    "Branches",
    "CheckpointError",
    "Comparison",
    "Correction",
    "Difference",
    "DryRun",
    "Finding",
    "Job",
    "LoadResult",
    "MeasuredStep",
    "Mesh",
    "Partial",
    "Plan",
    "PlanError",
    "Prediction",
    "RankError",
    "Recipe",
    "Recording",
    "RemoteTensor",
    "ReplicaError",
    "Replicate",
    "Report",
    "RowShard",
    "RowsError",
    "SearchResult",
    "Shard",
    "ShardMap",
    "UnfrozenError",
    "Verdict",
    "Watch",
    "check",
    "compare",
    "compare_branches",
    "compare_recordings",
    "correct_profile",
    "dry_run",
    "find_plans",
    "html_of",
    "launch",
    "load_checkpoint",
    "local_workers",
    "make_recipe",
    "measure",
    "parallelize",
    "predict",
    "record",
    "report",
    "save_checkpoint",
    "shard_map",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module(f"meshwright.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
