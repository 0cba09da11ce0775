"""Seconds of a collective (the α–β model): the latency of its steps, and the time of the bytes that each device sends.

A collective takes the time of its fastest algorithm, because NCCL chooses by such a model (NVIDIA/nccl, src/graph/tuning.cc).
Letters: ``n`` ranks on ``k`` nodes; ``g`` ranks on each node; ``S`` bytes; ``α`` and ``α'``: the latency of a step within a
node and across nodes; ``T(b)`` and ``T'(b)``: seconds in which a device sends ``b`` bytes within its node and across nodes.

| collective | algorithm | steps | bytes | where |
| --- | --- | --- | --- | --- |
| all-reduce | ring | (2(n−k)α + 2(k−1)α') · min(1, S / (2n · segment)) | max(T(2(n−1)/n·S), T'(2(n−1)/n·S/g)) | `_ring` |
| | tree | 2(g−1)α + 2⌈log2 k⌉α' | max(T(2S), T'(2S/g)) / 0.92; T'(S/g) on two nodes | `_tree` |
| | in the switch | 2⌈log2 k⌉α' | max(T((1+1/g)·S) / in_switch, T'(2S/g)); T'(S/g) on two nodes | `_in_switch` |
| all-gather, reduce-scatter | ring | (n−k)α + (k−1)α' | max(T((n−1)/n·S), T'((n−1)/n·S/g)) | `_ring` |
| broadcast | ring, pipelined | (n−k)α + (k−1)α' | max(T(S), T'(S/g)) | `_ring` |
| all-to-all | pairwise | max(3α, (k−1)α') | max(T((g−1)/n·S), T'((n−g)/n·S)) | `_pairwise` |
| send | | α or α' | T(S) or T'(S) | `_send` |

Every collective begins after ``Link.start``; a reduction in the switch begins after 25 us. Across nodes there are g rings,
or g trees, so that each device of a node sends 1/g of the bytes over the network. If a backend uses another algorithm, a
collective takes `Link.kinds` times as long.

Sources: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 2005 (ring,
pairwise exchange). Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel
Computing 2009. NVIDIA/nccl-tests, doc/PERFORMANCE.md (2(n−1)/n and (n−1)/n). NCCL's tuning.cc (steps, 0.92, 25 us).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal, TypeAlias

from meshwright.hardware.profile import NOTHING, Estimate, Link, Profile

CollectiveKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]

TREE = 0.92
"""The fraction of a ring's bandwidth that a tree attains: NCCL, tuning.cc (``busBw * .92``)."""

EXCHANGE = 3
"""Steps of an all-to-all within a node, for any number of ranks. Measured: a small all-to-all over 2, 4 or 8 devices takes
9 to 13 us on A100, 6.5 to 7.5 us on H100, 8 to 10 us on B200: ``start`` plus about three steps (ai-dynamo/aiconfigurator,
nccl_perf)."""

SWITCH = 25e-6
"""Seconds before a reduction in the switch sends its first byte: NCCL, tuning.cc (``hwLatencies``: NVLS, NVLSTree, NVLink)."""


@dataclass(frozen=True)
class Group:
    """How the ranks of a collective are spread over nodes.

    Attributes:
        ranks: number of ranks.
        per_node: number of these ranks on one node. If ``per_node >= ranks``, one node has all of them. The last node may
            have fewer.
    """

    ranks: int
    per_node: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.per_node < 1:
            raise ValueError(f"a group has at least one rank, and one a node; given {self.ranks} and {self.per_node}")

    @property
    def here(self) -> int:
        """Number of ranks of the group on a full node."""
        return min(self.ranks, self.per_node)

    @property
    def nodes(self) -> int:
        """Number of nodes that the group spans."""
        return ceil(self.ranks / self.here)

    @property
    def fewest(self) -> int:
        """Number of ranks on the node with the fewest ranks. This node limits the bandwidth of a ring."""
        return self.ranks - (self.nodes - 1) * self.here


