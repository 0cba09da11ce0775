"""Functions with a rule, other than elementwise ones: in the forms in which models call them."""

from __future__ import annotations

from typing import Any

import torch
from harness import Make, Table
from torch import Tensor, nn
from torch.nn import functional

CASES = Table()

# --- products ---------------------------------------------------------------------------------------------------------


@CASES.add("linear", rounds=3)
def _(make: Make) -> Any:
    a, b, i, o = make.sizes(4)
    return [make(a, b, i), make(o, i), make(o)], functional.linear


@CASES.add("linear without bias, of a vector, to a number")
def _(make: Make) -> Any:
    a, i, o = make.sizes(3)

    def run(x: Tensor, w: Tensor) -> Any:
        return (
            functional.linear(x, w),
            functional.linear(x[0], w),
            functional.linear(x, w[0]),
            functional.linear(x[None, None], w),
        )

    return [make(a, i), make(o, i)], run


@CASES.add("a two-layer block", rounds=2)
def _(make: Make) -> Any:
    a, i, h = make.sizes(3)

    def run(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return x + functional.linear(functional.gelu(functional.linear(x, w1, b1)), w2, b2)

    return [make(a, 3, i), make(h, i), make(h), make(i, h), make(i)], run


@CASES.add("addmm", rounds=2)
def _(make: Make) -> Any:
    a, i, o = make.sizes(3)
    return [make(o), make(a, i), make(i, o)], torch.addmm


@CASES.add("addmm with beta and alpha")
def _(make: Make) -> Any:
    a, i, o = make.sizes(3)
    return [make(a, o), make(a, i), make(i, o)], lambda b, x, w: (
        torch.addmm(b, x, w, beta=0.5, alpha=2),
        b.addmm(x, w),
    )


@CASES.add("addmm of a base that is not read")
def _(make: Make) -> Any:
    a, i, o = make.sizes(3)

    def run(x: Tensor, w: Tensor) -> Any:
        return torch.addmm(x.new_full((o,), float("nan")), x, w, beta=0)

    return [make(a, i), make(i, o)], run


@CASES.add("baddbmm of a base that is not read")
def _(make: Make) -> Any:
    a, n, i, o = make.sizes(4)

    def run(x: Tensor, w: Tensor) -> Any:
        return torch.baddbmm(x.new_full((1, 1, 1), float("nan")), x, w, beta=0.0, alpha=0.5)

    return [make(a, n, i), make(a, i, o)], run


@CASES.add("baddbmm", rounds=2)
def _(make: Make) -> Any:
    a, n, i, o = make.sizes(4)
    return [make(a, 1, o), make(a, n, i), make(a, i, o)], lambda b, x, w: (
        torch.baddbmm(b, x, w),
        torch.baddbmm(b, x, w, beta=2, alpha=0.3),
        b.baddbmm(batch1=x, batch2=w, beta=0.5),  # as people write it who name their arguments
    )


@CASES.add("addbmm, addmv")
def _(make: Make) -> Any:
    a, n, i, o = make.sizes(4)
    return [make(n, o), make(a, n, i), make(a, i, o)], lambda b, x, w: (
        torch.addbmm(b, x, w),
        torch.addmv(b[:, 0], x[0], w[0, :, 0]),
    )


@CASES.add("addmm_ and out=")
def _(make: Make) -> Any:
    a, i, o = make.sizes(3)

    def run(b: Tensor, x: Tensor, w: Tensor) -> Any:
        with torch.no_grad():
            out = torch.zeros(a, o, dtype=torch.float64)
            torch.addmm(b, x, w, out=out)
            second = torch.zeros(a, i, dtype=torch.float64)
            torch.softmax(x, -1, out=second)
            third = torch.zeros(a, i, dtype=torch.float64)
            torch.cumsum(x, 1, out=third)
            return b.addmm_(x, w) * 1, out, second, third

    return [make(a, o), make(a, i), make(i, o)], run


@CASES.add("matmul", rounds=3)
def _(make: Make) -> Any:
    a, b, n, i, o = make.sizes(5)
    return [make(a, b, n, i), make(a, b, i, o)], torch.matmul


@CASES.add("matmul, batches that broadcast", rounds=3)
def _(make: Make) -> Any:
    a, b, n, i, o = make.sizes(5)
    shapes = [((a, 1, n, i), (b, i, o)), ((n, i), (a, b, i, o)), ((1, b, n, i), (a, 1, i, o)), ((a, b, n, i), (i, o))]
    left, right = make.choose.choice(shapes)
    return [make(*left), make(*right)], lambda x, y: x @ y


@CASES.add("matmul of vectors")
def _(make: Make) -> Any:
    a, n, i = make.sizes(3)

    def run(x: Tensor, v: Tensor) -> Any:
        return (
            x @ v,
            v @ x.mT,
            v @ v,
            torch.mv(x[0], v),
            torch.dot(v, v),
            torch.inner(x, v),
            x.__rmatmul__(v[None, :1].expand(2, n)),
        )

    return [make(a, n, i), make(i)], run


@CASES.add("mm, bmm")
def _(make: Make) -> Any:
    a, n, i, o = make.sizes(4)
    return [make(a, n, i), make(a, i, o)], lambda x, y: (
        torch.bmm(x, y),
        torch.mm(x[0], y[0]),
        x[1].mm(mat2=y[0]),
        torch.linalg.matmul(x, y),
    )


@CASES.add("product of a tensor with itself", rounds=2)
def _(make: Make) -> Any:
    a, b, n = make.sizes(3)
    return [make(a, b, n)], lambda x: (x @ x.transpose(-1, -2), torch.einsum("abn,abm->anm", x, x), x * x)


@CASES.add("einsum", rounds=2)
def _(make: Make) -> Any:
    b, h, q, k, d = make.sizes(5)
    return [make(b, q, h, d), make(b, k, h, d)], lambda x, y: torch.einsum("bqhd,bkhd->bhqk", x, y)


@CASES.add("einsum with an ellipsis", rounds=2)
def _(make: Make) -> Any:
    a, b, i, o = make.sizes(4)

    def run(x: Tensor, w: Tensor) -> Any:
        return (
            torch.einsum("...i,io->...o", x, w),
            torch.einsum("...i, oi", x, w.mT),
            torch.einsum("a...i,i...->a...", x[:, 0], w),
        )

    return [make(a, b, i), make(i, o)], run


@CASES.add("einsum of kinds")
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor, y: Tensor, z: Tensor) -> Any:
        return (
            torch.einsum("ab,a->b", x, y),
            torch.einsum("ab,a,b->ab", x, y, z),
            torch.einsum("ab,c->a", x, z),
            torch.einsum("ab->ba", x),
            torch.einsum("ab", x),
            torch.einsum("ab,a,b", x, y, z),
            torch.einsum("ii->i", x[:2, :2]),
            torch.einsum(x, [0, 1], y, [0], [1]),
            torch.einsum("ab,a", [x, y]),
        )

    return [make(a, b), make(a), make(b)], run


