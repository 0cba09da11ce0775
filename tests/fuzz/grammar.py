"""How random programs are made: a table of operations, each of a kind that a switch can leave out.

A statement is run, on a small real batch, as soon as it is drawn: so shapes are known, and what torch refuses is no part
of the program. Values are of two sorts: those whose dim 0 are the rows of the batch (``rowed``), and the others
(``plain``: parameters, buffers, what was summed over rows).
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from judge import NAMES, VOCABULARY, one_device, sample
from program import Class, Given, Member, Program, Run, Statement
from torch import Tensor, nn

ROWS = 4
MOST_ELEMENTS = 2048
LARGEST = 50.0

Operation = Callable[["Builder"], None]
OPERATIONS: list[tuple[str, int, Operation]] = []  # kind, weight, what adds statements


class RefusedError(Exception):
    """Nothing fits, or torch refuses it: another operation is drawn."""


def operation(kind: str, weight: int = 2) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        OPERATIONS.append((kind, weight, function))
        return function

    return register


class Builder:
    """Makes one class: holds its module, and the values of its forward for the sample batch."""

    def __init__(
        self, draw: random.Random, kinds: frozenset[str], inputs: dict[str, Tensor], classes: list[Class | Given]
    ) -> None:
        self.draw, self.allowed, self.classes = draw, kinds, classes
        self.module = nn.Module()
        self.namespace: dict[str, Any] = {**NAMES, "__name__": "program", "self": self.module, "carried": {}, **inputs}
        self.inputs = inputs
        self.rowed = [n for n, t in inputs.items() if t.is_floating_point()]
        self.plain: list[str] = []
        self.members: list[Member] = []
        self.body: list[Statement] = []
        self.kinds: set[str] = set()
        self.hooked_views: list[Tensor] = []
        self.depth = 0
        self._count = 0

    # --- draws ---

    def pick(self, options: Any) -> Any:
        options = list(options)
        if not options:
            raise RefusedError
        return self.draw.choice(options)

    def chance(self, of: int = 2) -> bool:
        return self.draw.randint(1, of) == 1

    def size(self) -> int:
        return self.draw.choice([6, 8, 4, 3, 12, 5, 2])

    def get(self, name: str) -> Tensor:
        return eval(name, self.namespace)

    def value(self, fits: Callable[[Tensor], bool] = lambda t: True) -> str:
        """A value with rows: a late one rather than an early one, and one that nothing uses yet rather than others."""
        found = [n for n in self.rowed if fits(self.get(n))]
        used = {name for statement in self.body for name in _used(statement)}
        return self.pick([*found[-3:], *found[-1:], *found, *(n for n in found if n not in used)])

    def parameter(self, *shape: int, scale: float = 1.0) -> str:
        sizes = ", ".join(map(str, shape))
        text = f"nn.Parameter(torch.randn({sizes}))" if shape else "nn.Parameter(torch.tensor(0.7))"
        return "self." + self.member("p", text if scale == 1 else text[:-1] + f" * {scale})")

    def member(self, stem: str, made: str) -> str:
        """A member that is made so; one that there is already, one time in three."""
        same = [m.name for m in self.members if m.text == f"self.{m.name} = {made}"]
        if same and self.chance(3):
            return self.pick(same)
        self._count += 1
        name = f"{stem}{self._count}"
        self.set_up(name, f"self.{name} = {made}")
        return name

    def set_up(self, name: str, text: str) -> None:
        exec(text, self.namespace)
        self.members.append(Member(name, text))

    def buffer(self, *shape: int, made: str = "torch.zeros") -> str:
        self._count += 1
        name = f"b{self._count}"
        text = f"{made}({', '.join(map(str, shape))})" if shape else "torch.tensor(0.5)"
        self.set_up(name, f'self.register_buffer("{name}", {text})')
        return f"self.{name}"

    def given(self, name: str) -> str:
        """A class that stands in the program as it is."""
        if all(c.name != name for c in self.classes):
            self.classes.append(Given(name, GIVEN[name]))
        exec(GIVEN[name], self.namespace)
        return name

    # --- statements ---

    def new(self, text: str, *of: str, plain: bool = False) -> str:
        """A new value. Raises RefusedError if torch refuses, or it is not a small finite float tensor."""
        self._count += 1
        statement = Statement(f"v{self._count}", text, of)
        self._run(statement)
        name = f"v{self._count}"
        t = self.namespace[name]
        if not isinstance(t, Tensor) or not t.is_floating_point() or not 0 < t.numel() <= MOST_ELEMENTS or t.dim() > 5:
            raise RefusedError
        if not bool(t.isfinite().all()) or float(t.detach().abs().max()) > LARGEST:
            raise RefusedError
        self.body.append(statement)
        if plain or not t.dim() or t.shape[0] != ROWS:
            self.plain.append(name)
        else:
            self.rowed.append(name)
        return name

    def do(self, text: str, *of: str) -> None:
        """A statement that makes no new value."""
        statement = Statement(None, text, of)
        self._run(statement)
        self.body.append(statement)
        if of and isinstance(self.get(of[0]), Tensor) and self.shares(self.get(of[0]), self.inputs.values()):
            self.kinds.add("input writes")

    def other(self, text: str, *of: str) -> str:
        """A value that only the next statements use: a tuple, integers."""
        self._count += 1
        statement = Statement(f"n{self._count}", text, of)
        self._run(statement)
        self.body.append(statement)
        return f"n{self._count}"

    def _run(self, statement: Statement) -> None:
        try:
            exec(statement.code(), self.namespace)
        except Exception as error:
            raise RefusedError from error

    @contextmanager
    def region(self, head: str) -> Iterator[None]:
        """What is added within goes under this line."""
        outer, self.body = self.body, []
        self.depth += 1
        try:
            yield
        finally:
            inner, self.body = self.body, outer
            self.depth -= 1
            if inner:
                self.body.append(Statement(None, head, (), tuple(inner)))

    def step(self) -> None:
        """One operation of the table."""
        table = [(kind, op) for kind, weight, op in OPERATIONS if kind in self.allowed for _ in range(weight)]
        before = len(self.body), list(self.rowed), list(self.plain)
        kind, op = self.pick(table)
        try:
            op(self)
            self.kinds.add(kind)
        except (RefusedError, RuntimeError):  # torch refuses even to look at some views
            del self.body[before[0] :]
            self.rowed, self.plain = before[1], before[2]

    def made(self, name: str, result: str) -> Class:
        return Class(name, tuple(self.inputs), tuple(self.members), tuple(self.body), result)

    def safe_to_write(self, t: Tensor) -> bool:
        """Whether a write changes no leaf, no view with a hook, and nothing that came with the batch unless that is allowed."""
        kept = [*self.module.parameters(), *self.module.buffers(), *self.hooked_views]
        if "input writes" not in self.allowed:
            kept += self.inputs.values()
        return not self.shares(t, kept) and not (t.is_leaf and t.requires_grad)

    @staticmethod
    def shares(t: Tensor, others: Iterable[Tensor]) -> bool:
        """Whether they have memory in common."""
        return t.untyped_storage().data_ptr() in {o.untyped_storage().data_ptr() for o in others}

    def tie_ends(self, loss: str) -> str:
        """A loss that all values go into."""
        used = {name for s in self.body for name in list(_used(s))[0 if s.out or s.within else 1 :]} | set(
            re.findall(r"\w+", loss)
        )
        ends = [n for n in dict.fromkeys([*self.rowed, *self.plain]) if n.startswith("v") and n not in used]
        for n in ends:
            if self.get(n).requires_grad:
                with suppress(RefusedError):
                    loss = self.new("{0} + 0.01 * {1}.square().mean()", loss, n, plain=True)
        return loss


def _used(statement: Statement) -> Iterator[str]:
    yield from (name for name in statement.of if name != statement.out)
    for inner in statement.within:
        yield from _used(inner)


def whole(t: Tensor) -> bool:
    return t.dim() >= 2


def long(t: Tensor) -> bool:
    return t.dim() >= 3


# --- pointwise ----------------------------------------------------------------------------------------------------------

UNARY = ["F.gelu({0})", "torch.tanh({0})", "torch.sigmoid({0})", "F.silu({0})", "torch.sin({0})", "F.softplus({0})", "{0} * 0.5",
         "{0} + 1", "-{0}", "F.relu({0})", "{0}.clamp(-1, 1)", "{0}.pow(2)", "torch.where({0} > 0, {0}, {0} * 0.1)", "{0}.abs()",
         "F.leaky_relu({0}, 0.2)", "{0}.exp().clamp(max=9.0)", "1 - {0}", "{0}.masked_fill({0} > 1, 0.5)", "torch.square({0})",
         "{0} / ({0}.abs() + 1)", "F.elu({0})", "{0}.clone()"]  # fmt: skip
BINARY = ["{0} + {1}", "{0} * {1}", "{0} - {1}", "torch.maximum({0}, {1})", "torch.addcmul({0}, {1}, {0}, value=0.1)",
          "torch.lerp({0}, {1}, 0.3)", "{0} / ({1}.abs() + 1)", "torch.where({0} > {1}, {0}, {1})", "torch.hypot({0}, {1} + 1)"]  # fmt: skip


@operation("pointwise", 6)
def unary(b: Builder) -> None:
    b.new(b.pick(UNARY), b.value())


@operation("pointwise", 6)
def binary(b: Builder) -> None:
    x = b.value()
    shape = b.get(x).shape
    text = b.pick(BINARY)
    if b.plain and b.chance(3):
        b.new(text, x, b.pick(b.plain))
    elif b.chance(3):
        b.new(text, x, b.parameter(*shape[b.pick(range(1, len(shape) + 1)) :]))
    else:
        b.new(text, x, b.value(lambda t: t.shape == shape))


@operation("pointwise", 1)
def scaled(b: Builder) -> None:
    b.new("{0} * {1}", b.value(), b.parameter())


# --- products -----------------------------------------------------------------------------------------------------------


@operation("products", 8)
def linear(b: Builder) -> None:
    x = b.value(whole)
    last, out = b.get(x).shape[-1], b.size()
    bias = "" if b.chance() else ", bias=False"
    b.new("self.%s({0})" % b.member("linear", f"nn.Linear({last}, {out}{bias})"), x)


@operation("products", 4)
def mlp(b: Builder) -> None:
    x = b.value(whole)
    last, hidden = b.get(x).shape[-1], b.size()
    up, down = b.member("linear", f"nn.Linear({last}, {hidden})"), b.member("linear", f"nn.Linear({hidden}, {last})")
    h = b.new(b.pick(UNARY), b.new(f"self.{up}({{0}})", x))
    b.new(b.pick(["self.%s({0})", "{1} + self.%s({0})"]) % down, h, x)


@operation("products", 3)
def product(b: Builder) -> None:
    x = b.value(whole)
    last, out = b.get(x).shape[-1], b.size()
    if b.chance():
        b.new("F.linear({0}, {1})", x, b.parameter(out, last, scale=0.4))
    else:
        b.new(b.pick(["{0} @ {1}", "torch.matmul({0}, {1})", "torch.einsum('...i,ij->...j', {0}, {1})"]), x,
              b.parameter(last, out, scale=0.4))  # fmt: skip


@operation("products", 2)
def outer(b: Builder) -> None:
    x = b.value(lambda t: t.dim() == 3)
    shape = b.get(x).shape
    y = b.value(lambda t: t.dim() == 3 and t.shape[2] == shape[2])
    b.new(b.pick(["{0} @ {1}.transpose(1, 2) * 0.1", "torch.bmm({0}, {1}.mT) * 0.1", "torch.einsum('bik,bjk->bij', {0}, {1}) * 0.1"]),
          x, y)  # fmt: skip


@operation("products", 2)
def gated(b: Builder) -> None:
    x = b.value(whole)
    last, half = b.get(x).shape[-1], b.size()
    h = b.new("self.%s({0})" % b.member("linear", f"nn.Linear({last}, {2 * half})"), x)
    parts = b.other(b.pick(["{0}.chunk(2, -1)", f"{{0}}.split({half}, -1)", "torch.tensor_split({0}, 2, dim=-1)",
                            f"{{0}}.unflatten(-1, (2, {half})).unbind(-2)"]), h)  # fmt: skip
    b.new(f"torch.sigmoid({parts}[0]) * {parts}[1]")


# --- shapes -------------------------------------------------------------------------------------------------------------


@operation("shapes", 5)
def shaped(b: Builder) -> None:
    x = b.value(whole)
    shape = b.get(x).shape
    d = b.pick(range(1, len(shape)))
    n = shape[d]
    ways = [f"{{0}}.unsqueeze({d})", f"{{0}}.flip({d})", f"{{0}}.roll(1, {d})", "{0}.contiguous()", f"{{0}}.movedim({d}, -1)",
            f"{{0}}.transpose({d}, -1)", "{0}.flatten(1)", f"torch.cat([{{0}}, {{0}}], {d})", f"torch.stack([{{0}}, -{{0}}], {d})",
            "{0}.transpose(1, -1).contiguous()", "{0}.reshape({0}.shape[0], -1)", f"{{0}}.squeeze({d})",
            f"{{0}}.repeat_interleave(2, dim={d})", "F.pad({0}, (1, 1))", f"{{0}}.unsqueeze({d}).expand({', '.join(['-1'] * d + ['2'] + ['-1'] * (len(shape) - d))})"]  # fmt: skip
    for k in (2, 3):
        if n % k == 0:
            ways += [f"{{0}}.unflatten({d}, ({k}, {n // k}))", f"{{0}}.unflatten({d}, ({n // k}, {k}))"]
    if d == len(shape) - 1 and n % 2 == 0:
        ways += [f"{{0}}.view(*{{0}}.shape[:-1], 2, {n // 2}).transpose(-1, -2).reshape(*{{0}}.shape)"]
    if len(shape) > 2:
        ways += ["{0}.flatten(-2)", "{0}.flatten(1, 2)", "{0}.mT"]
    b.new(b.pick(ways), x)


@operation("shapes", 3)
def joined(b: Builder) -> None:
    x = b.value(whole)
    shape = b.get(x).shape
    d = b.pick(range(1, len(shape)))

    def same(t: Tensor) -> bool:
        return t.dim() == len(shape) and all(
            a == c or i == d for i, (a, c) in enumerate(zip(t.shape, shape, strict=True))
        )

    b.new(f"torch.cat([{{0}}, {{1}}], {d})", x, b.value(same))


@operation("slices", 5)
def sliced(b: Builder) -> None:
    x = b.value(whole)
    shape = b.get(x).shape
    d = b.pick(range(1, len(shape)))
    n = shape[d]
    k = b.draw.randint(1, n)
    before = ":, " * d
    ways = [f"{{0}}[{before}:{k}]", f"{{0}}[{before}{k - 1}:]", f"{{0}}[{before}{k - 1}]", f"{{0}}[{before}::2]", f"{{0}}.narrow({d}, 0, {k})",
            f"{{0}}.select({d}, {k - 1})", f"{{0}}[{before}[0, {k - 1}]]", f"{{0}}[{before}None]", f"{{0}}[{before}{k - 1}:{k}] * {{0}}",
            f"{{0}}.index_select({d}, torch.tensor([{k - 1}, 0]))", f"{{0}}.tensor_split(2, {d})[0]", f"{{0}}.chunk(2, {d})[-1]"]  # fmt: skip
    b.new(b.pick(ways), x)


@operation("slices", 1)
def gathered(b: Builder) -> None:
    x = b.value(lambda t: t.dim() == 3)
    n = b.get(x).shape[2]
    b.new(f"{{0}}.gather(2, ({{0}}.detach() > 0).long() % {n})", x)


# --- reductions and norms -----------------------------------------------------------------------------------------------


@operation("reductions", 4)
def reduced(b: Builder) -> None:
    x = b.value(whole)
    d = b.pick(range(1, b.get(x).dim()))
    keep = b.pick(["", ", keepdim=True"])
    ways = [f"{{0}}.mean({d}{keep})", f"{{0}}.sum({d}{keep}) * 0.3", f"{{0}}.amax({d}{keep})", f"{{0}}.var({d}{keep}, correction=0)",
            f"{{0}}.logsumexp({d}{keep})", f"{{0}}.softmax({d})", f"{{0}}.log_softmax({d})", f"{{0}}.cumsum({d}) * 0.3",
            f"{{0}}.max({d}{keep}).values", f"{{0}}.sort({d}).values", f"{{0}}.square().sum({d}{keep}).add(1).sqrt()",
            f"{{0}} - {{0}}.mean({d}, keepdim=True)", f"{{0}}.topk(2, {d}).values", f"{{0}}.norm(dim={d}{keep})", f"{{0}}.prod({d}{keep})"]  # fmt: skip
    b.new(b.pick(ways), x)


@operation("norms", 3)
def norm(b: Builder) -> None:
    x = b.value(whole)
    shape = b.get(x).shape
    last = shape[-1]
    ways = [lambda: "self.%s({0})" % b.member("norm", f"nn.LayerNorm({last})"),
            lambda: "self.%s({0})" % b.member("norm", f"nn.RMSNorm({last})"),
            lambda: "F.normalize({0}, dim=-1)",
            lambda: f"F.layer_norm({{0}}, ({last},))",
            lambda: "self.%s({0}.transpose(1, 2)).transpose(1, 2)" % b.member("norm", f"nn.GroupNorm({2 if last % 2 == 0 else 1}, {last})"),
            lambda: f"F.rms_norm({{0}}, ({last},), {b.parameter(last)})"]  # fmt: skip
    b.new(b.pick(ways)(), x)


@operation("coupled")
def batch_norm(b: Builder) -> None:
    x = b.value(lambda t: t.dim() in (2, 3))
    last = b.get(x).shape[-1]
    name = b.member("norm", f"nn.BatchNorm1d({last})")
    b.new(f"self.{name}({{0}})" if b.get(x).dim() == 2 else f"self.{name}({{0}}.transpose(1, 2)).transpose(1, 2)", x)


@operation("coupled")
def over_rows(b: Builder) -> None:
    b.new(b.pick(["{0}.mean(0)", "{0}.amax(0)", "{0} - {0}.mean(0, keepdim=True)", "{0}.softmax(0)", "{0}.cumsum(0) * 0.2", "{0}.roll(1, 0)",
                  "{0}.flip(0)", "{0} - {0}[:1]", "{0}.std(0)"]), b.value())  # fmt: skip


# --- attention, convolutions, embeddings --------------------------------------------------------------------------------


@operation("attention", 3)
def attention(b: Builder) -> None:
    x = b.value(lambda t: t.dim() == 3)
    length, width = b.get(x).shape[1:]
    heads, size = b.pick([2, 3, 4]), b.pick([2, 3, 4])
    shared = b.pick([1, 1, heads])  # how many heads share a key: grouped-query attention
    q = b.new("self.%s({0})" % b.member("query", f"nn.Linear({width}, {heads * size})"), x)
    kv = heads // shared if heads % shared == 0 else heads
    if b.chance():
        k = b.new("self.%s({0})" % b.member("key", f"nn.Linear({width}, {kv * size})"), x)
        v = b.new("self.%s({0})" % b.member("values", f"nn.Linear({width}, {kv * size})"), x)
    else:
        both = b.new("self.%s({0})" % b.member("both", f"nn.Linear({width}, {2 * kv * size})"), x)
        parts = b.other("{0}.chunk(2, -1)", both)
        k, v = b.new(f"{parts}[0]"), b.new(f"{parts}[1]")
    split = b.pick(["{0}.unflatten(-1, (%d, %d)).transpose(1, 2)", "{0}.view({0}.shape[0], -1, %d, %d).transpose(1, 2)",
                    "{0}.reshape(*{0}.shape[:2], %d, %d).permute(0, 2, 1, 3)"])  # fmt: skip
    q, k, v = b.new(split % (heads, size), q), b.new(split % (kv, size), k), b.new(split % (kv, size), v)
    if kv != heads:
        k, v = (b.new(f"{{0}}.repeat_interleave({heads // kv}, dim=1)", n) for n in (k, v))
    kind = b.pick(["sdpa", "causal", "mask", "soft", "masked"])
    if kind in ("sdpa", "causal"):
        out = b.new(
            "F.scaled_dot_product_attention({0}, {1}, {2}%s)" % (", is_causal=True" if kind == "causal" else ""),
            q,
            k,
            v,
        )
    elif kind == "mask":
        mask = b.other(f"torch.ones({length}, {length}, dtype=torch.bool).tril()")
        out = b.new("F.scaled_dot_product_attention({0}, {1}, {2}, attn_mask={3})", q, k, v, mask)
    else:
        scores = b.new("{0} @ {1}.transpose(-2, -1) / %s" % round(size**0.5, 3), q, k)
        if kind == "masked":
            mask = b.other(f"torch.ones({length}, {length}, dtype=torch.bool).triu(1)")
            scores = b.new(
                b.pick(["{0}.masked_fill({1}, float('-inf')).softmax(-1)", "{0}.masked_fill({1}, -1e9).softmax(-1)"]),
                scores,
                mask,
            )
            out = b.new("{0} @ {1}", scores, v)
        else:
            out = b.new("F.softmax({0}, dim=-1) @ {1}", scores, v)
    out = b.new(
        b.pick(
            [
                "{0}.transpose(1, 2).flatten(2)",
                "{0}.transpose(1, 2).contiguous().view({0}.shape[0], -1, %d)" % (heads * size),
            ]
        ),
        out,
    )
    b.new("{1} + self.%s({0})" % b.member("out", f"nn.Linear({heads * size}, {width})"), out, x)


@operation("attention", 1)
def multihead(b: Builder) -> None:
    x = b.value(lambda t: t.dim() == 3 and t.shape[2] % 2 == 0)
    name = b.member("attention", f"nn.MultiheadAttention({b.get(x).shape[2]}, 2, batch_first=True)")
    b.new(f"self.{name}({{0}}, {{0}}, {{0}}, need_weights=False)[0]", x)


@operation("convolutions", 2)
def convolution(b: Builder) -> None:
    x = b.value(lambda t: t.dim() == 3)
    channels, length = b.get(x).shape[1:]
    out = b.pick([channels, 4, 6])
    groups = b.pick([g for g in (1, 2, channels) if channels % g == 0 and out % g == 0])
    kernel = b.pick([1, min(3, length)])
    options = f"padding={kernel // 2}, groups={groups}"
    if b.chance():
        b.new("self.%s({0})" % b.member("conv", f"nn.Conv1d({channels}, {out}, {kernel}, {options})"), x)
    else:
        b.new(f"F.conv1d({{0}}, {b.parameter(out, channels // groups, kernel, scale=0.4)}, {options})", x)


@operation("convolutions", 2)
def pooled(b: Builder) -> None:
    x = b.value(lambda t: t.dim() == 3)
    channels, length = b.get(x).shape[1:]
    ways = [lambda: "F.avg_pool1d({0}, 2)", lambda: "F.max_pool1d({0}, 2, stride=1)", lambda: "F.adaptive_avg_pool1d({0}, 2)",
            lambda: "F.adaptive_max_pool1d({0}, 3)", lambda: "F.interpolate({0}, scale_factor=2)", lambda: "F.lp_pool1d({0}, 2, 2)",
            lambda: "F.conv_transpose1d({0}, %s)" % b.parameter(channels, b.size(), 2, scale=0.3),
            lambda: "self.%s({0}[:, None]).flatten(1, 2)" % b.member("conv", f"nn.Conv2d(1, {b.pick([2, 3])}, 3, padding=1)"),
            lambda: "self.%s({0}.mT).mT" % b.member("conv", f"nn.Conv1d({length}, {b.size()}, 1)"),
            lambda: "F.unfold({0}[:, None], (2, 2))", lambda: "F.pixel_shuffle({0}[:, None].expand(-1, 4, -1, -1), 2).squeeze(1)",
            lambda: "F.avg_pool2d({0}[:, None], 2, stride=1).squeeze(1)"]  # fmt: skip
    b.new(b.pick(ways)(), x)


@operation("products", 2)
def of_several(b: Builder) -> None:
    """An einsum of several operands."""
    x = b.value(lambda t: t.dim() == 3)
    n, last = b.get(x).shape[1:]
    y = b.value(lambda t: t.shape == b.get(x).shape)
    k = b.size()
    b.new(*b.pick([
        lambda: ("torch.einsum('bni,ij,jk->bnk', {0}, %s, %s)" % (b.parameter(last, k, scale=0.4), b.parameter(k, last, scale=0.4)), x),
        lambda: ("torch.einsum('bni,bnj,ijk->bnk', {0}, {1}, %s) * 0.2" % b.parameter(last, last, k, scale=0.2), x, y),
        lambda: ("torch.einsum('bni,bmi,m->bn', {0}, {1}, %s) * 0.1" % b.parameter(n), x, y),
        lambda: ("torch.einsum('b n i, i -> b n', {0}, %s)" % b.parameter(last), x),
        lambda: ("torch.einsum('bni,bni->bn', {0}, {1})", x, y), lambda: ("torch.einsum('bni->bin', {0})", x),
        lambda: ("torch.einsum('bni,nj->bij', {0}, %s)" % b.parameter(n, k, scale=0.4), x),
        lambda: ("torch.tensordot({0}, %s, dims=([2], [0]))" % b.parameter(last, k, scale=0.4), x),
        lambda: ("torch.linalg.multi_dot([{0}.flatten(0, 1), %s, %s]).unflatten(0, {0}.shape[:2])" % (b.parameter(last, k, scale=0.4), b.parameter(k, 4, scale=0.4)), x),
        lambda: ("F.bilinear({0}, {1}, %s) * 0.2" % b.parameter(k, last, last, scale=0.3), x, y),
    ])())  # fmt: skip


@operation("embeddings", 2)
def embedding(b: Builder) -> None:
    if "ids" not in b.inputs:
        raise RefusedError
    b.new("self.%s(ids)" % b.member("table", f"nn.Embedding({VOCABULARY}, {b.size()})"))


@operation("embeddings", 1)
def positions(b: Builder) -> None:
    x = b.value(lambda t: t.dim() == 3)
    length, width = b.get(x).shape[1:]
    name = b.member("places", f"nn.Embedding({length + 2}, {width})")
    b.new(f"{{0}} + self.{name}(torch.arange({{0}}.shape[1]))", x)


@operation("ties", 2)
def tied(b: Builder) -> None:
    if not any(f"nn.Embedding({VOCABULARY}," in m.text for m in b.members):
        embedding(b)
    table = b.pick(m for m in b.members if f"nn.Embedding({VOCABULARY}," in m.text)
    weight = b.get(f"self.{table.name}.weight")
    x = b.value(lambda t: t.dim() >= 2 and t.shape[-1] == weight.shape[1])
    if b.chance():
        b.new(f"F.linear({{0}}, self.{table.name}.weight)", x)
    else:
        head = b.member("head", f"nn.Linear({weight.shape[1]}, {VOCABULARY}, bias=False)")
        b.set_up("", f"self.{head}.weight = self.{table.name}.weight")
        b.new(f"self.{head}({{0}})", x)


# --- writes in place ----------------------------------------------------------------------------------------------------

WRITES = [
    "{0}.mul_(0.5)",
    "{0}.add_(1)",
    "{0}.zero_()",
    "{0}.neg_()",
    "{0}.tanh_()",
    "{0}.clamp_(-1, 1)",
    "{0}.sub_(0.3).mul_(2)",
]


@operation("alias", 4)
def written(b: Builder) -> None:
    b.do(b.pick(WRITES), b.value(b.safe_to_write))


@operation("alias", 6)
def written_part(b: Builder) -> None:
    x = b.value(lambda t: whole(t) and b.safe_to_write(t))
    shape = b.get(x).shape
    d = b.pick(range(1, len(shape)))
    k = b.draw.randint(1, shape[d])
    before = ":, " * d
    part = b.pick([f"[{before}:{k}]", f"[{before}{k - 1}]", f"[{before}{k - 1}:]", f"[{before}::2]", f".narrow({d}, {k - 1}, 1)", ".transpose(1, -1)",
                   f".select({d}, {k - 1})", ".view({0}.shape[0], -1)", f".unsqueeze({d})", f".chunk(2, {d})[0]", f".tensor_split(2, {d})[-1]",
                   ".mT", ".flatten(1)", ".detach()", ".reshape({0}.shape[0], -1)", f".unbind({d})[0]", ".contiguous()", ".expand_as({0})"])  # fmt: skip
    y = b.new("{0}" + part, x)
    if b.chance(3):
        other = b.get(y).shape
        z = b.value(lambda t: t.shape == other or (not t.dim()))
        b.do(b.pick(["{0}.copy_({1})", "{0}.add_({1})", "{0}.mul_({1}.detach())"]), y, z)
    else:
        b.do(b.pick(WRITES), y)


@operation("alias", 3)
def assigned(b: Builder) -> None:
    x = b.value(lambda t: whole(t) and b.safe_to_write(t))
    shape = b.get(x).shape
    d = b.pick(range(1, len(shape)))
    k = b.draw.randint(1, shape[d])
    before = ":, " * d
    part = b.pick(
        [
            f"[{before}:{k}]",
            f"[{before}{k - 1}]",
            f"[{before}{k - 1}:]",
            f"[{before}::2]",
            "[...]",
            f"[..., :{min(k, shape[-1])}]",
        ]
    )
    value = b.pick(["0.5", f"{{0}}{part} * 2", f"{{0}}{part}.tanh()"])
    if b.chance(3):
        b.do(f"{{0}}{part} = {{1}}", x, b.parameter(*b.get(x + part).shape[1:]))
    else:
        b.do(f"{{0}}{part} {b.pick(['=', '=', '+=', '*='])} {value}", x)


@operation("alias", 2)
def augmented(b: Builder) -> None:
    x = b.value(b.safe_to_write)
    shape = b.get(x).shape
    b.do(b.pick(["{0} += {1}", "{0}.copy_({1})", "{0}.add_({1}, alpha=0.5)", "{0}.lerp_({1}, 0.3)", "torch.add({0}, {1}, out={0}) if not torch.is_grad_enabled() else {0}.sub_({1})"]),
         x, b.value(lambda t: t.shape == shape))  # fmt: skip


@operation("alias", 2)
def scattered(b: Builder) -> None:
    x = b.value(lambda t: whole(t) and b.safe_to_write(t))
    shape = b.get(x).shape
    n = shape[1]
    b.do(b.pick([f"{{0}}.index_fill_(1, torch.tensor([{n - 1}]), 0.3)", "{0}.masked_fill_({0}.detach() > 0.5, 0.1)",
                 f"{{0}}.index_add_(1, torch.tensor([0, {n - 1}]), {{0}}.detach()[:, :1].clone().expand({', '.join(['-1', '2'] + ['-1'] * (len(shape) - 2))}))",
                 "{0}.squeeze_(1) if {0}.shape[1] == 1 else {0}.unsqueeze_(1)", "{0}.transpose_(1, -1)", "{0}.relu_()",
                 "{0}.scatter_(1, torch.zeros_like({0}[:, :1], dtype=torch.long), 0.7)"]), x)  # fmt: skip


@operation("data writes", 1)
def data_written(b: Builder) -> None:
    b.do(b.pick(["{0}.data.mul_(0.5)", "{0}.detach().add_(0.1)", "{0}.data.zero_()"]), b.value(b.safe_to_write))


# --- what is looked up, ordered and written by index ------------------------------------------------------------------


@operation("indexed", 3)
def indexed(b: Builder) -> None:
    x = b.value(whole)
    shape = b.get(x).shape
    d = b.pick(range(1, len(shape)))
    n = shape[d]
    ways = [f"{{0}}.cummax({d}).values", f"{{0}}.cummin({d}).values", f"{{0}}.sort({d}, descending=True).values", f"{{0}}.gather({d}, {{0}}.argsort({d}))",
            f"{{0}}.take_along_dim({{0}}.argsort({d}), {d})", f"torch.zeros_like({{0}}).scatter_add({d}, {{0}}.detach().argsort({d}), {{0}})",
            f"{{0}}.kthvalue({n}, {d}).values", f"{{0}}.median({d}).values", f"{{0}}.logcumsumexp({d})", f"{{0}}.diff(dim={d})", "{0}.tril()", "{0}.triu()",
            f"torch.zeros_like({{0}}).index_add({d}, torch.arange({n}).flip(0), {{0}})", f"{{0}}.unfold({d}, 1, 1).squeeze(-1)",
            "torch.cdist({0}.flatten(1)[:, None], {0}.flatten(1)[:, None]).flatten(1)", f"torch.fft.rfft({{0}}, dim={d}).abs().square()",
            "torch.view_as_real(torch.complex({0}, {0}.tanh())).sum(-1)", "torch.polar({0}.abs() + 1, {0}).real"]  # fmt: skip
    b.new(b.pick(ways), x)


@operation("indexed", 1)
def put(b: Builder) -> None:
    x = b.value(lambda t: whole(t) and b.safe_to_write(t))
    b.do(b.pick(["{0}.index_put_((slice(None) if False else torch.arange({0}.shape[0]),), {0}.detach() * 0.1, accumulate=True)",
                 "{0}.fill_diagonal_(0.2) if {0}.dim() == 2 else {0}.add_(0.1)", "{0}[:, [0, 0]] = {0}.detach()[:, :1] * 0.5", "{0}.clamp_min_(-0.5)"]), x)  # fmt: skip


@operation("picked", 2)
def picked(b: Builder) -> None:
    """What has a size that follows from values, of the batch or of parameters; Python is told the size, or acts on it."""
    if "ids" not in b.inputs:
        raise RefusedError
    x = b.value(lambda t: t.dim() == 3 and t.shape[:2] == b.inputs["ids"].shape)
    width = b.get(x).shape[-1]
    mask = b.pick(["ids > 5", "labels >= 0", "{0}.sum(-1) > 0", "{0}.detach()[..., 0] > 0.5"])
    kind = b.pick(["sum", "told", "acted on", "linear", "repeated"])
    if kind == "repeated":
        n = b.other("{0}.repeat_interleave(ids[0] % 2 + 1, dim=1)", x)
        b.new("{0} + {1}.mean(1, keepdim=True) / {1}.shape[1]", x, n)
        return
    n = b.other("{0}[%s]" % mask, x)
    if kind == "sum":
        b.new("{0}.sum(0) * 0.1", n, plain=True)
    elif kind == "told":
        b.new("{0} * (len({1}) / 8)", x, n)
    elif kind == "linear":
        name = b.member("linear", f"nn.Linear({width}, {b.size()})")
        b.new(f"self.{name}({{0}}).tanh().sum(0) / (len({{0}}) + 1)", n, plain=True)
    else:
        y = b.new("{0} * 1.0", x)
        then = Statement(y, "{0} * {1}", (y, b.parameter(width)))
        b.body.append(Statement(None, f"if len({n}) > 9:", (), (then,)))


@operation("placed", 2)
def placed(b: Builder) -> None:
    """The forward says where a module's parameters are, of which type, or writes to them."""
    x = b.value(whole)
    name = b.member("linear", f"nn.Linear({b.get(x).shape[-1]}, {b.size()})")
    dtype = "double" if b.get(x).dtype == torch.float64 else "float"
    b.do(b.pick([f"self.{name}.to({{0}}.device)", f"self.{name}.{dtype}()", f"self.{name}.weight.data.clamp_(-0.5, 0.5)",
                 f"self.{name}.requires_grad_(True)"]), x)  # fmt: skip
    b.new(f"self.{name}({{0}})", x)


