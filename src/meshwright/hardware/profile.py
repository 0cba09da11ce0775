"""``Profile``: what a prediction knows of a device and of the links between devices, as values.

| what | equation | where |
| --- | --- | --- |
| efficiency of a size | log e linear in log(size) | `Curve.at` |
| seconds of a call | max(flops / (peak · e(flops)), slower · bytes / (bandwidth · e(bytes)), launch) | `Profile.compute` |
| seconds of bytes over a link | bytes / (bandwidth · e(bytes)) | `Link.seconds` |
| seconds of a collective | by algorithm | `meshwright.hardware.collectives` |
| interval of a prediction | mean / (1 + 2 scatter) to mean · (1 + 2 scatter) | `Estimate` |

A profile is read from a YAML file (``read_profile``) or measured (``calibrate``); `Profile.text` is such a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import log
from typing import TypeAlias

from meshwright.hardware.text import profile_text

Work: TypeAlias = str
"""``matmul``, ``attention`` (fused), or anything else: ``other``, or the name of a function of ATen whose time does not follow
from its bytes alone (``hardware.functions``)."""

_HALF, _SINGLE = ("bfloat16", "float16"), ("float32", "tfloat32", "float64")
_NEAREST = {
    "bfloat16": ("float16", *_SINGLE),
    "float16": ("bfloat16", *_SINGLE),
    "float32": ("float64", "tfloat32", *_HALF),
    "tfloat32": ("float32", *_HALF, "float64"),
    "float64": ("float32", "tfloat32", *_HALF),
    "complex128": ("float64", "float32", *_HALF),
}


@dataclass(frozen=True)
class Curve:
    """An efficiency, a fraction of a peak, by size.

    Attributes:
        points: (size, efficiency) with growing sizes above 0 and efficiencies in (0, 1]; at least one.

    Raises ValueError where the points are not that.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] <= 0 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"a curve has at least one point, and sizes that grow from above 0; given {sizes}")
        if wrong := [e for _, e in self.points if not 0 < e <= 1]:
            raise ValueError(f"an efficiency is above 0 and at most 1; given {wrong[0]}")

    def at(self, size: float) -> float:
        """The efficiency at a size: its logarithm is linear in log(size) between points; beyond them that of the nearest end.

        So size / e, the time of a call, is a power of the size between two points, and grows wherever it grows from point to
        point. (Were e itself linear in log(size), a call of few bytes would take longer than one of more: there the time is
        nearly the same, and e nearly proportional to the size.)

        >>> round(Curve(((10.0, 0.2), (1000.0, 0.8))).at(100.0), 6)
        0.4
        """
        (left, low), *rest = self.points
        if size <= left:
            return low
        for right, high in rest:
            if size <= right:
                return low * (high / low) ** (log(size / left) / log(right / left))
            left, low = right, high
        return low


@dataclass(frozen=True)
class Estimate:
    """Seconds with their uncertainty.

    Attributes:
        seconds: the mean.
        scatter: the standard deviation as a fraction of the mean.
    """

    seconds: float
    scatter: float = 0.0

    @property
    def low(self) -> float:
        """The lower end of the interval: mean / (1 + 2 scatter). About 19 in 20 where the logarithm is normal."""
        return self.seconds / (1 + 2 * self.scatter)

    @property
    def high(self) -> float:
        """The upper end of the interval: mean · (1 + 2 scatter)."""
        return self.seconds * (1 + 2 * self.scatter)

    def __add__(self, other: Estimate) -> Estimate:
        """The sum. Absolute deviations add up, too: terms that rest on the same constants of a profile err together."""
        seconds = self.seconds + other.seconds
        deviation = self.seconds * self.scatter + other.seconds * other.scatter
        return Estimate(seconds, deviation / seconds if seconds else 0.0)

    def __mul__(self, times: float) -> Estimate:
        return Estimate(self.seconds * times, self.scatter)

    __rmul__ = __mul__

    @staticmethod
    def total(estimates: Iterable[Estimate]) -> Estimate:
        """The sum of any number of estimates."""
        return sum(estimates, NOTHING)


NOTHING = Estimate(0.0)


@dataclass(frozen=True)
class Link:
    """How devices reach each other: within a node, or across nodes.

    Attributes:
        latency: seconds that each step of a collective takes, from one device to the next, however few its bytes are.
        bandwidth: bytes that one device sends a second, in one direction, over all its ports.
        efficiency: which fraction of the bandwidth a device attains, by the bytes that it sends in one collective.
        scatter: relative standard deviation of what the link takes.
        name, source: for a person: which link, and where its numbers are from.
        start: seconds before the first byte of a collective leaves: the launch of its kernel, its first handshake.
        in_switch: the efficiency of an all-reduce that the switch adds up (NVLink SHARP), as a fraction of ``efficiency``;
            0 where the switch cannot.
        mesh: the bandwidth is that of wires to each other device of the node, with no switch between: r of d devices use
            (r − 1)/(d − 1) of it.
        kinds: collective → how many times as long it takes as its algorithm says, where a backend does something else: gloo
            has an all-reduce in place of a reduce-scatter. Default: 1.
    """

    latency: float
    bandwidth: float
    efficiency: Curve
    scatter: float
    name: str = ""
    source: str = ""
    start: float = 0.0
    in_switch: float = 0.0
    mesh: bool = False
    kinds: Mapping[str, float] = field(default_factory=dict, hash=False)

    def seconds(self, sent: float, share: float = 1.0) -> float:
        """bytes / (share · bandwidth · e(bytes)): what the bytes that one device sends take, without latency."""
        return sent / (share * self.bandwidth * self.efficiency.at(sent)) if sent > 0 else 0.0