@CASES.add("einsum over a dim of size 1")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make(a, 1, b), make(a, c, b)], lambda x, y: (
        torch.einsum("acb,acb->acb", x, y),
        torch.einsum("acb,acb->ab", x, y),
    )


# --- tables -----------------------------------------------------------------------------------------------------------


@CASES.add("embedding", rounds=2)
def _(make: Make) -> Any:
    v, e, a, b = make.sizes(4, 3, 7)
    return [make.ints(v, a, b), make(v, e)], functional.embedding


@CASES.add("embedding with padding", rounds=2)
def _(make: Make) -> Any:
    v, e, a, b = make.sizes(4, 3, 7)

    def run(i: Tensor, w: Tensor) -> Any:
        return (
            functional.embedding(i, w, 1),
            functional.embedding(i, w, padding_idx=-1),
            torch.embedding(w, i, 2),
            torch.embedding(w, i),
        )

    return [make.ints(v, a, b), make(v, e)], run


@CASES.add("embedding by module, scaled gradients, one index")
def _(make: Make) -> Any:
    v, e, a = make.sizes(3, 3, 7)
    return [make.ints(v, a), make(v, e)], lambda i, w: (
        functional.embedding(i, w, scale_grad_by_freq=True),
        functional.embedding(i[0], w),
    )


@CASES.add("embedding with a largest norm")
def _(make: Make) -> Any:
    v, e, a = make.sizes(3, 3, 7)
    return [make.ints(v, a), make(v, e)], lambda i, w: functional.embedding(i, w * 1.0, max_norm=0.5)


# --- convolutions -----------------------------------------------------------------------------------------------------


@CASES.add("conv1d", rounds=2)
def _(make: Make) -> Any:
    a, i, o, s = make.sizes(4, 2, 5)
    return [make(a, i, s + 4), make(o, i, 3), make(o)], lambda x, w, b: functional.conv1d(x, w, b, 2, 1)


@CASES.add("conv2d", rounds=2)
def _(make: Make) -> Any:
    a, i, o, s = make.sizes(4, 2, 5)
    return [make(a, i, s + 2, s + 3), make(o, i, 2, 3), make(o)], lambda x, w, b: functional.conv2d(
        x, w, b, padding="same", dilation=1
    )


@CASES.add("conv2d without rows or bias, and conv3d")
def _(make: Make) -> Any:
    i, o, s = make.sizes(3, 2, 4)
    return [make(i, s + 1, s), make(o, i, 2, 2)], lambda x, w: (
        functional.conv2d(x, w),
        functional.conv3d(x[:, None], w[:, :, None]),
    )


@CASES.add("conv_transpose", rounds=2)
def _(make: Make) -> Any:
    a, i, o, s = make.sizes(4, 2, 4)

    def run(x: Tensor, w: Tensor, b: Tensor) -> Any:
        flat = functional.conv_transpose1d(x[..., 0], w[..., 0], b, stride=2, output_padding=1)
        return (
            flat,
            functional.conv_transpose2d(x, w, b, 2, 1),
            functional.conv_transpose3d(x[..., None], w[..., None], b),
        )

    return [make(a, i, s, s), make(i, o, 3, 3), make(o)], run


@CASES.add("conv in groups", rounds=3)
def _(make: Make) -> Any:
    a, g, i, o = make.sizes(4, 2, 4)
    return [make(a, g * i, 5), make(g * o, i, 2), make(g * o)], lambda x, w, b: functional.conv1d(x, w, b, groups=g)


@CASES.add("conv of each channel", rounds=2)
def _(make: Make) -> Any:
    a, c = make.sizes(2, 3, 7)
    return [make(a, c, 5, 4), make(c, 1, 3, 3), make(c)], lambda x, w, b: functional.conv2d(
        x, w, b, padding=1, groups=c
    )


@CASES.add("conv_transpose in groups", rounds=2)
def _(make: Make) -> Any:
    a, g, i, o = make.sizes(4, 2, 4)
    return [make(a, g * i, 5), make(g * i, o, 2), make(g * o)], lambda x, w, b: functional.conv_transpose1d(
        x, w, b, groups=g
    )


@CASES.add("pools", rounds=2)
def _(make: Make) -> Any:
    a, c = make.sizes(2, 2, 5)

    def run(x: Tensor) -> Any:
        return (
            functional.max_pool2d(x, 2),
            functional.max_pool2d(x, 2, return_indices=True)[0],
            functional.avg_pool2d(x, 2, 1),
            functional.adaptive_avg_pool2d(x, 2),
            functional.adaptive_max_pool2d(x, 2),
            functional.lp_pool2d(x, 2.0, 2),
            functional.max_pool1d(x[..., 0], 2),
            functional.avg_pool1d(x[..., 0], 2),
            functional.adaptive_avg_pool1d(x[..., 0], 2),
            functional.adaptive_max_pool1d(x[..., 0], 2),
            functional.max_pool3d(x, 2),
            functional.avg_pool3d(x, 2),
            functional.adaptive_avg_pool3d(x, 2),
            functional.max_pool2d(x[0], 2),
        )

    return [make.distinct(a, c, 4, 5)], run


