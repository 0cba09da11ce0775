"""Several hosts on one machine: network namespaces, joined by a bridge, with torchrun on each.

    python examples/hosts.py 4 2 examples/four_nodes.py      4 hosts × 2 processes; needs Linux, iproute2 and root

Each host has a loopback and an address of its own, so that what reaches another goes through the bridge, and what would only
work within one host does not work. A link can be cut: ``ip -n mwhost2 link set eth0 down``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PORT = 29777
BRIDGE, HOST, LINK = "mwbridge", "mwhost{}", "mwlink{}"
ENVIRONMENT = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
TORCHRUN = "-m torch.distributed.run"
NAMES = Path("/tmp/mwnames")  # the hosts' names, as /etc/hosts has them


def allowed() -> bool:
    """Whether this process may make network namespaces."""
    if not shutil.which("ip") or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    trial = [["ip", "netns", verb, "mwtrial"] for verb in ("add", "del")]
    return sum(subprocess.run(words, capture_output=True, check=False).returncode for words in trial) == 0


def launch(hosts: int, processes: int, command: list[str], timeout: float = 240) -> int:
    """Runs a script under torchrun on every host; the largest exit status. Hosts and links are gone afterwards."""
    launched: list[subprocess.Popen[bytes]] = []
    with joined(hosts), _store() as where:
        meet = f"--rdzv-backend c10d --rdzv-endpoint {where} --rdzv-conf is_host=false --rdzv-id {os.getpid()}"
        try:
            for n in range(hosts):
                torchrun = f"--nnodes {hosts} --nproc-per-node {processes} --local-addr {address(n)} {meet}"
                launched.append(start(n, [*torchrun.split(), *command]))
            return max(abs(p.wait(timeout=timeout)) for p in launched)
        finally:
            for process in launched:
                process.terminate()


@contextmanager
def _store() -> Iterator[str]:
    """The address at which torchruns meet: a store on host 0, which outlives them. If the first torchrun kept it, it would be
    gone while the others take their leave, who then print tracebacks after a run that went well."""
    keep = (
        "import sys; from torch.distributed import TCPStore; "
        f"store = TCPStore('{address(0)}', {PORT}, is_master=True, wait_for_workers=False); print(flush=True); sys.stdin.read()"
    )
    with start(0, [keep], "-c", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()  # it listens now
        yield f"{address(0)}:{PORT}"  # at the end its input is closed, and so it ends


@contextmanager
def joined(hosts: int) -> Iterator[None]:
    """So many hosts, each with a link to the others; they are gone afterwards."""
    NAMES.write_text("".join(f"{ip}{address(n)} {HOST.format(n)}\n" for n in range(hosts) for ip in ("", "::ffff:")))
    try:
        _ip(f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up")
        for n in range(hosts):
            host, link = HOST.format(n), LINK.format(n)
            _ip(f"netns add {host}", f"link add {link} type veth peer name eth0 netns {host}")
            _ip(f"link set {link} master {BRIDGE} up", f"-n {host} addr add {address(n)}/24 dev eth0")
            _ip(f"-n {host} link set eth0 up", f"-n {host} link set lo up")
        yield
    finally:
        for n in range(hosts):
            # The link too: a namespace lives on, with its end of it, while any process is left in it.
            for words in (["link", "del", LINK.format(n)], ["netns", "del", HOST.format(n)]):
                subprocess.run(["ip", *words], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)
        NAMES.unlink()


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def start(host: int, arguments: list[str], run: str = TORCHRUN, **options: Any) -> subprocess.Popen[bytes]:
    """Torchrun with these arguments on a host, where addresses have names: torch warns at each connection if they have none.
    The mount is seen there alone. ``run``: what Python runs instead; ``options``: of ``Popen``."""
    named = f'mount --bind {NAMES} /etc/hosts && exec "$0" "$@"'
    words = ["ip", "netns", "exec", HOST.format(host), "sh", "-c", named, sys.executable, *run.split(), *arguments]
    return subprocess.Popen(words, env=ENVIRONMENT, **options)


def set_link(host: int, state: str) -> None:
    """``down`` cuts a host off from the others; ``up`` joins it again. What it sends to itself goes on."""
    _ip(f"link set {LINK.format(host)} {state}")


def processes_of(host: int) -> list[int]:
    """The processes that run on a host."""
    found = subprocess.run(["ip", "netns", "pids", HOST.format(host)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


def _ip(*commands: str) -> None:
    for words in commands:
        subprocess.run(["ip", *words.split()], check=True)


def main() -> int:
    if len(sys.argv) < 4 or not allowed():
        print(__doc__)
        return 2
    return launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