# --- buffers ------------------------------------------------------------------------------------------------------------


# A value with a buffer: as arguments of a function, or a function takes the buffer by itself.
_WITH_A_BUFFER = ["{0} + {1}", "{0} * ({1} + 1)", "torch.vmap(lambda t: t * ({1} + 1))({0})",
                  "{0} + torch.func.grad(lambda t: (t * {1}.clone()).square().sum() * 0.1)({0})"]  # fmt: skip


@operation("buffers", 3)
def counted(b: Builder) -> None:
    """Updated from nothing of the batch, then read."""
    x = b.value(whole)
    s = b.buffer(b.get(x).shape[-1]) if b.chance() else b.buffer()
    update = b.pick([f"{s}.mul_(0.9).add_(0.1)", f"{s}.add_(0.25)", f"{s} += 0.5"])
    b.do(update)
    b.new(b.pick(_WITH_A_BUFFER), x, s)


@operation("buffers", 3)
def read_then_updated(b: Builder) -> None:
    """Read in a step, updated for the next from the batch: an EMA."""
    x = b.value(whole)
    dims = tuple(range(b.get(x).dim() - 1))
    s = b.buffer(b.get(x).shape[-1], made=b.pick(["torch.zeros", "torch.ones"]))
    b.new(b.pick(_WITH_A_BUFFER), x, s)
    y = b.value(lambda t: t.dim() >= 2 and t.shape[-1] == b.get(s).shape[0])
    dims = tuple(range(b.get(y).dim() - 1))
    b.do(
        b.pick(
            [
                f"{s}.lerp_({{0}}.detach().mean({dims}), 0.1)",
                f"{s}.mul_(0.9).add_({{0}}.detach().mean({dims}), alpha=0.1)",
            ]
        ),
        y,
    )