@CASES.add("pools under their private names")
def _(make: Make) -> Any:
    a, c = make.sizes(2, 2, 5)

    def run(x: Tensor) -> Any:
        y = x[..., 0]
        return (
            torch.max_pool1d(y, 2),
            torch.max_pool2d(x, 2),
            torch.max_pool3d(x, 2),
            torch.adaptive_avg_pool1d(y, 2),
            torch.adaptive_max_pool1d(y, 2)[0],
            torch._C._nn.adaptive_max_pool2d(x, 2)[0],
        )

    return [make.distinct(a, c, 4, 5)], run


@CASES.add("resizing and padding")
def _(make: Make) -> Any:
    a, c = make.sizes(2, 2, 5)

    def run(x: Tensor) -> Any:
        return (
            functional.interpolate(x, scale_factor=2, mode="bilinear"),
            functional.interpolate(x, size=(2, 3), mode="nearest"),
            functional.upsample(x, scale_factor=2),
            functional.pad(x, (1, 2)),
            functional.pad(x, (1, 1, 0, 2), mode="reflect"),
            functional.pad(x, pad=(0, 0, 1, 0, 2, 1), value=3.0),
            functional.pixel_shuffle(x.repeat_interleave(4, 1), 2),
            functional.instance_norm(x),
            functional.local_response_norm(x, 2),
        )

    return [make.normal(a, c, 4, 5)], run


# --- attention --------------------------------------------------------------------------------------------------------


@CASES.add("attention", rounds=2)
def _(make: Make) -> Any:
    b, h, s, t, d = make.sizes(5)
    return [make(b, h, s, d), make(b, h, t, d), make(b, h, t, d)], functional.scaled_dot_product_attention


@CASES.add("attention, causal and scaled")
def _(make: Make) -> Any:
    b, h, s, d = make.sizes(4)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)

    return [make(b, h, s, d), make(b, h, s, d), make(b, h, s, d)], run


@CASES.add("attention with masks", rounds=3)
def _(make: Make) -> Any:
    b, h, s, t, d = make.sizes(5)
    shape = make.choose.choice(
        [(s, t), (b, 1, s, t), (1, h, s, t), (b, h, s, t), (1, 1, 1, t), (h, s, t), (b, 1, 1, t)]
    )
    mask = make(*shape) if make.choose.random() < 0.5 else make.bools(*shape) | (torch.arange(t) == 0)
    return [make(b, h, s, d), make(b, h, t, d), make(b, h, t, d), mask], functional.scaled_dot_product_attention


@CASES.add("attention with shared heads", rounds=3)
def _(make: Make) -> Any:
    b, h, times, s, d = make.sizes(5, 1, 4)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return [make(b, h * times, s, d), make(b, h, s, d), make(b, h, s, d)], run


@CASES.add("attention without heads, with one key for all rows")
def _(make: Make) -> Any:
    b, s, d = make.sizes(3)
    return [make(b, s, d), make(b, s, d), make(1, s, d)], lambda q, k, v: (
        functional.scaled_dot_product_attention(q, k, k),
        functional.scaled_dot_product_attention(q, v, v),
    )


@CASES.add("attention with dropout", rounds=2)
def _(make: Make) -> Any:
    b, h, s, d = make.sizes(4)
    bools = make.bools(s, s) | torch.eye(s, dtype=torch.bool)
    bools[0] = False  # a query that sees no key

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return (
            functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
            functional.scaled_dot_product_attention(q, k, v, None, 0.3, True),
            functional.scaled_dot_product_attention(q[:1], k, v, bias, dropout_p=0.2, scale=0.7),
            functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout_p=0.1
            ),
            functional.scaled_dot_product_attention(q, k, v, bools, dropout_p=0.2),
            torch.rand(3),
        )

    return [make(b, h, s, d), make(b, h, s, d), make(b, h, s, d), make(h, s, s)], run


def _attend(x: Tensor, heads: int, weights: tuple[Tensor, ...], **options: Any) -> Any:
    n, e = x.shape[0], x.shape[-1]
    return functional.multi_head_attention_forward(
        x, x, x, e, heads, weights[0], weights[1], None, None, False, 0.0, weights[2], weights[3], **options
    ), n


@CASES.add("multi_head_attention_forward", rounds=2)
def _(make: Make) -> Any:
    s, b, h, d = make.sizes(4, 2, 4)
    e = h * d

    def run(x: Tensor, *weights: Tensor) -> Any:
        mask = torch.ones(s, s, dtype=torch.bool).triu(1)
        return _attend(x, h, weights), _attend(x, h, weights, need_weights=False, attn_mask=mask)

    return [make(s, b, e), make(3 * e, e), make(3 * e), make(e, e), make(e)], run


@CASES.add("MultiheadAttention, the module", rounds=2)
def _(make: Make) -> Any:
    s, b, h, d = make.sizes(4, 2, 4)
    e = h * d
    module = nn.MultiheadAttention(e, h, batch_first=True, dtype=torch.float64)
    names = [name for name, _ in module.named_parameters()]

    def run(x: Tensor, pad: Tensor, *weights: Tensor) -> Any:
        values = dict(zip(names, weights, strict=True))
        module.train(True)
        masked = torch.func.functional_call(module, values, (x, x, x), {"key_padding_mask": pad, "need_weights": False})
        with torch.no_grad():
            module.eval()
            plain = torch.func.functional_call(module, values, (x, x, x))
        return masked, plain

    pad = make.bools(b, s) & (torch.arange(s) > 0)
    return [make(b, s, e), pad, make(3 * e, e), make(3 * e), make(e, e), make(e)], run


@CASES.add("TransformerEncoderLayer, the module")
def _(make: Make) -> Any:
    b, s, h = make.sizes(3, 2, 3)
    e = 2 * h
    layer = nn.TransformerEncoderLayer(e, h, 5, dropout=0.0, batch_first=True, dtype=torch.float64)
    values = {name: make(*p.shape) for name, p in layer.named_parameters()}

    def run(x: Tensor, *weights: Tensor) -> Any:
        named = dict(zip(values, weights, strict=True))
        layer.train()
        trained = torch.func.functional_call(layer, named, (x,))
        layer.eval()
        with torch.no_grad():
            return trained, torch.func.functional_call(layer, named, (x,))

    return [make(b, s, e), *values.values()], run


