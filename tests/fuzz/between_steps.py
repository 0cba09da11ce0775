"""Random training scripts: what people do to parameters, gradients and optimizers between steps, in a random order.

The same seed makes the same script. It runs on one device, and on each rank of a job, with the parameters that the rank has.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Step = Callable[[Tensor], Any]


class Net(nn.Module):
    """Odd dims, a scalar, a table, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(9, 7), nn.Linear(7, 9), nn.Linear(9, 7)
        self.norm, self.scale, self.head = nn.LayerNorm(7), nn.Parameter(torch.ones(())), nn.Linear(7, 5)
        self.gain = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        h = h + self.down(torch.tanh(self.up(self.norm(h)))) * self.gain
        return (self.head(h) * self.scale).square().mean()


def batch(number: int, rows: int = 6) -> Tensor:
    return torch.randint(9, (rows, 3), generator=torch.Generator().manual_seed(number))


@dataclass
class Run:
    """A script as it runs.

    Attributes:
        module: the model; ``parameters``: those that this rank has, by name.
        step: forward and backward of a whole batch, of which it takes this rank's rows; ``evaluate``: a forward.
        clip: scales all gradients to a norm of at most a number, and returns the norm before.
        optimizer: of the parameters; ``kept``: a tensor like each parameter, by name.
        state: a copy of the model's state.
    """

    module: nn.Module
    parameters: dict[str, Any]
    step: Step
    evaluate: Step
    clip: Callable[[float], Any]
    optimizer: Any = None
    kept: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] | None = None
    told: list[float] = field(default_factory=list)

    def restart(self) -> None:
        made = (
            torch.optim.SGD
            if self.optimizer is None or isinstance(self.optimizer, torch.optim.AdamW)
            else torch.optim.AdamW
        )
        self.optimizer = made(self.parameters.values(), lr=0.05)


def script(seed: int, run: Run, names: list[str], actions: int = 14) -> None:
    """Runs a random script. ``names``: of all parameters of the model."""
    draw = random.Random(seed)
    run.restart()
    for number in range(actions):
        kind = draw.choice(KINDS)
        name, of_all = draw.choice(names), draw.choice(OF_ALL)
        own = draw.choice(OF_ONE)
        if kind == "step":
            run.told.append(float(run.step(batch(seed * 100 + number, draw.choice([6, 6, 4])))))
            if draw.random() < 0.7:
                run.optimizer.step()
                run.optimizer.zero_grad(set_to_none=draw.random() < 0.5)
        elif kind == "all":
            of_all(run)
        elif name in run.parameters:
            torch.manual_seed(number)
            own(run, name, run.parameters[name])
    run.told.append(float(run.step(batch(seed))))


KINDS = ("step", "step", "all", "one", "one", "one", "one", "one")


def keep(run: Run, name: str, w: Any) -> None:
    run.kept[name] = w.detach().clone()


def keep_alias(run: Run, name: str, w: Any) -> None:
    run.kept[name] = w.data


def assign(run: Run, name: str, w: Any) -> None:
    if name in run.kept:
        w.data = run.kept[name]


def swap(run: Run, name: str, w: Any) -> None:
    if name in run.kept:
        w.data, run.kept[name] = run.kept[name], w.data


def average(run: Run, name: str, w: Any) -> None:
    if name in run.kept:
        run.kept[name].lerp_(w.detach(), 0.3)


def scale_kept(run: Run, name: str, w: Any) -> None:
    if name in run.kept:
        run.kept[name].mul_(0.9)


@torch.no_grad()
def restore(run: Run, name: str, w: Any) -> None:
    if name in run.kept:
        w.copy_(run.kept[name])


def product(run: Run, name: str, w: Any) -> None:
    w.data = w.data * 0.9


def writes(write: Callable[[Any], Any]) -> Callable[[Run, str, Any], None]:
    @torch.no_grad()
    def action(run: Run, name: str, w: Any) -> None:
        if w.ndim:
            write(w)

    return action


def to_gradient(write: Callable[[Any], Any]) -> Callable[[Run, str, Any], None]:
    @torch.no_grad()
    def action(run: Run, name: str, w: Any) -> None:
        if w.grad is not None and w.ndim:
            write(w)

    return action