@dataclass(frozen=True)
class Profile:
    """A device, its host, and its links.

    Attributes:
        name: as ``read_profile`` takes it.
        source: where the numbers are from.
        date: when they were put together, as 2026-11-23.
        notes: for a person; the first line says what it is.
        memory: bytes of a device, as its driver gives them to a program.
        context: bytes of those that a process takes besides its tensors: the driver's context, libraries, workspaces.
        per_group: bytes that each communicator (NCCL) takes.
        reserve: fraction by which an allocator holds more than what is alive at the peak.
        peak: type → flops a second of a device, dense, as its data sheet has them.
        matmul, attention: type → which fraction of the peak a product, or a fused attention, attains, by its flops.
        bandwidth: bytes of its memory that a device reads and writes a second.
        streaming: which fraction of the bandwidth a call attains, by the bytes that it reads and writes.
        launch: seconds that a call takes on the device at least.
        host, host_backward: seconds that the host takes for one torch function in a forward of eager PyTorch with autograd,
            and for its part of the backward.
        devices_per_node: how many devices a node has.
        node: the link within a node.
        network: the link across nodes, of one device; None where there is none.
        scatter: relative standard deviation of ``compute``.
        cores: how many devices of a node compute at once, where they share its cores (processes on CPUs); 0: all of them.
        host_collective: seconds that the host takes to call a collective, where that is not within its link's latency.
        host_unit: the same for a gather or a reduction of parameters, with the hooks of FSDP2 that ask for it; 0: as any other.
        host_update: seconds of the host for a function of clipping or of the optimizer; 0: as any other function.
        host_sharded: seconds of the host for a function of clipping or of the optimizer where parameters are DTensors; 0:
            ``host_update``.
        job_call, job_step, job_action: seconds that a job adds on the host to a torch function of a forward over tp that is not
            replayed, to a step, and to a forward or backward of a microbatch; 0: not measured.
        contention: how much longer functions take while a collective runs beside them, as a fraction: it takes multiprocessors,
            memory bandwidth and power.
        slower: function of ATen → how many times as long it takes as another that moves as many bytes.
    """

    name: str
    source: str
    date: str
    notes: str
    memory: int
    context: int
    per_group: int
    reserve: float
    peak: Mapping[str, float] = field(hash=False)
    matmul: Mapping[str, Curve] = field(hash=False)
    attention: Mapping[str, Curve] = field(hash=False)
    bandwidth: float
    streaming: Curve
    launch: float
    host: float
    host_backward: float
    devices_per_node: int
    node: Link
    network: Link | None
    scatter: float
    cores: int = 0
    host_collective: float = 0.0
    host_unit: float = 0.0
    host_update: float = 0.0
    host_sharded: float = 0.0
    job_call: float = 0.0
    job_step: float = 0.0
    job_action: float = 0.0
    contention: float = 0.0
    slower: Mapping[str, float] = field(default_factory=dict, hash=False)

    def compute(self, flops: float, moved: float, dtype: str, kind: Work) -> Estimate:
        """What one call takes on the device: max(flops / (peak · e(flops)), slower · bytes / (bandwidth · e(bytes)), launch).

        The roofline model (Williams, Waterman, Patterson: Roofline, CACM 2009) with efficiencies by size (Isaev et al.:
        Calculon, SC 2023), and a launch, which bounds small calls.

        Args:
            flops: floating-point operations that the call does; of a causal attention those that are not masked.
            moved: bytes that it reads and writes.
            dtype: the type it computes in, as torch names it, or ``tfloat32``. One that the profile lacks is taken to be as
                efficient as the nearest one that it has, in calls of the same time at peak, with twice the scatter.
            kind: "matmul", "attention" (fused), or anything else, at the peak of float32 without a curve, since tensor cores do
                not compute it: "other", or the name of a function that may be ``slower``.
        """
        busy, known = self._arithmetic(flops, dtype, kind)
        streamed = moved / (self.bandwidth * self.streaming.at(moved)) if moved > 0 else 0.0
        streamed *= self.slower.get(kind, 1.0)
        return Estimate(max(busy, streamed, self.launch), self.scatter * (1 if known else 2))

    def _arithmetic(self, flops: float, dtype: str, kind: Work) -> tuple[float, bool]:
        """flops / (peak · e(flops)), and whether the profile has the type."""
        if kind not in ("matmul", "attention"):
            return flops / self.peak[nearest_dtype("float32", self.peak)], True
        curves = self.matmul if kind == "matmul" else self.attention
        rated = nearest_dtype(dtype, self.peak)
        measured = nearest_dtype(rated, curves)
        peak = self.peak[rated]
        efficiency = curves[measured].at(flops * self.peak[measured] / peak)
        return flops / (peak * efficiency), rated == dtype == measured

    def update(self, *, sharded: bool) -> float:
        """Seconds of the host for a function of clipping or of the optimizer. ``sharded``: parameters are DTensors."""
        return (sharded and self.host_sharded) or self.host_update or self.host

    def text(self) -> str:
        """The profile as a YAML file. ``read_profile`` reads it as an equal profile, if its links have names."""
        return profile_text(self)


def nearest_dtype(dtype: str, known: Iterable[str]) -> str:
    """The type itself, or the one of those known that is most like it.

    >>> nearest_dtype("bfloat16", ["float32", "float16"]), nearest_dtype("float8_e4m3fn", ["float32", "bfloat16"])
    ('float16', 'bfloat16')
    """
    known = list(known)
    if dtype in known:
        return dtype
    half = dtype.startswith(("float8", "float4", "int8"))
    order = _NEAREST.get(dtype, (*_HALF, *_SINGLE) if half else (*_SINGLE, *_HALF))
    return next((name for name in order if name in known), known[0])
