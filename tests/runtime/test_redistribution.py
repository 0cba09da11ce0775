"""DTensors of fused parameters and of uneven shares over tp: every function of them is that of the whole tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import meshwright as mw
from meshwright.spmd import dtensor_patches
from meshwright.workers.pool import LocalWorkers


class Attention(nn.Module):
    """q, k and v are one parameter."""

    def __init__(self, heads: int, *, up: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(12, 36), nn.Linear(12, 12), heads
        if up:
            self.up, self.down = nn.Linear(12, 36), nn.Linear(36, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, 12 // self.heads)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return (x + self.down(self.up(x).relu()) if hasattr(self, "up") else x).square().mean()


BATCH = torch.randn(4, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def job_of(mesh: str, heads: int, *, up: bool = False) -> mw.Job:
    return mw.parallelize(
        lambda: Attention(heads, up=up), mesh, batch=(torch.ones(4, 5, 12),), loss=lambda out: out, dtype=torch.float64
    )


def orthogonalized(w: Any) -> Any:
    """As Muon computes it."""
    x = w / (w.norm() + 1e-7)
    for _ in range(3):
        a = x @ x.T
        x = 2 * x - 1.5 * (a @ x) + 0.5 * (a @ (a @ x))
    return x


def second_moments(w: Any) -> Any:
    """As Adafactor computes them."""
    rows, columns = w.square().mean(-1, keepdim=True), w.square().mean(-2, keepdim=True)
    return w / (rows * columns / rows.mean(-2, keepdim=True)).sqrt()


def like(w: Any, numbers: Tensor) -> Any:
    """Numbers beside a tensor: a DTensor beside a DTensor."""
    if not isinstance(w, DTensor):
        return numbers
    return DTensor.from_local(numbers, w.device_mesh, [Replicate()] * w.device_mesh.ndim)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda w: w,
    "twice": lambda w: w * 2,
    "T": lambda w: w.T,
    "wᵀw": lambda w: w.T @ w,
    "wwᵀ": lambda w: w @ w.T,
    "orthogonalized": orthogonalized,
    "second moments": second_moments,
    "mean": lambda w: w.mean(),
    "means": lambda w: (w.mean(0), w.mean(1), w.mean((0, 1)), w.mean(dim=-1, keepdim=True)),
    "a loss": lambda w: F.mse_loss(w, 2 * w),
    "variances": lambda w: (w.std(), w.var(0)),
    "sums": lambda w: (w.sum(0), w.amax(0), w.norm(dim=1), w.logsumexp(0)),
    "softmax": lambda w: (w.softmax(0), w.softmax(1)),
    "cumsum": lambda w: w.cumsum(0),
    "views": lambda w: (w.view(3, -1, w.shape[1]), w.view(-1), w.reshape(2, -1), w.flatten(), w.unsqueeze(0)),
    "expanded": lambda w: w[None].expand(2, -1, -1),
    "slices": lambda w: (w[0], w[5], w[:7], w[:, 3], w[:, 2:9], w[::2], w[-1]),
    "chunks": lambda w: (*w.chunk(3), *w.chunk(3, 1), *w.split(5)),
    "sorted": lambda w: (w.sort(0)[0], w.flatten().topk(3)[0], w.median()),
    "argmax": lambda w: (w.argmax(), w.argmin(0)),
    "gathered": lambda w: (w.gather(0, w.argsort(0)), w.gather(0, w.argsort(0)[:, :5]), w.gather(1, w.argsort(1)[:5])),
    "scattered": lambda w: (w.scatter(1, w.argsort(1)[:5], 0.0), w.scatter_add(1, w.argsort(1)[:5], w[:5])),
    "diagonal": lambda w: (w.diagonal(), w.triu(), w.flip(0), w.roll(1, 0)),
    "joined": lambda w: (torch.cat([w, w]), torch.stack([w, w]), w.repeat(2, 1)),
    "products": lambda w: (torch.einsum("ij,kj->ik", w, w), torch.bmm(w[None], w.T[None]), torch.linalg.svdvals(w)),
    "sums of norms": lambda w: (w.norm(dim=0).sum(), w.norm(p=3, dim=0).sum(0), torch.stack(torch._foreach_norm([w, w])).sum()),
    "no dims": lambda w: (w.sum(()), w.amax(()), (w > 0).sum(())),
    "any": lambda w: (w.isnan().any(), (w > 0.2).any(0) * 2, (w > 0.2).any(0).sum(), (w > 0.2).all(0) * 2),
    "filled": lambda w: (w.sum(0).fill_(2.0), w.norm(dim=0).fill_(2.0), w.mean().fill_(2.0) + 1),
    "cosine": lambda w: F.cosine_embedding_loss(w, w.cos(), w[:, 0].sign(), margin=0.1, reduction="none"),
    "lists": lambda w: (*torch._foreach_mul([w, w], 2.0), *torch._foreach_norm([w])),
    "embedding": lambda w: F.embedding(like(w, torch.tensor([0, 5, 6])), w),
}  # fmt: skip


# of a parameter and a tensor that is divided as it is → a number, whose gradient is taken
PENALTIES: dict[str, Callable[[Any, Any], Any]] = {
    "mse": F.mse_loss,
    "mse, summed": lambda w, v: F.mse_loss(w, v, reduction="sum") + F.mse_loss(w, v, reduction="none").amax(),
    "huber": F.huber_loss,
    "huber of 0.1": lambda w, v: F.huber_loss(w, v, delta=0.1),
    "smooth l1": F.smooth_l1_loss,
    "soft margin": lambda w, v: F.soft_margin_loss(w, v.sign()),
    "cross entropy": lambda w, v: F.binary_cross_entropy(w.sigmoid(), v.sigmoid()),
    "weighted": lambda w, v: F.binary_cross_entropy(w.sigmoid(), v.sigmoid(), weight=v.square()),
    "of logits": lambda w, v: F.binary_cross_entropy_with_logits(w, v.sigmoid()),
    "divergence": lambda w, v: F.kl_div(w.log_softmax(-1), v.softmax(-1), reduction="batchmean"),
    "l1": F.l1_loss,
    "cosine": lambda w, v: 1 - F.cosine_similarity(w, v, dim=1).mean() + F.cosine_similarity(w, v, dim=0).sum(),
    "norm": lambda w, v: (w - v).norm().square() + w.norm(dim=0).square().sum(),
    "orthogonal": lambda w, v: (w.T @ w - v.T @ v).square().mean() + (w @ w.T).triu(1).square().sum(),
    "nuclear": lambda w, v: torch.linalg.matrix_norm(w - v, "nuc"),
    "groups": lambda w, v: w.norm(dim=0).sum() + w.norm(dim=1).sum() + w.square().sum(0).add(1).log().mean(),
    "variance": lambda w, v: w.var() + w.std(0).sum() + w.logsumexp(0).sum(),
    "largest": lambda w, v: (
        w.abs().amax(0).mean()
        + w.max()
        + w.amax()
        - w.amin()
        + torch.linalg.vector_norm(w, torch.inf)
        + w.topk(2, 0).values.sum()
    ),
    "smooth": lambda w, v: (w.cumsum(0) * v).sum(),
    "softmax": lambda w, v: (w.softmax(0) * v).sum() + (F.normalize(w, dim=0) * v).sum(),
}


def wrong_penalties(named: dict[str, Any]) -> dict[str, str]:
    """Penalties of parameters whose value or gradient is not that of the whole tensors."""
    found = {}
    for name in ("qkv.weight", "out.weight"):
        for label, penalty in PENALTIES.items():
            w, v = named[name].detach().requires_grad_(), named[name].detach().cos()
            one, other = w.full_tensor().detach().requires_grad_(), v.full_tensor()
            try:
                value, expected = penalty(w, v), penalty(one, other)
                value.backward()
                expected.backward()
                torch.testing.assert_close(whole(value), expected, rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(w.grad.full_tensor(), one.grad, rtol=1e-9, atol=1e-12)
            except Exception as error:
                found[f"{label} of {name}"] = f"{type(error).__name__}: {error}"
    return found


def whole(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(whole(one) for one in value)
    return value.full_tensor() if isinstance(value, DTensor) else value


def wrong(mesh: str, heads: int) -> dict[str, str]:
    """Each function of a parameter that is not that of the whole parameter; and parameters that full_tensor has otherwise."""
    job, found = job_of(mesh, heads), {}
    named = dict(job.named_parameters())
    job.step((BATCH[: 4 // job.recipe.mesh.axis_size("dp_shard")],))
    for recipe, full in job.full_parameters():
        gathered = named[recipe.name].detach().full_tensor()
        if full is not None and not torch.equal(gathered, full):
            found[recipe.name] = "full_tensor()"
    state = get_model_state_dict(job.module, options=StateDictOptions(full_state_dict=True))
    for recipe, full in job.full_parameters():
        if full is not None and not torch.equal(state[recipe.name], full):
            found[recipe.name] = "get_model_state_dict"
    return found | wrong_functions(named)


def wrong_functions(named: dict[str, Any]) -> dict[str, str]:
    """Functions of parameters, and of their gradients if they have any, that are not those of the whole tensors."""
    found = {}
    for name in ("qkv.weight", "out.weight"):
        for t in filter(lambda t: t is not None, (named[name].detach(), named[name].grad)):
            full = t.full_tensor()
            for label, function in FUNCTIONS.items():
                try:
                    expected = function(full)
                except RuntimeError:  # its dims do not divide
                    continue
                try:
                    torch.testing.assert_close(whole(function(t)), expected, rtol=1e-9, atol=1e-12)
                except Exception as error:
                    found[f"{label} of {name}"] = f"{type(error).__name__}: {error}"
    return {label: said for label, said in found.items() if "argmax.default does not support _StridedShard" not in said}


class Odd(nn.Module):
    """Dims that no axis divides."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.qkv(x).tanh()).square().mean()


