"""Functions that no rule knows, or that a rule does not fit: right by the fallback, and counted at the caller's line."""

from __future__ import annotations

from typing import Any

import torch
from harness import Make, Table
from torch import Tensor
from torch.nn import functional

CASES = Table()


class Doubled(torch.autograd.Function):
    """A function of someone's own, with a backward that is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return 2 * g * y, g * x


@CASES.add("cdist", fallback="cdist")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make(a, c), make(b, c)], lambda x, y: torch.cdist(x, y, p=3.0)


@CASES.add("qr", fallback="linalg_qr", partial=False)
def _(make: Make) -> Any:
    a = make.sizes(1)[0]
    return [make.normal(a + 2, a)], lambda x: [part.abs() for part in torch.linalg.qr(x)]


@CASES.add("fold", fallback="col2im")
def _(make: Make) -> Any:
    a, c = make.sizes(2)
    return [make(a, c * 4, 9)], lambda x: functional.fold(x, (4, 4), 2)


@CASES.add("unfold", fallback="im2col")
def _(make: Make) -> Any:
    a, c = make.sizes(2)
    return [make(a, c, 4, 4)], lambda x: functional.unfold(x, 2)


@CASES.add("a Function of someone's own", fallback="Doubled")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b), make(a, b)], lambda x, y: Doubled.apply(x, y)


kept = Doubled.apply  # as models do, when they are imported


@CASES.add("a Function's apply, kept when imported", fallback="Doubled")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b), make(a, b)], lambda x, y: kept(x, y)


@CASES.add("cumsum along the cut dim", fallback="cumsum")
def _(make: Make) -> Any:
    return [make(make.sizes(1)[0])], lambda x: x.cumsum(0)


@CASES.add("topk along the cut dim", fallback="topk")
def _(make: Make) -> Any:
    return [make.distinct(make.sizes(1, 3)[0])], lambda x: tuple(x.topk(2))


@CASES.add("gather, scatter", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor, i: Tensor, v: Tensor) -> Any:
        return (
            x.gather(1, i),
            x.scatter_add(1, i, v),
            torch.scatter(x, 1, i[:, :1], 0.5),
            x.scatter_reduce(1, i, v, "sum"),
            x.take_along_dim(i, 1),
            (x * 1).scatter_add_(1, i, v),
        )

    return [make(a, b), make.ints(b, a, b), make(a, b)], run


@CASES.add("numpy, tolist, item")
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor) -> Any:
        return (
            x.detach().tolist(),
            x.detach().numpy().sum(),
            x.sum().item() > 0,
            bool(x[0, 0] > 0),
            round(float(x[1, 1]), 9),
            f"{x.sum().item():.6f}",
        )

    return [make(a, b)], run


@CASES.add("batch_norm", rounds=2)
def _(make: Make) -> Any:
    a, c = make.sizes(2, 3)

    def run(x: Tensor, w: Tensor, b: Tensor) -> Any:
        mean, var = torch.zeros(c, dtype=torch.float64), torch.ones(c, dtype=torch.float64)
        return functional.batch_norm(x, mean, var, w, b, training=True), mean, var

    return [make.normal(a, c, 4), make(c), make(c)], run


@CASES.add("a mixture of experts", rounds=2)
def _(make: Make) -> Any:
    n, e, i, h = make.sizes(4, 3, 6)

    def run(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Any:
        weights, chosen = functional.softmax(functional.linear(x, router), -1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        mask = functional.one_hot(chosen, e).permute(2, 1, 0)
        for expert in range(e):
            place, token = torch.where(mask[expert])
            hidden = functional.linear(functional.silu(functional.linear(x[token], up[expert])), down[expert])
            out.index_add_(0, token, hidden * weights[token, place, None])
        return out

    return [make.normal(n, i), make.normal(e, i), make(e, h, i), make(e, i, h)], run


@CASES.add("recurrent")
def _(make: Make) -> Any:
    a, t, i, h = make.sizes(4, 2, 4)
    cell = torch.nn.GRU(i, h, batch_first=True, dtype=torch.float64)
    names = [name for name, _ in cell.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> Any:
        return torch.func.functional_call(cell, dict(zip(names, weights, strict=True)), (x,))

    return [make(a, t, i), *[make(*p.shape) for p in cell.parameters()]], run


@CASES.add("rarer functions", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        return (
            x.diagonal(0, 0, 1),
            torch.kron(x[0], x[0]),
            torch.outer(x[0, 0], x[0, 1]),
            torch.diff(x),
            torch.trapezoid(x),
            x.unfold(1, 2, 1),
            torch.meshgrid(x[0, 0], x[0, 1], indexing="ij"),
            torch.tensordot(x, x, 3),
            torch.fft.rfft(x).abs(),
            torch.linalg.multi_dot([x[0], x[0].T, x[0]]),
            functional.softmin(x, -1),
            functional.log_softmax(x, -1).exp(),
            torch.block_diag(x[0], x[1]),
            torch.hstack([x, x]),
            torch.vstack([x, x]),
            torch.dstack([x, x]),
            x.quantile(0.3, dim=1),
            torch.trace(x[0]),
            functional.prelu(x, x[0, :1, 0] * 0 + 0.2),
            torch.cross(x[..., :1].expand(a, b, 3), x[..., 1:2].expand(a, b, 3) + 1, dim=-1),
            torch.unique(x.detach()),
            torch.nonzero(x.detach() > 0),
            x.detach().histc(4),
            torch.allclose(x, x),
            torch.equal(x, x),
            torch.renorm(x, 2, 0, 0.5),
            torch.baddbmm(x, x @ x.mT, x),
            x.logit(0.2),
        )

    return [make(a, b, c, low=0.1, high=0.9)], run


@CASES.add("more losses")
def _(make: Make) -> Any:
    a, b = make.sizes(2, 3)

    def run(x: Tensor, y: Tensor, t: Tensor) -> Any:
        return (
            functional.nll_loss(functional.log_softmax(x, -1), t),
            functional.gaussian_nll_loss(x, y, torch.ones_like(x)),
            functional.triplet_margin_loss(x, y, x + y),
            functional.hinge_embedding_loss(x, t[:, None] * 0 + 1),
            functional.cosine_embedding_loss(x, y, t * 0 + 1),
            functional.margin_ranking_loss(x, y, torch.ones(a, b)),
            functional.multi_margin_loss(x, t),
            functional.pairwise_distance(x, y),
            functional.mse_loss(x, y[:1]),
        )

    return [make(a, b, low=0.1, high=0.9), make(a, b, low=0.1, high=0.9), make.ints(b, a)], run


@CASES.add("without gradients and in inference mode")
def _(make: Make) -> Any:
    a, i, o = make.sizes(3)

    def run(x: Tensor, w: Tensor) -> Any:
        with torch.no_grad():
            first = functional.linear(x, w).relu()
        second = functional.linear(x, w).relu()
        return first, second

    return [make(a, i), make(o, i)], run


@CASES.add("inference mode")
def _(make: Make) -> Any:
    a, i, o = make.sizes(3)

    def run(x: Tensor, w: Tensor) -> Any:
        with torch.inference_mode():
            y = functional.linear(x, w).relu()
            return functional.linear(y, w.mT).softmax(-1).sum().item(), functional.linear(y * 2, w.mT).tolist()

    return [make(a, i), make(o, i)], run


@CASES.add("gradients taken inside")
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor, w: Tensor) -> Any:
        energy = (functional.linear(x, w).tanh() ** 2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force

    return [make(a, b), make(3, b)], run


@CASES.add("hooks on values", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor, w: Tensor) -> Any:
        y = x * 2
        y.register_hook(lambda g: g * 3 + g.sum())
        y.register_hook(lambda g: None)
        return functional.linear(y, w)

    return [make(a, b), make(3, b)], run


@CASES.add("recomputed")
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor, w: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(lambda t: functional.linear(t, w).tanh(), x, use_reentrant=False) * 2

    return [make(a, b), make(3, b)], run
