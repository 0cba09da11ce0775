"""``job_costs``: measures the host's seconds of a job, with jobs of a small model on one and two processes.

The tensors of the narrow model are so small that nearly all time is the host's. A rehearsal counts the functions and
collectives of each job. Each run in this table has one cost more than the runs before it, so that the difference is this cost:

| run | seconds of a rank's main thread | measures |
| --- | --- | --- |
| the model, without a job, beside each job | F = functions · host + device; B likewise | host, host_backward |
| a job: 4 microbatches minus 1 | 3 (F + B + 2 job_action) | job_action |
| a job, one microbatch | F + B + 2 job_action + job_step | job_step |
| a job over dp_shard=2 | as one process + spans of FSDP2's hooks · host_unit / 4 | host_unit |
| clip and optimizer: one process, a narrow and a wide model | functions · host_update + update_fraction · device | both |
| clip and optimizer: dp_shard=2 | functions · host_sharded + update_fraction · device | host_sharded |
| a job over tp=2 | as one process + collectives · host_collective | host_collective |
| a job over pp=2, 4 microbatches; mean of both ranks | as 4 microbatches, halved + sends and receives · host_send | host_send |

In each run, steps of the model and of the job take turns: the speed of a machine that others share changes within seconds, and
these costs are small differences. The clock is CPU time of the main thread, which stops while the thread waits for a core or
for another rank. The CPU time of a backend's threads is part of the link (``hardware.exchange``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.hardware.meter import four_digits
from meshwright.hardware.profile import Profile
from meshwright.hardware.text import HOST
from meshwright.mesh import Mesh
from meshwright.plan import Plan
from meshwright.planned import make_job
from meshwright.prediction.clock import SPAN, SPANS_OF_UNIT, UPDATES, Clock, last_step
from meshwright.prediction.rehearsal import rehearsal_of, rehearse
from meshwright.prediction.trace import Collective, Op
from meshwright.runtime.rows.batch import copied
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.runtime.weights.fsdp import holds_dtensors

if TYPE_CHECKING:
    from meshwright.workers.pool import LocalWorkers

WORDS, WIDTH, HEADS, DEPTH, TOKENS, ROWS = 64, 32, 4, 4, 16, 4
WIDE = 256  # the width of the model whose parameters take longer to update than the host
MICROBATCHES = 4
WARM, STEPS = 5, 15  # steps before the timed ones, in which blocks are recorded; timed steps
_LEAST_HOST = 1e-8  # seconds of a function on the host
_LEAST_FRACTION = 0.05


class Block(nn.Module):
    """A usual transformer block: attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (one(h).view(rows, length, HEADS, -1).transpose(1, 2) for one in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Small(nn.Module):
    """A small decoder that returns its loss."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        for block in self.blocks:
            h = block(h)
        loss: Tensor = functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())
        return loss


def host_seconds(seconds: float, device: float, functions: float) -> float:
    """The host's seconds of one function: what a pass took beside its device, over its number of functions.

    Never 0, which no profile may say: on a busy machine the functions alone may have taken longer than the pass.
    """
    return max(_LEAST_HOST, (seconds - device) / functions)


def job_costs(profile: Profile, workers: LocalWorkers, steps: int = STEPS) -> Profile:
    """Measures the host's seconds of a job, and returns the profile with them. Takes about half a minute.

    Args:
        profile: the profile of this machine, with its measured link.
        workers: at least two workers, with as many threads as the profile's devices have.
        steps: number of timed steps of each job.
    """
    run = partial(_JobRun.measured, workers, profile, steps)
    single, microbatched = run(mesh="dp_shard=1"), run(mesh="dp_shard=1", microbatches=MICROBATCHES)
    sharded, tensor_parallel = run(mesh="dp_shard=2"), run(mesh="tp=2")
    pipelined = run(mesh="pp=2", microbatches=MICROBATCHES)
    wide = run(WIDE, mesh="dp_shard=1")
    runs = single, microbatched, sharded, tensor_parallel, pipelined
    host, host_backward = (statistics.median(run.host_of(kind, single) for run in runs) for kind in ("F", "B"))
    once, often = (run.beside_functions(single) for run in (single, microbatched))
    job_action = max(0.0, often - once) / (2 * (MICROBATCHES - 1))
    job_step = max(0.0, once - 2 * job_action)

    def seconds_of_each(calls: float, run: _JobRun, microbatches: int = 1) -> float:
        """The host's seconds of one of these collectives, sends or units in a run, which take all time besides functions."""
        in_calls = run.beside_functions(single) - 2 * microbatches * job_action - job_step
        return max(0.0, in_calls) / calls

    update_fraction = fraction_of_updates(single, wide)
    host_update, host_sharded = (
        max(0.0, run.update - update_fraction * run.device["update"]) / run.functions["update"]
        for run in (single, sharded)
    )
    fields: dict[str, float] = {
        "host": host,
        "host_backward": host_backward,
        "job_action": job_action,
        "job_step": job_step,
        "host_unit": seconds_of_each(sharded.spans / SPANS_OF_UNIT, sharded),
        "host_send": seconds_of_each(pipelined.collectives, pipelined, MICROBATCHES),
        "host_collective": seconds_of_each(tensor_parallel.collectives, tensor_parallel),
        "host_update": host_update,
        "host_sharded": host_sharded,
        "update_fraction": update_fraction,
    }
    return _with(profile, {name: four_digits(value) for name, value in fields.items()})


def fraction_of_updates(narrow: _JobRun, wide: _JobRun) -> float:
    """Seconds of clip and optimizer on the device, as a fraction of those that the profile says; at most 1, and above 0.

    Both models call as many functions, so that the difference between them is the device's.
    """
    device = wide.device["update"] - narrow.device["update"]
    return min(1.0, max(_LEAST_FRACTION, (wide.update - narrow.update) / device))


def _with(profile: Profile, fields: dict[str, Any]) -> Profile:
    """The profile with these fields replaced."""
    return replace(profile, **fields)


@dataclass(frozen=True, eq=False)
class _JobRun:
    """The measured seconds of a job's step, and the calls of this step by a rehearsal; means over ranks.

    Attributes:
        step: seconds of all forwards and backwards.
        update: seconds of clip and optimizer.
        functions: F (forwards), B (backwards) or update → number of functions.
        device: F, B or update → seconds of these functions on the device.
        collectives: number of collectives, sends and receives in forwards and backwards.
        spans: number of the spans of FSDP2's hooks there.
        model: F or B → seconds of a pass of the narrow model without a job, between the steps of the job.
    """

    step: float
    update: float
    functions: Mapping[str, float]
    device: Mapping[str, float]
    collectives: float
    spans: float
    model: Mapping[str, float]

    @classmethod
    def measured(
        cls, workers: LocalWorkers, profile: Profile, steps: int, width: int = WIDTH, **settings: Any
    ) -> _JobRun:
        """Runs a job of a model of this width under the plan with these settings, and rehearses it."""
        build, plan = partial(Small, width), Plan.parse(settings)
        ids = torch.arange(ROWS * TOKENS * (plan.microbatches or 1)).reshape(-1, TOKENS) % WORDS
        ranks = plan.mesh.size
        measured = workers.run(_time_job, build, plan, ids, steps, ranks=ranks)
        forward, backward, step, update = (statistics.mean(times) for times in zip(*measured, strict=True))
        rehearsal = rehearsal_of(build, (ids,), plan, _identity, torch.optim.AdamW, 1.0)
        hostless = _with(profile, dict.fromkeys(HOST, 0.0))
        clock = Clock(hostless, plan.mesh, dtensors=holds_dtensors(rehearsal.recipe))
        functions, device = dict.fromkeys(_PASSES, 0.0), dict.fromkeys(_PASSES, 0.0)
        collectives = spans = 0.0
        for rank in range(ranks):
            trace = rehearse(rehearsal, rank)
            for (label, events), phase in zip(last_step(trace), clock.phases(trace), strict=True):
                kind = "update" if label in UPDATES else str(getattr(label, "kind", ""))
                if kind in _PASSES:
                    functions[kind] += sum(isinstance(event, Op) for event in events) / ranks
                    device[kind] += phase.spent.device.seconds / ranks
                    spans += sum(isinstance(event, Op) and event.name == SPAN for event in events) / ranks
                collectives += (
                    kind != "update" and sum(_is_over_all_ranks(event, plan.mesh) for event in events) / ranks
                )
        return cls(step, update, functions, device, collectives, spans, {"F": forward, "B": backward})

    def host_of(self, kind: str, single: _JobRun) -> float:
        """Seconds of the host for a function in a forward (F) or backward (B) of the model without a job, whose functions are
        those of the run ``single``."""
        return host_seconds(self.model[kind], single.device[kind], single.functions[kind])

    def beside_functions(self, single: _JobRun) -> float:
        """Seconds of the step besides the functions in its forwards and backwards."""
        return self.step - sum(self.functions[k] * self.host_of(k, single) + self.device[k] for k in ("F", "B"))


_PASSES = ("F", "B", "update")


def _is_over_all_ranks(event: object, mesh: Mesh) -> bool:
    """Whether an event is a collective of all ranks of a mesh with several."""
    return isinstance(event, Collective) and len(event.ranks) == mesh.size > 1


def _identity(output: Any) -> Any:
    return output


# --- on a worker ------------------------------------------------------------------------------------------------------


def _time_job(build: Callable[[], nn.Module], plan: Plan, ids: Tensor, steps: int) -> list[float]:
    """Seconds of a forward and a backward of the narrow model without a job; of the forwards and backwards of a job's step; of
    clip and optimizer."""
    job = make_job(build, plan.replace(verify=0), batch=(ids,), loss=_identity)
    rows = copied(rows_of_rank((ids,), job.recipe, job.rank))
    optimizer = torch.optim.AdamW(job.parameters())
    model, model_ids = Small(), torch.arange(ROWS * TOKENS).reshape(-1, TOKENS) % WORDS
    losses: list[Tensor] = []

    def update() -> None:
        job.clip_grad_norm_(1.0)
        optimizer.step()

    def step() -> list[float]:
        passes = [lambda: losses.append(model(model_ids)), lambda: losses.pop().backward()]
        seconds = _thread_seconds([*passes, lambda: job.step(rows), update])
        model.zero_grad()
        optimizer.zero_grad()
        return seconds

    return _medians(step, steps)


def _medians(step: Callable[[], list[float]], steps: int) -> list[float]:
    """The median seconds of each part of a step, over ``steps`` steps after ``WARM`` others.

    ``step`` runs a step and returns the seconds of each of its parts.
    """
    times = [step() for _ in range(WARM + steps)][WARM:]
    return [statistics.median(part) for part in zip(*times, strict=True)]


def _thread_seconds(parts: Sequence[Callable[[], object]]) -> list[float]:
    """Calls each part, and returns the CPU seconds of this thread for it."""
    seconds = []
    for part in parts:
        began = time.thread_time()
        part()
        seconds.append(time.thread_time() - began)
    return seconds