@operation("shared buffers", 2)
def of_one_memory(b: Builder) -> None:
    """Two tensors of the module in one memory, as the constructor made them: a write to one is read through the other."""
    x = b.value(whole)
    n = b.get(x).shape[-1]
    s = b.buffer(b.pick([n, 2 * n, 5000]), made=b.pick(["torch.zeros", "torch.ones"]))
    b._count += 1
    part = b.pick([f"{s}[:{n}]", f"{s}[-{n}:]", f"{s}.view(-1)[:{n}]"])
    name = b.pick([f"b{b._count}", f"part{b._count}"])
    text = f'self.register_buffer("{name}", {part})' if name[0] == "b" else f"self.{name} = {part}"
    b.set_up(name, text)
    written, read = b.draw.sample([s, f"self.{name}"], 2)
    if b.chance():
        b.new(b.pick(_WITH_A_BUFFER), x, f"self.{name}")
    update = b.pick(
        [
            f"{written}.mul_(0.9).add_(0.1)",
            f"{written}[:{n}].lerp_({{0}}.detach().mean({tuple(range(b.get(x).dim() - 1))}), 0.1)",
        ]
    )
    b.do(update, x)
    if b.chance():
        b.step()
    b.new(
        b.pick(["{0} + {1}.sum() * 0.01", f"{{0}} * ({{1}}[:{n}] + 1)"]),
        b.value(lambda t: t.dim() >= 1 and t.shape[-1] == n),
        read,
    )


