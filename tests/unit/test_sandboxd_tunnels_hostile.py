"""A guest that sends invalid reports about its connections: the guest loses its sandbox, and no other session is
affected.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_engine import FakeGuest
from tests.fake_sandboxd import running_sandboxd
from tests.sandboxd_calls import call
from tests.tunnel_ends import running_tunnels, unreachable, wait_for_cut
from workers.sandboxd.egress import relay as relay_module
from workers.sandboxd.egress import tunnels as tunnels_module
from workers.sandboxd.egress.relay import GRANT, PIECE, WINDOW
from workers.sandboxd.egress.tunnels import MAX_TUNNELS, Tunnels
from workers.sandboxd.frames import Frame


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "LINGER_S", 0.05)


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
async def test_a_guest_that_breaks_the_rules_of_connections_is_lost(
    tmp_path: Path, event: str, conn: object, body: bytes, fields: dict[str, object]
) -> None:
    async with running_tunnels(tmp_path) as guest:
        proxy = await guest.open_through(1)
        guest.tell(event, conn, body, **fields)
        assert len(guest.violations) == 1
        await wait_for_cut(proxy.reader)


@pytest.mark.parametrize("event", ["net_data", "net_end", "net_open"])
async def test_nothing_may_follow_the_end_of_a_connection_but_its_close(tmp_path: Path, event: str) -> None:
    async with running_tunnels(tmp_path) as guest:
        await guest.open_through(1)
        guest.tell("net_end", 1)
        guest.tell(event, 1, b"x" if event == "net_data" else b"")
        assert len(guest.violations) == 1


async def test_more_connections_than_allowed_cost_the_sandbox(tmp_path: Path) -> None:
    async with running_tunnels(tmp_path) as guest:
        for number in range(1, MAX_TUNNELS + 1):
            guest.open(number)
        assert guest.violations == []
        guest.open(MAX_TUNNELS + 1)
        assert len(guest.violations) == 1


async def test_a_connection_counts_until_both_have_closed_it(tmp_path: Path) -> None:
    async with running_tunnels(tmp_path, unreachable) as guest:
        for number in range(1, MAX_TUNNELS + 1):
            guest.open(number)
        for number in range(1, MAX_TUNNELS + 1):
            await guest.hear_ops(number)
        guest.tell("net_close", 7)
        guest.open(MAX_TUNNELS + 1)
        assert guest.violations == []
        guest.open(MAX_TUNNELS + 2)
        assert len(guest.violations) == 1


async def test_holding_memory_with_data_for_a_closed_connection_fails(tmp_path: Path) -> None:
    async with running_tunnels(tmp_path, unreachable) as guest:
        guest.open(1)
        await guest.hear_ops(1)
        guest.tell("net_data", 1, bytes(WINDOW))
        assert guest.violations == []
        guest.tell("net_data", 1, b"x")
        assert len(guest.violations) == 1


@pytest.fixture
def small_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a budget of 2,000 frames, or 100 openings, that time does not refill."""
    monkeypatch.setattr(tunnels_module, "_FRAMES_AT_ONCE", 2000.0)
    monkeypatch.setattr(tunnels_module, "_FRAMES_PER_S", 0.0)


@pytest.mark.usefixtures("small_store")
async def test_keeping_sandboxd_busy_with_single_bytes_costs_the_sandbox(tmp_path: Path) -> None:
    async with running_tunnels(tmp_path) as guest:
        await guest.open_through(1)
        for _ in range(1980):
            guest.tell("net_data", 1, b"x")
        assert guest.violations == []
        guest.tell("net_data", 1, b"x")
        assert "too many connections" in guest.violations[0]


@pytest.mark.usefixtures("small_store")
async def test_opening_and_closing_without_a_pause_costs_the_sandbox(tmp_path: Path) -> None:
    async with running_tunnels(tmp_path) as guest:
        for number in range(1, 101):
            guest.open(number)
            guest.tell("net_close", number)
            await guest.hear_ops(number)
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

        tunnels = Tunnels(lambda header, _: sent.append(header), drain, unreachable, violations.append)
        for header, body in frames:
            tunnels.take(Frame(header, body))
            await asyncio.sleep(0)
        assert len(violations) <= 1
        closes = [header["conn"] for header in sent if header["op"] == "net_close"]
        assert len(closes) == len(set(closes))
        tunnels.close()

    asyncio.run(play())


@pytest.mark.parametrize("event", [None, 7, ["net_open"], {"net_open": 1}])
async def test_an_event_that_is_no_word_costs_the_sandbox(tmp_path: Path, event: object) -> None:
    async with running_tunnels(tmp_path) as guest:
        guest.tunnels.take(Frame({"ev": event, "conn": 1}))
        assert len(guest.violations) == 1


async def test_a_guest_without_network_that_speaks_of_a_connection_is_lost(tmp_path: Path) -> None:
    async def speak(guest: FakeGuest) -> None:
        await guest.hello()
        await guest.request()
        await guest.send({"ev": "net_open", "conn": 1}, b"")
        await guest.gone.wait()

    async with running_sandboxd(tmp_path, speak) as daemon:
        client, name = await daemon.open()
        response = await call(client, name)
        assert "net_open" in response.done["sandbox_lost"]
