"""The planner against this machine: predicted and measured steps of many layouts, and what its choice costs.

    meshwright calibrate && python bench/planner.py [--keep] [--models decoder vision …] [--rounds 3] [--ranks 8]

For each model, on local processes of this machine (gloo, one thread each):

1. Each layout is predicted (`mw.predict`, hardware cpu-local), and `mw.find_plans` says which plan it would take.
2. All layouts, and the plan that was found, are run in turns, `--rounds` times, in an order drawn anew for each round: what
   else the machine does falls on all alike. Each turn makes a job, warms up, and times `--steps` steps; a layout's seconds are
   the median over the medians of its turns.
3. Reported: signed errors of seconds, their median, the rank correlation (Spearman), and the regret for 2, 4 and 8 devices:
   the seconds of the plan that was found over those of the fastest layout of as many that was measured, less one.

Beside the wall time stands what all ranks computed, over the cores that they can use: the least that a step takes, whatever
else runs, without what ranks wait for each other. On a busy machine that alone is worth comparing; each turn notes the load.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import raw
import torch
import torch.distributed as dist
from small_models import MODELS, Model

import meshwright as mw
from meshwright.amounts import duration_text, size_text
from meshwright.errors import PlanError
from meshwright.hardware.profile_file import CPU_LOCAL
from meshwright.hardware.reader import read_profile
from meshwright.plan import Plan
from meshwright.planned import make_job
from meshwright.runtime.rows.batch import copied, plain
from meshwright.runtime.rows.microbatches import rows_of, rows_of_rank
from meshwright.workers.pool import LocalWorkers, WorkerError

WARM = 5  # steps before those that are timed: in the first rows are tried, in the next two blocks are recorded
FOUND = "found by find_plans"
FOUR = ["decoder", "vision", "U-Net", "two towers, two rows"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {"mesh": "dp_shard=1"},
    "dp_replicate=2": {"mesh": "dp_replicate=2"},
    "dp_shard=2": {"mesh": "dp_shard=2"},
    "tp=2": {"mesh": "tp=2"},
    "pp=2": {"mesh": "pp=2", "microbatches": 4},
    "dp_shard=4": {"mesh": "dp_shard=4"},
    "tp=4": {"mesh": "tp=4"},
    "dp_shard=2,tp=2": {"mesh": "dp_shard=2,tp=2"},
    "dp_replicate=2,dp_shard=2": {"mesh": "dp_replicate=2,dp_shard=2"},
    "pp=2,dp_shard=2": {"mesh": "pp=2,dp_shard=2", "microbatches": 4},
    "pp=2,tp=2": {"mesh": "pp=2,tp=2", "microbatches": 4},
    "dp_shard=8": {"mesh": "dp_shard=8"},
    "dp_shard=4,tp=2": {"mesh": "dp_shard=4,tp=2"},
    "dp_shard=2,tp=4": {"mesh": "dp_shard=2,tp=4"},
    "pp=2,dp_shard=4": {"mesh": "pp=2,dp_shard=4", "microbatches": 2},
    "dp_shard=2, recompute": {"mesh": "dp_shard=2", "recompute": "blocks"},
}
BRANCHES: dict[str, dict[str, Any]] = {
    "tp=2, branches": {"mesh": "tp=2", "branches": "auto"},
    "tp=4, branches": {"mesh": "tp=4", "branches": "auto"},
    "dp_shard=2,tp=2, branches": {"mesh": "dp_shard=2,tp=2", "branches": "auto"},
    "dp_replicate=2,tp=2, branches": {"mesh": "dp_replicate=2,tp=2", "branches": "auto"},
}
"""Layouts of models whose parts can run at the same time."""


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=FOUR)
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--ranks", type=int, default=8, help="processes at most")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each layout")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a turn may take")
    parser.add_argument("--keep", action="store_true", help="write docs/bench/planner.json")
    chosen = parser.parse_args()
    profile = read_profile(CPU_LOCAL)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}; profile of {profile.date}"
    )
    samples: dict[str, Any] = {"profile": profile.text(), "cores": os.cpu_count() or 1, "models": {}}
    with mw.local_workers(chosen.ranks) as workers:
        for name in chosen.models:
            print(f"\n{name}", flush=True)
            one = _model(MODELS[name], chosen, workers)
            samples["models"][name] = one
            _print(one, samples["cores"])
    for line in _summary(samples):
        print(line)
    for name, one in samples["models"].items():
        for size, (more, choice, fastest) in regrets(one).items():
            print(f"{name}, {size} devices: {choice} ({one[choice]['plan']['mesh']}) takes {more:+.1%} of {fastest}")
    if chosen.keep:
        print(raw.keep("planner", samples))


def _model(model: Model, chosen: argparse.Namespace, workers: LocalWorkers) -> dict[str, Any]:
    """What is predicted and measured of a model: layout → its numbers."""
    batch, layouts = plain(model.batch()), {name: {**LAYOUTS[name], **model.settings} for name in chosen.layouts}
    if model.branches:
        layouts |= {name: {**plan, **model.settings} for name, plan in BRANCHES.items()}
    predicted = {
        name: one for name, plan in layouts.items() if (one := _predicted(model, batch, name, plan, chosen.ranks))
    }
    for devices in _sizes(chosen.ranks):
        try:
            found = mw.find_plans(model.build, batch, devices=devices, hardware=CPU_LOCAL, loss=model.loss, verify=True)
        except PlanError as problem:
            print(f"  find_plans for {devices}: {str(problem).splitlines()[-1]}")
            continue
        best = found.plans[0]
        plan = best.plan.settings() | {"precision": best.plan.precision}
        predicted[f"{FOUND} for {devices}"] = _record(plan, best.prediction, best.seconds)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in predicted}
    for number in range(chosen.rounds):
        order = random.Random(number).sample(list(predicted), len(predicted))
        for name in order:
            if turn := _turn(model, batch, predicted[name]["plan"], chosen, workers):
                turns[name].append(turn)
    return {name: one | {"turns": turns[name]} for name, one in predicted.items() if turns[name]}


def _sizes(ranks: int) -> list[int]:
    """Powers of two up to so many ranks, from 2."""
    return [2**i for i in range(1, ranks.bit_length()) if 2**i <= ranks]


def _predicted(model: Model, batch: Any, name: str, plan: dict[str, Any], ranks: int) -> dict[str, Any] | None:
    parsed = Plan.parse(plan)
    if parsed.mesh.size > ranks or rows_of(batch) % (parsed.mesh.data_size * (parsed.microbatches or 1)):
        return None
    try:
        prediction = mw.predict(model.build, batch, parsed, hardware=CPU_LOCAL, loss=model.loss)
    except PlanError as problem:
        print(f"  {name}: {str(problem).splitlines()[-1]}")
        return None
    return _record(plan, prediction, prediction.seconds.seconds)


def _record(plan: dict[str, Any], prediction: Any, seconds: float) -> dict[str, Any]:
    peaks = {} if prediction is None else {
        str(rank): prediction.memory(role.rank).peak for role in prediction.roles for rank in role.ranks
    }  # fmt: skip
    terms = {} if prediction is None else dict(prediction.seconds.waterfall)
    low, high = (0.0, 0.0) if prediction is None else (prediction.seconds.low, prediction.seconds.high)
    return {"plan": plan, "predicted": seconds, "low": low, "high": high, "terms": terms, "peak": peaks}


def _turn(
    model: Model, batch: Any, plan: dict[str, Any], chosen: argparse.Namespace, workers: LocalWorkers
) -> dict[str, Any] | None:
    """One turn of a layout: seconds of each step, of the slowest rank; what all ranks computed; the machine's load."""
    parsed = Plan.parse(plan)
    try:
        ran = workers.run(
            timed, model.build, batch, parsed, model.loss, chosen.steps, ranks=parsed.mesh.size, timeout=chosen.timeout
        )
    except WorkerError as error:
        print(f"  {parsed.mesh}: {error.reason}", flush=True)
        return None
    return {
        "seconds": [max(step) for step in zip(*(one["seconds"] for one in ran), strict=True)],
        "computed": [sum(step) for step in zip(*(one["computed"] for one in ran), strict=True)],
        "load": os.getloadavg()[0],
    }


