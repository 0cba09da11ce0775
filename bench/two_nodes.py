"""Two nodes, one of which is cut off, or killed, in mid-run: does the job end in time, say why, and go on to the same losses?

    python bench/two_nodes.py [--folder DIR] [--ranks 2]        Linux, iproute2 and root: nodes are network namespaces

Each node runs torchrun (``--nnodes 2``, c10d rendezvous, ``--max-restarts``), and starts it again where it gives up, as systemd
or Kubernetes would. Stage 0 of a pipeline is on node 0, stage 1 on node 1. Three runs of the same steps:

    undisturbed
    cut       the link of node 1 goes down; each side is to end its ranks, with a report, within the timeout; then it comes up
    killed    every process of node 1, torchrun included, is killed; the node is started again

The losses of each step are to be those of the undisturbed run, bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import hosts

import meshwright as mw

STEPS, SAVE_EVERY, PAUSE = 60, 5, 0.1  # PAUSE: seconds a step, so that there is a middle of the run
TIMEOUT = 12.0  # of the watch
BREAK_AT = 23  # the step at which something happens: between two checkpoints
CONF = "join_timeout=60,read_timeout=15,last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=3"
GIVE_UP = 150.0  # seconds that a run may take


# --- on each rank -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.up(self.norm(x)).tanh()))


def network() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(16, 1))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def train(folder: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    plan = {"mesh": {"pp": 2, "dp_shard": world // 2}, "microbatches": 2}
    job = mw.parallelize(network, plan, batch=(rows[:8],), loss=loss_of, device="cpu", timeout=60)
    optimizer = torch.optim.AdamW(job.parameters(), lr=1e-2)
    data = job.batches((rows,), 8, epochs=None)
    done = job.load(folder, optimizer, data=data).step if list(folder.glob("step-*")) else 0
    batches = iter(data)
    with mw.Watch(job, TIMEOUT, folder=folder, step=done):
        for step in range(done + 1, STEPS + 1):
            loss = job.step(next(batches))
            job.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(PAUSE)
            if job.rank == 0:
                with (folder / "losses.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "loss": loss.item().hex()}) + "\n")
            if step % SAVE_EVERY == 0:
                job.save(folder, optimizer, step=step, data=data, keep=2)
    dist.destroy_process_group()


# --- around them ------------------------------------------------------------------------------------------------------


class Node:
    """Torchrun on one host, started again whenever it gives up: what systemd or Kubernetes does."""

    def __init__(self, number: int, ranks: int, folder: Path) -> None:
        self.number, self.folder, self.starts = number, folder, 0
        # Torch finds out by names which node has the rendezvous; addresses of namespaces have none.
        conf = f"is_host={number == 0},{CONF}"
        words = f"--nnodes 2 --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-id trial --max-restarts 3 \
            --rdzv-endpoint {hosts.address(0)}:{hosts.PORT} --local-addr {hosts.address(number)} --rdzv-conf {conf}"
        self._arguments = [*words.split(), __file__, "--folder", str(folder)]
        self.log = folder / f"node-{number}.log"
        self.start()

    def start(self) -> None:
        self.starts += 1
        with self.log.open("a") as log:
            log.write(f"--- node {self.number}, start {self.starts}\n")
            log.flush()
            self.process = hosts.start(self.number, self._arguments, stdout=log, stderr=log)

    def finished(self) -> bool:
        """Whether its ranks have; where torchrun gave up, it is started again."""
        if self.process.poll() is None:
            return False
        if self.process.returncode:
            self.start()
        return self.process.returncode == 0

    def kill(self) -> None:
        """Everything that runs there: processes that this script has started."""
        while found := hosts.processes_of(self.number):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)

    def reports(self) -> int:
        """How often a rank said why the job ends: the watch in its report, or a job that has lost a rank in its error."""
        text = self.log.read_text(errors="replace")
        return text.count("; the job ends") + text.count("RankError: step")


def losses(folder: Path) -> dict[int, str]:
    """Step → the loss, as it was computed last."""
    file = folder / "losses.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {line["step"]: line["loss"] for line in map(json.loads, filter(None, lines))}


def wait(what: str, until: Callable[[], bool]) -> float:
    started = time.monotonic()
    while not until():
        if time.monotonic() - started > GIVE_UP:
            raise TimeoutError(what)
        time.sleep(0.1)
    return time.monotonic() - started


def cut(nodes: list[Node]) -> str:
    hosts.set_link(1, "down")
    started, took = time.monotonic(), dict[int, float]()

    def told() -> bool:
        for node in nodes:
            if node.reports() and node.number not in took:
                took[node.number] = time.monotonic() - started
        return len(took) == len(nodes)

    wait("a report on each side", told)
    time.sleep(5)
    hosts.set_link(1, "up")
    return ", ".join(f"node {n} ended with its report after {s:.1f} s" for n, s in sorted(took.items()))


def killed(nodes: list[Node]) -> str:
    nodes[1].kill()
    started = time.monotonic()
    wait("a report", lambda: nodes[1].finished() or bool(nodes[0].reports()))
    return f"node 0 told of it after {time.monotonic() - started:.1f} s"


def run(name: str, folder: Path, ranks: int, trouble: Callable[[list[Node]], str] | None) -> dict[int, str]:
    """Prints what happened; the losses."""
    folder = folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    with hosts.joined(2):
        nodes = [Node(n, ranks, folder) for n in range(2)]
        try:
            told = ""
            if trouble is not None:
                wait("the middle of the run", lambda: max(losses(folder), default=0) >= BREAK_AT)
                told = trouble(nodes)
            wait("the end of the run", lambda: sum(node.finished() for node in nodes) == len(nodes))
        finally:
            for node in nodes:
                node.kill()
    found = losses(folder)
    starts = " and ".join(str(node.starts) for node in nodes)
    print(
        f"{name:12} {len(found)} steps in {time.monotonic() - started:.0f} s; torchrun started {starts} times; {told}"
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where checkpoints, reports and logs go")
    parser.add_argument("--ranks", type=int, default=2, help="of each node")
    options = parser.parse_args()
    if "RANK" in os.environ:  # under torchrun
        train(options.folder)
        return 0
    if not hosts.allowed():
        print("two nodes need network namespaces: Linux, iproute2 and root")
        return 0
    folder = options.folder or Path(tempfile.mkdtemp(prefix="two-nodes-"))
    expected = run("undisturbed", folder, options.ranks, None)
    wrong = 0
    for name, trouble in (("cut", cut), ("killed", killed)):
        found = run(name, folder, options.ranks, trouble)
        differ = [step for step in range(1, STEPS + 1) if found.get(step) != expected.get(step)]
        print(f"{'':12} losses {'differ at steps ' + str(differ) if differ else 'equal, bit by bit'}")
        wrong += len(differ)
    print(f"logs, reports and checkpoints: {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