def wrong_of_odd(mesh: str) -> dict[str, str]:
    batch = (torch.ones(4, 7, dtype=torch.float64),)
    job = mw.parallelize(Odd, mesh, batch=batch, loss=lambda out: out, dtype=torch.float64)
    named = dict(job.named_parameters())
    return wrong_functions(named)


def wrong_penalties_of(mesh: str, fused: bool) -> dict[str, str]:
    batch = (torch.ones(4, 7, dtype=torch.float64),)
    job = (
        job_of(mesh, 3) if fused else mw.parallelize(Odd, mesh, batch=batch, loss=lambda out: out, dtype=torch.float64)
    )
    return wrong_penalties(dict(job.named_parameters()))


@pytest.mark.parametrize(
    ("mesh", "fused", "ranks"),
    [
        ("dp_shard=2", False, 2),
        ("tp=2", False, 2),
        ("tp=2", True, 2),
        pytest.param("dp_shard=2,tp=2", True, 4, marks=pytest.mark.proof),
        pytest.param("dp_replicate=2,dp_shard=2", False, 4, marks=pytest.mark.proof),
    ],
)
def test_gradients_of_penalties_are_those_of_the_whole_tensor(
    fresh: LocalWorkers, mesh: str, fused: bool, ranks: int
) -> None:
    assert fresh.run(wrong_penalties_of, mesh, fused, ranks=ranks) == [{}] * ranks


