"""Wrong addresses, and a wire between two simulated nodes that is cut for a while or for good."""

import ctypes
import hashlib
import os
import socket
import subprocess
import threading
import time

import pytest
import torch

from benchmarks import two_nodes
from benchmarks.two_nodes import TwoNodesSettings, namespaces
from cs336_systems import comm
from cs336_systems.comm import Place, all_gather, all_reduce, distributed
from tests.benchmarks.test_two_nodes import able, namespaces_of
from tests.support import ranks

CLONE_NEWNET = 0x40000000
needs_root = pytest.mark.skipif(not able(), reason="needs root, iproute2 and network namespaces with tbf")


def wrong_address_case(rank: int, world: int, folder: str, host: str, port: int, alone: bool) -> None:
    """Rank 1 of 2 looks for rank 0 where it is not; `alone` in a network of no address but its own."""
    if alone:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    with distributed("cpu", timeout=1.0, place=Place(1, 2, 0, 1, f"{host}:{port}")):
        raise AssertionError("joined")


def said(host: str, port: int, alone: bool = False) -> str:
    began = time.monotonic()
    with pytest.raises(ranks.RanksFailedError) as error:
        ranks.run_alone(wrong_address_case, 1, host=host, port=port, alone=alone)
    assert time.monotonic() - began < 20  # for a timeout of 1 s, and a resolver that is out of reach
    [(kind, text)] = error.value.errors
    assert kind == "UserError"
    assert "\n" not in text
    start = f"rank 1 of 2 finds no rank 0 at {host}:{port} within 1 s: "
    assert text.startswith(start)
    return text.removeprefix(start)


def test_a_host_that_does_not_exist():
    assert said("no..such.host", 29500) == "there is no host of that name: check MASTER_ADDR"  # no name has two dots


@needs_root
def test_a_machine_out_of_reach():
    words = "Network is unreachable: check MASTER_ADDR, the network, and whether a firewall lets port 29500 through"
    assert said("10.0.0.1", 29500, alone=True) == words


def test_a_stranger_at_the_port():
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        threading.Thread(target=turn_away, args=(stranger,), daemon=True).start()
        words = "what answers there is not a store of ranks: choose another port with MASTER_PORT"
        assert said("127.0.0.1", stranger.getsockname()[1]) == words
        stranger.shutdown(socket.SHUT_RDWR)


def turn_away(stranger: socket.socket) -> None:
    """Answer as a web server does."""
    try:
        while True:
            guest, _ = stranger.accept()
            with guest:
                guest.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    except OSError:
        return


def enter(name: str) -> None:
    """Move this process into a network namespace."""
    with open(f"/var/run/netns/{name}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(file.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def cut_case(rank: int, world: int, folder: str, names: list[str], down: float, timeout: float) -> list[str]:
    """Some collectives, in the midst of which the wire is cut for `down` seconds, 0 for never; hashes of the results,
    before and after."""
    enter(names[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = two_nodes.DEVICE
    comm.agreement.EXPLAIN_SECONDS = 0.5
    place = Place(rank, world, 0, 1, f"{two_nodes.ADDRESS.format(1)}:{two_nodes.PORT}")
    with distributed("cpu", timeout=timeout, place=place) as group:
        digests = []
        for cut in (False, True):
            torch.manual_seed(rank)
            digest = hashlib.sha256()
            for step in range(20):
                comm.at_step(step)
                if cut and rank == 0 and step == 10:
                    switch = f"ip -n {names[0]} link set {two_nodes.DEVICE}"
                    subprocess.run([*switch.split(), "down"], check=True)
                    subprocess.Popen(["sh", "-c", f"sleep {down}; {switch} up"])
                tensor = torch.randn(100_000)
                all_reduce(tensor, group, f"bucket {step}").wait()
                all_gather(tensor, group, f"weight {step}").wait()
                digest.update(tensor.numpy().tobytes())
            digests.append(digest.hexdigest())
    return digests


@needs_root
def test_a_wire_that_is_cut_for_three_seconds_changes_no_bit():
    with namespaces(2) as names:
        two_nodes.join(names, TwoNodesSettings())
        (quiet, cut), other = ranks.run_alone(cut_case, 2, names=names, down=3, timeout=30.0)
    assert quiet == cut
    assert other == [quiet, cut]
    assert namespaces_of(os.getpid()) == []


@needs_root
def test_a_wire_that_is_cut_for_good_ends_both_nodes():
    with namespaces(2) as names:
        two_nodes.join(names, TwoNodesSettings())
        with pytest.raises(ranks.RanksFailedError) as error:
            ranks.run_alone(cut_case, 2, names=names, down=60, timeout=2.0)
    for rank, (kind, text) in enumerate(error.value.errors):
        assert kind == "CommError", text
        first = text.splitlines()[0]
        assert first.startswith(f"rank {rank} waited in "), first
        assert f"; no news from rank {1 - rank}, which is on another machine (" in first
    assert namespaces_of(os.getpid()) == []