# --- norms ------------------------------------------------------------------------------------------------------------


@CASES.add("layer_norm", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make.normal(a, b, c), make(c), make(c)], lambda x, w, b: functional.layer_norm(
        x, (x.shape[-1],), w, b, 1e-3
    )


@CASES.add("layer_norm of two dims, or without weights")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make.normal(a, b, c), make(b, c)], lambda x, w: (
        functional.layer_norm(x, (b, c), weight=w),
        functional.layer_norm(x, [c]),
        torch.native_layer_norm(x, [c], None, None, 1e-5)[0],
        torch.layer_norm(x, [b, c], w, None),
    )


@CASES.add("rms_norm", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make.normal(a, b, c), make(c)], lambda x, w: (
        functional.rms_norm(x, (c,), w, 1e-6),
        functional.rms_norm(x, (c,)),
        torch.rms_norm(x, (c,), w),
    )


@CASES.add("a norm written out", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor, w: Tensor) -> Any:
        return w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    return [make.normal(a, b, c), make(c)], run


@CASES.add("group_norm", rounds=3)
def _(make: Make) -> Any:
    a, g, c = make.sizes(3, 2, 4)
    return [make.normal(a, g * c, 5), make(g * c), make(g * c)], lambda x, w, b: (
        functional.group_norm(x, g, w, b),
        torch.group_norm(x, g),
        functional.group_norm(x, num_groups=g, eps=1e-2),
    )


@CASES.add("normalize, cosine_similarity")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make.normal(a, b, c), make.normal(b, c)], lambda x, y: (
        functional.normalize(x),
        functional.normalize(x, 1.0, dim=-1),
        functional.cosine_similarity(x, y, -1),
        torch.cosine_similarity(x, y, dim=1),
        nn.CosineSimilarity(dim=2)(x, y),
    )


@CASES.add("cosine_similarity of zeros")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b) * 0, make(a, b)], lambda x, y: functional.cosine_similarity(x, y, 1)


# --- reductions -------------------------------------------------------------------------------------------------------


@CASES.add("sum, mean", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        return (
            x.sum(),
            x.mean(),
            x.sum(1),
            x.mean(-1),
            x.sum((0, 2)),
            x.mean((0, 1), True),
            x.sum(1, keepdim=True),
            torch.sum(x, dim=[0]),
            torch.mean(x, dim=-1, keepdim=True),
            torch.nansum(x, 1),
            x.nansum(),
            x.sum(-1, dtype=torch.float32),
            x.sum(dtype=torch.float64),
        )

    return [make(a, b, c)], run


@CASES.add("sum, mean in words of NumPy")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        return (
            x.sum(axis=1),
            x.mean(axis=0),
            torch.sum(x, axis=0, keepdims=True),
            torch.mean(input=x, dim=1),
            torch.sum(input=x),
        )

    return [make(a, b, c)], run


@CASES.add("reductions in words of NumPy")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        return (
            x.amax(0, keepdims=True),
            x.cumsum(axis=1),
            torch.max(x, axis=0).values,
            torch.argmax(x, axis=1),
            x.softmax(axis=1),
        )

    return [make.distinct(a, b, c)], run


@CASES.add("sums of ints and bools")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make.bools(a, b), make.ints(5, a, b)], lambda m, i: (
        m.sum(),
        m.sum(-1),
        i.sum(0),
        m.any(),
        m.all(1),
        i.prod(0),
        i.amax(-1),
        m.float().mean(),
        m.count_nonzero(),
        torch.count_nonzero(i, 1),
        i.bincount(minlength=5) if i.dim() == 1 else i.max(),
    )


@CASES.add("over one dim", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        every = [
            f(x, d, k)
            for f in (
                torch.amax,
                torch.amin,
                torch.prod,
                torch.argmax,
                torch.argmin,
                torch.logsumexp,
                torch.special.logsumexp,
            )
            for d in (0, 1, -1)
            for k in (False, True)
        ]
        pairs = [f(x, d) for f in (torch.max, torch.min, torch.median) for d in (0, -1)]
        return (
            every,
            [(p.values, p.indices) for p in pairs],
            x.any(1),
            x.all(0),
            x.amax((0, 2)),
            torch.max(x, dim=1, keepdim=True)[0],
        )

    return [make.distinct(a, b, c)], run


@CASES.add("over all dims")
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor) -> Any:
        return (
            x.max(),
            x.min(),
            x.prod(),
            x.argmax(),
            x.std(),
            x.var(),
            x.median(),
            x.norm(),
            torch.logsumexp(x, (0, 1)),
            x.amax(),
            x.argmin().item(),
        )

    return [make.distinct(a, b)], run


@CASES.add("var, std", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        every = [
            f(x, d, **o)
            for f in (torch.var, torch.std)
            for d in (0, 1, 2)
            for o in ({}, {"unbiased": False}, {"correction": 0, "keepdim": True})
        ]
        return (
            every,
            torch.var_mean(x, 1),
            torch.std_mean(x, -1, keepdim=True),
            x.var(unbiased=False),
            x.std(dim=(0, 1)),
        )

    return [make.normal(a, b, c)], run


@CASES.add("var, std with positions", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        return [
            f(x, d, *rest) for f in (torch.var, torch.std) for d in (0, 1, 2) for rest in ((True,), (False, True))
        ], torch.var_mean(x, 0, True, False)

    return [make.normal(a, b, c)], run


@CASES.add("norms of vectors", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        return (
            x.norm(dim=-1),
            torch.norm(x, 2, 1),
            x.norm(1, 0, True),
            torch.linalg.vector_norm(x, 3, dim=1),
            torch.linalg.norm(x, dim=(0, 2)),
            torch.linalg.norm(x),
            torch.linalg.vector_norm(x, dim=-1, keepdim=True),
            x.norm(p=2, dim=(0, 1)),
            torch.linalg.norm(x, dim=0, keepdim=True),
        )

    return [make.normal(a, b, c)], run


@CASES.add("two tensors' max and min")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b), make(b)], lambda x, y: (torch.max(x, y), torch.min(y, x), x.max(other=y))


@CASES.add("along one dim", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        one = [f(x, d) for f in (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.argsort) for d in (0, 1, -1)]
        two = [tuple(f(x, dim=d)) for f in (torch.sort, torch.cummax, torch.cummin) for d in (0, 2)]
        top = (
            x.topk(2, -1),
            torch.topk(x, 1, dim=1, largest=False),
            x.topk(1),
            x.sort(descending=True),
            x.sort(dim=1, stable=True),
        )
        return one, two, [tuple(t) for t in top]

    return [make.distinct(a, b, c)], run


@CASES.add("glu")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make(2 * a, b, 2 * c)], lambda x: (functional.glu(x), functional.glu(x, 0), torch._C._nn.glu(x, -1))


@CASES.add("softmax", rounds=3)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        many = [
            f(x, d)
            for f in (torch.softmax, torch.log_softmax, torch.special.softmax, torch.special.log_softmax)
            for d in (0, 1, -1)
        ]
        return (
            many,
            functional.softmax(x, dim=-1),
            functional.log_softmax(x, -1),
            x.softmax(dim=0),
            torch.softmax(input=x, dim=1),
        )

    return [make.normal(a, b, c) * 5], run


@CASES.add("softmax in another dtype", rough=True)
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make.normal(a, b)], lambda x: (
        functional.softmax(x, -1, dtype=torch.float32),
        functional.log_softmax(x, 0, dtype=torch.float32),
    )


