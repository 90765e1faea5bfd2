"""Ports for servers that start later: no other program gets them in between."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from toolcrew.orchestrator.operations import ports
from toolcrew.orchestrator.operations.ports import reserve_port


def test_a_reserved_port_is_outside_of_the_range_that_the_kernel_assigns() -> None:
    first, last = (int(number) for number in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if set(range(20_000, 32_768)) <= set(range(first, last + 1)):
        pytest.skip("the kernel of this machine assigns every port")
    assert not [port for port in (reserve_port() for _ in range(20)) if first <= port <= last]


def test_a_port_is_reserved_once_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_RANGE", find_free_range(8))
    own = {reserve_port() for _ in range(6)}
    program = f"""
from toolcrew.orchestrator.operations import ports
ports._RANGE = {ports._RANGE!r}
print(ports.reserve_port(), ports.reserve_port())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    others = {int(port) for port in done.stdout.split()}
    assert own | others == set(ports._RANGE)
    # The other program has ended, so its ports are free again.
    assert {reserve_port(), reserve_port()} == others
    with pytest.raises(OSError, match="no port from"):
        reserve_port()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_not_reserved(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    one, other = find_free_range(2)
    monkeypatch.setattr(ports, "_RANGE", range(one, other + 1))
    with socket.socket() as server:
        server.bind((address, one))
        server.listen()
        assert reserve_port() == other


def test_a_server_can_start_on_a_reserved_port() -> None:
    with socket.create_server(("127.0.0.1", reserve_port())) as server:
        assert server.getsockname()[1] in ports._RANGE


def find_free_range(count: int) -> range:
    """Return free ports next to each other."""
    for first in range(31_000, 20_000, -count):
        marks = [ports._mark(port) for port in range(first, first + count)]
        for mark in filter(None, marks):
            mark.close()
        if None not in marks:
            return range(first, first + count)
    raise AssertionError
