"""The hardware profile of a case: the one of its machine, with the row's own capacity, node and network."""

from __future__ import annotations

from dataclasses import replace

from meshwright.hardware.profile import Profile
from meshwright.hardware.reader import read_profile
from published_cases.case import Machine

_EFFICIENCIES = {  # kind of network of a row → whose efficiencies it has, of those that profiles know
    "infiniband": "ib",
    "omnipath": "ib",  # none of it are known here
    "roce": "roce",
    "ethernet": "roce",
}
_NETWORKS = {  # profile → its network of that kind
    "v100": {"ib": "ib-50", "roce": "roce-12"},
    "a100-40": {"ib": "ib-200", "roce": "roce-100"},
    "a100-80": {"ib": "ib-200", "roce": "roce-100"},
    "h100": {"ib": "ib-400", "roce": "roce-400"},
    "b200": {"ib": "ib-400", "roce": "roce-400"},
    "mi300x": {"ib": "ib-400", "roce": "roce-400"},
}
_RATES = ("peak", "matmul", "attention")
_SOLD = 0.03  # a device of "80 GB" has 79.15 GiB: a capacity that differs by less is the profile's


def profile_of(machine: Machine, computed_in: str = "bfloat16") -> Profile:
    """The profile of a machine. Where a row computes in float16, which plans do as bfloat16, bfloat16 has its rates: a V100 has
    none of its own.

    A link between nodes has the efficiencies of the profile's network of that kind, and the row's bandwidth, divided by the
    devices of a node. Calls that the row's software computes slower are slower. A capacity that differs from the profile's by
    more than 3 % is the row's.
    """
    known = _EFFICIENCIES.get(machine.network)  # none within one node
    profile = read_profile(machine.profile, network=_NETWORKS[machine.profile][known] if known else None)
    if abs(machine.capacity / profile.memory - 1) > _SOLD:
        profile = replace(profile, memory=machine.capacity)
    slower = {kind: factor * profile.slower.get(kind, 1.0) for kind, factor in machine.slower}
    profile = replace(profile, devices_per_node=machine.node, slower={**profile.slower, **slower})
    if computed_in == "float16":
        rates = {key: {**getattr(profile, key), "bfloat16": getattr(profile, key)["float16"]} for key in _RATES}
        profile = replace(profile, peak=rates["peak"], matmul=rates["matmul"], attention=rates["attention"])
    if known is None or profile.network is None:
        return profile
    bandwidth = machine.network_gbps * 1e9 / 8 / machine.node
    return replace(profile, network=replace(profile.network, bandwidth=bandwidth))