@CASES.add("softmax in another dtype, by position", rough=True)
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make.normal(a, b)], lambda x: (
        x.softmax(-1, torch.float32),
        torch.log_softmax(x, 0, torch.float32),
        torch.softmax(x.float(), 1, torch.float64),
    )


@CASES.add("softmax under private names")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make.normal(a, b)], lambda x: (torch._softmax(x, 1, False), torch._log_softmax(x, 0, False))


@CASES.add("softmax of masked rows")
def _(make: Make) -> Any:
    a, b = make.sizes(2, 3, 6)

    def run(x: Tensor) -> Any:
        low = torch.full((a, b), -1e300, dtype=torch.float64)
        mask = torch.arange(b) > 0
        return (
            torch.softmax(x.masked_fill(mask, float("-inf")), -1),
            torch.log_softmax(torch.where(mask, low, x), -1),
            (x * 1e300).softmax(1),
        )

    return [make.normal(a, b)], run


@CASES.add("softmax of rows without anything")
def _(make: Make) -> Any:
    a, b = make.sizes(2, 3, 6)
    return [make.normal(a, b)], lambda x: torch.softmax(
        torch.where(torch.arange(a)[:, None] == 0, float("-inf"), x), -1
    ).detach()


@CASES.add("one_hot")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make.ints(5, a, b)], lambda i: (
        functional.one_hot(i, 5),
        functional.one_hot(i),
        functional.one_hot(i, num_classes=7),
    )


# --- shapes -----------------------------------------------------------------------------------------------------------


@CASES.add("dims moved", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        return (
            x.transpose(0, -1),
            torch.swapaxes(x, 1, 2),
            x.swapdims(0, 1),
            x.permute(2, 0, 1),
            x.permute((1, 0, 2)),
            torch.permute(x, dims=(0, 2, 1)),
            x.movedim(0, 2),
            torch.moveaxis(x, (0, 1), (1, 0)),
            x[0].t(),
            x[0].T,
            x.mT,
            x.permute(-1, 0, 1),
            torch.transpose(x, dim0=0, dim1=1),
            x.t() if x.dim() < 3 else x,
        )

    return [make(a, b, c)], run


@CASES.add("dims moved, by keyword")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make(a, b, c)], lambda x: (
        torch.transpose(input=x, dim0=0, dim1=2),
        x.movedim(destination=0, source=2),
        torch.permute(input=x, dims=(2, 1, 0)),
    )


@CASES.add("dims of size 1 come and go", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor) -> Any:
        return (
            x.unsqueeze(0),
            x.unsqueeze(-1),
            x.unsqueeze(dim=2),
            x.squeeze(1),
            x.squeeze(),
            x.squeeze(-1),
            x[None].squeeze((0, 2)),
            x.squeeze(dim=1),
            x[:, None, ..., None],
            torch.squeeze(x),
            x[0].squeeze(),
            torch.unsqueeze(x, 1),
        )

    return [make(a, 1, b)], run


@CASES.add("squeeze of a cut that is one element here", rounds=2)
def _(make: Make) -> Any:
    b = make.sizes(1)[0]
    return [make(3, b)], lambda x: (x.squeeze(), x.squeeze(0), x.view(3, 1, b).squeeze())


@CASES.add("reshape", rounds=4)
def _(make: Make) -> Any:
    a, b, c, d = make.sizes(4)

    def run(x: Tensor) -> Any:
        return (
            x.view(a, b, c * d),
            x.reshape(a * b, -1),
            x.reshape(-1),
            x.flatten(1),
            x.flatten(1, 2),
            torch.flatten(x),
            x.view(-1, d),
            x.reshape((a, b * c, d)),
            x.ravel(),
            x.unflatten(1, (b, 1)),
            x.unflatten(-1, (1, -1)),
            x.view(a, 1, b, c, d),
            x.transpose(1, 2).reshape(a, c, b * d),
            x.flatten(0, 1).flatten(-2),
            x.reshape_as(x.flatten(1)),
            x.view_as(x),
            torch.unflatten(x, 1, (-1,)),
            x.transpose(0, 1).flatten(0, 1).unflatten(0, (b, a)),
            torch.reshape(x, shape=(a, -1)),
        )

    return [make(a, b, c, d)], run


@CASES.add("reshape to heads", rounds=4)
def _(make: Make) -> Any:
    b, s, h, d = make.sizes(4)
    return [make(b, s, 3 * h * d)], lambda x: (
        x.view(b, s, 3, h, d),
        x.view(b, s, h, 3, d).permute(0, 2, 1, 3, 4),
        x.view(b, s, 3 * h, d).transpose(1, 2),
        x.unflatten(-1, (3, -1)).unflatten(-1, (h, d)),
    )