def neighbours(profile: Profile, ranks: int, apart: int = 1) -> Group:
    """A group of ``ranks`` ranks: r, r + apart, r + 2 · apart …"""
    return Group(ranks, max(1, min(ranks, profile.devices_per_node // apart)))


def collective(
    profile: Profile, kind: CollectiveKind, nbytes: float, group: Group, contention: float = 1.0
) -> Estimate:
    """Seconds of one collective, from the moment at which its last rank enters. The equations are in this file's docstring.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send.
        nbytes: bytes of the full tensor: the input of a reduction, the result of an all-gather or broadcast. For an
            all-to-all, bytes of one rank's input. For a send, bytes that are sent.
        group: the ranks of the collective; for a send, two.
        contention: number of collectives that share the link at the same time. Each has an equal part of the bandwidth.

    Raises:
        ValueError: the group spans several nodes and the profile has no network; or the group has more ranks on a node than
            the node has devices; or ``contention`` is below 1.
    """
    if group.ranks == 1:
        return NOTHING
    if group.here > profile.devices_per_node:
        raise ValueError(f"{group.here} ranks in a node of {profile.devices_per_node} devices ({profile.name})")
    if group.nodes > 1 and profile.network is None:
        raise ValueError(f"a group over {group.nodes} nodes, and {profile.name} has no network")
    if contention < 1:
        raise ValueError(f"at least one collective uses the link; given {contention}")
    wires = _Wires(profile, group, contention)
    fastest = min(
        (algorithm(wires, kind, nbytes) for algorithm in _algorithms(profile, kind, group)),
        key=lambda estimate: estimate.seconds,
    )
    factor = (wires.network if group.nodes > 1 else wires.node).kinds.get(kind, 1.0)
    return fastest if factor == 1.0 else factor * fastest


@dataclass(frozen=True)
class _Wires:
    """The links that a group uses, within a node and across nodes, and their speed under contention."""

    profile: Profile
    group: Group
    contention: float

    @property
    def node(self) -> Link:
        return self.profile.node

    @property
    def network(self) -> Link:
        return self.profile.network or self.profile.node

    def within(self, sent: float, rate: float = 1.0) -> float:
        """T: seconds in which a device sends ``sent`` bytes within its node; 0 if the group has one rank on each node.

        ``rate``: the fraction of the link's bandwidth that the algorithm attains.
        """
        ranks_on_node = self.group.here
        fraction_of_wires = (
            (ranks_on_node - 1) / (self.profile.devices_per_node - 1) if self.node.mesh and ranks_on_node > 1 else 1.0
        )
        return self.node.seconds(sent, rate * fraction_of_wires / self.contention) if ranks_on_node > 1 else 0.0

    def across(self, sent: float, rate: float = 1.0) -> float:
        """T': seconds in which a device sends ``sent`` bytes to other nodes; 0 if the group is on one node."""
        return self.network.seconds(sent, rate / self.contention) if self.group.nodes > 1 else 0.0

    @property
    def start(self) -> float:
        """Seconds before the first byte leaves."""
        return max(self.node.start * (self.group.here > 1), self.network.start * (self.group.nodes > 1))

    def estimate(self, latency: float, within: float, across: float) -> Estimate:
        """The latency plus the larger of ``within`` and ``across``, since both links send at the same time.

        The scatter is that of the link that takes longer.
        """
        crossing = self.group.nodes > 1 and (across >= within or self.group.here == 1)
        return Estimate(latency + max(within, across), (self.network if crossing else self.node).scatter)


def _ring(wires: _Wires, kind: str, size: float) -> Estimate:
    """Ring: each rank sends to the next rank, and its part of the bytes passes all ranks once, in an all-reduce twice.

    An all-reduce is a reduce-scatter followed by an all-gather: 2(n−1) steps of S/n bytes. A broadcast sends all bytes, in
    small pieces that follow each other (pipelined). gloo divides an all-reduce into 2n segments of at least one element, so
    that a rank leaves out steps of a tensor of fewer elements (pytorch/gloo, allreduce.cc: ``ring``).
    """
    group = wires.group
    n, k, g = group.ranks, group.nodes, group.fewest
    rounds = 2 if kind == "all_reduce" else 1
    sent = size if kind == "broadcast" else rounds * (n - 1) / n * size
    steps = rounds * ((n - k) * wires.node.latency + (k - 1) * wires.network.latency)
    segment = (wires.network if k > 1 else wires.node).segment
    if kind == "all_reduce" and segment:
        steps *= min(1.0, size / (2 * n * segment))
    return wires.estimate(wires.start + steps, wires.within(sent), wires.across(sent / g))


def _tree(wires: _Wires, kind: str, size: float) -> Estimate:
    """Two binary trees over the nodes, each for half of the bytes.

    Each node is an inner node of one tree and a leaf of the other. A node sends at most 2S bytes, and S bytes if there are
    two nodes (Sanders et al.). Within a node, a chain of devices goes up and down. The number of steps grows with the
    logarithm of the number of nodes; in a ring it grows with the number of ranks. So a tree is fast for few bytes, and for
    two nodes.
    """
    group = wires.group
    k, g = group.nodes, group.fewest
    latency = wires.start + 2 * ((group.here - 1) * wires.node.latency + _levels(k) * wires.network.latency)
    return wires.estimate(latency, wires.within(2 * size, TREE), wires.across(min(2, k - 1) * size / g, TREE))


def _in_switch(wires: _Wires, kind: str, size: float) -> Estimate:
    """The switch of a node adds (NVLink SHARP); across nodes there are two trees.

    A device sends S bytes to the switch, and S/g bytes of the sum to all devices.

    Klenk et al.: An In-Network Architecture for Accelerating Shared-Memory Multiprocessor Collectives, ISCA 2020; NCCL's NVLS
    and NVLSTree.
    """
    group = wires.group
    k, g = group.nodes, group.fewest
    latency = SWITCH + 2 * _levels(k) * wires.network.latency
    within = wires.within((1 + 1 / group.here) * size, wires.node.in_switch)
    return wires.estimate(latency, within, wires.across(min(2, k - 1) * size / g))


def _pairwise(wires: _Wires, kind: str, size: float) -> Estimate:
    """Each rank sends S/n bytes to each other rank: at the same time within a node, node after node across nodes."""
    group = wires.group
    n, k, ranks_on_node = group.ranks, group.nodes, group.here
    latency = wires.start + max(EXCHANGE * wires.node.latency * (ranks_on_node > 1), (k - 1) * wires.network.latency)
    return wires.estimate(
        latency, wires.within((ranks_on_node - 1) / n * size), wires.across((n - ranks_on_node) / n * size)
    )


def _send(wires: _Wires, kind: str, size: float) -> Estimate:
    """A send from one rank to another: one step."""
    across = wires.group.nodes > 1
    latency = wires.start + (wires.network if across else wires.node).latency
    return wires.estimate(latency, wires.within(size), wires.across(size))


def _levels(nodes: int) -> int:
    """Number of levels of a binary tree over the nodes."""
    return ceil(log2(nodes))


def _algorithms(
    profile: Profile, kind: CollectiveKind, group: Group
) -> Sequence[Callable[[_Wires, str, float], Estimate]]:
    """The algorithms that can run a collective."""
    if kind == "send":
        return [_send]
    if kind == "all_to_all":
        return [_pairwise]
    if kind != "all_reduce":
        return [_ring]
    algorithms = [_ring]
    if group.nodes > 1:
        algorithms.append(_tree)
    if profile.node.in_switch > 0 and group.here > 1:
        algorithms.append(_in_switch)
    return algorithms