@pytest.mark.parametrize(("mesh", "ranks"), [("dp_shard=2", 2), ("tp=2", 2), ("dp_shard=2,tp=2", 4)])
def test_dims_need_not_divide(fresh: LocalWorkers, mesh: str, ranks: int) -> None:
    assert fresh.run(wrong_of_odd, mesh, ranks=ranks) == [{}] * ranks


@pytest.mark.parametrize(
    ("mesh", "heads", "ranks"), [("tp=2", 3, 2), ("tp=2", 2, 2), ("tp=3", 4, 3), ("dp_shard=2,tp=2", 3, 4)]
)
def test_every_function_is_that_of_the_whole_tensor(fresh: LocalWorkers, mesh: str, heads: int, ranks: int) -> None:
    assert fresh.run(wrong, mesh, heads, ranks=ranks) == [{}] * ranks


def of_two_layouts() -> list[Any]:
    job = job_of("tp=2", 3, up=True)
    named = dict(job.named_parameters())
    job.step((BATCH,))
    told: list[Any] = []
    for recipe, full in job.full_parameters():
        named[recipe.name].grad.full_tensor()
        gathered = named[recipe.name].full_tensor()
        told.append(full is None or torch.equal(gathered, full))
    try:
        (named["qkv.weight"] * 2).full_tensor()
    except mw.PlanError as error:
        told.append(str(error))
    return told


