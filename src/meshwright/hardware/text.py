"""``profile_text``: a profile as YAML text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.hardware.quantity import Kind, spell_quantity
from meshwright.plan.text import written

if TYPE_CHECKING:
    from meshwright.hardware.profile import Curve, Link, Profile


ABSENT = (
    "host_collective",
    "host_unit",
    "host_send",
    "host_update",
    "host_sharded",
    "job_call",
    "job_step",
    "job_action",
)
"""Optional fields of a profile: seconds, 0 by default."""
HOST = ("host", "host_backward", *ABSENT)
"""The fields of a profile for seconds of the host."""


def profile_text(profile: Profile) -> str:
    """The profile as YAML, with units. If its links have names, ``read_profile`` reads an equal profile from it."""
    network = profile.network
    values = {
        **{key: getattr(profile, key) for key in ("name", "source", "date", "notes") if getattr(profile, key)},
        **{key: spell_quantity(getattr(profile, key), "B") for key in ("memory", "context", "per_group")},
        "reserve": profile.reserve,
        "peak": {dtype: spell_quantity(rate, "flop/s") for dtype, rate in profile.peak.items()},
        "matmul": {dtype: _curve(curve, "flop") for dtype, curve in profile.matmul.items()},
        "attention": {dtype: _curve(curve, "flop") for dtype, curve in profile.attention.items()},
        "bandwidth": spell_quantity(profile.bandwidth, "B/s"),
        "streaming": _curve(profile.streaming, "B"),
        **{key: spell_quantity(getattr(profile, key), "s") for key in ("launch", "host", "host_backward")},
        **{key: spell_quantity(getattr(profile, key), "s") for key in ABSENT if getattr(profile, key)},
        **({"slower": dict(profile.slower)} if profile.slower else {}),
        **({"update_fraction": profile.update_fraction} if profile.update_fraction != 1 else {}),
        **({"skew": _curve(profile.skew, "s")} if profile.skew else {}),
        **({"contention": profile.contention} if profile.contention else {}),
        "scatter": profile.scatter,
        **({"cores": profile.cores} if profile.cores else {}),
        "nodes": {profile.node.name or "node": {"devices": profile.devices_per_node} | _link(profile.node)},
        **({"networks": {network.name or "network": _link(network)}} if network else {}),
    }
    return written(values)


def _link(link: Link) -> dict[str, Any]:
    return {
        **({"source": link.source} if link.source else {}),
        "latency": spell_quantity(link.latency, "s"),
        **({"start": spell_quantity(link.start, "s")} if link.start else {}),
        "bandwidth": spell_quantity(link.bandwidth, "B/s"),
        "efficiency": _curve(link.efficiency, "B"),
        "scatter": link.scatter,
        **({"in_switch": link.in_switch} if link.in_switch else {}),
        **({"mesh": True} if link.mesh else {}),
        **({"kinds": dict(link.kinds)} if link.kinds else {}),
        **({"segment": spell_quantity(link.segment, "B")} if link.segment else {}),
    }


def _curve(curve: Curve, kind: Kind) -> dict[str, float]:
    return {spell_quantity(size, kind): efficiency for size, efficiency in curve.points}
