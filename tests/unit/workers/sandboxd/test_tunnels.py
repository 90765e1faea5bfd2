"""sandboxd's ends of a sandbox's connections: bytes, ends, windows, the reply without a proxy, and hostile guests."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.support.sandboxd.fake_engine import FakeGuest
from tests.support.sandboxd.fake_sandboxd import running_sandboxd
from tests.support.sandboxd.sandboxd_calls import call
from tests.support.sandboxd.tunnel_ends import PREAMBLE, FakeGuestEnd, refuse_connection, running_tunnels, wait_closed
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.session_spec import NetworkPolicy
from toolcrew.contract.settings import SandboxdSettings
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.contract.tenant_classes import EgressRules, TenantClass
from toolcrew.workers.sandboxd.egress import relay as relay_module
from toolcrew.workers.sandboxd.egress import tunnels as tunnels_module
from toolcrew.workers.sandboxd.egress.relay import GRANT, PIECE, WINDOW, open_proxy
from toolcrew.workers.sandboxd.egress.tunnels import MAX_TUNNELS, Tunnels
from toolcrew.workers.sandboxd.frames import Frame
from toolcrew.workers.sandboxd.plans import Plans


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "LINGER_S", 0.05)


@pytest.fixture
async def guest(tmp_path: Path, short_linger: None) -> AsyncIterator[FakeGuestEnd]:
    async with running_tunnels(tmp_path) as opened:
        yield opened


# Relaying


async def test_connection_to_the_proxy_buffers_few_bytes(tmp_path: Path) -> None:
    """Aim: fill the memory of sandboxd with downloads that the programs do not read."""
    written = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * 2_000_000)
        written.set()

    async with await asyncio.start_unix_server(serve, tmp_path / "proxy"):
        reader, writer = await open_proxy(tmp_path / "proxy", PREAMBLE, frozenset({os.getuid()}))
        await written.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert 0 < len(reader._buffer) <= 3 * 16_384  # type: ignore[attr-defined]
        writer.transport.abort()


async def test_connection_is_closed_after_both_sides_end(guest: FakeGuestEnd) -> None:
    proxy = await guest.open_through(1)
    assert proxy.preamble == PREAMBLE  # the identity comes before the first byte
    guest.send_frame("net_end", 1)
    assert await proxy.read_all() == b""
    await proxy.write(b"late answer")
    proxy.writer.close()
    assert await guest.receive_data(1, 11) == b"late answer"
    assert await guest.receive_ops(1) == ["net_end", "net_close"]
    guest.send_frame("net_close", 1)
    guest.send_frame("net_close", 1)
    assert len(guest.violations) == 1  # the first was its last word


async def test_end_of_the_proxy_reply_leaves_the_upload_open(guest: FakeGuestEnd) -> None:
    proxy = await guest.open_through(1)
    proxy.writer.write_eof()
    assert await guest.receive_ops(1, until="net_end") == ["net_end"]
    guest.send_frame("net_data", 1, b"more")
    assert await proxy.read(4) == b"more"


async def test_closed_proxy_connection_is_reported_to_the_guest(guest: FakeGuestEnd) -> None:
    proxy = await guest.open_through(1)
    await proxy.write(b"bye")
    proxy.writer.close()
    assert await guest.receive_ops(1) == ["net_data", "net_end", "net_close"]


async def test_killed_proxy_sends_close_without_an_end(guest: FakeGuestEnd) -> None:
    proxy = await guest.open_through(1)
    proxy.stop_reading()
    guest.send_frame("net_data", 1, bytes(GRANT))
    assert await guest.receive_ops(1, until="net_room") == ["net_room"]
    proxy.writer.transport.abort()  # what it never read makes of its end a reset
    assert await guest.receive_ops(1) == ["net_close"]


async def test_aborted_program_aborts_the_proxy_connection(guest: FakeGuestEnd) -> None:
    proxy = await guest.open_through(1)
    guest.send_frame("net_close", 1)
    await wait_closed(proxy.reader)
    assert await guest.receive_ops(1) == ["net_close"]


async def test_connection_closed_before_it_is_established_is_closed(guest: FakeGuestEnd) -> None:
    for number in range(1, 41):
        guest.open(number)
        guest.send_frame("net_close", number)
    for number in range(1, 41):
        assert await guest.receive_ops(number) == ["net_close"]
    assert guest.violations == []


async def test_end_of_a_sandbox_aborts_its_connections(guest: FakeGuestEnd) -> None:
    proxies = [await guest.open_through(number) for number in (1, 2)]
    guest.tunnels.close()
    for proxy in proxies:
        await wait_closed(proxy.reader)
    guest.open(3)
    assert guest.proxied.empty()


async def test_cut_ends_open_connections_and_allows_new_ones(guest: FakeGuestEnd) -> None:
    proxies = [await guest.open_through(number) for number in (1, 2)]
    guest.tunnels.cut()
    for number, proxy in enumerate(proxies, 1):
        await wait_closed(proxy.reader)
        assert await guest.receive_ops(number) == ["net_close"]
        guest.send_frame("net_close", number)
    await guest.open_through(3)
    assert guest.violations == []


# Room


async def test_upload_is_limited_to_the_speed_of_the_proxy(guest: FakeGuestEnd) -> None:
    proxy = await guest.open_through(1)
    sent = room = 0
    while True:  # until the proxy's socket is full and no room comes back
        guest.send_frame("net_data", 1, bytes(min(PIECE, WINDOW - sent + room)))
        sent += min(PIECE, WINDOW - sent + room)
        if sent - room == WINDOW:
            try:
                room += (await asyncio.wait_for(guest.receive(1), 0.2))[1]["bytes"]
            except TimeoutError:
                break
    assert guest.violations == []
    assert sent < 2 * 1024 * 1024
    assert len(await proxy.read(sent)) == sent


async def test_download_stops_when_the_program_stops_reading(guest: FakeGuestEnd) -> None:
    proxy = await guest.open_through(1)
    proxy.writer.write(bytes(4 * WINDOW))
    received_bytes = 0
    while received_bytes < WINDOW:
        received_bytes += len((await guest.receive(1))[2])
    await asyncio.sleep(0.05)
    assert (received_bytes, guest.unread_bytes) == (WINDOW, 0)
    guest.send_frame("net_room", 1, bytes=GRANT)
    assert await guest.receive_data(1, GRANT) == bytes(GRANT)


async def test_proxy_is_not_read_while_the_guest_is_behind(guest: FakeGuestEnd) -> None:
    guest.drained.clear()
    proxies = [await guest.open_through(number) for number in range(1, 9)]
    for proxy in proxies:
        proxy.writer.write(bytes(2 * WINDOW))
    await asyncio.sleep(0.05)
    assert guest.unread_bytes == 0
    guest.drained.set()
    for number in range(1, 9):
        await guest.receive_data(number, 2 * WINDOW)


# Without a proxy


async def test_pending_data_is_read_before_the_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "LINGER_S", 30.0)
    async with running_tunnels(tmp_path, refuse_connection) as guest:
        guest.open(1)
        guest.send_frame("net_data", 1, bytes(WINDOW))
        assert await guest.receive_ops(1, until="net_room") == ["net_data", "net_end", "net_room"]
        guest.send_frame("net_end", 1)
        assert await guest.receive_ops(1) == ["net_close"]


async def test_proxy_outage_is_logged_once(tmp_path: Path) -> None:
    results = [False, False, True, True]

    async def connect() -> Any:
        if not results.pop(0):
            raise FileNotFoundError("no socket")
        return await open_proxy(tmp_path / "proxy.sock", PREAMBLE, frozenset({os.geteuid()}))

    with capture_logs() as logs:
        async with running_tunnels(tmp_path, connect) as guest:
            for number in (1, 2):
                guest.open(number)
                await guest.receive_ops(number)
            for number in (3, 4):
                await guest.open_through(number)
    assert [line["event"] for line in logs] == ["egress_proxy_unreachable", "egress_proxy_answers"]


async def test_proxy_socket_of_another_user_gets_no_identity(tmp_path: Path) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.put_nowait(await reader.read())
        writer.close()

    server = await asyncio.start_unix_server(accept, str(tmp_path / "false.sock"))
    with pytest.raises(OSError, match="uid"):
        await open_proxy(tmp_path / "false.sock", PREAMBLE, frozenset({os.geteuid() + 1}))
    assert await asyncio.wait_for(received.get(), SOON_S) == b""
    server.close()


@pytest.mark.parametrize("name", ["none.sock", None])
async def test_missing_proxy_raises_os_error(tmp_path: Path, name: str | None) -> None:
    with pytest.raises(OSError):
        await open_proxy(tmp_path / name if name else None, PREAMBLE, frozenset({os.geteuid()}))


# A class that has lost its network


def test_class_without_network_has_no_egress_hosts(tmp_path: Path) -> None:
    def hosts_with(network: NetworkPolicy) -> tuple[str, ...]:
        granted = TenantClass(network=network, egress=EgressRules(hosts=("site.example",)))
        plans = Plans(SandboxdSettings(tenant_classes={"a": granted}, egress_socket=tmp_path / "egress.sock"))
        return plans.rules(SandboxPolicy(tenant_class="a")).hosts

    assert (hosts_with("egress"), hosts_with("none")) == (("site.example",), ())


@pytest.mark.parametrize(
    ("event", "conn", "body", "fields"),
    [
        ("net_open", 1, b"", {}),
        ("net_open", 0, b"", {}),
        ("net_open", True, b"", {}),
        ("net_open", 2.0, b"", {}),
        ("net_open", "2", b"", {}),
        ("net_open", None, b"", {}),
        ("net_open", [2], b"", {}),
        ("net_open", 2**53, b"", {}),
        ("net_open", 2, b"x", {}),
        ("net_open", 2, b"", {"id": "0" * 32}),
        ("net_data", 2, b"x", {}),
        ("net_data", 1, b"", {}),
        ("net_data", 1, bytes(WINDOW + 1), {}),
        ("net_end", 2, b"", {}),
        ("net_close", 2, b"", {}),
        ("net_room", 1, b"", {}),
        ("net_room", 1, b"", {"bytes": GRANT}),
        ("net_room", 1, b"", {"bytes": 1}),
        ("net_room", 1, b"", {"bytes": -GRANT}),
        ("net_room", 1, b"", {"bytes": True}),
        ("net_room", 1, b"", {"bytes": float(GRANT)}),
        ("net_tunnel", 1, b"", {}),
    ],
)
async def test_invalid_connection_event_is_a_violation(
    guest: FakeGuestEnd, event: str, conn: object, body: bytes, fields: dict[str, object]
) -> None:
    proxy = await guest.open_through(1)
    guest.send_frame(event, conn, body, **fields)
    assert len(guest.violations) == 1
    await wait_closed(proxy.reader)


@pytest.mark.parametrize("event", ["net_data", "net_end", "net_open"])
async def test_only_close_may_follow_the_end_of_a_connection(guest: FakeGuestEnd, event: str) -> None:
    await guest.open_through(1)
    guest.send_frame("net_end", 1)
    guest.send_frame(event, 1, b"x" if event == "net_data" else b"")
    assert len(guest.violations) == 1


async def test_connections_above_the_limit_are_a_violation(guest: FakeGuestEnd) -> None:
    for number in range(1, MAX_TUNNELS + 1):
        guest.open(number)
    assert guest.violations == []
    guest.open(MAX_TUNNELS + 1)
    assert len(guest.violations) == 1


async def test_connection_counts_until_both_sides_have_closed(tmp_path: Path) -> None:
    async with running_tunnels(tmp_path, refuse_connection) as guest:
        for number in range(1, MAX_TUNNELS + 1):
            guest.open(number)
        for number in range(1, MAX_TUNNELS + 1):
            await guest.receive_ops(number)
        guest.send_frame("net_close", 7)
        guest.open(MAX_TUNNELS + 1)
        assert guest.violations == []
        guest.open(MAX_TUNNELS + 2)
        assert len(guest.violations) == 1


async def test_data_for_a_closed_connection_is_limited_to_one_window(tmp_path: Path) -> None:
    async with running_tunnels(tmp_path, refuse_connection) as guest:
        guest.open(1)
        await guest.receive_ops(1)
        guest.send_frame("net_data", 1, bytes(WINDOW))
        assert guest.violations == []
        guest.send_frame("net_data", 1, b"x")
        assert len(guest.violations) == 1


@pytest.fixture
def small_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a budget of 2,000 frames, or 100 openings, that time does not refill."""
    monkeypatch.setattr(tunnels_module, "_FRAMES_AT_ONCE", 2000.0)
    monkeypatch.setattr(tunnels_module, "_FRAMES_PER_S", 0.0)


