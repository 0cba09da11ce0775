"""``Profile``: the rates, sizes and latencies of a device and its links, from which a prediction computes seconds and bytes.

| quantity | equation | function |
| --- | --- | --- |
| efficiency at a size | log e is linear in log(size) | `Curve.at` |
| seconds of a call | max(flops / (peak · e(flops)), slower · bytes / (bandwidth · e(bytes)), launch) | `Profile.compute` |
| seconds of bytes over a link | bytes / (bandwidth · e(bytes)) | `Link.seconds` |
| seconds of a collective | one for each algorithm | `meshwright.hardware.collectives` |
| ranks that wait for each other | seconds · skew(seconds / collectives) | `Profile.waiting` |
| interval of a prediction | mean / (1 + 2 scatter) to mean · (1 + 2 scatter) | `Estimate` |

``read_profile`` reads a profile from a YAML file, ``calibrate`` measures one, and `Profile.text` writes one as YAML.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import log
from typing import TypeAlias

from meshwright.hardware.functions import CONVOLUTIONS
from meshwright.hardware.text import profile_text

CallKind: TypeAlias = str
"""The kind of a call: ``matmul``; ``attention`` (fused) and ``attention_backward``; the name of an ATen function that is slower
than a copy of as many bytes, or than a product of as many operations (``hardware.functions``); or ``other``."""
PRODUCTS: tuple[CallKind, ...] = ("matmul", *sorted(CONVOLUTIONS))
"""The kinds of calls that are products of matrices."""
ATTENTIONS: tuple[CallKind, ...] = ("attention", "attention_backward")

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
    """The efficiency of calls, as a fraction of a peak rate, by their size (flops or bytes).

    Attributes:
        points: at least one (size, efficiency). Sizes are above 0 and grow; efficiencies are above 0 and at most 1.

    Raises:
        ValueError: the points are not so.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] <= 0 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"a curve has at least one point, and sizes that grow from above 0; given {sizes}")
        if wrong := [e for _, e in self.points if not 0 < e <= 1]:
            raise ValueError(f"an efficiency is above 0 and at most 1; given {wrong[0]}")

    def at(self, size: float) -> float:
        """The efficiency e at a size: log e is linear in log(size) between points, and constant beyond the first and last.

        So size / e, to which the time of a call is proportional, is a power of the size between two points. If it grows from
        one point to the next, it grows between them. (For small sizes, the time is nearly constant and e is nearly
        proportional to the size. If e itself were linear in log(size), a smaller call could take longer than a larger one.)

        >>> round(Curve(((10.0, 0.2), (1000.0, 0.8))).at(100.0), 6)
        0.4
        """
        (smaller, smaller_efficiency), *rest = self.points
        if size <= smaller:
            return smaller_efficiency
        for larger, efficiency in rest:
            if size <= larger:
                position = log(size / smaller) / log(larger / smaller)  # from 0 at the smaller point to 1 at the larger
                return smaller_efficiency * (efficiency / smaller_efficiency) ** position
            smaller, smaller_efficiency = larger, efficiency
        return smaller_efficiency


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
        """The lower end of the interval: mean / (1 + 2 scatter).

        If the logarithm of the seconds is normally distributed, about 19 of 20 values are in the interval.
        """
        return self.seconds / (1 + 2 * self.scatter)

    @property
    def high(self) -> float:
        """The upper end of the interval: mean · (1 + 2 scatter)."""
        return self.seconds * (1 + 2 * self.scatter)

    def __add__(self, other: Estimate) -> Estimate:
        """The sum. Standard deviations are added too, since terms from the same numbers of a profile have the same error."""
        seconds = self.seconds + other.seconds
        deviation = self.seconds * self.scatter + other.seconds * other.scatter
        return Estimate(seconds, deviation / seconds if seconds else 0.0)

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.seconds * factor, self.scatter)

    __rmul__ = __mul__

    @staticmethod
    def total(estimates: Iterable[Estimate]) -> Estimate:
        """The sum of any number of estimates."""
        return sum(estimates, NOTHING)


NOTHING = Estimate(0.0)


