"""Hardware profiles: the speed and memory of devices and links. A prediction computes seconds and bytes from them.

profile      Profile, Link, Curve, Estimate       a device and its links: rates, efficiencies by size, scatter
collectives  collective, Group                    seconds of a collective, by algorithm and by how its ranks lie on nodes
reader       read_profile, profiles               reads a profile from a YAML file; the files of this package are in profiles/
profile_file calibrated_file                      the path of this machine's profile
devices      profile_here                         the profile of this machine's devices
quantity     read_quantity, spell_quantity        a number with a unit as text: "3.35 TB/s"
calibrate    calibrate                            measures the CPU of this machine
correction   learnt, corrected                    corrects a profile by the measured seconds of steps
exchange     measured_link, measured_skew         measures the link between processes, and how long they wait

    profile = read_profile("h100", network="roce-400")
    profile.compute(flops=2 * 4096**3, moved=3 * 2 * 4096**2, dtype="bfloat16", kind="matmul")
    collective(profile, "all_reduce", nbytes=2**30, group=Group(ranks=64, per_node=8))
"""

from meshwright.hardware.calibrate import calibrate
from meshwright.hardware.collectives import Group, collective
from meshwright.hardware.exchange import measured_link, measured_skew
from meshwright.hardware.profile import Curve, Estimate, Link, Profile
from meshwright.hardware.profile_file import CPU_LOCAL, calibrated_file, keep_profile
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
    "measured_skew",
    "profiles",
    "read_profile",
]
