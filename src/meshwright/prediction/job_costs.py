"""``job_costs``: what a job takes on the host, from jobs of a small model: one process, and two.

Its tensors are so small that nearly all is the host's. A rehearsal counts what each job calls; one job after another has one
thing more, and what it takes longer is that thing's:

| what is run | seconds of a rank's main thread | gives |
| --- | --- | --- |
| the model, without a job | F = functions · host + device; B likewise | host, host_backward |
| a job, 4 microbatches less one | 3 (F + B + 2 job_action) | job_action |
| a job, one microbatch | F + B + 2 job_action + job_step | job_step |
| over dp_shard=2 | that of its functions + gathers and reductions · host_unit | host_unit |
| clip and optimizer, alone; over dp_shard=2 | functions · host_… + device | host_update; host_sharded |
| over tp=2 | that of its functions + collectives · host_collective | host_collective |

The clock is that of the main thread, which stands while it waits for a core or for another rank; what a backend's threads take
is the link's (``hardware.exchange``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.hardware.meter import short
from meshwright.hardware.profile import Profile
from meshwright.mesh import Mesh
from meshwright.plan import Plan
from meshwright.planned import make_job
from meshwright.prediction.clock import Clock, last_step
from meshwright.prediction.rehearsal import rehearsal_of, rehearse
from meshwright.prediction.trace import Collective, Op
from meshwright.runtime.rows.batch import copied
from meshwright.runtime.rows.microbatches import rows_of_rank

if TYPE_CHECKING:
    from meshwright.workers.pool import LocalWorkers

WORDS, WIDTH, HEADS, DEPTH, TOKENS, ROWS = 64, 32, 4, 4, 16, 4
WARM, STEPS = 5, 15  # steps before those that are timed, which record blocks; steps that are timed
HOST = (
    "host",
    "host_backward",
    "host_collective",
    "host_unit",
    "host_update",
    "host_sharded",
    "job_call",
    "job_step",
    "job_action",
)


class Block(nn.Module):
    """Attention and an MLP, as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (one(h).view(rows, length, HEADS, -1).transpose(1, 2) for one in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Small(nn.Module):
    """A decoder that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        for block in self.blocks:
            h = block(h)
        loss: Tensor = functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())
        return loss


def job_costs(profile: Profile, workers: LocalWorkers, steps: int = STEPS) -> Profile:
    """The profile with what the host takes. About 15 seconds.

    Args:
        profile: of this machine, its link measured.
        workers: at least two, with as many threads as the profile's devices have.
        steps: of each job, which are timed.
    """
    forward, backward = workers.run(_plain, steps, ranks=1)[0]
    alone, many, shards, tp = (_Ran.of(workers, profile, steps, **plan) for plan in (
        {"mesh": "dp_shard=1"}, {"mesh": "dp_shard=1", "microbatches": 4}, {"mesh": "dp_shard=2"}, {"mesh": "tp=2"},
    ))  # fmt: skip
    host = max(0.0, forward - alone.device["F"]) / alone.functions["F"]
    back = max(0.0, backward - alone.device["B"]) / alone.functions["B"]
    action = max(0.0, many.step - alone.step - many.plain(host, back) + alone.plain(host, back)) / (2 * 3)
    step = max(0.0, alone.step - alone.plain(host, back) - 2 * action)

    def called(run: _Ran) -> float:
        """Seconds of a collective."""
        more = run.step - run.plain(host, back) - 2 * action - step
        return max(0.0, more) / run.collectives

    update, sharded = (max(0.0, run.update - run.device["update"]) / run.functions["update"] for run in (alone, shards))
    host_seconds: dict[str, float] = {
        "host": host, "host_backward": back, "job_action": action, "job_step": step, "host_unit": called(shards),
        "host_collective": called(tp), "host_update": update, "host_sharded": sharded,
    }  # fmt: skip
    return _with(profile, {name: short(seconds) for name, seconds in host_seconds.items()})


def _with(profile: Profile, seconds: dict[str, Any]) -> Profile:
    return replace(profile, **seconds)


@dataclass(frozen=True)
class _Ran:
    """A job's seconds, and what a rehearsal says that it calls.

    Attributes:
        step, update: seconds of forwards and backwards, and of clip and optimizer.
        functions: F, B and update → how many there are; ``device``: and what they take on the device.
        collectives: of forwards and backwards.
    """

    step: float
    update: float
    functions: dict[str, int]
    device: dict[str, float]
    collectives: int

    @classmethod
    def of(cls, workers: LocalWorkers, profile: Profile, steps: int, **settings: Any) -> _Ran:
        plan = Plan.parse(settings)
        ids = torch.arange(ROWS * TOKENS * (plan.microbatches or 1)).reshape(-1, TOKENS) % WORDS
        measured = workers.run(_job, plan, ids, steps, ranks=plan.mesh.size)
        trace = rehearse(rehearsal_of(Small, (ids,), plan, _itself, torch.optim.AdamW, 1.0), 0)
        hostless = _with(profile, dict.fromkeys(HOST, 0.0))
        functions, device, collectives = dict.fromkeys(_KINDS, 0), dict.fromkeys(_KINDS, 0.0), 0
        for (label, events), phase in zip(last_step(trace), Clock(hostless, plan.mesh).phases(trace), strict=True):
            kind = "update" if label in ("clip", "optimizer") else str(getattr(label, "kind", ""))
            if kind in _KINDS:
                functions[kind] += sum(isinstance(event, Op) for event in events)
                device[kind] += phase.spent.device.seconds
                collectives += kind != "update" and sum(_counts(event, plan.mesh) for event in events)
        step, update = (statistics.mean(times) for times in zip(*measured, strict=True))
        return cls(step, update, functions, device, collectives)

    def plain(self, host: float, backward: float) -> float:
        """Seconds of its functions in forwards and backwards."""
        return self.functions["F"] * host + self.functions["B"] * backward + self.device["F"] + self.device["B"]


_KINDS = ("F", "B", "update")


def _counts(event: object, mesh: Mesh) -> bool:
    return isinstance(event, Collective) and len(event.ranks) == mesh.size > 1


def _itself(output: Any) -> Any:
    return output


# --- on a worker ------------------------------------------------------------------------------------------------------


def _plain(steps: int) -> tuple[float, float]:
    """Seconds of a forward and a backward of the model itself."""
    model, ids = Small(), torch.arange(ROWS * TOKENS).reshape(-1, TOKENS) % WORDS

    def step() -> list[float]:
        model.zero_grad()
        losses: list[Tensor] = []
        return _thread_seconds([lambda: losses.append(model(ids)), lambda: losses[0].backward()])

    forward, backward = _medians(step, steps)
    return forward, backward


def _job(plan: Plan, ids: Tensor, steps: int) -> tuple[float, float]:
    """Seconds of a job's step, and of its clip and optimizer."""
    job = make_job(Small, plan.replace(verify=0), batch=(ids,), loss=_itself)
    rows = copied(rows_of_rank((ids,), job.recipe, job.rank))
    optimizer = torch.optim.AdamW(job.parameters())

    def update() -> None:
        job.clip_grad_norm_(1.0)
        optimizer.step()

    def step() -> list[float]:
        seconds = _thread_seconds([lambda: job.step(rows), update])
        optimizer.zero_grad()
        return seconds

    forward_and_backward, updating = _medians(step, steps)
    return forward_and_backward, updating


def _medians(step: Callable[[], list[float]], steps: int) -> list[float]:
    """Of each part of some steps, after some that warm up."""
    times = [step() for _ in range(WARM + steps)][WARM:]
    return [statistics.median(part) for part in zip(*times, strict=True)]


def _thread_seconds(parts: Sequence[Callable[[], object]]) -> list[float]:
    seconds = []
    for part in parts:
        began = time.thread_time()
        part()
        seconds.append(time.thread_time() - began)
    return seconds