def timed(build: Any, batch: Any, plan: Plan, loss: Any, steps: int) -> dict[str, list[float]]:
    """Runs on every rank: seconds of steps from barrier to barrier, and of this process's own computation."""
    job = make_job(build, plan.replace(verify=0, weights="drawn"), batch=batch, loss=loss)
    rows = copied(rows_of_rank(batch, job.recipe, job.rank))
    optimizer = torch.optim.AdamW(job.parameters())
    times: dict[str, list[float]] = {"seconds": [], "computed": []}
    for number in range(WARM + steps):
        dist.barrier()
        began, computed = time.perf_counter(), time.process_time()
        job.step(rows)
        job.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if number >= WARM:
            times["seconds"].append(time.perf_counter() - began)
            times["computed"].append(time.process_time() - computed)
    return times


# --- what follows from the samples ------------------------------------------------------------------------------------


def seconds_of(one: Mapping[str, Any]) -> float:
    """The median over turns of the median step."""
    return statistics.median(statistics.median(turn["seconds"]) for turn in one["turns"])


def least_of(one: Mapping[str, Any], cores: int) -> float:
    """What all ranks computed in a step, over the cores that they can use: the least that a step takes, whatever else runs."""
    computed = statistics.median(statistics.median(turn["computed"]) for turn in one["turns"])
    return computed / min(Plan.parse(one["plan"]).mesh.size, cores)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of two orders."""
    if len(a) < 2:
        return 1.0
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    """Of each value its place; equal ones share the mean of theirs."""
    places = sorted(values)
    return [statistics.mean(i for i, other in enumerate(places) if other == value) for value in values]


def regrets(one: Mapping[str, Any]) -> dict[str, tuple[float, str, str]]:
    """For each number of devices for which a plan was found: its measured seconds over those of the fastest layout of as many,
    less 1, and the names of both; 0 if both are one plan. "any": the same for what is predicted to be fastest of all.
    """
    of_size: dict[str, list[str]] = {}
    for name, of in one.items():
        of_size.setdefault(str(Plan.parse(of["plan"]).mesh.size), []).append(name)
    choices = {size: f"{FOUND} for {size}" for size in of_size if f"{FOUND} for {size}" in one}
    choices["any"], of_size["any"] = min(one, key=lambda name: one[name]["predicted"]), list(one)
    found = {}
    for size, choice in choices.items():
        fastest = min(of_size[size], key=lambda name: seconds_of(one[name]))
        more = 0.0 if _is_same(one[choice], one[fastest]) else seconds_of(one[choice]) / seconds_of(one[fastest]) - 1
        found[size] = more, choice, fastest
    return found


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two layouts are one plan: what differs in their seconds is the machine's."""
    first, second = (Plan.parse(of["plan"]) for of in (one, other))
    return first.replace(microbatches=first.microbatches or 1) == second.replace(microbatches=second.microbatches or 1)


