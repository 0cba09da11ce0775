"""``calibrate``: measures how fast one process of this machine computes and moves bytes.

``measured_link`` measures the link between processes:

link = workers.run(measured_link, ranks=2)[0]
Path("cpu-local.yaml").write_text(replace(calibrate(), node=link).text())
"""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from meshwright.hardware.functions import CONVOLUTIONS, convolution_flops, function_calls
from meshwright.hardware.meter import Calls, Meter, curve, four_digits, monotone_points, rate
from meshwright.hardware.profile import Curve, Link, Profile

if TYPE_CHECKING:
    from torch import Tensor

SIDES = tuple(2**i for i in range(6, 12))
"""Sides of the square matrices that are multiplied."""
LENGTHS = (64, 128, 256, 512, 1024)
"""Sequence lengths of the timed attentions."""
SIZES = tuple(4**i * 2**12 for i in range(9))
"""Bytes of the tensors that are copied and added: 4 KiB to 256 MiB."""

DTYPES = ("float32", "float64", "bfloat16")
HEADS, WIDTH = 4, 64  # of an attention; a second shape has 16 rows, shorter sequences and 8 heads of half the width
POOL = 2**25
"""Total bytes of the tensors that the calls of one size use in turn. In a training step, a tensor is rarely in the nearest
cache when it is read; a pool larger than that cache has the same effect."""
MOST_COPIES = 1024
"""Copies of a small tensor at most. So many of 4 KiB take 4 MiB, more than the nearest cache has."""
RESULTS = 4
"""Results of a timed call that live at the same time."""
CHAIN = 100  # number of functions in the chain that measures the host's time
CLEAR = 4  # a call counts for the peak only if it takes at least this many times the host's time for one function
LINK = Link(
    75e-6, 1e9, Curve(((1.0, 1.0),)), 0.5, "gloo", "not measured: the order of magnitude of gloo in one machine"
)


def calibrate(
    device: str = "cpu",
    *,
    sides: Sequence[int] = SIDES,
    lengths: Sequence[int] = LENGTHS,
    sizes: Sequence[int] = SIZES,
    rounds: int = 5,
    budget: float = 5.0,
    devices_per_node: int = 8,
    tell: Callable[[str], None] = lambda next_measurement: None,
) -> Profile:
    """Measures the CPU of this machine and returns its profile. Takes about 20 seconds.

    A device of the profile is a process with as many threads as torch has in this process. The time of a call includes the
    allocation of its result, as in a model's forward. The link within the node is not measured: the profile has ``LINK``,
    with a scatter of one half. ``measured_link`` measures the link.

    Args:
        device: "cpu". This function cannot measure GPUs; profiles of GPUs are part of the package.
        sides, lengths, sizes: see SIDES, LENGTHS and SIZES.
        rounds: how often each call is timed.
        budget: seconds for each of six curves. Sizes that would exceed the budget are left out.
        devices_per_node: number of processes on the node of the profile.
        tell: a function that is called before each measurement, with the name of the measurement.

    Raises:
        ValueError: ``device`` is not "cpu".
    """
    if device != "cpu":
        raise ValueError(f'calibrate measures "cpu"; given {device!r}. read_profile has the profiles of GPUs')
    meter = Meter(rounds, budget)
    tell("the host's part of small functions")
    meter.host, backward = _host(meter)
    computes, moves = _computes(meter, sides, lengths, tell), _moves(meter, sizes, tell)
    return Profile(
        **_machine(),
        **computes,
        **moves,
        slower={**_slower(meter, computes, moves), "attention_backward": _attention_backward(meter, computes, lengths)},
        host=meter.host,
        host_backward=backward,
        scatter=meter.scatter,
        devices_per_node=devices_per_node,
    )


def _computes(
    meter: Meter, sides: Sequence[int], lengths: Sequence[int], tell: Callable[[str], None]
) -> dict[str, Any]:
    """The fields of the profile for flops: the peak of each dtype, the curves of products and attentions."""
    products, attentions = {}, {}
    for dtype in DTYPES:
        tell(f"products of matrices in {dtype}")
        products[dtype] = meter.points(_products(dtype, sides))
    for dtype in ("float32", "bfloat16"):
        tell(f"attention in {dtype}")
        attentions[dtype] = meter.points(_attentions(dtype, lengths))
    peak = {dtype: rate(points, CLEAR * meter.host) for dtype, points in products.items()}
    return {
        "peak": peak,
        "matmul": {dtype: curve(points, peak[dtype]) for dtype, points in products.items()},
        "attention": {dtype: curve(points, peak[dtype]) for dtype, points in attentions.items()},
    }


def _moves(meter: Meter, sizes: Sequence[int], tell: Callable[[str], None]) -> dict[str, Any]:
    """The fields of the profile for bytes: the bandwidth of memory, and its curve."""
    tell("copies and additions in memory")
    streams = monotone_points(meter.points(_streams(sizes)))
    bandwidth = rate(streams, CLEAR * meter.host)
    return {"bandwidth": bandwidth, "streaming": curve(streams, bandwidth)}


def _machine() -> dict[str, Any]:
    """The fields of the profile that need no measurement."""
    import torch

    threads = torch.get_num_threads()
    return {
        "name": "cpu-local",
        "source": f"calibrate, {platform.node()}, {platform.machine()}, torch {torch.__version__}",
        "date": date.today().isoformat(),
        "notes": f"{threads} thread{'' if threads == 1 else 's'} a process",
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "context": 0,
        "per_group": 0,
        "reserve": 0.0,
        "launch": 0.0,  # on a CPU the host itself computes, so a call begins at once
        "node": LINK,
        "network": None,
        "cores": processes_at_once(threads),
    }