def penalty(function: Callable[[Any, Any], Any]) -> Callable[[Run, str, Any], None]:
    def action(run: Run, name: str, w: Any) -> None:
        if w.ndim and w.requires_grad:
            (function(w, run.kept.get(name, w).detach().cos()) * 0.1).backward()

    return action


def set_item(w: Any, where: Any, value: Any) -> None:
    w[where] = value


def new_gradient(w: Any) -> None:
    w.grad = w.grad.sign() * w.grad.abs().mean()


def unit_gradient(w: Any) -> None:
    w.grad.div_(w.grad.norm() + 1e-3)


def gradient_data(w: Any) -> None:
    w.grad.data = w.grad.data.clamp(-0.1, 0.1)


def toggle(run: Run, name: str, w: Any) -> None:
    w.requires_grad_(not w.requires_grad)


OF_ONE: tuple[Callable[[Run, str, Any], None], ...] = (
    keep, keep, keep_alias, keep_alias, assign, assign, swap, swap, average, scale_kept, restore, product, toggle,
    writes(lambda w: w[0].zero_()),
    writes(lambda w: w[1:].mul_(0.5)),
    writes(lambda w: set_item(w, w > 0.2, 0.1)),
    writes(lambda w: set_item(w, (..., 0), 0.3)),
    writes(lambda w: w.chunk(2, -1)[0].neg_()),
    writes(lambda w: w.clamp_(-0.5, 0.5)),
    writes(lambda w: w.div_(w.norm(dim=-1, keepdim=True) + 0.1)),
    writes(lambda w: w.sub_(w.mean())),
    writes(lambda w: w.add_(torch.randn_like(w), alpha=0.1)),
    writes(lambda w: w.normal_(std=0.3)),
    writes(lambda w: nn.init.uniform_(w, -0.4, 0.4)),
    writes(lambda w: w.copy_(F.dropout(w, 0.3))),
    to_gradient(lambda w: w.grad.mul_(0.5)),
    to_gradient(lambda w: w.grad.add_(w, alpha=0.01)),
    to_gradient(lambda w: w.grad.zero_()),
    to_gradient(lambda w: w.grad[0].zero_()),
    to_gradient(new_gradient),
    to_gradient(unit_gradient),
    to_gradient(gradient_data),
    penalty(F.mse_loss),
    penalty(F.smooth_l1_loss),
    penalty(lambda w, v: (w - v).square().sum().sqrt()),
    penalty(lambda w, v: w.norm(dim=0).sum()),
    penalty(lambda w, v: w.abs().amax() + w.std()),
    penalty(lambda w, v: (w.softmax(0) * v).sum()),
    penalty(lambda w, v: F.l1_loss(w, v) + F.cosine_similarity(w, v, dim=0).sum()),
)  # fmt: skip


def evaluated(run: Run) -> None:
    run.told.append(float(run.evaluate(batch(7))))


def clip(run: Run) -> None:
    run.told.append(float(run.clip(0.05)))


def save(run: Run) -> None:
    run.state = {name: value.clone() for name, value in run.module.state_dict().items()}


def load(run: Run) -> None:
    if run.state is not None:
        run.module.load_state_dict(run.state)


@torch.no_grad()
def decay(run: Run) -> None:
    torch._foreach_mul_([p for p in run.parameters.values() if p.ndim], 0.95)


@torch.no_grad()
def by_hand(run: Run) -> None:
    for p in run.parameters.values():
        if p.grad is not None:
            p.sub_(p.grad, alpha=0.05)
            p.grad = None


def gain(run: Run) -> None:
    run.module.gain = 0.5 if run.module.gain == 1.0 else 1.0  # type: ignore[assignment]


OF_ALL: tuple[Callable[[Run], None], ...] = (evaluated, clip, save, load, decay, by_hand, gain, Run.restart)


def outcome(run: Run) -> dict[str, Any]:
    """What a script leaves: losses; parameters, gradients and what it keeps, whole."""
    found: dict[str, Any] = {f"told {i}": torch.tensor(value, dtype=torch.float64) for i, value in enumerate(run.told)}
    for name, p in run.parameters.items():
        found[name], found[f"gradient of {name}"] = whole(p), whole(p.grad)
    return found | {f"kept for {name}": whole(value) for name, value in run.kept.items()}


def whole(t: Any) -> Tensor | None:
    if t is None:
        return None
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
