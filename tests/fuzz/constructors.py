"""Random constructors: tensors are made, viewed, written in place and read, and some of them become parameters and buffers.

The same seed makes the same constructor. Torch's own generator is the only state that it shares with the world.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = 30_000  # elements
REFUSED = (RuntimeError, IndexError, ValueError, TypeError)  # what torch or NumPy says of a function that does not fit


class Constructor:
    """``build()`` of a random module.

    Args:
        seed: which; ``size``: of its larger dims.

    Attributes:
        refused: the steps that torch or NumPy refused in the last run. A function that is deferred may be refused later.
    """

    def __init__(self, seed: int, size: int = 40) -> None:
        self._seed, self._size = seed, size

    def __call__(self) -> nn.Module:
        self._draw = random.Random(self._seed)
        self._tensors, self.refused = [self._new()], list[int]()
        with torch.no_grad():
            for number in range(self._draw.randint(3, 14)):
                self._step(number)
            return self._module()

    def _step(self, number: int) -> None:
        kind = self._draw.random()
        try:
            if kind < 0.25:
                self._tensors.append(self._new())
            elif kind < 0.45:
                self._tensors.append(self._one_of(VIEWS)(self._any()))
            elif kind < 0.75:
                self._one_of(WRITES)(self._any(), self._any())
            else:
                result = self._one_of(FUNCTIONS)(self._any(), self._any())
                self._tensors += [result] if result.numel() < LARGEST else []
        except REFUSED:
            self.refused.append(number)

    def _any(self) -> Tensor:
        return self._draw.choice(self._tensors)

    def _one_of(self, table: tuple[Callable[..., Tensor], ...]) -> Callable[..., Tensor]:
        return self._draw.choice(table)

    def _new(self) -> Tensor:
        rows, columns = self._draw.choice([self._size, self._size // 2, 7, 3]), self._draw.choice([self._size, 20, 5])
        return self._one_of(MADE)(rows, columns)

    def _module(self) -> nn.Module:
        module = nn.Module()
        for i, t in enumerate(t for t in self._tensors if t.is_floating_point()):
            kind = self._draw.randrange(4)
            if kind == 0:
                module.register_parameter(f"parameter{i}", nn.Parameter(t.detach()))
            elif kind == 1:
                module.register_buffer(f"buffer{i}", t.detach())
            elif kind == 2:
                setattr(module, f"kept{i}", [t.detach()])
            else:
                copied = nn.Parameter(torch.empty(t.shape, dtype=t.dtype))
                copied.data.copy_(t)
                module.register_parameter(f"copied{i}", copied)
        return module


def _by_numpy(t: Tensor, other: Tensor) -> Tensor:
    values = t.detach().numpy()
    values[...] = values * 2 + 1
    return t


def _part_of(t: Tensor, other: Tensor) -> Tensor:
    """Copies as much of ``other`` as fits."""
    rows = min(len(t), len(other))
    t, other = t[:rows], other[:rows]
    while t.dim() > other.dim():
        t = t[..., 0]
    while other.dim() > t.dim():
        other = other[..., 0]
    columns = min(t.shape[-1], other.shape[-1])
    return t[..., :columns].copy_(other[..., :columns])


def _itself(t: Tensor, other: Tensor) -> Tensor:
    """As ``load_state_dict`` of what ``state_dict`` gave."""
    return t.copy_(t.detach())


def _negated_if_positive(t: Tensor, other: Tensor) -> Tensor:
    return t.neg_() if t.sum() > 0 else t.add_(1)


def _where_large(t: Tensor, other: Tensor) -> Tensor:
    t[t > 0.3] = 0.1
    return t


def _saved(t: Tensor, other: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file)


MADE = (
    torch.randn,
    torch.rand,
    torch.zeros,
    torch.eye,
    lambda n, m: torch.arange(n * m, dtype=torch.float32).view(n, m) / 7,
    lambda n, m: torch.empty(n, m).uniform_(-1, 1),
    lambda n, m: nn.Linear(m, n).weight,
    lambda n, m: nn.Embedding(n, m, padding_idx=0).weight.data,
    lambda n, m: torch.from_numpy(np.random.RandomState(n).randn(n, m).astype("float32")),
    lambda n, m: nn.init.xavier_normal_(torch.empty(n, m)),
    lambda n, m: torch.full((n, m), 0.5),
    lambda n, m: torch.randperm(n * m).float().view(n, m),
)
VIEWS = (
    torch.t,
    torch.flatten,
    torch.detach,
    torch.diagonal,
    lambda t: t[1:],
    lambda t: t[..., ::2],
    lambda t: t.data,
    lambda t: t[None],
    lambda t: t.narrow(-1, 0, max(1, t.shape[-1] // 2)),
    lambda t: t.chunk(2, -1)[-1],
    lambda t: t.expand(2, *t.shape)[1],
    lambda t: t.reshape(-1),
    lambda t: t.unbind(0)[-1][None],
)
WRITES = (
    lambda t, o: t.mul_(0.5),
    lambda t, o: t.add_(1),
    lambda t, o: t.normal_(),
    lambda t, o: t.uniform_(-2, 2),
    lambda t, o: t.clamp_(-0.5, 0.5),
    lambda t, o: t.zero_(),
    lambda t, o: t.bernoulli_(0.5),
    lambda t, o: t.exponential_(),
    lambda t, o: t.copy_(torch.randn_like(t)),
    lambda t, o: t.sub_(t.mean()),
    lambda t, o: t.div_(t.norm() + 1),
    lambda t, o: t.cumsum_(0),
    lambda t, o: t.masked_fill_(t < 0, 0.0),
    lambda t, o: t.index_fill_(0, torch.tensor([0]), 3.0),
    lambda t, o: t.index_put_((torch.randint(0, len(t), (2,)),), torch.randn(())),
    lambda t, o: t.mul_(1 + abs(float(t.flatten()[0])) % 1),
    lambda t, o: nn.init.trunc_normal_(t, std=0.02),
    lambda t, o: torch.add(t, 1, out=t),
    lambda t, o: torch.add(o, t.flatten()[0], out=t),
    _by_numpy,
    _part_of,
    _part_of,
    _itself,
    _negated_if_positive,
    _where_large,
)
FUNCTIONS = (
    lambda t, o: t.clone(),
    lambda t, o: t * 2,
    lambda t, o: torch.cat([t.flatten(), o.flatten()]),
    lambda t, o: t.flatten(1) @ t.flatten(1).t(),
    lambda t, o: torch.where(t > 0, t, -t),
    lambda t, o: t.sort(-1)[0],
    lambda t, o: t.cumsum(-1),
    lambda t, o: copy.deepcopy(t.detach()),
    lambda t, o: torch.stack([t, t]),
    lambda t, o: t.softmax(-1),
    lambda t, o: torch.from_numpy(t.detach().numpy().copy()),
    lambda t, o: t.bfloat16().float(),
    lambda t, o: t.half(),
    lambda t, o: t.double(),
    lambda t, o: t.flip(0),
    lambda t, o: t[torch.randperm(len(t))],
    lambda t, o: t.gather(0, torch.zeros_like(t, dtype=torch.long)),
    lambda t, o: torch.tensor(t.tolist()),
    lambda t, o: torch.randn_like(t),
    lambda t, o: F.dropout(t, 0.5),
    lambda t, o: torch.kron(t[:2], o[:2]),
    _saved,
)
