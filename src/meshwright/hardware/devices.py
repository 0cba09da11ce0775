"""The profile of this machine's devices: for a GPU by its name, for a CPU the file that ``meshwright calibrate`` wrote."""

from __future__ import annotations

import re
from dataclasses import replace

from meshwright.errors import Findings, PlanError
from meshwright.hardware.profile import Profile
from meshwright.hardware.profile_file import CPU_LOCAL, calibrated_file
from meshwright.hardware.reader import profiles, read_profile

GPUS = {
    "a100-40": r"A100-SXM4-40GB",
    "a100-80": r"A100-SXM4-80GB",
    "b200-sxm": r"\bB200$",
    "h100-sxm": r"H100 80GB HBM3$",
    "h200-sxm": r"\bH200$",
    "mi300x": r"MI300X$",
    "v100": r"V100-SXM[23]",
}
"""Name of a profile of this package → a pattern of the names that torch has for its GPUs. The patterns leave out PCIe cards,
because their links differ."""


def profile_here(device: str) -> Profile:
    """The profile of this machine's devices.

    Args:
        device: ``cpu`` or ``cuda``. The profile of a GPU has the memory size that the driver reports.

    Raises:
        PlanError: the CPU has not been measured, or the package has no profile of the GPU.
    """
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return replace(profile_of_gpu(properties.name), memory=properties.total_memory)
    findings = Findings("this search")
    if not calibrated_file().is_file():
        findings.add(
            where="mesh",
            given=f"auto, and no profile of this machine ({calibrated_file()})",
            required="a profile of the devices, by which plans are compared; or a mesh",
            fix="meshwright calibrate",
        )
    findings.raise_if_any()
    return read_profile(CPU_LOCAL)


def profile_of_gpu(name: str) -> Profile:
    """The profile of a GPU. ``name``: torch's name of the GPU, such as ``NVIDIA H100 80GB HBM3``.

    Raises:
        PlanError: the package has no profile of this GPU.
    """
    for profile, pattern in GPUS.items():
        if re.search(pattern, name):
            return read_profile(profile)
    raise PlanError.of(
        "this search",
        where="mesh",
        given=f"auto, on {name}",
        required=f"a GPU whose profile ships ({', '.join(profiles())}); or a mesh",
        fix="mesh: {dp_shard: 2}",
    )
