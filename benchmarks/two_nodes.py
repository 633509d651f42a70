"""A slow link between two nodes, simulated on this machine: `python -m benchmarks.two_nodes -- FILE.py ARGUMENTS`.

Two network namespaces, joined by a pair of virtual Ethernet devices whose rate is limited on both ends, and a torchrun
in each. The nodes share this machine's cores and memory, so only the link is like that of two nodes. The command gets
a `--link` option that describes it, for its records.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import click

from benchmarks.lib.options import COUNT, command
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import setting
from cs336_systems.host.text import printable

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}  # by package
DEVICE, ADDRESS, PORT = "wire", "10.0.0.{}", 29500  # seen by nobody outside of the namespaces
# What may pass at once: more than the 64 KiB packets that Linux makes, 2 ms of a gigabit. What waits longer than the
# latency in the link's queue is dropped; there is no other delay.
BUCKET = ("burst", "256kb", "latency", "50ms")
GRACE = 10.0  # seconds that one node gets to say what it misses after the other has failed


@dataclass(frozen=True)
class TwoNodesSettings:
    """Options of the command line, one field each."""

    nproc: int = setting(1, "Ranks per node.", type=COUNT)
    rate: str = setting("1gbit", "Speed of the link in each direction, in tc's notation.")
    one_node: bool = setting(False, "Use one node, whose ranks all share one loopback of that rate.")

    def describe(self) -> str:
        """Description of the link in the command's records."""
        where = "loopback of one node" if self.one_node else "2 nodes simulated on one machine"
        return f"{where}, {self.rate} tbf"


def require(settings: TwoNodesSettings, command: tuple[str, ...]) -> None:
    """Raises UserError for what is missing or misspelt, before anything is made."""
    if not re.fullmatch(r"\d+(\.\d+)?([kmgt]i?)?(bit|bps)", settings.rate.lower()):
        raise UserError(f"--rate {settings.rate} is no rate; write 1gbit, 100mbit, or 10mbps for megabytes a second")
    if not command or (command[0] != "-m" and not Path(command[0]).is_file()):
        what = f"{command[0]} is no file" if command else "no command"
        raise UserError(f"{what}; after -- comes what torchrun runs, such as benchmarks/allreduce.py or -m MODULE")
    if os.geteuid() != 0:
        raise UserError("only root may make network namespaces; run it as root, or in a container that is")
    for tool, package in TOOLS.items():
        if not shutil.which(tool):
            raise UserError(f"there is no {tool} here; install {package}")


def tool(*words: str) -> str:
    """Run ip or tc, and return what it prints. Raises UserError with its own words."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"{' '.join(words)}: {said}")
    return done.stdout


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Names of fresh network namespaces, removed on exit with every process and device inside."""
    names = [f"node{number}-{os.getpid()}" for number in range(count)]
    made = []
    try:
        for name in names:
            tool("ip", "netns", "add", name)
            made.append(name)
            tool("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            with suppress(UserError):  # the others are to be removed all the same
                # Torchrun's ranks have sessions of their own, out of a signal's reach.
                while pids := tool("ip", "netns", "pids", name).split():
                    for pid in pids:
                        with suppress(ProcessLookupError):
                            os.kill(int(pid), signal.SIGKILL)
                    time.sleep(0.05)
                tool("ip", "netns", "del", name)  # and with it its end of the wire, which takes the other end along


def limit(name: str, device: str, settings: TwoNodesSettings) -> None:
    """Limit what leaves a device of a namespace with a token bucket."""
    tool("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", "rate", settings.rate, *BUCKET)


def join(names: list[str], settings: TwoNodesSettings) -> None:
    """Join two namespaces by a link that is limited at both ends."""
    peer = ("type", "veth", "peer", "name", DEVICE, "netns", names[1])
    tool("ip", "link", "add", DEVICE, "netns", names[0], *peer)
    for number, name in enumerate(names, 1):
        tool("ip", "-n", name, "address", "add", f"{ADDRESS.format(number)}/24", "dev", DEVICE)
        tool("ip", "-n", name, "link", "set", DEVICE, "up")
        limit(name, DEVICE, settings)


def torchrun(settings: TwoNodesSettings, node: int) -> list[str]:
    """The torchrun of one node, without its command. Nodes meet at a fixed address: the host's name leads elsewhere."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(settings.nproc)]
    if settings.one_node:
        return [*start, "--standalone"]
    meeting = ["--master-addr", ADDRESS.format(1), "--master-port", str(PORT)]
    return [*start, "--nnodes", "2", "--node-rank", str(node), *meeting]


def start(name: str, words: list[str], variables: dict[str, Any], out: Any) -> subprocess.Popen[bytes]:
    """A process in a namespace, with some environment variables. `out` of None shows what it prints."""
    # nsenter, not `ip netns exec`: that one hides /sys/fs/cgroup, which says how much memory there is.
    inside = ["nsenter", f"--net=/var/run/netns/{name}", "env", *(f"{key}={value}" for key, value in variables.items())]
    errors = None if out is None else subprocess.STDOUT
    return subprocess.Popen([*inside, *words], stdout=out, stderr=errors, start_new_session=True)


def finish(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all; once one has failed, the others have a moment to follow. Returns which failed first, if any."""
    first, deadline = None, float("inf")
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if first is None and any(codes):
            first, deadline = next(i for i, code in enumerate(codes) if code), time.monotonic() + GRACE
        if None not in codes:
            break
        time.sleep(0.05)
    return first


def run(settings: TwoNodesSettings, command: tuple[str, ...]) -> int:
    """Build, run, show node 0's output, and clean up whatever happens. Returns the command's exit code."""
    require(settings, command)
    words = [*command, "--link", settings.describe()]
    nodes, device = (1, "lo") if settings.one_node else (2, DEVICE)
    # The nodes share the cores, and torch would warn of every address that has no name, which is all of them.
    threads = max(1, len(os.sched_getaffinity(0)) // (nodes * settings.nproc))
    variables = {"GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": threads, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with TemporaryFile() as log, namespaces(nodes) as names:
        if settings.one_node:
            limit(names[0], device, settings)
        else:
            join(names, settings)
        processes = [
            start(name, [*torchrun(settings, node), *words], variables, log if node else None)
            for node, name in enumerate(names)
        ]
        failed = finish(processes)
        if failed == 1:  # what node 0 has to say of it is only that node 1 is gone
            log.seek(0)
            said = printable(log.read().decode(errors="replace"), keep="\n\t")
            print(f"node 1 failed first:\n{said}", file=sys.stderr)
    return 0 if failed is None else int(processes[failed].returncode)


@command(TwoNodesSettings)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def main(settings: TwoNodesSettings, command: tuple[str, ...]) -> None:
    """Run a benchmark, such as benchmarks/allreduce.py with its options after --, as if on two nodes. Needs root.

    The command gets a --link option, so that its records describe the link. Course assignments use 2 x 1,
    2 x 2 and 2 x 3 ranks: --nproc 1, 2 and 3.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # and not one that nohup has told it to ignore
            signal.signal(number, signal.default_int_handler)  # like ^C, after which everything is cleaned up
    if code := run(settings, command):
        sys.exit(code if code > 0 else 1)


if __name__ == "__main__":
    sys.exit(console.run_command(main))