@pytest.mark.usefixtures("small_store")
async def test_flood_of_single_byte_frames_is_a_violation(guest: FakeGuestEnd) -> None:
    await guest.open_through(1)
    for _ in range(1980):
        guest.send_frame("net_data", 1, b"x")
    assert guest.violations == []
    guest.send_frame("net_data", 1, b"x")
    assert "too many connections" in guest.violations[0]


@pytest.mark.usefixtures("small_store")
async def test_flood_of_opened_connections_is_a_violation(guest: FakeGuestEnd) -> None:
    for number in range(1, 101):
        guest.open(number)
        guest.send_frame("net_close", number)
        await guest.receive_ops(number)
    assert guest.violations == []
    guest.open(101)
    assert "too many connections" in guest.violations[0]


_HEADERS = st.fixed_dictionaries(
    {
        "ev": st.sampled_from(["net_open", "net_data", "net_end", "net_close", "net_room"]),
        "conn": st.integers(-1, 6) | st.none() | st.booleans() | st.text(max_size=2),
    },
    optional={"bytes": st.integers(-1, 2 * WINDOW) | st.none(), "id": st.text(max_size=3)},
)
_FRAMES = st.lists(st.tuples(_HEADERS, st.sampled_from([b"", b"x", bytes(PIECE)])), max_size=40)


