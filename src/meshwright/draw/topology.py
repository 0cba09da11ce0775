"""``Topology``: the ranks of a mesh on nodes, and which axes communicate between nodes, as data.

torchrun numbers ranks node by node: node 0 has the first ``per_node`` ranks, node 1 the next ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.draw.plain import from_plain, to_plain
from meshwright.mesh import Mesh


@dataclass(frozen=True)
class AxisLinks:
    """The links that the groups of one axis communicate over.

    Attributes:
        axis: its name.
        groups: number of its groups.
        crossing: number of its groups that have ranks on several nodes.
        example: the ranks of one group: the first of those on the most nodes.
        on_nodes: number of ranks of ``example`` on each of its nodes, in node order.
    """

    axis: str
    groups: int
    crossing: int
    example: tuple[int, ...]
    on_nodes: tuple[int, ...]

    def __str__(self) -> str:
        """``within a node``, or ``between 2 nodes, 4 ranks on each``."""
        if not self.crossing:
            return "within a node"
        least, most = min(self.on_nodes), max(self.on_nodes)
        each = f", {least} to {most} ranks on each" if least < most else f", {most} ranks on each" if most > 1 else ""
        some = f" ({self.crossing} of {self.groups} groups)" if self.crossing < self.groups else ""
        return f"between {len(self.on_nodes)} nodes{each}{some}"


@dataclass(frozen=True)
class Topology:
    """The nodes of a mesh and the links of its axes; see `topology`.

    Attributes:
        mesh: axes and their sizes.
        per_node: number of ranks on a node; the last node may have fewer.
        axes: the links of each axis with more than one rank, in mesh order.
    """

    mesh: Mesh
    per_node: int
    axes: tuple[AxisLinks, ...]

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return -(-self.mesh.size // self.per_node)

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def ranks_of(self, node: int) -> range:
        """The ranks on a node, in order."""
        return range(node * self.per_node, min((node + 1) * self.per_node, self.mesh.size))

    def to_json(self) -> str:
        """The topology as JSON."""
        return json.dumps(to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """The topology from the text of ``to_json``."""
        return from_plain(cls, json.loads(text))


def topology(mesh: Mesh, per_node: int) -> Topology:
    """The topology of a mesh whose ranks are numbered node by node.

    Args:
        per_node: number of ranks on a node.

    Raises:
        ValueError: a node with no rank.
    """
    if per_node < 1:
        raise ValueError(f"a node has at least one rank; given {per_node}")
    return Topology(mesh, per_node, tuple(_links(mesh, per_node, axis) for axis, size in mesh.axes if size > 1))


def _links(mesh: Mesh, per_node: int, axis: str) -> AxisLinks:
    groups = mesh.groups(axis)
    counts = [_on_nodes(group, per_node) for group in groups]
    worst = max(range(len(groups)), key=lambda i: len(counts[i]))
    return AxisLinks(axis, len(groups), sum(len(c) > 1 for c in counts), tuple(groups[worst]), counts[worst])


def _on_nodes(ranks: Sequence[int], per_node: int) -> tuple[int, ...]:
    """The number of ranks on each node that has some, in node order."""
    return tuple(Counter(rank // per_node for rank in ranks).values())