def test_a_tensor_that_may_have_one_of_two_layouts_is_refused(fresh: LocalWorkers) -> None:
    """A parameter and its gradient are known by their memory."""
    for *right, refused in fresh.run(of_two_layouts, ranks=2):
        assert right == [True] * 8
        assert "(36, 12)" in refused and "in different ways" in refused and "job.full_parameters()" in refused


def of_two_jobs() -> tuple[list[bool], list[bool]]:
    """Whether torch redistributes by itself before, with two jobs, with one, and after; whether both jobs' tensors are right."""
    plain = [patch.plain for patch in dtensor_patches.redistributions()]

    def untouched() -> bool:
        return [getattr(patch.owner, patch.name) for patch in dtensor_patches.redistributions()] == plain

    own = [untouched()]
    fused = job_of("tp=2", 3)
    other = mw.parallelize(
        lambda: nn.Sequential(nn.Linear(12, 36), nn.ReLU(), nn.Linear(36, 12)),
        "tp=2", batch=(torch.ones(4, 12),), loss=lambda out: out.square().mean(), dtype=torch.float64,
    )  # fmt: skip
    own.append(untouched())
    right = []
    for job in (fused, other):
        named = dict(job.named_parameters())
        for recipe, full in job.full_parameters():
            gathered = named[recipe.name].full_tensor()
            right.append(full is None or torch.equal(gathered, full))
    del fused, named, job
    gc.collect()
    own.append(untouched())
    del other
    gc.collect()
    own.append(untouched())
    return own, right


def test_each_of_two_jobs_has_its_own_layouts(fresh: LocalWorkers) -> None:
    for own, right in fresh.run(of_two_jobs, ranks=2):
        assert own == [True, False, False, True]
        assert right == [True] * 8


def masks(mesh: str) -> list[Any]:
    job, told = job_of(mesh, 3), []
    w = dict(job.named_parameters())["qkv.weight"].detach()
    mask = torch.arange(36.0 * 12, dtype=torch.float64).view(36, 12)
    expected = w.full_tensor() * mask
    try:
        distributed = distribute_tensor(mask, w.device_mesh, w.placements)
        told.append(torch.equal((w * distributed).full_tensor(), expected))
    except mw.PlanError as error:
        told.append(str(error))
    replicated = DTensor.from_local(mask, w.device_mesh, [Replicate()] * w.device_mesh.ndim)
    told.append(torch.equal((w * replicated.redistribute(placements=w.placements)).full_tensor(), expected))
    return told


def test_a_tensor_is_distributed_as_the_parameter_is(fresh: LocalWorkers) -> None:
    assert fresh.run(masks, "tp=2", ranks=2) == [[True, True]] * 2
    for refused, redistributed in fresh.run(masks, "dp_shard=2,tp=2", ranks=4):
        assert redistributed and "replicated.redistribute(placements=p.placements)" in refused


COMPILED: dict[str, Callable[[Any], Any]] = {
    "rows": lambda w: w[:3] * 2,
    "means": lambda w: w.mean(0),
    "a view": lambda w: w.view(-1).sum(),
    "a write": lambda w: w[:3].mul_(2) + 0,
    "a foreach": lambda w: torch._foreach_mul([w], 2.0)[0],
}


def of_compiled(mesh: str) -> list[str]:
    job, found = job_of(mesh, 3), []
    w = dict(job.named_parameters())["qkv.weight"].detach()
    for name, function in COMPILED.items():
        one = w.full_tensor().clone()
        expected = function(one)
        torch.compiler.reset()
        result = torch.compile(function, backend="aot_eager")(w)
        if not torch.allclose(result.full_tensor(), expected) or not torch.equal(w.full_tensor(), one):
            found.append(name)
    return found


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2"])
def test_compiled_functions_are_those_of_the_whole_tensor(fresh: LocalWorkers, mesh: str) -> None:
    assert fresh.run(of_compiled, mesh, ranks=2) == [[], []]