def _print(one: Mapping[str, Any], cores: int) -> None:
    print(
        f"  {'layout':34}{'predicted':>11}{'measured':>11}{'error':>8}{'computed / cores':>18}{'error':>8}{'load':>7}  memory"
    )
    for name, of in sorted(one.items(), key=lambda item: seconds_of(item[1])):
        load = statistics.median(turn["load"] for turn in of["turns"])
        mesh = f" ({of['plan']['mesh']})" if name.startswith(FOUND) else ""
        peak = size_text(max(of["peak"].values())) if of["peak"] else ""
        cells = [f"  {name + mesh:34}", f"{duration_text(of['predicted']):>11}"]
        for seconds, width in ((seconds_of(of), 11), (least_of(of, cores), 18)):
            cells.append(f"{duration_text(seconds):>{width}}{of['predicted'] / seconds - 1:>+8.0%}")
        print("".join(cells), f"{load:6.1f}  {peak}", flush=True)


def _summary(samples: Mapping[str, Any]) -> list[str]:
    head, *rows = tables(samples)["summary"]
    return ["", *(", ".join(f"{title} {cell}" for title, cell in zip(head, row, strict=True) if title) for row in rows)]


def tables(samples: Mapping[str, Any]) -> dict[str, raw.Table]:
    """``summary``: a row for each model; and for each model the layouts, the fastest that was measured first."""
    summary = [[
        "model", "layouts", "median error", "mean, signed", "rank correlation", "median error of what is computed",
        "its rank correlation", "regret by devices", "load",
    ]]  # fmt: skip
    made: dict[str, raw.Table] = {"summary": summary}
    for name, one in samples["models"].items():
        pairs = [(of["predicted"], seconds_of(of)) for of in one.values()]
        computed = [(of["predicted"], least_of(of, samples["cores"])) for of in one.values()]
        errors, least = ([p / m - 1 for p, m in those] for those in (pairs, computed))
        loads = [turn["load"] for of in one.values() for turn in of["turns"]]
        summary.append([
            name, str(len(pairs)), f"{statistics.median(map(abs, errors)):.1%}", f"{statistics.mean(errors):+.1%}",
            f"{spearman(*map(list, zip(*pairs, strict=True))):.2f}", f"{statistics.median(map(abs, least)):.1%}",
            f"{spearman(*map(list, zip(*computed, strict=True))):.2f}",
            ", ".join(f"{size}: {more:.1%}" for size, (more, _, _) in regrets(one).items()), f"{statistics.median(loads):.1f}",
        ])  # fmt: skip
        rows = [["layout", "predicted", "measured", "error"]]
        for layout, of in sorted(one.items(), key=lambda item: seconds_of(item[1])):
            seconds = seconds_of(of)
            rows.append(
                [
                    layout,
                    duration_text(of["predicted"]),
                    duration_text(seconds),
                    f"{of['predicted'] / seconds - 1:+.0%}",
                ]
            )
        made[name] = rows
    return made


if __name__ == "__main__":
    main()