@CASES.add("flatten and unflatten, by keyword")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make(a, b, c)], lambda x: (
        x.flatten(end_dim=1),
        torch.flatten(x, start_dim=1),
        x.flatten(end_dim=-2),
        torch.flatten(input=x, start_dim=0, end_dim=1),
        x.unflatten(sizes=(b, 1), dim=1),
    )


@CASES.add("view of another dtype")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make.ints(9, a, b)], lambda x: x.view(torch.int32)


@CASES.add("expand, repeat", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor, y: Tensor) -> Any:
        return (
            x.expand(a, 3, b),
            x.expand(2, -1, 3, -1),
            y.expand(a, b),
            y.expand_as(x.squeeze(1)),
            x[:, 0].expand_as(x.squeeze(1)),
            torch.broadcast_to(y, (2, a, b)),
            x.repeat(2, 3, 2),
            x.repeat(2, 1, 1, 1),
            y.tile(2),
            torch.tile(x, (2, 1)),
            x.repeat_interleave(2, 0),
            torch.repeat_interleave(x, 3, -1),
            x.repeat_interleave(2),
            y.repeat_interleave(torch.arange(b), 0),
            x.repeat(1, 1, 1).expand(a, 2, b),
        )

    return [make(a, 1, b), make(b)], run


@CASES.add("cat, stack", rounds=3)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor, y: Tensor) -> Any:
        return (
            torch.cat([x, y], 1),
            torch.cat((x, x), dim=-1),
            torch.cat([x, x, y], dim=1),
            torch.concat([y, y]),
            torch.concatenate((x, x), axis=0),
            torch.stack([x, x]),
            torch.stack((y, y), -1),
            torch.stack([x, 2 * x], dim=1),
            torch.cat([x, torch.zeros(0)], 1),
            torch.cat([x, torch.ones(a, 1, c, dtype=torch.float64)], 1),
            torch.cat(tensors=[x, x], dim=2),
        )

    return [make(a, b, c), make(a, b + 1, c)], run


@CASES.add("rotate half", rounds=2)
def _(make: Make) -> Any:
    a, h, s, d = make.sizes(4)

    def run(x: Tensor, cos: Tensor) -> Any:
        first, second = x[..., :d], x[..., d:]
        return x * cos + torch.cat((-second, first), dim=-1) * (1 - cos)

    return [make(a, h, s, 2 * d), make(s, 2 * d)], run


@CASES.add("flip, roll, tril, triu", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        return (
            x.flip(0),
            x.flip(-1, 1),
            torch.flip(x, dims=(1,)),
            x.roll(1, 0),
            torch.roll(x, 2),
            x.roll(shifts=(1, 2), dims=(0, 2)),
            torch.roll(x, shifts=1, dims=-1),
            x.tril(),
            x.triu(1),
            torch.tril(x, diagonal=-1),
        )

    return [make(a, b, c)], run


# --- slices -----------------------------------------------------------------------------------------------------------


@CASES.add("split, chunk", rounds=3)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        return (
            x.split(2),
            x.split(b, 1),
            torch.split(x, [b, 2 * b], dim=1),
            x.chunk(3, 1),
            torch.chunk(x, 2, -1),
            x.chunk(2),
            x.tensor_split(2, 1),
            x.split(c, -1),
            x.split((1, a - 1)),
            torch.unsafe_split(x, b, 1),
            torch.unsafe_chunk(x, 3, 1),
            torch.split_with_sizes(x, [b, b, b], 1),
            x.chunk(chunks=3, dim=1),
            x.split(split_size=b, dim=1),
        )

    return [make(a, 3 * b, c)], run


@CASES.add("split, chunk by keywords in another order")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, 2 * b)], lambda x: (
        x.chunk(dim=1, chunks=2),
        torch.chunk(input=x, chunks=2),
        torch.split_with_sizes(x, dim=1, split_sizes=[b, b]),
    )


@CASES.add("unbind, iteration")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        first, *rest = x
        return x.unbind(), torch.unbind(x, dim=1), x.unbind(-1), first, rest

    return [make(a, b, c)], run


@CASES.add("select, narrow")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make(a, b, c)], lambda x: (
        x.select(0, 1),
        torch.select(x, -1, 0),
        x.select(dim=1, index=-1),
        x.narrow(1, 0, 1),
        torch.narrow(x, -1, 1, 1),
        x.narrow(0, 0, a),
        x.narrow(dim=2, start=0, length=1),
        x.narrow(1, -1, 1),
    )


@CASES.add("select, narrow by keywords in another order")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3, 3)
    return [make(a, b, c)], lambda x: (
        x.select(index=2, dim=0),
        x.narrow(start=2, length=1, dim=1),
        torch.select(input=x, dim=1, index=0),
    )


@CASES.add("getitem", rounds=3)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3, 3)

    def run(x: Tensor, rows: Tensor, mask: Tensor) -> Any:
        return (
            x[0],
            x[-1],
            x[:, 1],
            x[..., 0],
            x[1:],
            x[:, :2],
            x[:, 1:3],
            x[..., ::2],
            x[None],
            x[:, None, 1],
            x[0, ..., 1:],
            x[rows],
            x[:, rows % b],
            x[..., rows % c],
            x[rows, rows % b],
            x[rows, :, rows % c],
            x[mask],
            x[mask[:, 0]],
            x[[0, 2]],
            x[:, [1, 0]],
            x[0, rows % b],
            x[:, 0, rows % c],
            x[torch.tensor(1)],
            x[..., None, :],
            x[0:0],
            x[1:2, 0:1, :-1],
            x[:][:, :, 1],
            x[(0, 1)],
        )

    return [make(a, b, c), make.ints(a, 4), make.bools(a, b)], run


@CASES.add("slices with nothing in them")
def _(make: Make) -> Any:
    a, b = make.sizes(2, 3)
    return [make(a, b)], lambda x: (x[0:0], x[:, 2:2].sum(), x[5:9], torch.cat([x[:0], x]), x[:, :0].numel())


@CASES.add("getitem, rarer kinds")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3, 3)

    def run(x: Tensor) -> Any:
        import numpy as np

        return (
            x[True],
            x[False],
            x[:, np.array([0, 1])],
            x[[[0, 1], [1, 0]]],
            x[range(2)],
            x[(0, 1), :],
            x[:, np.int64(1)],
            x[[True] + [False] * (a - 1)],
            x[torch.tensor(0), :, torch.tensor([1, 0])],
        )

    return [make(a, b, c)], run


