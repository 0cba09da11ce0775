"""``meshwright env``: versions, GPUs and settings of this machine."""

from __future__ import annotations

import os

from rich.table import Table
from rich.text import Text

from meshwright import __version__
from meshwright.amounts import size_text
from meshwright.draw.console import console


def env() -> None:
    """Show what Meshwright finds on this machine.

    Prints versions, GPUs, backends, cores, memory, the installed extras and the
    environment variables of a launcher. Paste the output into a bug report.
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in _environment().items():
        table.add_row(Text(name, style="bold"), Text(value))
    console().print(table)


def _environment() -> dict[str, str]:
    """Label → text, in the order of printing."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch
    import torch.distributed as dist

    def installed(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} –"

    cuda, gpus = torch.version.cuda, torch.cuda.device_count()
    usable_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    variables = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
    )
    return {
        "meshwright": __version__,
        "python": f"{platform.python_version()}, {platform.platform()}",
        "torch": f"{torch.__version__}, CUDA {cuda or 'not built in'}",
        "GPUs": ", ".join(torch.cuda.get_device_name(i) for i in range(gpus)) or "none",
        "backends": ", ".join(name for name, available in backends.items() if available) or "none",
        "cores": f"{usable_cores} of {os.cpu_count()}",
        "memory": size_text(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "launcher": ", ".join(f"{key}={os.environ[key]}" for key in variables if key in os.environ)
        or "none: a plain process",
        "extras": ", ".join(map(installed, ("transformers", "scikit-learn", "tensorboard"))),
    }