@settings(max_examples=100, deadline=None)
@given(_FRAMES)
def test_any_frames_of_a_guest_hold_at_most_one_window(frames: list[tuple[dict[str, Any], bytes]]) -> None:
    async def play() -> None:
        violations: list[str] = []
        sent: list[dict[str, Any]] = []

        async def drain() -> None:
            await asyncio.sleep(0)

        tunnels = Tunnels(lambda header, _: sent.append(header), drain, refuse_connection, violations.append)
        for header, body in frames:
            tunnels.take(Frame(header, body))
            await asyncio.sleep(0)
        assert len(violations) <= 1
        closes = [header["conn"] for header in sent if header["op"] == "net_close"]
        assert len(closes) == len(set(closes))
        tunnels.close()

    asyncio.run(play())


@pytest.mark.parametrize("event", [None, 7, ["net_open"], {"net_open": 1}])
async def test_event_that_is_not_text_is_a_violation(guest: FakeGuestEnd, event: object) -> None:
    guest.tunnels.take(Frame({"ev": event, "conn": 1}))
    assert len(guest.violations) == 1


async def test_connection_event_without_a_network_loses_the_sandbox(tmp_path: Path) -> None:
    async def open_connection(guest: FakeGuest) -> None:
        await guest.hello()
        await guest.request()
        await guest.send({"ev": "net_open", "conn": 1}, b"")
        await guest.gone.wait()

    async with running_sandboxd(tmp_path, open_connection) as daemon:
        client, name = await daemon.open()
        response = await call(client, name)
        assert "net_open" in response.done["sandbox_lost"]
