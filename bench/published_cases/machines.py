"""The machines of published tables, and their peak rates.

Capacities are those that ``nvidia-smi`` and torch report: what is sold as 80 GB has about 80 GiB.
"""

from __future__ import annotations

from dataclasses import replace

from published_cases.case import GIB, Machine

PEAKS = {"v100": 125e12, "a100-40": 312e12, "a100-80": 312e12, "h100": 989e12, "mi300x": 1307e12, "b200": 2250e12}
"""Dense half-precision flop/s of matrix products: NVIDIA's data sheets of V100 SXM2, A100 SXM, H100 SXM, HGX B200 (half of the
figure with sparsity), and AMD's of MI300X."""

V100_32 = Machine("v100", 32 * GIB, node=4)
V100_16 = Machine("v100", 16 * GIB, node=4)
A100_40 = Machine("a100-40", 40 * GIB)
A100_80 = Machine("a100-80", 80 * GIB)
H100 = Machine("h100", 80 * GIB)
MI300X = Machine("mi300x", 192 * GIB)
B200 = Machine("b200", 180 * GIB)

NETWORK_ASSUMED = "network not stated: 1600 Gbit/s of InfiniBand a node, as a DGX A100 has"


def linked(machine: Machine, devices: int, network: str, gbps: float) -> Machine:
    """The machine with the links between its nodes, where a run has several nodes."""
    return replace(machine, network=network, network_gbps=gbps) if devices > machine.node else machine


def linked_by_default(machine: Machine, devices: int) -> tuple[Machine, tuple[str, ...]]:
    """The machine with links that its source does not state, and what was assumed."""
    assumed = (NETWORK_ASSUMED,) if devices > machine.node else ()
    return linked(machine, devices, "infiniband", 1600), assumed