@CASES.add("setitem", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2, 3)

    def run(x: Tensor, v: Tensor) -> Any:
        x = x * 1
        x[0] = v
        x[:, 1] = 0.25
        x[1:, ::2] = v[::2]
        x[..., 0] = v[0]
        return x * 2

    return [make(a, b), make(b)], run


@CASES.add("index_select and its kin", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2, 3)

    def run(x: Tensor, rows: Tensor, v: Tensor) -> Any:
        return (
            x.index_select(0, rows),
            torch.index_select(x, 1, rows % b),
            x.index_select(dim=-1, index=rows % b),
            x.index_add(0, rows, v),
            x.index_copy(0, torch.arange(2), v[:2]),
            x.index_fill(1, rows[:1] % b, 0.5),
            x.clone().index_add_(0, rows, v),
            torch.index_add(x, 0, rows, v, alpha=2),
        )

    return [make(a, b), make.ints(a, 3), make(3, b)], run


# --- random numbers ---------------------------------------------------------------------------------------------------


@CASES.add("dropout", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        same = functional.dropout(x, 0.3, training=False), functional.dropout(x, 0.0)
        return (
            functional.dropout(x, 0.5),
            torch.dropout(x, 0.2, True),
            functional.dropout(x * 1, 0.5, inplace=True),
            same,
            torch.rand(2),
        )

    return [make(a, b, c)], run


@CASES.add("dropout of a transposed tensor", rounds=3)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3, 1, 4)
    return [make(a, b, c)], lambda x: (
        functional.dropout(x.transpose(1, 2), 0.5),
        functional.dropout(x.permute(2, 0, 1), 0.4),
        functional.dropout((x * 1).movedim(0, -1), 0.5, inplace=True),
        functional.dropout(x[:, ::2], 0.5),
        functional.dropout(x.unsqueeze(1).expand(-1, 3, -1, -1), 0.5),
    )


@CASES.add("dropout of whole channels")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor) -> Any:
        return (
            functional.alpha_dropout(x, 0.5, True),
            functional.feature_alpha_dropout(x, 0.5, True),
            functional.dropout1d(x),
            functional.dropout2d(x[..., None]),
            functional.dropout3d(x[..., None, None]),
            torch.feature_dropout(x, 0.5, True),
            torch.dropout_(x * 1, 0.5, True),
            torch.alpha_dropout(x, 0.3, True),
            functional.dropout2d(x[..., None], training=False),
        )

    return [make(a, b, c)], run


@CASES.add("draws of the same shape", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor) -> Any:
        likes = (
            torch.rand_like(x),
            torch.randn_like(x),
            torch.randint_like(x, 7),
            torch.rand_like(x.t(), dtype=torch.float32),
            torch.bernoulli(x.detach()),
            torch.poisson(x.detach()),
            torch.multinomial(x.detach(), 2),
            torch.normal(x, 0.3),
            torch.normal(0.0, x.detach()),
            torch.normal(x.detach().t(), x.detach().t()),
            x.detach().bernoulli(0.3),
            x.detach().t().bernoulli(),
        )
        return likes, torch.rand(2), functional.gumbel_softmax(x, dim=-1), functional.gumbel_softmax(x.t(), hard=True)

    return [make(a, b, low=0.2, high=0.8)], run


def _draws(x: Tensor) -> dict[str, Any]:
    """Every draw in place, of a tensor between 0 and 1."""
    return {
        "normal_": lambda t: t.normal_(0.1, 2.0),
        "uniform_": lambda t: t.uniform_(-1, 1),
        "bernoulli_": lambda t: t.bernoulli_(0.4),
        "bernoulli_ of a tensor": lambda t: t.bernoulli_(x.detach()),
        "exponential_": lambda t: t.exponential_(),
        "random_": lambda t: t.random_(5),
        "log_normal_": lambda t: t.log_normal_(),
        "cauchy_": lambda t: t.cauchy_(),
        "geometric_": lambda t: t.geometric_(0.5),
        "init": lambda t: nn.init.trunc_normal_(nn.init.xavier_uniform_(t), 0.1, 0.5, -1, 1),
        "orthogonal": lambda t: nn.init.kaiming_normal_(nn.init.orthogonal_(t)),
    }


@CASES.add("draws in place", rounds=3)
def _(make: Make) -> Any:
    a, b = make.sizes(2, 1, 5)

    def run(x: Tensor) -> Any:
        with torch.no_grad():
            base = x.detach()
            fresh = [draw(base.clone()) for draw in _draws(base).values()]
            turned = [draw(base.clone().t()) for name, draw in _draws(base.t()).items() if name != "orthogonal"]
            pieces = []
            for draw in list(_draws(base[:, :1]).values())[:4]:
                whole = base.clone()
                draw(whole[:, :1])  # a slice of it
                pieces.append(whole)
        return fresh, turned, pieces, torch.rand(2)

    return [make(a, b, low=0.2, high=0.8)], run


@CASES.add("draws in place have no gradient", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor) -> Any:
        y, z = x * 2, (x * 3).t()
        y.uniform_()
        z[:1].normal_()
        return y * x, z * 2

    return [make(a, b)], run


@CASES.add("draws into out=, and functions that draw", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor) -> Any:
        with torch.no_grad():
            outs = [x.detach().clone() for _ in range(5)]
            torch.rand(a, b, out=outs[0])
            torch.randn(a, b, out=outs[1])
            torch.bernoulli(x.detach(), out=outs[2])
            torch.normal(x.detach(), 1.0, out=outs[3])
            torch.randint(9, (a, b), out=outs[4])
            number = torch.empty(a, dtype=torch.int64)
            torch.randperm(a, out=number)
        return outs, number, functional.rrelu(x - 0.5, training=True), torch.rrelu(x.t() - 0.5, training=True)

    return [make(a, b, low=0.2, high=0.8)], run


# --- losses -----------------------------------------------------------------------------------------------------------


