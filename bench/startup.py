"""What a person waits for: CPU seconds and wall seconds of the waits before anything is trained.

    python bench/startup.py [--runs 3] [NAME …]

Each wait is a process of its own, with a fresh Python; the best of a few runs is shown, as other programs on the machine only
add. CPU seconds are those of the process and of all that it started, and say what an idle machine would take where one core
works at a time; the wall seconds say what the person waited here. ``beyond torch`` is a process less one that imports torch
alone. Nothing is downloaded, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raw

SEVENTY_BILLION = (
    "hidden_size=8192,intermediate_size=28672,num_hidden_layers=80,num_attention_heads=64,num_key_value_heads=8"
)
SMALL = "n_layer=2,n_embd=64,n_head=4,vocab_size=512"
TORCH = ("-c", "import torch")
LENGTHS = "lengths"


@dataclass(frozen=True)
class Took:
    """Seconds of the CPU and of the wall clock."""

    cpu: float
    wall: float

    def less(self, other: Took) -> Took:
        return Took(max(0.0, self.cpu - other.cpu), max(0.0, self.wall - other.wall))


@dataclass(frozen=True)
class Wait:
    """One thing that a person waits for.

    Attributes:
        aim: seconds on an idle machine; None where none is set.
        code: the exit code that is right.
        beyond: another process, whose seconds are not counted.
    """

    name: str
    what: str
    aim: float | None
    arguments: tuple[str, ...]
    code: int = 0
    beyond: tuple[str, ...] | None = None


def _command(*arguments: str) -> tuple[str, ...]:
    return "-m", "meshwright", *arguments


def _script(name: str) -> tuple[str, ...]:
    return str(Path(__file__).parent / "startup_cases.py"), name


WAITS = (
    Wait("show", "show: Llama of 70 B on 1,024 ranks, tp", 5.0,
         _command("show", "hf:llama", "--mesh", "dp_shard=128,tp=8", "--set", SEVENTY_BILLION)),
    Wait("show-pp", "show: the same over pp=8", 5.0,
         _command("show", "hf:llama", "--mesh", "pp=8,dp_shard=16,tp=8", "--set", SEVENTY_BILLION)),
    Wait("mistake", "an error in the plan of an hf: target", 3.0,
         _command("show", "hf:llama", "--mesh", "dp_shard=128,tpp=8"), code=2),
    Wait("import", "import torch, meshwright: beyond torch", 0.2, ("-c", "import torch, meshwright"), beyond=TORCH),
    Wait("api", "from meshwright import parallelize: beyond torch", None,
         ("-c", "import torch; from meshwright import parallelize"), beyond=TORCH),
    Wait("help", "meshwright --help", None, _command("--help")),
    Wait("check", "check: a small GPT-2 on 2 workers", 12.0,
         _command("check", "hf:gpt2", "--mesh", "tp=2", "--set", SMALL)),
    Wait("unet", "planning: a U-Net of 953 events, pp=8,tp=2: beyond import", 10.0, _script("unet"),
         beyond=_script("nothing")),
    Wait("demo", "make demo, after the install", 90.0, (str(Path(__file__).parents[1] / "examples" / "demo.py"),)),
)  # fmt: skip


def run(arguments: Sequence[str], code: int) -> Took:
    """A process of Python with these arguments. Raises CalledProcessError if it ends with another code."""
    before, begin = _children(), time.perf_counter()
    ended = subprocess.run([sys.executable, *arguments], env=_environment(), capture_output=True, text=True)
    wall = time.perf_counter() - begin
    if ended.returncode != code:
        raise subprocess.CalledProcessError(ended.returncode, list(arguments), ended.stdout, ended.stderr)
    return Took(_children() - before, wall)


def _children() -> float:
    """CPU seconds of all processes that have been started and have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


Runs = list[tuple[float, float]]  # CPU and wall seconds of each


def best(runs: Runs) -> Took:
    """The least of some runs, by CPU seconds."""
    return Took(*min(runs))


def _runs(arguments: Sequence[str], code: int, runs: int) -> Runs:
    return [(took.cpu, took.wall) for took in (run(arguments, code) for _ in range(runs))]


def tables(samples: dict[str, Any]) -> dict[str, raw.Table]:
    """``waits``: the best run of each wait."""
    rows = [["", "aim, s", "CPU s", "wall s"]]
    for one in samples.values():
        took = best(one["runs"]).less(best(one["beyond"])) if one["beyond"] else best(one["runs"])
        rows.append(
            [one["what"], "" if one["aim"] is None else f"{one['aim']:g}", f"{took.cpu:.1f}", f"{took.wall:.1f}"]
        )
    return {"waits": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(wait.name for wait in WAITS), LENGTHS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write docs/bench/startup.json")
    given = parser.parse_args()
    samples: dict[str, Any] = {}
    print(f"{'':58} {'aim':>6} {'CPU':>7} {'wall':>7}   seconds")
    for wait in WAITS:
        if given.names and wait.name not in given.names:
            continue
        runs = _runs(wait.arguments, wait.code, given.runs)
        beyond = _runs(wait.beyond, 0, given.runs) if wait.beyond is not None else []
        samples[wait.name] = {"what": wait.what, "aim": wait.aim, "runs": runs, "beyond": beyond}
        took = best(runs).less(best(beyond)) if beyond else best(runs)
        aim = "" if wait.aim is None else f"{wait.aim:.1f}"
        print(f"{wait.what:58} {aim:>6} {took.cpu:7.2f} {took.wall:7.2f}", flush=True)
    if not given.names or LENGTHS in given.names:
        print("\na step of a new length, by CPU time of rank 0:", flush=True)
        subprocess.run([sys.executable, *_script(LENGTHS)], env=_environment(), check=True)
    if given.keep:
        print(raw.keep("startup", samples))


if __name__ == "__main__":
    main()
