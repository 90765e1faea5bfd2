"""Attacks through the network: services of the host, the internet, neighbours, the hypervisor. A test passes if no
socket received a byte.
"""

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sandboxd.containers import Box, python

pytestmark = pytest.mark.stack


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Run a server on every address of the host, as a target for attackers."""
    with socket.create_server(("", 0)) as server:
        server.setblocking(False)
        yield server


def host_addresses() -> list[str]:
    found = re.findall(r"/32 host LOCAL|(\d+\.\d+\.\d+\.\d+)", Path("/proc/net/fib_trie").read_text())
    return sorted({address for address in found if address and not address.startswith("0.")})


def test_services_of_the_host_are_not_reachable(shared_box: Box, listener: socket.socket) -> None:
    """Aim: use a service of the host that trusts local clients."""
    port = listener.getsockname()[1]
    answer = shared_box.run(
        python(f"""
import socket
for address in {host_addresses()!r} + ['127.0.0.1']:
    try: socket.create_connection((address, {port}), 2); print('reached', address)
    except OSError as error: print(error)
""")
    )

    assert "127.0.0.1" in host_addresses()
    assert "reached" not in answer.output
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize(
    "target", ["169.254.169.254", "8.8.8.8", "172.17.0.1", "fd00:ec2::254", "2001:4860:4860::8888"]
)
def test_internet_and_metadata_addresses_are_not_reachable(shared_box: Box, target: str) -> None:
    """Aim: send data out, or get the host's cloud credentials."""
    answer = shared_box.run(
        python(f"""
import errno, socket
try: socket.create_connection(({target!r}, 80), 2)
except OSError as error: print(errno.errorcode[error.errno])
""")
    )

    assert answer.output.strip() in ("ENETUNREACH", "EADDRNOTAVAIL")


def test_the_only_network_interface_is_loopback(shared_box: Box) -> None:
    """Aim: find any route out of the sandbox."""
    lines = Path(f"/proc/{shared_box.pid}/net/dev").read_text().splitlines()[2:]

    assert [line.split(":")[0].strip() for line in lines] == ["lo"]


def test_names_cannot_be_resolved(shared_box: Box) -> None:
    """Aim: send data out inside domain names."""
    assert shared_box.run("getent hosts secret.example.com").status != 0


@pytest.mark.parametrize("family", ["AF_VSOCK", "AF_PACKET", "AF_ALG", "AF_TIPC", "AF_BLUETOOTH"])
def test_unusual_socket_families_are_refused(shared_box: Box, family: str) -> None:
    """Aim: reach the hypervisor, or a part of the kernel. vsock ignores network namespaces."""
    answer = shared_box.run(
        python(f"""
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
    try: socket.socket(socket.{family}, kind); print('opened')
    except PermissionError: print('refused')
""")
    )

    assert answer.output.split() == ["refused"] * 4


def test_of_netlink_only_the_lists_of_the_own_network_are_reachable(shared_box: Box) -> None:
    """Aim: reach the audit log, the packet filter, IPsec or generic netlink, with or without high bits of a number."""
    answer = shared_box.run(
        python("""
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
for family, protocol in [(16, number) for number in range(1, 32)] + [(16, 1 << 32), ((1 << 32) + 16, 0)]:
    fd = libc.syscall(41 if os.uname().machine == 'x86_64' else 198, ctypes.c_long(family), 3, ctypes.c_long(protocol))
    print(errno.errorcode[ctypes.get_errno()] if fd < 0 else 'opened')
print(socket.if_nameindex())
""")
    )

    *refused, interfaces = answer.output.splitlines()
    assert refused == ["EPERM"] * 33
    assert interfaces == "[(1, 'lo')]"


def test_a_route_socket_cannot_change_the_network(shared_box: Box) -> None:
    """Aim: add an interface or an address, or enter another network, through the one netlink protocol."""
    answer = shared_box.run(
        python("""
import errno, socket, struct
def ask(kind, flags, body):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.send(struct.pack('=IHHII', 16 + len(body), kind, flags | 5, 1, 0) + body)
        code = struct.unpack_from('=i', link.recv(4096), 16)[0]
        return errno.errorcode.get(-code, code)
link = struct.pack('=BxHiII', 0, 0, 0, 0, 0)
name = struct.pack('=HH', 8, 3) + b'dmy\\0'
kind = struct.pack('=HHHH', 16, 18, 10, 1) + b'dummy\\0' + bytes(2)
print(ask(16, 0x600, link + name + kind))                                       # RTM_NEWLINK
print(ask(20, 0x600, struct.pack('=BBBBI', 2, 8, 0, 0, 1) + struct.pack('=HH4s', 8, 2, bytes([10, 9, 9, 9]))))  # RTM_NEWADDR
print(ask(16, 0, struct.pack('=BxHiII', 0, 0, 1, 0, 1)))                        # lo down
print(ask(24, 0x600, struct.pack('=BBBBBBBBI', 2, 0, 0, 0, 254, 3, 0, 1, 0)))  # RTM_NEWROUTE
""")
    )

    assert answer.output.split() == ["EPERM"] * 4


def test_abstract_sockets_of_the_host_are_not_reachable(shared_box: Box) -> None:
    """Aim: use a service of the host that listens on an abstract name."""
    name = f"\0toolcrew-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        server.setblocking(False)
        answer = shared_box.run(
            python(f"import socket; socket.socket(socket.AF_UNIX).connect({name!r}); print('reached')")
        )

        assert "reached" not in answer.output
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_datagrams_do_not_leave_the_sandbox(shared_box: Box, family: socket.AddressFamily) -> None:
    """Aim: send data out in datagrams: to the host, to its neighbours by multicast, or to a link-local address."""
    with socket.socket(family, socket.SOCK_DGRAM) as server:
        server.bind(("", 0))
        server.setblocking(False)
        targets = (
            ["ff02::1", "fe80::1", "::1"]
            if family == socket.AF_INET6
            else ["224.0.0.251", "169.254.0.1", "255.255.255.255", *host_addresses()]
        )
        answer = shared_box.run(
            python(f"""
import socket
sender = socket.socket({int(family)}, socket.SOCK_DGRAM)
for address in {targets!r}:
    try: sender.sendto(b'secret', (address, {server.getsockname()[1]}))
    except OSError: pass
print('sent')
""")
        )

        assert answer.output.strip() == "sent"
        with pytest.raises(BlockingIOError):
            server.recv(1)


@pytest.mark.parametrize(
    "change",
    ["ip link add d0 type dummy", "ip link set lo down", "echo 1 >/proc/sys/net/ipv4/ip_forward", "ifconfig eth0 up"],
)
def test_interfaces_and_routes_cannot_be_changed(shared_box: Box, change: str) -> None:
    """Aim: add an interface or a route."""
    before = Path(f"/proc/{shared_box.pid}/net/dev").read_text().count(":")
    assert shared_box.run(change).status != 0
    assert Path(f"/proc/{shared_box.pid}/net/dev").read_text().count(":") == before