def _reductions(loss: Any, *args: Any, **options: Any) -> Any:
    return [loss(*args, reduction=r, **options) for r in ("mean", "sum", "none")]


@CASES.add("cross_entropy", rounds=2)
def _(make: Make) -> Any:
    n, c = make.sizes(2, 3, 8)
    return [make.normal(n, c) * 3, make.ints(c, n)], lambda x, t: _reductions(functional.cross_entropy, x, t)


@CASES.add("cross_entropy with ignored labels", rounds=2)
def _(make: Make) -> Any:
    n, c = make.sizes(2, 3, 8)

    def run(x: Tensor, t: Tensor) -> Any:
        ignored = torch.where(torch.arange(n) == 1, -100, t)
        return (
            _reductions(functional.cross_entropy, x, ignored),
            functional.cross_entropy(x, t, ignore_index=2),
            functional.cross_entropy(x, torch.where(ignored < 0, 255, t), ignore_index=255),
        )

    return [make.normal(n, c), make.ints(c, n)], run


@CASES.add("cross_entropy, smoothed and weighted", rounds=2)
def _(make: Make) -> Any:
    n, c = make.sizes(2, 3, 8)

    def run(x: Tensor, t: Tensor, w: Tensor) -> Any:
        ignored, w = torch.where(torch.arange(n) == 1, -100, t), w.detach()
        return (
            _reductions(functional.cross_entropy, x, ignored, label_smoothing=0.1),
            _reductions(functional.cross_entropy, x, ignored, weight=w),
            _reductions(functional.cross_entropy, x, ignored, w, label_smoothing=0.2),
        )

    return [make.normal(n, c), make.ints(c, n), make(c, low=0.2)], run


@CASES.add("cross_entropy with weights and an ignored label past the classes")
def _(make: Make) -> Any:
    n, c = make.sizes(2, 3, 8)
    return [make.normal(n, c), make.ints(c, n), make(c, low=0.2)], lambda x, t, w: functional.cross_entropy(
        x, torch.where(torch.arange(n) == 1, 255, t), w.detach(), ignore_index=255
    )


@CASES.add("cross_entropy over places", rounds=2)
def _(make: Make) -> Any:
    n, c, s = make.sizes(3, 3, 6)
    return [make.normal(n, c, s, 2), make.ints(c, n, s, 2)], lambda x, t: (
        _reductions(functional.cross_entropy, x, t, ignore_index=1),
        functional.cross_entropy(x[0, :, 0, 0], t[0, 0, 0]),
    )


@CASES.add("cross_entropy with probabilities")
def _(make: Make) -> Any:
    n, c = make.sizes(2, 3, 8)
    return [make.normal(n, c), make(n, c, low=0.0)], lambda x, t: (
        _reductions(functional.cross_entropy, x, t),
        functional.cross_entropy(x, t, label_smoothing=0.1),
    )


@CASES.add("cross_entropy, the builtin and the old style")
def _(make: Make) -> Any:
    n, c = make.sizes(2, 3, 8)
    return [make.normal(n, c), make.ints(c, n)], lambda x, t: (
        torch._C._nn.cross_entropy_loss(x, t),
        torch._C._nn.cross_entropy_loss(x, t, None, 2, 1, 0.1),
        functional.cross_entropy(x, t, size_average=False),
        nn.CrossEntropyLoss(label_smoothing=0.1)(x, t),
        torch._C._nn.cross_entropy_loss(x, t, reduction=2),
    )


@CASES.add("losses of elements", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor, y: Tensor) -> Any:
        return (
            _reductions(functional.mse_loss, x, y),
            _reductions(functional.l1_loss, x, y),
            _reductions(functional.smooth_l1_loss, x, y, beta=0.5),
            _reductions(functional.huber_loss, x, y, delta=0.3),
            _reductions(functional.binary_cross_entropy, x, y),
            _reductions(functional.binary_cross_entropy_with_logits, x, y),
            _reductions(functional.kl_div, x, y),
            _reductions(functional.soft_margin_loss, x, y.detach()),
            _reductions(functional.poisson_nll_loss, x, y),
            functional.kl_div(x, y, reduction="batchmean"),
            functional.kl_div(x, y, log_target=True),
            functional.mse_loss(x, y, size_average=False),
        )

    return [make(a, b, low=0.1, high=0.9), make(a, b, low=0.1, high=0.9)], run


@CASES.add("losses of elements with weights")
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor, y: Tensor, w: Tensor, v: Tensor) -> Any:
        logits = functional.binary_cross_entropy_with_logits
        w, v = w.detach(), v.detach()
        return (
            functional.binary_cross_entropy(x, y, w),
            logits(x, y, pos_weight=v),
            logits(x, y, w, pos_weight=v),
            functional.binary_cross_entropy(x, y, weight=v),
            functional.mse_loss(x, y, weight=w),
        )

    return [make(a, b, low=0.1, high=0.9), make(a, b, low=0.1, high=0.9), make(a, b, low=0.1), make(b, low=0.1)], run


@CASES.add("losses of elements under builtin names")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    nn_ = torch._C._nn
    return [make(a, b, low=0.1, high=0.9), make(a, b, low=0.1, high=0.9)], lambda x, y: (
        nn_.mse_loss(x, y),
        nn_.mse_loss(x, y, 2),
        nn_.smooth_l1_loss(x, y, 1, 0.5),
        torch.kl_div(x, y),
        torch.binary_cross_entropy_with_logits(x, y),
        torch.poisson_nll_loss(x, y, True, False, 1e-8, 1),
        nn_.l1_loss(x, y, reduction=0),
    )


@CASES.add("adjoint, H, mH, hsplit, vsplit, dsplit, as_strided")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)

    def run(x: Tensor, m: Tensor) -> Any:
        pieces = [*x.hsplit([1]), *x.vsplit([1]), *x.dsplit([1])]
        return (
            m.H,
            m.mH * 2,
            x.adjoint(),
            x.mH,
            *pieces,
            m.as_strided((b, a), (1, b)),
            m.T.as_strided((b, a), m.T.stride()),
            m.as_strided((torch.tensor(b), torch.tensor(a)), (1, torch.tensor(b))),
        )

    return [make(a, b, c), make(a, b)], run