def processes_at_once(threads: int) -> int:
    """How many processes with ``threads`` threads each can run without sharing the cores of this machine; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


def _host(meter: Meter) -> tuple[float, float]:
    """The host's seconds for one small function under autograd: (of its forward, of its backward)."""
    import torch

    start = torch.ones(8, 8, requires_grad=True)

    def chain() -> Tensor:
        x = start
        for _ in range(CHAIN // 4):
            x = torch.relu((x * 1.5 + 1.0).t())
        return x

    both = meter.seconds(lambda: chain().backward(torch.ones(8, 8)))
    forward = meter.seconds(chain)
    return four_digits(forward / CHAIN), four_digits(max(both - forward, forward / 10) / CHAIN)


def _products(dtype: str, sides: Sequence[int]) -> Calls:
    """Matrix products of 2·m·k·n flops, for each side s in the three forms of a linear layer: its forward x Wᵀ, and for its
    backward g W and gᵀ x."""
    import torch

    def product(m: int, k: int, n: int, form: str) -> Callable[[], object]:
        a, b = torch.randn(m, k).to(getattr(torch, dtype)), torch.randn(k, n).to(getattr(torch, dtype))
        if form == "gᵀ x":
            a = a.t().contiguous().t()  # the same matrix, in memory as its transpose
        elif form == "x Wᵀ":
            b = b.t().contiguous().t()
        return _with_copies(torch.mm, [a, b])

    for side in sides:
        shapes = {
            "x Wᵀ": (4 * side, side // 2, side // 2),
            "g W": (side,) * 3,
            "gᵀ x": (side // 2, 4 * side, side // 2),
        }
        yield 2.0 * side**3, [partial(product, *shape, form) for form, shape in shapes.items()]


def _attentions(dtype: str, lengths: Sequence[int]) -> Calls:
    """Attentions of 4·heads·length²·width flops, in two shapes for each length."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def attention(*shape: int) -> Callable[[], object]:
        q, k, v = (torch.randn(shape).to(getattr(torch, dtype)) for _ in range(3))
        return _with_copies(scaled_dot_product_attention, [q, k, v])

    for length in lengths:
        shapes = (1, HEADS, length, WIDTH), (16, 2 * HEADS, max(1, length // 4), WIDTH // 2)
        yield 4.0 * HEADS * length**2 * WIDTH, [partial(attention, *shape) for shape in shapes]


def _streams(sizes: Sequence[int]) -> Calls:
    """Copies, which move 2 · size bytes, and additions, which move 3 · size bytes."""
    import torch

    def copy(size: int) -> Callable[[], object]:
        return _with_copies(torch.clone, [torch.ones(size // 4)])

    def addition(size: int) -> Callable[[], object]:
        return _with_copies(torch.add, [torch.ones(size // 4)] * 2)

    for size in sizes:
        yield 2.0 * size, [partial(copy, size)]
        yield 3.0 * size, [partial(addition, size)]


def _slower(meter: Meter, computes: Mapping[str, Any], moves: Mapping[str, Any]) -> dict[str, float]:
    """Function of ``hardware.functions`` → its seconds / those of a copy of as many bytes, at least 1; of a convolution, /
    those of a product of as many operations: another library computes it, which may be faster.

    Args:
        computes, moves: the fields of the profile for flops and for bytes.
    """
    import torch

    rate: Curve = computes["matmul"]["float32"]
    bandwidth, streaming = moves["bandwidth"], moves["streaming"]
    factors: dict[str, float] = {}
    for name, (function, arguments) in function_calls().items():
        call, result = _with_copies(function, arguments), function(*arguments)
        if name in CONVOLUTIONS:
            flops = convolution_flops(name)
            like, least = flops / (computes["peak"]["float32"] * rate.at(flops)), 0.01
        else:
            tensors = (*arguments, *(result if isinstance(result, tuple) else (result,)))
            moved = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
            like, least = moved / (bandwidth * streaming.at(moved)), 1.0
        factors[name] = max(least, round((meter.seconds(call) - meter.host) / like, 2))
    return factors


def _attention_backward(meter: Meter, computes: Mapping[str, Any], lengths: Sequence[int]) -> float:
    """Seconds of the backward of an attention / those of a forward of as many operations. The backward has five products for
    the forward's two (Dao: FlashAttention-2, arXiv 2307.08691, section 3.1)."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    length = lengths[len(lengths) // 2]
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3))
    out = scaled_dot_product_attention(q, k, v)
    gradient = torch.randn_like(out)
    seconds = meter.seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    flops, curve = 2.5 * 4.0 * HEADS * length**2 * WIDTH, computes["attention"]["float32"]
    return max(0.01, round((seconds - meter.host) * computes["peak"]["float32"] * curve.at(flops) / flops, 2))


def _with_copies(function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[[], Any]:
    """A call of a function with these arguments, and with other copies of their tensors each time (`_pool`).

    Its last results live on, as in a step, and so many as large as they have lived before: a step finds memory that the one
    before it has given back, without faults of pages.
    """
    import torch

    places = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
    pool = _pool([arguments[i] for i in places])
    results: deque[Any] = deque(maxlen=RESULTS)

    def call() -> Any:
        given = dict(zip(places, next(pool), strict=True))
        results.append(function(*(given.get(i, a) for i, a in enumerate(arguments))))
        return results[-1]

    first = call()
    for _ in range(RESULTS + 1):
        results.append([t.clone() for t in (first if isinstance(first, tuple) else (first,))])

    return call


def _pool(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Copies of these tensors, in turn: so many that none is in the nearest cache when it comes again."""
    copies = min(MOST_COPIES, max(2, POOL // sum(t.nbytes for t in tensors)))
    return cycle([[t.clone() for t in tensors] for _ in range(copies)])