@operation("assigned buffers", 2)
def buffer_assigned(b: Builder) -> None:
    x = b.value(whole)
    dims = tuple(range(b.get(x).dim() - 1))
    s = b.buffer(b.get(x).shape[-1])
    b.do(f"{s} = 0.9 * {s} + 0.1 * {{0}}.detach().mean({dims})", x)
    b.new(
        b.pick(_WITH_A_BUFFER),
        b.value(lambda t: t.dim() >= 1 and t.shape[-1] == b.get(s).shape[0]),
        s,
    )


@operation("counter dropout", 2)
def counter_dropout(b: Builder) -> None:
    """Its mask follows from a counter, so that one device's masks are known."""
    x = b.value(whole)
    n = b.get(x).shape[-1]
    s = b.buffer(made="")
    b.do(f"{s}.add_(1)")
    mask = b.other(f"((torch.arange({n}) * 7 + {s} * 3) % 5 > 1).to({{0}}.dtype)", x)
    b.new("{0} * {1} * 1.5", x, mask)


@operation("dropout", 2)
def dropout(b: Builder) -> None:
    """Torch's own generator: the same numbers as one device's where all ranks have all rows."""
    x = b.value()
    b.new(b.pick(["F.dropout({0}, 0.3)", "{0} * torch.rand_like({0})", "{0} + 0.1 * torch.randn_like({0})", "{0} * torch.bernoulli(torch.full_like({0}, 0.5))",
                  "{0} + torch.zeros_like({0}).uniform_()", "{0} * (torch.rand({0}.shape[-1]) > 0.3)"]), x)  # fmt: skip