class Orthogonal(torch.optim.Optimizer):
    """Updates as Muon's, without momentum."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(orthogonalized(p.grad) if p.ndim == 2 else p.grad, alpha=0.1)


def trained(mesh: str) -> dict[str, Tensor | None]:
    job = job_of(mesh, 3)
    optimizer = Orthogonal(job.parameters())
    rows = BATCH.chunk(job.recipe.mesh.data_size)[job.recipe.mesh.data_index(job.rank)]
    for _ in range(3):
        job.step((rows,))
        optimizer.step()
        optimizer.zero_grad()
    return {recipe.name: p for recipe, p in job.full_parameters()}


@pytest.mark.parametrize(("mesh", "ranks"), [("tp=2", 2), ("dp_shard=2,tp=2", 4)])
def test_an_optimizer_of_matrices_trains_as_on_one_device(fresh: LocalWorkers, mesh: str, ranks: int) -> None:
    torch.manual_seed(0)
    model = Attention(3).double()
    optimizer = Orthogonal(model.parameters())
    for _ in range(3):
        model(BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = fresh.run(trained, mesh, ranks=ranks)[0]
    for name, p in model.named_parameters():
        torch.testing.assert_close(result[name], p.detach(), rtol=1e-9, atol=1e-11)


def of_other_types(mesh: str) -> list[str]:
    """Types whose whole tensor, or a slice of it, is not that of the parts."""
    model = job_of(mesh, 3).module  # the job has gone
    w = dict(model.named_parameters())["qkv.weight"].detach()
    full, found = w.full_tensor(), []
    for dtype in (torch.bfloat16, torch.float16, torch.int16, torch.int64, torch.bool, torch.complex64):
        part, expected = (w * 100).to(dtype), (full * 100).to(dtype)
        if not torch.equal(part.full_tensor(), expected) or not torch.equal(part[:5].full_tensor(), expected[:5]):
            found.append(str(dtype))
    largest = torch.full_like(w, 6e4, dtype=torch.float16)  # the sum of two is infinite
    empty = w[:, :0].full_tensor(), w[3:3].full_tensor()
    return found + [str(x) for x in (largest.mean().full_tensor().item(), *(tuple(t.shape) for t in empty))]


@pytest.mark.parametrize(("mesh", "ranks"), [("tp=2", 2), ("dp_shard=2,tp=2", 4)])
def test_other_types_and_empty_tensors(fresh: LocalWorkers, mesh: str, ranks: int) -> None:
    assert fresh.run(of_other_types, mesh, ranks=ranks) == [["60000.0", "(36, 0)", "(0, 12)"]] * ranks


def reduced_without_a_job() -> dict[str, bool]:
    """Whether torch itself is right."""
    whole_one = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    mesh = init_device_mesh("cpu", (2,))
    w: Any = distribute_tensor(whole_one.detach(), mesh, [Shard(0)]).requires_grad_()

    def gradient(function: Callable[[Any], Any]) -> bool:
        (of_one,) = torch.autograd.grad(function(whole_one), whole_one)
        (of_w,) = torch.autograd.grad(function(w), w)
        return torch.equal(of_w.full_tensor(), of_one)

    def value(function: Callable[[Any], Any]) -> bool:
        return torch.equal(function(w.detach()).full_tensor(), function(whole_one.detach()))

    return {
        "loss": gradient(lambda t: F.mse_loss(t, t.detach() * 2)),
        "extreme": gradient(lambda t: t.amax()),
        "norms": value(lambda t: t.norm(dim=0).sum()),
        "any": value(lambda t: (t > 0).any(0) * 2),
        "filled": value(lambda t: t.sum(0).fill_(2.0)),
    }


def test_torch_itself_reduces_parts(fresh: LocalWorkers) -> None:
    """If torch changes this, parts of ``reductions`` may go."""
    for right in fresh.run(reduced_without_a_job, ranks=2):
        assert not any(right.values()), right
