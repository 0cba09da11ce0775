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
        self.register_buffer("seen", torch.zeros(7))
        self.gain = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        h = h + self.down(torch.tanh(self.up(self.norm(h)))) * self.gain
        if self.training:
            self.seen.mul_(0.9).add_(self.norm.weight.detach(), alpha=0.1)
        return (self.head(h + self.seen * 0.01) * self.scale).square().mean()


class Attending(nn.Module):
    """q, k and v in one parameter, three heads, and a table that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 12), nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)  # a bias of keys has no gradient
        self.mlp = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12, bias=False))
        self.head = nn.Linear(12, 9, bias=False)
        self.head.weight = self.table.weight
        self.gain = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        x = self.norm(h)
        h = h + self.attention(x, x, x, need_weights=False)[0] * self.gain
        return F.cross_entropy(self.head(h + self.mlp(h))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


MODELS: tuple[type[nn.Module], ...] = (Net, Attending)


def batch(number: int, rows: int = 6) -> Tensor:
    return torch.randint(9, (rows, 3), generator=torch.Generator().manual_seed(number))


@dataclass
class Run:
    """A script as it runs.

    Attributes:
        module: the model; ``parameters``: those that this rank has, by name.
        step: forward and backward of a whole batch, of which it takes this rank's rows; ``evaluate``: a forward.
        clip: scales all gradients to a norm of at most a number, and returns the norm before.
        save, load: of a checkpoint: parameters and the optimizer's state.
        targets: the parameters of another model of the same kind, by name; ``judge``: a forward of it.
        optimizer: of the parameters; ``kept``: a tensor like each parameter, by name.
        state, memory: copies of the model's state and of the optimizer's; ``saved``: whether there is a checkpoint.
    """

    module: nn.Module
    parameters: dict[str, Any]
    step: Step
    evaluate: Step
    clip: Callable[[float], Any]
    save: Callable[[Any], None]
    load: Callable[[Any], Any]
    targets: dict[str, Any]
    judge: Step
    optimizer: Any = None
    scheduler: Any = None
    kept: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    saved: bool = False
    told: list[float] = field(default_factory=list)

    def restart(self, kind: int) -> None:
        """A new optimizer of a kind, with two groups."""
        groups: dict[int, list[Any]] = {0: [], 1: []}
        for name, p in self.parameters.items():
            groups[len(name) % 2].append(p)
        make, options = OPTIMIZERS[kind]
        self.optimizer = make([{"params": ps, "lr": 0.05 / (1 + g)} for g, ps in groups.items() if ps], **options)
        self.optimizer.step()  # without gradients: a scheduler warns before the first step
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.memory, self.saved = None, False


OPTIMIZERS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.SGD, {}),
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.NAdam, {}),
)


def script(seed: int, run: Run, names: list[str], actions: int = 14) -> None:
    """Runs a random script. ``names``: of all parameters of the model."""
    draw = random.Random(seed)
    run.restart(0)
    for number in range(actions):
        kind = draw.choice(KINDS)
        name, of_all, own = draw.choice(names), draw.choice(OF_ALL), draw.choice(OF_ONE)
        rows, steps, optimizer = draw.choice([6, 6, 4]), draw.random() < 0.7, draw.randrange(len(OPTIMIZERS))
        if kind == "step":
            run.told.append(float(run.step(batch(seed * 100 + number, rows))))
            if steps:
                run.optimizer.step()
                run.optimizer.zero_grad(set_to_none=number % 2 == 0)
        elif kind == "new optimizer":
            run.restart(optimizer)
        elif kind == "all":
            of_all(run)
        elif name in run.parameters:
            torch.manual_seed(number)
            own(run, name, run.parameters[name])
    run.told.append(float(run.step(batch(seed))))


KINDS = ("step",) * 4 + ("all",) * 4 + ("one",) * 9 + ("new optimizer",)

OfOne = Callable[[Run, str, Any], None]


def keep(run: Run, name: str, w: Any) -> None:
    run.kept[name] = w.detach().clone()


def keep_alias(run: Run, name: str, w: Any) -> None:
    run.kept[name] = w.data


def with_kept(act: Callable[[Run, str, Any], None]) -> OfOne:
    def action(run: Run, name: str, w: Any) -> None:
        if name in run.kept:
            act(run, name, w)

    return action


def assign(run: Run, name: str, w: Any) -> None:
    w.data = run.kept[name]


def swap(run: Run, name: str, w: Any) -> None:
    w.data, run.kept[name] = run.kept[name], w.data


def product(run: Run, name: str, w: Any) -> None:
    w.data = w.data * 0.9


def toggle(run: Run, name: str, w: Any) -> None:
    w.requires_grad_(not w.requires_grad)


def writes(write: Callable[[Any], Any]) -> OfOne:
    @torch.no_grad()
    def action(run: Run, name: str, w: Any) -> None:
        if w.ndim:
            write(w)

    return action


def of_matrix(write: Callable[[Any], Any]) -> OfOne:
    return writes(lambda w: write(w) if w.ndim == 2 else None)


def to_gradient(write: Callable[[Any], Any]) -> OfOne:
    @torch.no_grad()
    def action(run: Run, name: str, w: Any) -> None:
        if w.grad is not None and w.ndim:
            write(w)

    return action


def penalty(function: Callable[[Any, Any], Any]) -> OfOne:
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


def power_iteration(w: Any) -> None:
    u = torch.ones_like(w[:, 0])
    for _ in range(3):
        v = F.normalize(w.T @ u, dim=0)
        u = F.normalize(w @ v, dim=0)
    w.div_((u * (w @ v)).sum().abs() + 0.5)


@torch.no_grad()
def to_target(run: Run, name: str, w: Any) -> None:
    run.targets[name].lerp_(w, 0.2)


@torch.no_grad()
def from_target(run: Run, name: str, w: Any) -> None:
    w.copy_(run.targets[name])


def share_with_target(run: Run, name: str, w: Any) -> None:
    run.targets[name].data = w.data


OF_ONE: tuple[OfOne, ...] = (
    keep, keep, keep_alias, keep_alias, product, toggle, to_target, from_target, share_with_target,
    with_kept(assign),
    with_kept(assign),
    with_kept(swap),
    with_kept(swap),
    with_kept(lambda run, name, w: run.kept[name].lerp_(w.detach(), 0.3)),
    with_kept(lambda run, name, w: run.kept[name].mul_(0.9)),
    with_kept(torch.no_grad()(lambda run, name, w: w.copy_(run.kept[name]))),
    writes(lambda w: w[0].zero_()),
    writes(lambda w: w[1:].mul_(0.5)),
    writes(lambda w: set_item(w, w > 0.2, 0.1)),
    writes(lambda w: set_item(w, (..., 0), 0.3)),
    writes(lambda w: set_item(w, torch.tensor([0, 2]), 0.2)),
    writes(lambda w: set_item(w, torch.tensor([0, 2]), w[1:4:2])),
    writes(lambda w: w.chunk(2, -1)[0].neg_()),
    writes(lambda w: w.view(-1)[3:5].fill_(0.2)),
    writes(lambda w: w.clamp_(-0.5, 0.5)),
    writes(lambda w: w.div_(w.norm(dim=-1, keepdim=True) + 0.1)),
    writes(lambda w: w.sub_(w.mean())),
    writes(lambda w: w.sub_(w.mean(0, keepdim=True)).div_(w.std() + 0.2)),
    writes(lambda w: w.add_(torch.randn_like(w), alpha=0.1)),
    writes(lambda w: w.normal_(std=0.3)),
    writes(lambda w: nn.init.uniform_(w, -0.4, 0.4)),
    writes(lambda w: w.copy_(F.dropout(w, 0.3))),
    writes(lambda w: w.mul_((w.abs() > w.abs().mean()).to(w.dtype) * 0.5 + 0.5)),
    writes(lambda w: w.mul_(w.abs() >= w.abs().flatten().sort().values[2])),
    writes(lambda w: w.masked_fill_(w.abs() < 0.05, 0.0)),
    writes(lambda w: w.copy_(torch.where(w > 0, w, w * 0.5))),
    writes(lambda w: w.copy_(w.flip(0))),
    writes(lambda w: w.copy_(w.roll(1, 0))),
    writes(lambda w: w.index_fill_(0, torch.tensor([1]), 0.1)),
    writes(lambda w: w.copy_(w.cumsum(0) * 0.2)),
    writes(lambda w: w.addcmul_(w, w.sign(), value=-0.1)),
    of_matrix(lambda w: w.T[0].mul_(0.5)),
    of_matrix(lambda w: w.renorm_(2, 0, 0.7)),
    of_matrix(lambda w: w.copy_(torch.linalg.qr(w)[0] @ torch.linalg.qr(w)[1])),
    of_matrix(lambda w: w.div_(torch.linalg.svdvals(w)[0] + 0.5)),
    of_matrix(lambda w: w.copy_(w.triu())),
    of_matrix(lambda w: w.addmm_(w @ w.T, w.clone(), alpha=-0.05)),
    of_matrix(power_iteration),
    to_gradient(lambda w: w.grad.mul_(0.5)),
    to_gradient(lambda w: w.grad.add_(w, alpha=0.01)),
    to_gradient(lambda w: w.grad.zero_()),
    to_gradient(lambda w: w.grad[0].zero_()),
    to_gradient(lambda w: w.grad.nan_to_num_()),
    to_gradient(lambda w: w.addcdiv_(w.grad, w.grad.abs().sqrt() + 1, value=-0.01)),
    to_gradient(lambda w: w.sub_(w * (w * w.grad).sum() * 0.1)),
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
    penalty(lambda w, v: torch.logsumexp(w, 0).mean() + F.kl_div(w.log_softmax(-1), v.softmax(-1), reduction="batchmean")),
    penalty(lambda w, v: torch.dist(w, v) + torch.linalg.vector_norm(w, 1)),
    penalty(lambda w, v: (w.flatten() @ v.flatten()) + w.var(0).sum() if w.ndim == 2 else w.prod()),
    penalty(lambda w, v: (w.T @ w).square().sum() - w.square().sum() * 2 if w.ndim == 2 else w.sum()),
)  # fmt: skip


def evaluated(run: Run) -> None:
    run.told.append(float(run.evaluate(batch(7))))


def judged(run: Run) -> None:
    run.told.append(float(run.judge(batch(8))))


def evaluated_in_eval(run: Run) -> None:
    run.module.eval()
    evaluated(run)
    run.module.train()


def clip(run: Run) -> None:
    run.told.append(float(run.clip(0.05)))


def keep_state(run: Run) -> None:
    run.state = {name: value.clone() for name, value in run.module.state_dict().items()}


def load_state(run: Run) -> None:
    if run.state is not None:
        run.module.load_state_dict(run.state)


def keep_memory(run: Run) -> None:
    state = run.optimizer.state_dict()
    of_parameters = {
        p: {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}
        for p, values in state["state"].items()
    }
    run.memory = {**state, "state": of_parameters}


def load_memory(run: Run) -> None:
    if run.memory is not None:
        run.optimizer.load_state_dict(run.memory)


def save(run: Run) -> None:
    run.save(run.optimizer)
    run.saved = True


def load(run: Run) -> None:
    if run.saved:
        run.load(run.optimizer)


@torch.no_grad()
def decay(run: Run) -> None:
    torch._foreach_mul_([p for p in run.parameters.values() if p.ndim], 0.95)


@torch.no_grad()
def by_hand(run: Run) -> None:
    for p in run.parameters.values():
        if p.grad is not None:
            p.sub_(p.grad, alpha=0.05)
            p.grad = None


@torch.no_grad()
def all_to_targets(run: Run) -> None:
    for name, p in run.parameters.items():
        run.targets[name].mul_(0.7).add_(p, alpha=0.3)


def gain(run: Run) -> None:
    run.module.gain = 0.5 if run.module.gain == 1.0 else 1.0  # type: ignore[assignment]


def schedule(run: Run) -> None:
    run.scheduler.step()


def rate(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


OF_ALL: tuple[Callable[[Run], None], ...] = (
    evaluated, judged, evaluated_in_eval, clip, keep_state, load_state, keep_memory, load_memory, save, save, load, load,
    decay, by_hand, all_to_targets, gain, schedule, rate,
)  # fmt: skip


def outcome(run: Run) -> dict[str, Any]:
    """What a script leaves: losses; parameters, gradients, what it keeps and the other model's parameters, whole."""
    found: dict[str, Any] = {f"told {i}": torch.tensor(value, dtype=torch.float64) for i, value in enumerate(run.told)}
    for name, p in run.parameters.items():
        found[name], found[f"gradient of {name}"] = whole(p), whole(p.grad)
        found[f"target of {name}"] = whole(run.targets[name])
        for key, value in run.optimizer.state.get(p, {}).items():
            found[f"{key} of {name}"] = whole(value) if isinstance(value, Tensor) else None
    return found | {f"kept for {name}": whole(value) for name, value in run.kept.items()}


def whole(t: Any) -> Tensor | None:
    if t is None:
        return None
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