# --- functions of autograd's, transforms, closures ----------------------------------------------------------------------

GIVEN = {
    "WithContext": """class WithContext(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.context = inner, None

    def forward(self, h):
        c = self.context[0] if isinstance(self.context, list) else self.context() if callable(self.context) else self.context
        return self.inner(h) * torch.sigmoid(c)""",
    "Decides": """class Decides(nn.Module):
    def __init__(self, inner, sign):
        super().__init__()
        self.inner, self.sign = inner, sign

    def forward(self, h, other):
        made = self.inner(h)
        if (h.square().mean() * self.sign >= 0).item():
            return made, other
        return other, made""",
    "Bent": """class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x * p.tanh()

    @staticmethod
    def backward(ctx, g):
        x, p = ctx.saved_tensors
        return g * p.tanh() * 0.9, (g * x * (1 - p.tanh() ** 2)).flatten(0, -2).sum(0)""",
    "Rounded": """class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(x, steps):
        return (x * steps).round() / steps

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.steps = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return g * (1 + 0.1 / ctx.steps), None""",
    "Halves": """class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        n = x.shape[-1] // 2
        ctx.width = x.shape[-1]
        return x[..., :n].clone(), x[..., n:] * 2

    @staticmethod
    def backward(ctx, a, b):
        return torch.cat([a, b * 2], -1)""",
    "Doubled": """class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2""",
    "Levelled": """class Levelled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g - 0.5 * g.mean(0)""",
    "DoubledOfNorm": """class DoubledOfNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return 2 * g / (1 + g.norm())""",
    "Pair": """class Pair(NamedTuple):
    first: Any
    second: Any""",
    "Output": """@dataclass
class Output:
    out: Any
    extra: Any = None""",
}


@operation("functions", 3)
def custom_function(b: Builder) -> None:
    x = b.value(whole)
    last = b.get(x).shape[-1]
    kind = b.pick(["Bent", "Rounded", "Halves", "Doubled"])
    if kind == "Doubled":
        x = b.new("{0} * 1.0", x)
    name = b.given(kind)
    if kind == "Bent":
        b.new(f"{name}.apply({{0}}, {b.parameter(last)})", x)
    elif kind == "Halves":
        parts = b.other(f"{name}.apply({{0}})", x)
        b.new(f"torch.cat([{parts}[1], {parts}[0]], -1)")
    else:
        b.new(f"{name}.apply({{0}}{', 4' if kind == 'Rounded' else ''})", x)


HOOKS = ["lambda g: g * 2", "lambda g: g.clamp(-0.01, 0.01)", "lambda g: g / (g.norm() + 0.1)", "lambda g: g - g.mean()", "lambda g: g.tanh()",
         "lambda g: g * (g.abs() > 0.01)", "lambda g: None", "lambda g: g.flip(-1)", "lambda g: g.mul(0.5).add(0.01)"]  # fmt: skip


@operation("gradients", 2)
def parameter_hook(b: Builder) -> None:
    """On a parameter, from the constructor: it is called once, with the gradient of all rows."""
    name = b.pick(n for n, p in b.module.named_parameters() if p.dim())
    path = re.sub(r"[.]([0-9]+)", r"[\1]", name)
    b.set_up("", f"self.{path}.register_hook({b.pick(HOOKS)})")


@operation("gradients", 2)
def value_hook(b: Builder) -> None:
    """No hook is put on a view of memory that is written: torch ends the process then. (What a block is given may be one.)"""

    def safe(t: Tensor) -> bool:
        return t._base is None or (t._version == 0 and not b.shares(t, b.inputs.values()))

    x = b.value(lambda t: t.requires_grad and whole(t) and safe(t))
    b.do(f"{{0}}.register_hook({b.pick(HOOKS)})", x)
    b.hooked_views += [b.get(x)] if b.get(x)._base is not None else []


MODULE_HOOKS = [
    "register_full_backward_hook(lambda m, into, of: tuple(None if g is None else g * 0.5 for g in into))",
    "register_full_backward_hook(lambda m, into, of: None)",
    "register_full_backward_pre_hook(lambda m, of: tuple(None if g is None else g.tanh() for g in of))",
]


@operation("module hooks", 1)
def module_hook(b: Builder) -> None:
    """Backward hooks of a module: torch makes a node of autograd of all tensors that it takes, and of all that it gives."""
    name = b.pick(n for n, m in b.module.named_modules() if n and not isinstance(m, (nn.ModuleList, nn.ModuleDict)))
    path = re.sub(r"[.]([0-9]+)", r"[\1]", name)
    b.set_up("", f"self.{path}.{b.pick(MODULE_HOOKS)}")