@dataclass(frozen=True)
class Link:
    """The connection between the devices of a node, or between nodes.

    Attributes:
        latency: seconds that each step of a collective takes, from one device to the next, in addition to its bytes.
        bandwidth: bytes per second that one device sends, in one direction, over all its ports.
        efficiency: the fraction of the bandwidth that a device attains, by the bytes that it sends in one collective.
        scatter: relative standard deviation of the seconds that the link takes.
        name, source: for the reader of the profile: the name of the link, and the source of its numbers.
        start: seconds before the first byte of a collective leaves: the launch of its kernel, its first handshake.
        in_switch: efficiency of an all-reduce that the switch adds (NVLink SHARP), as a fraction of ``efficiency``; 0 if the
            switch cannot add.
        mesh: True if each device has a wire to each other device of the node, without a switch. A group of r of d devices
            then uses (r − 1)/(d − 1) of the bandwidth.
        kinds: collective → its seconds / the seconds of its algorithm, if a backend uses another algorithm: gloo runs an
            all-reduce in place of a reduce-scatter. Default: 1.
        segment: bytes of the smallest part of a tensor that an all-reduce sends. gloo sends a tensor in 2n parts; a tensor
            of fewer elements leaves out steps. 0: no steps are left out.
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
    segment: float = 0.0

    def seconds(self, sent: float, share: float = 1.0) -> float:
        """bytes / (share · bandwidth · e(bytes)): seconds in which one device sends ``sent`` bytes, without latency."""
        return sent / (share * self.bandwidth * self.efficiency.at(sent)) if sent > 0 else 0.0


@dataclass(frozen=True)
class Profile:
    """The numbers of a device, its host and its links.

    Attributes:
        name: the name that ``read_profile`` takes.
        source: the source of the numbers.
        date: the day on which the profile was written, as 2026-11-23.
        notes: text for the reader. The first line describes the hardware.
        memory: bytes of a device that a program can use.
        context: bytes of ``memory`` that a process takes besides its tensors: the driver's context, libraries, workspaces.
        per_group: bytes of each communicator (NCCL).
        reserve: bytes that an allocator holds beyond those that live at the peak, as a fraction of them.
        peak: dtype → flops per second of a device, dense, from its data sheet.
        matmul, attention: dtype → the fraction of the peak that a matrix product, or a fused attention, attains, by its
            flops.
        bandwidth: bytes of its memory that a device reads and writes per second.
        streaming: the fraction of the bandwidth that a call attains, by the bytes that it reads and writes.
        launch: least seconds of a call on the device.
        host, host_backward: seconds of the host for one torch function in a forward of eager PyTorch with autograd, and for
            its part of the backward.
        devices_per_node: number of devices of a node.
        node: the link within a node.
        network: the link of one device across nodes; None if there is none.
        scatter: relative standard deviation of ``compute``.
        cores: number of devices of a node that can compute at the same time, if devices are processes that share cores; 0:
            all of them.
        host_collective: seconds of the host for the call of a collective; 0 if the latency of the link includes them.
        host_unit: seconds of the host for a gather or a reduction of an FSDP unit, with the hooks around it, besides their
            functions; 0: ``host_collective``.
        host_send: seconds of the host for a send or a receive between stages of a pipeline, with what a stage does for it
            besides its functions; 0: ``host_collective``.
        host_update: seconds of the host for a function of clipping or of the optimizer; 0: ``host``.
        host_sharded: seconds of the host for a function of clipping or of the optimizer if parameters are DTensors; 0:
            ``host_update``.
        update_fraction: seconds of the functions of clipping and of the optimizer on the device, as a fraction of
            ``compute``. On a CPU the tensors of a parameter are in the cache after the first of these functions.
        job_call, job_step, job_action: seconds of the host that a job adds to a torch function of a forward over tp that is
            not replayed, to a step, and to a forward or backward of a microbatch; 0: not measured.
        skew: the fraction by which ranks that share the cores of a machine take longer from one collective to the next than
            they compute, because they do not arrive together; by these seconds. None: not measured.
        contention: how much longer functions take while a collective runs at the same time, as a fraction. The collective
            takes multiprocessors, memory bandwidth and power.
        slower: ATen function → its seconds / the seconds of a copy of as many bytes; of a convolution, / the seconds of a
            product of as many operations; of an attention or its backward (as `CallKind` names them), / those that the curve
            gives.
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
    host_send: float = 0.0
    host_update: float = 0.0
    host_sharded: float = 0.0
    update_fraction: float = 1.0
    job_call: float = 0.0
    job_step: float = 0.0
    job_action: float = 0.0
    skew: Curve | None = None
    contention: float = 0.0
    slower: Mapping[str, float] = field(default_factory=dict, hash=False)

    def compute(self, flops: float, moved: float, dtype: str, kind: CallKind) -> Estimate:
        """Seconds of one call on the device: max(flops / (peak · e(flops)), slower · bytes / (bandwidth · e(bytes)), launch).

        This is the roofline model (Williams, Waterman, Patterson: Roofline, CACM 2009), with efficiencies by size (Isaev et
        al.: Calculon, SC 2023), and with a launch time, which is a lower bound for small calls.

        Args:
            flops: floating-point operations of the call; of a causal attention, those that are not masked.
            moved: bytes that the call reads and writes.
            dtype: the dtype of the computation, as torch names it, or ``tfloat32``. If the profile lacks it, the nearest
                dtype of the profile gives the efficiency, at the size that takes as long at peak, and the scatter is
                doubled.
            kind: see `CallKind`. Calls other than products and attention have the peak of float32 and no curve of efficiency,
                since tensor cores do not compute them.
        """
        arithmetic, known = self._arithmetic(flops, dtype, kind)
        streamed = moved / (self.bandwidth * self.streaming.at(moved)) if moved > 0 else 0.0
        if kind in (*PRODUCTS, *ATTENTIONS):
            arithmetic *= self.slower.get(kind, 1.0)
        else:
            streamed *= self.slower.get(kind, 1.0)
        return Estimate(max(arithmetic, streamed, self.launch), self.scatter * (1 if known else 2))

    def _arithmetic(self, flops: float, dtype: str, kind: CallKind) -> tuple[float, bool]:
        """(flops / (peak · e(flops)), whether the profile has the dtype)."""
        if kind not in (*PRODUCTS, *ATTENTIONS):
            return flops / self.peak[nearest_dtype("float32", self.peak)], True
        curves = self.attention if kind in ATTENTIONS else self.matmul
        peak_dtype = nearest_dtype(dtype, self.peak)
        curve_dtype = nearest_dtype(peak_dtype, curves)
        peak = self.peak[peak_dtype]
        efficiency = curves[curve_dtype].at(flops * self.peak[curve_dtype] / peak)
        return flops / (peak * efficiency), peak_dtype == dtype == curve_dtype

    @property
    def unit(self) -> float:
        """Seconds of the host for a gather or a reduction of an FSDP unit."""
        return self.host_unit or self.host_collective

    @property
    def send(self) -> float:
        """Seconds of the host for a send or a receive between stages of a pipeline."""
        return self.host_send or self.host_collective

    def update(self, *, dtensors: bool) -> float:
        """Seconds of the host for a function of clipping or of the optimizer. ``dtensors``: whether parameters are DTensors."""
        return (dtensors and self.host_sharded) or self.host_update or self.host

    def waiting(self, seconds: float, collectives: float) -> float:
        """Seconds in which a rank waits for ranks that arrive later at a collective: seconds · skew(seconds / collectives).

        The process skew of MPI's literature (Faraj, Patarasuk, Yuan: A study of process arrival patterns for MPI collective
        operations, ICS 2007), which grows with the time since ranks last met.

        Args:
            seconds: of a step, if all ranks took equally long for each of its parts.
            collectives: number of times that the rank meets others in these seconds.
        """
        if self.skew is None or collectives <= 0 or seconds <= 0:
            return 0.0
        return seconds * self.skew.at(seconds / collectives)

    def text(self) -> str:
        """The profile as YAML. If its links have names, ``read_profile`` reads an equal profile from it."""
        return profile_text(self)


def nearest_dtype(dtype: str, known: Iterable[str]) -> str:
    """``dtype`` if it is among ``known``, else the known dtype that is most like it.

    >>> nearest_dtype("bfloat16", ["float32", "float16"]), nearest_dtype("float8_e4m3fn", ["float32", "bfloat16"])
    ('float16', 'bfloat16')
    """
    known = list(known)
    if dtype in known:
        return dtype
    half = dtype.startswith(("float8", "float4", "int8"))
    order = _NEAREST.get(dtype, (*_HALF, *_SINGLE) if half else (*_SINGLE, *_HALF))
    return next((name for name in order if name in known), known[0])
