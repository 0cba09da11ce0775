"""What devices and links can do, by which a prediction turns work into seconds and bytes into memory.

profile      Profile, Link, Curve, Estimate       a device and its links, with efficiencies by size and scatter
collectives  collective, Group                    seconds of a collective, by algorithm and by where its ranks stand
reader       read_profile, profiles               YAML files with units; those that ship are in profiles/
local        calibrated_file                      where the profile of this machine is
quantity     read_quantity, spell_quantity        "3.35 TB/s"
calibrate    calibrate, measured_link             this machine, measured

    profile = read_profile("h100", network="roce-400")
    profile.compute(flops=2 * 4096**3, moved=3 * 2 * 4096**2, dtype="bfloat16", kind="matmul")
    collective(profile, "all_reduce", nbytes=2**30, group=Group(ranks=64, per_node=8))
"""

from meshwright.hardware.calibrate import calibrate
from meshwright.hardware.collectives import Group, collective
from meshwright.hardware.exchange import measured_link
from meshwright.hardware.local import CPU_LOCAL, calibrated_file, keep_profile
from meshwright.hardware.profile import Curve, Estimate, Link, Profile
from meshwright.hardware.reader import profiles, read_profile

__all__ = [
    "CPU_LOCAL",
    "Curve",
    "Estimate",
    "Group",
    "Link",
    "Profile",
    "calibrate",
    "calibrated_file",
    "collective",
    "keep_profile",
    "measured_link",
    "profiles",
    "read_profile",
]