@operation("gradients", 1)
def own_backward(b: Builder) -> None:
    kind = b.pick(["Levelled", "DoubledOfNorm"])
    x = b.value(whole)
    b.new(f"{b.given(kind)}.apply({{0}})", b.new("{0} * 1.0", x) if kind == "DoubledOfNorm" else x)


@operation("transforms", 3)
def transformed(b: Builder) -> None:
    """Functions of torch.func."""
    x = b.value(whole)
    last = b.get(x).shape[-1]
    ways = [lambda: "torch.func.vmap(lambda t: t.tanh() * 2 + t.mean())({0})",
            lambda: "torch.vmap(torch.sin, in_dims=1, out_dims=1)({0})",
            lambda: "torch.func.grad(lambda t: t.tanh().square().sum())({0})",
            lambda: "torch.func.vmap(torch.func.grad(lambda t: t.sin().sum()))({0})",
            lambda: "torch.func.vmap(lambda t, w: t * w.sum(), in_dims=(0, None))({0}, %s)" % b.parameter(last),
            lambda: "torch.func.vmap(self.%s)({0})" % b.member("linear", f"nn.Linear({last}, {b.size()})"),
            lambda: "torch.func.jvp(torch.tanh, ({0},), (torch.ones_like({0}),))[1]",
            lambda: "torch.func.functional_call(self.%s, {'weight': %s}, ({0},))" % (b.member("linear", f"nn.Linear({last}, {last})"), b.parameter(last, last, scale=0.3))]  # fmt: skip
    b.new(b.pick(ways)(), x)


@operation("closures", 3)
def closed_over(b: Builder) -> None:
    """Functions and generators that modules keep, or that a forward makes."""
    x = b.value(whole)
    shape = b.get(x).shape
    kind = b.pick(["member", "of a parameter", "partial", "kept", "generator", "kept generator"])
    if kind == "member":
        b.new("self.%s({0})" % b.member("function", "lambda t: torch.tanh(t) * 0.5"), x)
    elif kind == "of a parameter":
        p = b.parameter(shape[-1])
        b.new("self.%s({0})" % b.member("function", f"lambda t: t * {p}"), x)
    elif kind == "partial":
        b.new("self.%s({0})" % b.member("function", "partial(torch.clamp, min=-0.5)"), x)
    elif kind == "kept":
        name = f"kept{len(b.members)}"
        b.do(f"self.{name} = lambda t, k={{0}}: t + k * 0.5", x)
        for _ in range(b.draw.randint(0, 2)):
            b.step()
        b.new(f"self.{name}({{0}})", b.value(lambda t: t.shape == shape))
    elif kind == "generator":
        b.new("torch.stack([t * k for k, t in enumerate({0}.unbind(1))], 1)", x)
    else:
        made = b.other("(t * 0.5 for t in {0}.unbind(1))", x)
        if b.chance():
            linear(b)
        b.new(f"torch.stack(list({made}), 1)")


@operation("recurrent", 1)
def recurrent(b: Builder) -> None:
    x = b.value(lambda t: t.dim() == 3)
    kind = b.pick(["GRU", "LSTM", "RNN"])
    name = b.member("recurrent", f"nn.{kind}({b.get(x).shape[2]}, {b.pick([3, 4])}, batch_first=True)")
    b.new(f"self.{name}({{0}})[0]", x)


# --- what is not trained, or not used -----------------------------------------------------------------------------------


@operation("detach", 2)
def detached(b: Builder) -> None:
    b.new(
        b.pick(["{0}.detach()", "{0}.detach() * {0}", "{0} + ({0}.round() - {0}).detach()", "{0}.detach().clone()"]),
        b.value(),
    )


@operation("no_grad", 2)
def no_grad(b: Builder) -> None:
    if b.depth:
        raise RefusedError
    with torch.no_grad(), b.region("with torch.no_grad():"):
        for _ in range(b.draw.randint(1, 3)):
            b.step()


@operation("unused", 1)
def unused(b: Builder) -> None:
    """A parameter that only some batches use."""
    x = b.value()
    if "ids" not in b.inputs:
        raise RefusedError
    p = b.parameter(b.get(x).shape[-1] if b.get(x).dim() > 1 else 1)
    name = b.new("{0} * 1.0", x)
    text = b.pick(["if int(ids[0, 0]) % 2:", "if bool((ids > 7).any()):", "if False:"])
    b.body.append(Statement(None, text, (), (Statement(name, "{0} * {1}", (name, p)),)))


# --- modules within modules ---------------------------------------------------------------------------------------------


# {0}: what a submodule is given, {1}: a parameter of the size of its last dim; K: a part of that size.
ARGUMENT_WRITES = ["{0}.mul_({1})", "{0} += {1}", "{0}[..., :K].copy_({1}[:K].expand_as({0}[..., :K]))", "{0}[:, 0] = {1}", "{0}[:, -1:].mul_(0.5)",
                   "{0}.transpose(1, -1).add_(0.3)", "{0}.unbind(1)[0].sigmoid_()", "{0}.chunk(2, -1)[0].tanh_()", "{0}.select(1, 0).copy_({0}[:, -1].detach() * {1})",
                   "{0}.flatten(1)[:, ::2].mul_(0.7)", "{0}.view_as({0}).addcmul_({1}, {1}, value=0.1)", "{0}.copy_({0}.detach().roll(1, 1) + {1})",
                   "F.relu({0}[..., :K], inplace=True)", "torch.mul({0}.detach(), 0.5, out={0}.data)"]  # fmt: skip


def block(b: Builder, x: str, *, without: Iterable[str] = (), writes: bool = False) -> str:
    """A new class whose forward takes and gives a value of this shape. Returns its name. ``writes``: whether the forward writes
    in place to what it is given."""
    t = b.get(x)
    with torch.no_grad():
        fresh = t.detach().clone()
    inner = Builder(
        b.draw,
        b.allowed
        - {"blocks", "towers", "embeddings", "outputs", "argument writes", "contexts", "deciding modules", *without},
        {"h": fresh.requires_grad_() * 1.0 if writes else fresh.requires_grad_()},
        b.classes,
    )
    inner.inputs = {"h": fresh}
    inner.depth = 0
    inner._count = 0
    if writes:
        last = t.shape[-1]
        inner.do(re.sub(r"\bK\b", str(max(1, last // 2)), b.pick(ARGUMENT_WRITES)), "h", inner.parameter(last))
    start = inner.new("h * 1.0")
    for _ in range(b.draw.randint(1, 4)):
        inner.step()
    same = [n for n in inner.rowed if inner.get(n).shape == t.shape and n not in ("h", start)]
    if same:
        result = f"h + {same[-1]}" if b.chance() else same[-1]
    else:
        final = inner.rowed[-1]
        if inner.get(final).shape[:-1] != t.shape[:-1]:
            raise RefusedError
        name = inner.member("linear", f"nn.Linear({inner.get(final).shape[-1]}, {t.shape[-1]})")
        result = f"h + self.{name}({final})"
    if "loose ends" not in b.allowed:
        result = inner.tie_ends(result)
    b.kinds |= inner.kinds
    name = f"Block{len(b.classes)}"
    b.classes.append(inner.made(name, result))
    for made in b.classes:
        if isinstance(made, Given):
            exec(made.text, b.namespace)
    exec(b.classes[-1].source(), b.namespace)
    return name


@operation("outputs", 3)
def in_a_structure(b: Builder) -> None:
    """A block that returns its value within a dict, a named tuple, a dataclass or a tuple, beside what is no tensor."""
    x = b.value(long)
    name = block(b, x)
    inner = b.classes[-1]
    assert isinstance(inner, Class)
    result, extra = inner.result, b.pick(["None", "h", "h.detach()", "h.shape[-1]", "[h, None]"])
    made, out = b.pick([
        (f"{{'out': {result}, 'extra': {extra}}}", "['out']"), (f"({result}, {extra})", "[0]"), (f"[{extra}, {result}]", "[1]"),
        (f"{b.given('Pair')}({result}, {extra})", ".first"), (f"{b.given('Output')}({result}, {extra})", ".out"),
        (f"{{'deep': [({result}, {extra})]}}", "['deep'][0][0]"),
    ])  # fmt: skip
    b.classes.append(replace(inner, name=f"{name}Out", result=made))
    exec(b.classes[-1].source(), b.namespace)
    member = b.member("block", f"{name}Out()")
    if b.chance():
        b.new(f"self.{member}({{0}}){out}", x)
    else:
        kept = b.other(f"self.{member}({{0}})", x)
        for _ in range(b.draw.randint(0, 2)):
            b.step()
        b.new(f"{{0}}{out} * 1.0", kept)


# Within a transform torch ends the process at a write under no_grad to a view, and at the use of a parameter whose ``data``
# was assigned, as `nn.Module.to` does (pytorch #184876).
ENDS_A_TRANSFORM = re.compile(r"no_grad|self\.\w+\.(to|float|double)\(")


@operation("blocks", 4)
def called_block(b: Builder) -> None:
    """A submodule, called once or several times, perhaps computed again in backward."""
    x = b.value(lambda t: long(t) and t.requires_grad)
    name = b.member("block", f"{block(b, x)}()")
    ways = [f"self.{name}({{0}})", f"self.{name}(self.{name}({{0}}))"]
    if "checkpoint" in b.allowed:
        ways += [f"checkpoint(self.{name}, {{0}}, use_reentrant=False)"]
    if "reentrant" in b.allowed:
        ways += [f"checkpoint(self.{name}, {{0}}, use_reentrant=True)"]
    if "swapped" in b.allowed:
        tensors = f"{{n: p * 0.7 for n, p in self.{name}.named_parameters()}}"
        ways += [f"torch.func.functional_call(self.{name}, {tensors}, ({{0}},))"]
    if "transforms" in b.allowed and not ENDS_A_TRANSFORM.search(b.classes[-1].source()):
        ways += [b.pick([f"torch.vmap(self.{name})({{0}})", f"torch.func.grad(lambda t: self.{name}(t).square().sum())({{0}})",
                         f"torch.func.jvp(self.{name}, ({{0}},), (torch.ones_like({{0}}),))[1]"])]  # fmt: skip
    text = b.pick(ways)
    if "vmap(" in text or "grad(" in text or "jvp(" in text:
        b.kinds.add("transforms")
    if "checkpoint" in text:
        b.kinds.add("reentrant" if "=True" in text else "checkpoint")
    if "functional_call" in text:
        b.kinds.add("swapped")
    b.new(text, x)


@operation("checkpointed code", 2)
def checkpointed_code(b: Builder) -> None:
    """A checkpoint of functions of two tensors, with one result or two, and perhaps of a submodule among them."""
    x = b.value(lambda t: long(t) and t.requires_grad)
    shape = b.get(x).shape
    c = b.value(lambda t: t.shape == shape)
    last = shape[-1]
    name = b.member("block", f"nn.Linear({last}, {last})")
    body, results = b.pick([
        ("(t @ u.transpose(-1, -2)).softmax(-1) @ u", 1), ("F.dropout(t.tanh(), p=0.0) * u", 1),
        (f"self.{name}(t).relu() * u", 1), (f"(self.{name}(t * u), u.sum(-1, keepdim=True))", 2),
        ("(t.sigmoid(), t.sigmoid() * u)", 2), ("(t, u * 2)", 2),
    ])  # fmt: skip
    again = b.pick(sorted({"checkpoint", "reentrant"} & b.allowed) or [""])
    text = f"checkpoint(lambda t, u: {body}, {{0}}, {{1}}, use_reentrant={again == 'reentrant'})"
    if not again:
        text = f"(lambda t, u: {body})({{0}}, {{1}})"
    else:
        b.kinds.add(again)
    if results == 1:
        b.new(text, x, c)
        return
    kept = b.other(text, x, c)
    for _ in range(b.draw.randint(0, 2)):
        b.step()
    b.new("{0}[0] + {0}[1]", kept)


@operation("blocks", 4)
def repeated_blocks(b: Builder) -> None:
    x = b.value(long)
    made = block(b, x)
    name = b.member("blocks", f"nn.ModuleList({made}() for _ in range({b.pick([2, 3])}))")
    y = b.new("{0} * 1.0", x)
    loop = Statement(None, f"for block in self.{name}:", (), (Statement(y, "block({0})", (y,)),))
    b._run(loop)
    if (
        not bool(b.get(y).isfinite().all())
        or float(b.get(y).detach().abs().max()) > LARGEST
        or b.get(y).shape != b.get(x).shape
    ):
        raise RefusedError
    b.body.append(loop)


@operation("lists", 2)
def listed(b: Builder) -> None:
    """Values in a Python list, among them what each of several blocks gives."""
    x = b.value(long)
    b.get(x)
    values = b.other("[{0}]", x)
    if b.chance() and "blocks" in b.allowed:
        name = b.member("blocks", f"nn.ModuleList({block(b, x)}() for _ in range(2))")
        loop = Statement(
            None, f"for block in self.{name}:", (), (Statement(None, f"{values}.append(block({values}[-1]))"),)
        )
        b._run(loop)
        b.body.append(loop)
    else:
        b.do("{0}.append({1})", values, b.value(lambda t: t.shape == b.get(x).shape))
    b.new(b.pick(["sum({0})", "torch.stack({0}).mean(0)", "torch.cat({0}, -1)", "{0}[-1] - {0}[0]"]), values)


@operation("stashes", 2)
def stashed(b: Builder) -> None:
    """A value that the module keeps until something later takes it."""
    x = b.value(whole)
    name = f"kept{len(b.members)}"
    b.do(f"self.{name} = {{0}}", x)
    for _ in range(b.draw.randint(0, 2)):
        b.step()
    b.new(f"{{0}} + self.{name}", b.value(lambda t: t.shape == b.get(x).shape))


@operation("towers", 2)
def towers(b: Builder) -> None:
    """Two submodules of one value, and their sum: what branches are made of. A branch draws random numbers of its own."""
    x = b.value(long)
    left, right = (b.member(side, f"{block(b, x, without={'dropout'})}()") for side in ("left", "right"))
    y = b.new(f"self.{left}({{0}})", x)
    z = b.new(f"self.{right}({{0}})", x)
    b.new("{0} + {1}", y, z)


@operation("argument writes", 2)
def argument_written(b: Builder) -> None:
    """A submodule that writes in place to the value that it is given, beside another one or alone; the value is used later."""
    x = b.value(long)
    y = b.new("{0} * 1.0", x)
    writer = b.member(b.pick(["left", "block"]), f"{block(b, y, without={'dropout'}, writes=True)}()")
    z = b.new(f"self.{writer}({{0}})", y)
    if b.chance():
        other = b.member("right", f"{block(b, x, without={'dropout'}, writes=b.chance(3))}()")
        z = b.new("{0} + {1}", z, b.new(f"self.{other}({{0}})", b.new("{0} * 1.0", x) if b.chance() else x))
    if b.chance():
        b.new(b.pick(["{0} + {1}", "{0} * {1}.tanh()", "torch.cat([{0}, {1}], -1)"]), z, y)


@operation("contexts", 2)
def in_context(b: Builder) -> None:
    """Submodules that find a value in an attribute, perhaps in a closure there, which may be reset when they have run."""
    x = b.value(long)
    shape = b.get(x).shape
    c = b.value(lambda t: t.shape == shape)
    sides = ["left", "right"] if b.chance() else ["block"]
    made = b.given("WithContext")
    names = [b.member(side, f"{made}({block(b, x, without={'dropout'})}())") for side in sides]
    kept = b.pick(["{0}", "lambda: {0}", "{0}.detach()", "({0} > 0).to({0}.dtype)", "[{0}]"])
    for name in names:
        b.do(f"self.{name}.context = {kept}", c)
    again = "checkpoint" in b.allowed and b.chance(3)
    way = "checkpoint(self.%s, {0}, use_reentrant=False)" if again else "self.%s({0})"
    values = [b.new(way % name, x) for name in names]
    for name in [] if again or b.chance() else names:
        b.do(f"self.{name}.context = None")
    if len(values) > 1:
        b.new("{0} + {1}", *values)


@operation("deciding modules", 2)
def decided(b: Builder) -> None:
    """Submodules that read a value, and return in one order or the other what they are given and what they make."""
    x = b.value(long)
    shape = b.get(x).shape
    c = b.value(lambda t: t.shape == shape)
    sides = ["left", "right"] if b.chance(3) else [b.pick(["left", "block"])]
    made = b.given("Decides")
    names = [b.member(side, f"{made}({block(b, x, without={'dropout'})}(), {b.pick([1, -1])})") for side in sides]
    pairs = [b.other(f"self.{name}({{0}}, {{1}})", x, c) for name in names]
    values = [b.new(f"{{0}}[{i}] * 1.0", pair) for pair in pairs for i in ((0, 1) if b.chance() else (b.pick([0, 1]),))]
    if len(values) > 1 and b.chance():
        b.new("{0} - 0.5 * {1}", *values[:2])


# --- half types ---------------------------------------------------------------------------------------------------------


@operation("half", 4)
def autocast(b: Builder) -> None:
    if b.depth:
        raise RefusedError
    head = b.pick(['with torch.autocast("cpu", dtype=torch.bfloat16):', 'with torch.autocast("cpu", enabled=False):'])
    # Torch ends the process at a weight that autocast has cast in a transform and keeps when the transform has ended.
    allowed, b.allowed = b.allowed, b.allowed - {"transforms"}
    try:
        with b.region(head), eval(head[5:-1], {"torch": torch}):
            for _ in range(b.draw.randint(1, 4)):
                b.step()
    finally:
        b.allowed = allowed


@operation("half", 3)
def cast(b: Builder) -> None:
    b.new(b.pick(["{0}.to(torch.bfloat16)", "{0}.bfloat16()", "{0}.half()", "{0}.float()", "{0}.to(torch.float16).mean(-1, keepdim=True)", "{0}.to(torch.float64).float()"]),
          b.value())  # fmt: skip


@operation("half", 3)
def type_seen(b: Builder) -> None:
    """The type of a value becomes a number, so that a wrong one is seen."""
    b.new("{0} * (torch.finfo({0}.dtype).bits / 32)", b.value())


# --- losses -------------------------------------------------------------------------------------------------------------


_LOGITS = "{0}.flatten(0, 1), labels.flatten()"
CROSS_ENTROPIES = [f"F.cross_entropy({_LOGITS})", "F.cross_entropy({0}.transpose(1, 2), labels)",
                   "F.cross_entropy({0}[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
                   "F.nll_loss({0}.log_softmax(-1).flatten(0, 1), labels.flatten())", f"F.cross_entropy({_LOGITS}, label_smoothing=0.1)",
                   "F.cross_entropy({0}.flatten(0, 1), ids.flatten(), ignore_index=3)",
                   f"F.cross_entropy({_LOGITS}, weight=torch.linspace(0.5, 2, {{0}}.shape[-1]).to({{0}}.dtype))"]  # fmt: skip
_PICKED = "{0}.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)"
SUMS = [f"F.cross_entropy({_LOGITS}, reduction='sum') * 0.1"]
MASKED = ["({0}.square().mean(-1) * (labels >= 0)).sum() / (labels >= 0).sum()",
          "({0}.square().sum(-1) * (ids > 2)).sum() / (ids > 2).sum().clamp(min=1)", "{0}.square().mean(-1)[labels >= 0].mean()",
          "{0}.square().mean(-1).masked_select(labels >= 0).mean()", "({0}.tanh() * (labels >= 0)[..., None]).sum() / ((labels >= 0).sum() + 1)"]  # fmt: skip
MASKED_ENTROPIES = [f"F.cross_entropy({_LOGITS}, reduction='none').sum() / (labels >= 0).sum()",
                    f"F.cross_entropy({_LOGITS}, reduction='sum') / (labels != -100).sum()",
                    f"-({_PICKED} * (labels >= 0)).sum() / (labels >= 0).sum()", f"-{_PICKED}[labels >= 0].mean()",
                    f"F.cross_entropy({_LOGITS}) + 0.01 * ({{0}}.logsumexp(-1).square() * (labels >= 0)).sum() / (labels >= 0).sum()",
                    f"-((1 - {_PICKED}.exp()) ** 2 * {_PICKED} * (labels >= 0)).sum() / (labels >= 0).sum()"]  # fmt: skip
MEANS = ["{0}.square().mean()", "{0}.tanh().mean()", "F.mse_loss({0}, torch.zeros_like({0}))", "F.smooth_l1_loss({0}, torch.ones_like({0}))",
         "{0}.sigmoid().mean(0).mean()", "F.binary_cross_entropy_with_logits({0}, torch.full_like({0}, 0.3))", "F.l1_loss({0}, {0}.detach() * 0.5)",
         "-{0}.log_softmax(-1).mean()", "F.kl_div({0}.log_softmax(-1), torch.full_like({0}, 0.2), reduction='batchmean')",
         "sum(t.square().mean() * 0.5 ** k for k, t in enumerate({0}.unbind(1)))", "torch.stack([t.tanh().mean() for t in {0}]).mean()",
         "(({0} * (ids > 2)[..., None]).sum(1) / (ids > 2).sum(1, keepdim=True).clamp(min=1)).square().mean()",
         "({0}.logsumexp(-1) - {0}.gather(-1, (ids % {0}.shape[-1])[..., None]).squeeze(-1)).mean()",
         "F.relu(0.3 + ({0} - {0}.roll(1, 1)).square().mean(-1) - ({0} - {0}.flip(1)).square().mean(-1)).mean()",
         "-F.logsigmoid({0}.mean(1) * ((ids.sum(1, keepdim=True) % 2) * 2 - 1)).mean()"]  # fmt: skip


def logits(b: Builder) -> str:
    x = b.value(lambda t: t.dim() == 3 and t.shape[1] == b.inputs["labels"].shape[1])
    width = b.get(x).shape[-1]
    if width >= VOCABULARY:
        return x
    return b.new("self.%s({0})" % b.member("head", f"nn.Linear({width}, {VOCABULARY}, bias=False)"), x)


def cross_entropy(b: Builder) -> str:
    return b.new(b.pick(CROSS_ENTROPIES), logits(b), plain=True)


def masked_mean(b: Builder) -> str:
    if b.chance(3):
        return b.new(b.pick(MASKED_ENTROPIES), logits(b), plain=True)
    x = b.value(lambda t: t.dim() == 3 and t.shape[1] == b.inputs["labels"].shape[1])
    return b.new(b.pick(MASKED), x, plain=True)


def mean(b: Builder) -> str:
    return b.new(b.pick(MEANS), b.value(), plain=True)


# {0}: a value, {1}: the mean of its square over all rows, {2}: that of another; %s: a number near the first mean.
OF_ALL_ROWS = ["{1}.clamp(min=%s)", "F.relu({1} - %s)", "({1} - %s).abs()", "{1} * ({1} > %s)", "torch.where({1} > %s, {1}, 0.1 * {1})",
               "torch.maximum({1}, {2})", "{1} / {1}.detach()", "{1} + {2} * ({1} / {2}).detach()", "{1} / {1}.item()", "{0}.mean(0).clamp(min=0.1).sum()",
               "{0}.mean(0).abs().mean()", "F.l1_loss({0}.mean(0), torch.zeros_like({0}[0]))", "{0}.mean((0, 1)).topk(1).values.sum()",
               "({0}.mean(0) > 0).to({0}.dtype).mean() * {1}"]  # fmt: skip


def of_all_rows(b: Builder) -> str:
    """A term that acts on a number of all rows in a way that shows only at some numbers, or in gradients."""
    x, other = (b.value(lambda t: t.dim() == 3) for _ in range(2))
    means = [b.new("{0}.square().mean()", v, plain=True) for v in (x, other)]
    form = b.pick(OF_ALL_ROWS)
    near = round(float(b.get(means[0])) * b.pick([0.9, 1.0, 1.1]), 4)
    return b.new(form % near if "%s" in form else form, x, *means, plain=True)


def total(b: Builder) -> str:
    if b.chance(3):
        return b.new(b.pick(SUMS), logits(b), plain=True)
    return b.new("{0}.square().sum() * 0.05", b.value(), plain=True)


LOSSES = {
    "cross entropy": cross_entropy,
    "masked mean": masked_mean,
    "mean": mean,
    "sum": total,
    "of all rows": of_all_rows,
}


def loss(b: Builder) -> str:
    """One or two terms."""
    terms = []
    for _ in range(1 if b.chance() else 2):
        kind = b.pick(sorted(set(LOSSES) & b.allowed))
        with suppress(RefusedError, RuntimeError):
            terms.append(LOSSES[kind](b))
            b.kinds.add(kind)
    terms = terms or [mean(b)]
    name = terms[0] if len(terms) == 1 else b.new("{0} + 0.5 * {1}", *terms, plain=True)
    if not b.get(name).requires_grad:
        raise RefusedError
    return name


KINDS = (
    frozenset(kind for kind, _, _ in OPERATIONS)
    | frozenset(LOSSES)
    | {"checkpoint", "reentrant", "input writes", "loose ends"}
)


def program(draw: random.Random, kinds: frozenset[str], longest: int = 10) -> Program | None:
    """A program of these kinds; None where what was drawn has no loss that can be trained."""
    tokens, width = draw.choice([4, 3, 5]), draw.choice([8, 6, 4])
    half = "half" in kinds
    run = Run("", {}, tokens=tokens, width=width, precise=not half)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if half else torch.float64)
    classes: list[Class | Given] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            b = Builder(draw, kinds, sample(run, ROWS, 1), classes)
            for _ in range(draw.randint(2, longest)):
                b.step()
            if not any(b.get(n).requires_grad for n in b.rowed):
                linear(b)
            found = loss(b)
            b.get(found).backward(retain_graph=True)  # torch refuses some writes only here
            result = f'{{"loss": {found if "loose ends" in kinds else b.tie_ends(found)}}}'
    except (RefusedError, RuntimeError, AttributeError):  # (a hook may get None for a gradient)
        return None
    finally:
        torch.set_default_dtype(default)
    found = frozenset(b.kinds | ({"half"} if half else set()))
    made = Program((*classes, b.made("Model", result)), tokens, width, found)
    return made if ".data" not in made.source() or _differentiable(made, run) else None


def _differentiable(program: Program, run: Run) -> bool:
    """Whether nothing that a backward needs is written through ``.data``, of which torch does not know: a gradient that is
    computed from what has changed is right nowhere."""
    source = re.sub(r"(\S+)\.data = (.*)", r"\1.detach().copy_(\2)", program.source())
    # Torch ends the process at a hook on a view that is written.
    source = re.sub(r"(?m)^( +)\S*\.register_hook\(.*$", r"\1pass", source)
    seen = replace(run, source=source.replace(".data", ".detach()"), rows=((ROWS,),))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if run.precise else torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one_device(seen)
    except RuntimeError:
        return False
    finally:
        torch.set_default_dtype(default)
    return True
