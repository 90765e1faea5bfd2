"""Locations of sessions, and their lists: one host each, chosen again when the host is lost. Over a real Redis."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio

from tests.support.records.builders import KEY, build_spec
from tests.support.sandboxd.fake_hosts import build_report
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.names import (
    host_key,
    hosts_key,
    location_key,
    open_sessions_key,
    run_key,
    session_facts_key,
    tenant_open_sessions_key,
    tenant_sessions_key,
    tombstone_key,
)
from toolcrew.contract.session_locations import LOCATION_MARGIN_S, LocationState, seal_checkpoint, seal_start
from toolcrew.contract.session_spec import EMPTY_SESSION, SessionSpec
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.dispatch import session_locator as homes_module
from toolcrew.orchestrator.dispatch.session_locator import OpenRequest, SessionLocator
from toolcrew.orchestrator.dispatch.transport import CallLost
from toolcrew.store.call_messages import NotSent
from toolcrew.store.run_log import close_unused_sessions, run_sessions_key, session_purpose
from toolcrew.store.session_list import SessionList
from toolcrew.store.sessions import STARTS_BYTES, SessionAddress, SessionStore

pytestmark = pytest.mark.usefixtures("quiet_logs")

DEFAULT = TenantPolicy()


def checkpoints(*names: str) -> dict[str, str]:
    """Return the last checkpoint of acme's session s1, and the checkpoint of its host, as stored in Redis."""
    return {
        field: seal_checkpoint(KEY, "acme", "s1", name)
        for field, name in zip(("checkpoint", "automatic"), names, strict=False)
    }


class Hosts:
    """The hosts of a deployment, by name. Each opens the requested session, unless it is scripted otherwise."""

    def __init__(self, *names: str) -> None:
        self.all = {f"host.{name}.b00t": build_report(name) for name in names}
        self.opened: list[tuple[str, OpenRequest, int]] = []
        self.answers: dict[str, Any] = {}
        self.silent_queues: list[str] = []
        self.reads = 0
        self.answer: Callable[[OpenRequest], ToolResult | None] = lambda _: None

    async def reports(self) -> list[Any]:
        self.reads += 1
        return list(self.all.values())

    async def silent(self) -> list[str]:
        return self.silent_queues

    async def send_open(self, opening: OpenRequest, address: SessionAddress) -> ToolResult:
        self.opened.append((address.queue, opening, address.fence))
        await asyncio.sleep(0)
        answer = self.answers.get(address.queue) or self.answer(opening)
        if isinstance(answer, Exception):
            raise answer
        call = ToolCall(id="c", name="session.open")
        return answer or ToolResult(call_id="c", name=call.name, success=True, metadata={"queue": address.queue})

    async def lose(self, client: "redis.asyncio.Redis", queue: str) -> None:
        """Given up."""
        del self.all[queue]
        await client.set(tombstone_key("d", queue), "1")


def build_open_failure(code: ErrorCode, message: str) -> ToolResult:
    return ToolResult.failed(ToolCall(id="c", name="session.open"), code, message)


def build_locator(client: "redis.asyncio.Redis", hosts: Hosts) -> SessionLocator:
    return SessionLocator(SessionStore(client, "d"), hosts, hosts.send_open, KEY)


async def open_and_lose(
    client: "redis.asyncio.Redis", hosts: Hosts, locator: SessionLocator, stored: dict[str, Any] | None = None
) -> SessionAddress:
    """Open acme's session s1 at its only host, store these fields in its record, and lose the host. Host b remains."""
    await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)
    if stored:
        await client.hset(location_key("d", "acme", "s1"), mapping=stored)
    address = await locator.find("acme", "s1", DEFAULT)
    await hosts.lose(client, address.queue)
    hosts.all["host.b.b00t"] = build_report("b")
    return address


async def test_session_stays_on_the_host_that_opened_it(client: "redis.asyncio.Redis") -> None:
    hosts = Hosts("a", "b")
    locator = build_locator(client, hosts)
    await locator.open("acme", "s1", DEFAULT, SessionSpec(ttl_s=60))
    address = await locator.find("acme", "s1", DEFAULT)
    # Another process finds the same.
    assert await build_locator(client, hosts).find("acme", "s1", DEFAULT) == address
    assert (address.queue, address.fence) == (hosts.opened[0][0], 1)


async def test_a_call_gets_the_configuration_of_its_tool_and_no_other(client: "redis.asyncio.Redis") -> None:
    """Requirement S4-13. The host does not get the configuration."""
    hosts, config = Hosts("a"), {"quote": {"currency": "EUR"}, "count": {"step": 2}}
    locator = build_locator(client, hosts)
    await locator.open("acme", "s1", DEFAULT, SessionSpec(tool_config=config))
    await locator.add_forks("acme", "s1", ["f1"], DEFAULT, {"queue": "host.a.b00t"})
    quote, bash = (build_spec(name) for name in ("quote", "bash_tool"))
    for program in (locator, build_locator(client, hosts)):
        for session in ("s1", "f1"):
            assert await program.call_fields("acme", session, quote) == {"config": {"currency": "EUR"}}
            assert await program.call_fields("acme", session, bash) == {"config": {}}
        assert await program.call_fields("other", "s1", quote) == {}


async def test_only_a_tool_outside_of_the_sandbox_gets_the_folder_of_the_session(client: "redis.asyncio.Redis") -> None:
    locator = build_locator(client, Hosts("a"))
    await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)
    inside, outside = build_spec("bash_tool"), build_spec("quote", pool="tools")
    assert await locator.call_fields("acme", "s1", outside) == {"config": {}}
    await client.hset(location_key("d", "acme", "s1"), "folder", "/workspace/a")
    assert await locator.call_fields("acme", "s1", outside) == {"config": {}, "cwd": "/workspace/a"}
    assert "cwd" not in await locator.call_fields("acme", "s1", inside)


async def test_a_session_without_a_configuration_is_read_once(client: "redis.asyncio.Redis") -> None:
    locator = build_locator(client, Hosts("a"))
    await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)
    await locator.call_fields("acme", "s1", build_spec("bash_tool"))
    await client.delete(location_key("d", "acme", "s1"))
    assert await locator.call_fields("acme", "s1", build_spec("bash_tool")) == {}


async def test_a_configuration_that_another_program_has_changed_is_refused(client: "redis.asyncio.Redis") -> None:
    locator = build_locator(client, Hosts("a"))
    await locator.open("acme", "s1", DEFAULT, SessionSpec(tool_config={"quote": {"a": 1}}))
    forged = seal_start(KEY, "acme", "s2", SessionSpec(tool_config={"quote": {"a": 2}}))
    await client.hset(location_key("d", "acme", "s1"), "start", forged)
    with pytest.raises(SandboxUnavailable):
        await locator.call_fields("acme", "s1", build_spec("quote"))


async def test_the_sandbox_quota_counts_only_open_sessions(client: "redis.asyncio.Redis") -> None:
    locator, policy = build_locator(client, Hosts("a")), TenantPolicy(sandboxes=2)
    for name in ("s1", "s2"):
        await locator.open("acme", name, policy, EMPTY_SESSION)
    with pytest.raises(ToolFailure) as full:
        await locator.open("acme", "s3", policy, EMPTY_SESSION)
    assert full.value.code is ErrorCode.QUOTA_EXCEEDED
    await locator.open("other", "s1", policy, EMPTY_SESSION)
    await locator.forget("acme", "s1")
    await locator.open("acme", "s4", policy, EMPTY_SESSION)
    await client.delete(location_key("d", "acme", "s2"))  # its time ran out
    await locator.open("acme", "s5", policy, EMPTY_SESSION)


async def test_forks_are_placed_on_the_host_of_their_session_and_count(client: "redis.asyncio.Redis") -> None:
    locator, policy, facts = build_locator(client, Hosts("a")), TenantPolicy(sandboxes=3), {"queue": "host.a.b00t"}
    await locator.open("acme", "s1", policy, EMPTY_SESSION)
    await client.expire(tenant_sessions_key("d", "acme"), 60)
    await locator.add_forks("acme", "s1", ["f1", "f2"], policy, facts)
    assert await build_locator(client, Hosts("a")).find("acme", "f2", policy) == SessionAddress("host.a.b00t", 1)
    assert await client.ttl(tenant_sessions_key("d", "acme")) > 60
    with pytest.raises(ToolFailure) as full:
        await locator.add_forks("acme", "s1", ["f3"], policy, facts)
    assert full.value.code is ErrorCode.QUOTA_EXCEEDED
    # The session was moved while its host forked it.
    with pytest.raises(SandboxUnavailable):
        await locator.add_forks("acme", "s1", ["f3"], DEFAULT, {"queue": "host.b.b00t"})
    assert await SessionStore(client, "d").find("acme", "f3") is None


STARTING = {"healthy": False, "problem": "starting"}
RESTARTING = {"worker": "", "draining": True}


@pytest.mark.parametrize(
    ("reports", "silent"),
    [([STARTING], []), ([RESTARTING], []), ([], ["host.a.b00t"]), ([{"draining": True}], ["host.b.b00t"])],
    ids=["starting", "restarting", "silent", "one drains and one is silent"],
)
@pytest.mark.parametrize("work", ["open", "any_queue"])
async def test_new_session_waits_for_a_host_that_is_coming(
    client: "redis.asyncio.Redis", reports: list[dict[str, Any]], silent: list[str], work: str
) -> None:
    """As the first session of a stack, or one right after an outage of Redis."""
    hosts = Hosts()
    hosts.all = {report.queue: report for report in (build_report("a", **fields) for fields in reports)}
    hosts.silent_queues = silent
    locator = build_locator(client, hosts)
    begun = asyncio.create_task(
        locator.open("acme", "s1", DEFAULT, EMPTY_SESSION) if work == "open" else locator.any_queue(DEFAULT)
    )
    while hosts.reads < 2:  # the second look proves that the first did not end the opening
        await asyncio.wait({begun}, timeout=0.01)
        assert not begun.done()
    hosts.all, hosts.silent_queues = {"host.c.b00t": build_report("c")}, []
    result = await asyncio.wait_for(begun, SOON_S)
    assert result == "host.c.b00t" if work == "any_queue" else result.metadata["queue"] == "host.c.b00t"


@pytest.mark.parametrize(
    "fields",
    [
        {"draining": True},
        {"sessions": 100},
        {**STARTING, "classes": ("gold",)},
        {**STARTING, "release": "0"},
        {**RESTARTING, "images": ()},
    ],
    ids=["draining", "full", "starting without the class", "starting with another release", "restarting, no image"],
)
async def test_new_session_does_not_wait_for_a_host_that_cannot_take_it(
    client: "redis.asyncio.Redis", fields: dict[str, Any]
) -> None:
    hosts = Hosts()
    hosts.all = {"host.a.b00t": build_report("a", **fields)}
    hosts.silent_queues = ["pool.a.b00t", *(["host.b.b00t"] if "sessions" in fields else [])]
    with pytest.raises((SandboxUnavailable, ToolFailure)):
        await build_locator(client, hosts).open("acme", "s1", DEFAULT, SessionSpec(image="base"))
    assert hosts.reads == 1


async def test_new_session_waits_for_a_host_only_for_a_limited_time(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes_module, "SETTLE_S", 0.3)
    hosts = Hosts()
    hosts.all = {"host.a.b00t": build_report("a", **STARTING)}
    with pytest.raises(SandboxUnavailable, match="the only host takes no sessions now"):
        await build_locator(client, hosts).open("acme", "s1", DEFAULT, EMPTY_SESSION)
    assert hosts.reads >= 2


@pytest.mark.parametrize(
    "answer",
    [
        CallLost("gone", has_started=True),
        build_open_failure(ErrorCode.SANDBOX_UNAVAILABLE, "the host is full"),
    ],
    ids=["lost on the way", "full"],
)
async def test_open_refused_by_one_host_goes_to_another(client: "redis.asyncio.Redis", answer: Any) -> None:
    hosts = Hosts("a", "b")
    hosts.answers["host.a.b00t"] = answer
    hosts.all["host.b.b00t"] = build_report("b", sessions=50)
    locator = build_locator(client, hosts)
    await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)
    assert [(queue, fence) for queue, _, fence in hosts.opened] == [("host.a.b00t", 1), ("host.b.b00t", 2)]
    assert await locator.find("acme", "s1", DEFAULT) == SessionAddress("host.b.b00t", 2)


async def test_open_follows_the_session_to_the_next_worker(client: "redis.asyncio.Redis") -> None:
    """If the opening were abandoned, its sandbox would remain without an owner."""
    hosts = Hosts("a", "b")
    requests: list[tuple[str, int]] = []

    async def send_open(opening: OpenRequest, address: SessionAddress) -> ToolResult:
        requests.append((address.queue, address.fence))
        if address.fence == 1:
            location = location_key("d", opening.tenant, opening.session)
            await client.hset(location, "queue", "host.a.n3w")
            await client.hincrby(location, "fence", 1)
            raise CallLost("gone", has_started=True)
        return await hosts.send_open(opening, address)

    locator = SessionLocator(SessionStore(client, "d"), hosts, send_open, KEY)
    opened = await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)

    assert opened.success
    assert requests[1:] == [("host.a.n3w", 2)]
    assert await locator.find("acme", "s1", DEFAULT) == SessionAddress("host.a.n3w", 2)


@pytest.mark.parametrize(
    "answer",
    [NotSent("host_lost"), build_open_failure(ErrorCode.NO_SPACE, "full")],
)
async def test_failed_open_leaves_no_location(client: "redis.asyncio.Redis", answer: Any) -> None:
    hosts = Hosts("a")
    hosts.answers["host.a.b00t"] = answer
    locator = build_locator(client, hosts)
    with contextlib.suppress(SandboxUnavailable):
        assert not (await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)).success
    assert await client.hget(location_key("d", "acme", "s1"), "state") == b"closed"
    assert await client.keys("*:sessions") == []


async def test_session_of_a_lost_host_moves_with_its_last_checkpoint(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts("a")
    locator = build_locator(client, hosts)
    start = {"image": "base", "ttl_s": 60, "restore": "c0", "cpus": 0.5, "user": "root"}
    await locator.open("acme", "s1", DEFAULT, SessionSpec(**start))
    await client.hset(location_key("d", "acme", "s1"), mapping={**checkpoints("c6"), "checkpoint_at": 1})
    begin_move = SessionStore.begin_move

    async def begin_after_checkpoint(*arguments: Any) -> SessionAddress | None:
        await client.hset(
            location_key("d", "acme", "s1"), mapping={**checkpoints("c7"), "checkpoint_at": 1_700_000_000}
        )
        return await begin_move(*arguments)

    monkeypatch.setattr(SessionStore, "begin_move", begin_after_checkpoint)
    address = await locator.find("acme", "s1", DEFAULT)
    await hosts.lose(client, "host.a.b00t")
    hosts.all["host.b.b00t"] = build_report("b")
    assert await locator.refresh("acme", "s1", address, DEFAULT, is_lost=True) == SessionAddress("host.b.b00t", 2)
    _, opening, _ = hosts.opened[-1]
    assert opening.spec == SessionSpec(**{**start, "restore": "c7"})
    assert opening.moved.model_dump(mode="json")["checkpoint_at"] == "2023-11-14T22:13:20+00:00"


async def test_concurrent_moves_open_the_session_once(client: "redis.asyncio.Redis") -> None:
    hosts = Hosts("a")
    first = build_locator(client, hosts)
    address = await open_and_lose(client, hosts, first)
    programs = [first, *(build_locator(client, hosts) for _ in range(4))]
    addresses = await asyncio.gather(
        *(locator.refresh("acme", "s1", address, DEFAULT, is_lost=True) for locator in programs for _ in range(3))
    )
    assert set(addresses) == {SessionAddress("host.b.b00t", 2)}
    assert len(hosts.opened) == 2


async def test_next_call_opens_a_parked_session(client: "redis.asyncio.Redis") -> None:
    hosts = Hosts("a", "b")
    locator = build_locator(client, hosts)
    await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)
    found_address = await locator.find("acme", "s1", DEFAULT)
    parked = {"state": LocationState.MOVING.value, "queue": "", "fence": 2, "checkpoint": "c1", "checkpoint_at": 1}
    await client.hset(location_key("d", "acme", "s1"), mapping=parked)
    # No host has the session, so a close does not wait for one.
    async with asyncio.timeout(homes_module.SETTLE_S / 2):
        assert await locator.find_for_closing("acme", "s1") is None
    await hosts.lose(client, found_address.queue)
    address = await locator.refresh("acme", "s1", found_address, DEFAULT, is_lost=False)
    assert address.fence == 3
    assert hosts.opened[-1][1].moved.is_planned is True


async def test_failed_move_can_be_repeated(client: "redis.asyncio.Redis") -> None:
    hosts = Hosts("a")
    locator = build_locator(client, hosts)
    address = await open_and_lose(client, hosts, locator)
    hosts.answers["host.b.b00t"] = build_open_failure(ErrorCode.NO_SPACE, "full")
    with pytest.raises(SandboxUnavailable, match="full"):
        await locator.refresh("acme", "s1", address, DEFAULT, is_lost=True)
    del hosts.answers["host.b.b00t"]
    assert (await locator.find("acme", "s1", DEFAULT)).queue == "host.b.b00t"


async def test_start_options_are_stored_without_the_checkpoint(client: "redis.asyncio.Redis") -> None:
    locator = build_locator(client, Hosts("a"))
    await locator.open("acme", "s1", DEFAULT, SessionSpec(ttl_s=5, restore="c0"))
    assert await locator.start("acme", "s1") == SessionSpec(ttl_s=5)


async def test_host_that_reports_again_keeps_its_sessions(client: "redis.asyncio.Redis") -> None:
    """An outage of Redis, during which every report expires, causes this case."""
    hosts = Hosts("a", "b")
    locator = build_locator(client, hosts)
    await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)
    address = await locator.find("acme", "s1", DEFAULT)
    await client.zadd(hosts_key("d"), {address.queue: 1})
    waiting = asyncio.create_task(locator.refresh("acme", "s1", address, DEFAULT, is_lost=True))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await client.set(host_key("d", address.queue), "a report")
    assert await waiting == address
    assert len(hosts.opened) == 1


async def _move_without_restores(
    client: "redis.asyncio.Redis", code: ErrorCode
) -> tuple[list[tuple[str, OpenRequest, int]], BaseException | None]:
    """Move a session with two checkpoints whose restores fail with `code`. Return the openings of the move, and its
    error.
    """
    hosts = Hosts("a")
    locator = build_locator(client, hosts)
    address = await open_and_lose(client, hosts, locator, {**checkpoints("c1", "auto-1"), "checkpoint_at": 1})
    failed = build_open_failure(code, "the restore failed")
    hosts.answer = lambda opening: failed if opening.spec.restore else None
    (moved,) = await asyncio.gather(
        locator.refresh("acme", "s1", address, DEFAULT, is_lost=True), return_exceptions=True
    )
    return hosts.opened[1:], moved if isinstance(moved, BaseException) else None


async def test_move_falls_back_to_the_automatic_checkpoint(client: "redis.asyncio.Redis") -> None:
    opened, error = await _move_without_restores(client, ErrorCode.FILE_NOT_FOUND)
    assert error is None
    assert [opening.spec.restore for _, opening, _ in opened] == ["c1", "auto-1", None]
    assert opened[-1][1].moved.checkpoint_at is None


async def test_failed_restore_does_not_open_the_session_without_files(client: "redis.asyncio.Redis") -> None:
    opened, error = await _move_without_restores(client, ErrorCode.INTERNAL)
    assert isinstance(error, SandboxUnavailable)
    assert "the restore failed" in str(error)
    assert [opening.spec.restore for _, opening, _ in opened] == ["c1"]


async def test_forged_checkpoint_is_not_restored(client: "redis.asyncio.Redis") -> None:
    hosts = Hosts("a")
    locator = build_locator(client, hosts)
    await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)
    for forged in ("another-sessions", seal_checkpoint(KEY, "acme", "s2", "another-sessions")):
        mapping = {**checkpoints("c1", "c1"), "checkpoint": forged, "checkpoint_at": 1}
        await client.hset(location_key("d", "acme", "s1"), mapping=mapping)
        address = await locator.find("acme", "s1", DEFAULT)
        await hosts.lose(client, address.queue)
        name = f"b{len(hosts.opened)}"
        hosts.all[f"host.{name}.b00t"] = build_report(name)
        await locator.refresh("acme", "s1", address, DEFAULT, is_lost=True)
        assert hosts.opened[-1][1].spec.restore == "c1"


async def test_move_tries_the_next_host_then_the_older_checkpoint(client: "redis.asyncio.Redis") -> None:
    hosts = Hosts("a")
    locator = build_locator(client, hosts)
    address = await open_and_lose(client, hosts, locator, {**checkpoints("c1"), "checkpoint_at": 1})
    hosts.all["host.c.b00t"] = build_report("c", sessions=50)
    hosts.answers["host.b.b00t"] = build_open_failure(ErrorCode.SANDBOX_UNAVAILABLE, "the host is full")
    missing = build_open_failure(ErrorCode.FILE_NOT_FOUND, "no such checkpoint")
    hosts.answer = lambda opening: missing if opening.spec.restore else None
    moved = await locator.refresh("acme", "s1", address, DEFAULT, is_lost=True)
    assert moved.queue == "host.c.b00t"
    assert [(queue, opening.spec.restore) for queue, opening, _ in hosts.opened[1:]] == [
        ("host.b.b00t", "c1"),
        ("host.c.b00t", "c1"),
        ("host.c.b00t", None),
    ]


async def test_placements_of_ended_hosts_are_dropped(client: "redis.asyncio.Redis") -> None:
    hosts = Hosts()
    locator = build_locator(client, hosts)
    for number in range(5):
        hosts.all = {f"host.a.b{number}": build_report("a")}
        await locator.open("acme", f"s{number}", DEFAULT, EMPTY_SESSION)
    assert len(locator._placed) == 1


async def test_move_reports_no_time_for_an_automatic_checkpoint(client: "redis.asyncio.Redis") -> None:
    hosts = Hosts("a")
    locator = build_locator(client, hosts)
    stored = {**checkpoints("asked", "older"), "checkpoint_at": 1_700_000_000}
    address = await open_and_lose(client, hosts, locator, stored)
    missing = build_open_failure(ErrorCode.FILE_NOT_FOUND, "no such checkpoint")
    hosts.answer = lambda opening: missing if opening.spec.restore == "asked" else None
    await locator.refresh("acme", "s1", address, DEFAULT, is_lost=True)
    last = hosts.opened[-1][1]
    assert (last.spec.restore, last.moved.checkpoint_at) == ("older", None)


async def test_refused_opens_do_not_count_as_placed(client: "redis.asyncio.Redis") -> None:
    hosts, full = Hosts(), TenantPolicy(sandboxes=0)
    hosts.all["host.a.b00t"] = build_report("a", max_sessions=2)
    locator = build_locator(client, hosts)
    for number in range(3):
        with pytest.raises(ToolFailure):
            await locator.open("greedy", f"s{number}", full, EMPTY_SESSION)
    assert (await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)).success


async def test_waiting_for_a_move_does_not_count_as_placed(client: "redis.asyncio.Redis") -> None:
    hosts = Hosts()
    hosts.all["host.a.b00t"] = build_report("a", max_sessions=2)
    locator = build_locator(client, hosts)
    await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)
    location = location_key("d", "acme", "s1")
    await client.hset(location, mapping={"state": "moving", "fence": 2, "moving_until": 9_000_000_000})
    waiting = [asyncio.create_task(build_locator(client, hosts).find("acme", "s1", DEFAULT)) for _ in range(2)]
    waiting += [
        asyncio.create_task(locator.refresh("acme", "s1", SessionAddress("host.a.b00t", 1), DEFAULT, is_lost=False))
        for _ in range(4)
    ]
    await asyncio.sleep(0.3)
    assert (await locator.open("acme", "s2", DEFAULT, EMPTY_SESSION)).success
    await client.hset(location, mapping={"state": "open", "moving_until": 0})
    assert set(await asyncio.gather(*waiting)) == {SessionAddress("host.a.b00t", 2)}


async def test_session_of_a_stopped_host_is_moved(client: "redis.asyncio.Redis") -> None:
    """Such a host has neither a report nor a tombstone."""
    hosts = Hosts("a")
    locator = build_locator(client, hosts)
    await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)
    address = await locator.find("acme", "s1", DEFAULT)
    del hosts.all[address.queue]
    await client.zrem(hosts_key("d"), address.queue)
    hosts.all["host.b.b00t"] = build_report("b")
    assert await locator.refresh("acme", "s1", address, DEFAULT, is_lost=True) == SessionAddress("host.b.b00t", 2)


async def test_cache_of_used_sessions_is_bounded(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes_module, "MAX_CACHED", 2)
    locator = build_locator(client, Hosts("a"))
    for number in range(4):
        await locator.open("acme", f"s{number}", DEFAULT, EMPTY_SESSION)
    assert [locator.last_used("acme", f"s{number}") is not None for number in range(4)] == [False, False, True, True]


async def test_the_arguments_of_all_sessions_of_a_tenant_have_a_limit(client: "redis.asyncio.Redis") -> None:
    """Aim: fill Redis with configurations of tools, in sessions or in their forks."""
    places, queue, large = SessionStore(client, "d"), "host.a.b00t", "x" * (STARTS_BYTES // 4)

    async def open_one(session: str, start: str, tenant: str = "acme") -> None:
        await places.open(tenant, session, queue, start=start, ttl_s=60, limit=1000)

    for number in range(4):
        await open_one(f"s{number}", large)
    with pytest.raises(ToolFailure, match="tool_config") as refused:
        await open_one("s4", large)
    assert refused.value.code is ErrorCode.QUOTA_EXCEEDED
    await open_one("small", "x")
    await open_one("s0", large, tenant="other")
    await places.close("acme", "s0")
    with pytest.raises(ToolFailure, match="tool_config"):
        await places.fork("acme", "s1", {"f1": large, "f2": large}, queue, facts="{}", limit=1000)
    await places.fork("acme", "s1", {"f1": large[:-10]}, queue, facts="{}", limit=1000)


async def test_completed_move_is_not_repeated(client: "redis.asyncio.Redis") -> None:
    """A process that saw the move in progress must not repeat it: changes made since then would be lost."""
    places = SessionStore(client, "d")
    await places.open(
        "acme", "s1", "host.a.b00t", start=seal_start(KEY, "acme", "s1", EMPTY_SESSION), ttl_s=60, limit=1
    )
    assert await places.begin_move("acme", "s1", 1, LocationState.OPEN, "host.b.b00t") == SessionAddress(
        "host.b.b00t", 2
    )
    address = await places.find("acme", "s1")
    assert address is not None
    assert await places.settle("acme", "s1", 2, LocationState.OPEN)
    assert await places.begin_move("acme", "s1", address.fence, address.state, "host.c.b00t") is None
    location = await places.find("acme", "s1")
    assert (location.state, location.queue, location.fence) == (LocationState.OPEN, "host.b.b00t", 2)


async def test_open_refused_by_all_hosts_reports_the_reason(client: "redis.asyncio.Redis") -> None:
    hosts = Hosts("a", "b")
    for queue in hosts.all:
        message = f"{queue} has no engine"
        hosts.answers[queue] = build_open_failure(ErrorCode.SANDBOX_UNAVAILABLE, message)
    result = await build_locator(client, hosts).open("acme", "s1", DEFAULT, EMPTY_SESSION)
    assert result.error_code == ErrorCode.SANDBOX_UNAVAILABLE
    assert "has no engine" in str(result.error)
    assert len(hosts.opened) == 2
    assert await client.hget(location_key("d", "acme", "s1"), "state") == b"closed"


async def test_new_report_resets_placements_of_its_host_only(client: "redis.asyncio.Redis") -> None:
    hosts = Hosts()
    hosts.all = {
        name: build_report(name.split(".")[1], max_sessions=3, reported_at=1.0)
        for name in ("host.a.b00t", "host.b.b00t")
    }
    locator = build_locator(client, hosts)
    for number in range(6):
        await locator.open("acme", f"s{number}", DEFAULT, EMPTY_SESSION)
    hosts.all["host.a.b00t"] = build_report("a", max_sessions=4, sessions=3, reported_at=2.0)
    await locator.open("acme", "s7", DEFAULT, EMPTY_SESSION)
    assert hosts.opened[-1][0] == "host.a.b00t"
    with pytest.raises(SandboxUnavailable, match="full"):
        await locator.open("acme", "s8", DEFAULT, EMPTY_SESSION)


@pytest.mark.parametrize("forgery", ["unsigned", "of another session", "changed"])
async def test_forged_start_options_do_not_reopen_a_session(client: "redis.asyncio.Redis", forgery: str) -> None:
    """The attacker's aim: a network for a session that was opened without one."""
    hosts = Hosts("a", "b")
    locator = build_locator(client, hosts)
    await locator.open("acme", "s1", DEFAULT, SessionSpec(network="none"))
    address = await locator.find("acme", "s1", DEFAULT)
    await locator.open("acme", "s2", DEFAULT, SessionSpec(network="egress"))
    location = await SessionStore(client, "d").find("acme", "s1")
    other = await client.hget(location_key("d", "acme", "s2"), "start")  # type: ignore[misc]
    forged = {
        "unsigned": '{"network": "egress"}',
        "of another session": other,
        "changed": location.start.replace("none", "egress"),
    }[forgery]
    await client.hset(location_key("d", "acme", "s1"), "start", forged)  # type: ignore[misc]
    await hosts.lose(client, location.queue)
    opened = len(hosts.opened)
    with pytest.raises(
        SandboxUnavailable, match="is not valid, so the session is not opened again: open a new session"
    ):
        await build_locator(client, hosts).refresh("acme", "s1", address, DEFAULT, is_lost=True)
    assert len(hosts.opened) == opened


KEYS = SigningKeys.of("a secret", deployment="d")


def signed_start(tenant: str, session: str, keys: SigningKeys = KEYS) -> str:
    return seal_start(keys, tenant, session, SessionSpec(image="python"))


async def open_sessions(client: "redis.asyncio.Redis", count: int, tenant: str = "acme") -> list[str]:
    """Open sessions of the tenant. Return the sessions, newest first."""
    names = [f"{tenant}-{number}" for number in range(count)]
    for name in names:
        await SessionStore(client, "d").open(
            tenant, name, "host.a.b1", start=signed_start(tenant, name), ttl_s=60, limit=1000
        )
    return names[::-1]


async def read_all(client: "redis.asyncio.Redis", tenant: str | None, limit: int) -> list[str]:
    """Read the list page by page."""
    sessions, cursor = list[str](), None
    while True:
        page = await SessionList(client, "d", KEYS).read(tenant, cursor, limit)
        sessions += [session.id for session in page.sessions]
        if page.cursor is None:
            return sessions
        cursor = page.cursor


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 50])
async def test_session_pages_list_every_session_once_newest_first(client: "redis.asyncio.Redis", limit: int) -> None:
    names = await open_sessions(client, 5)
    assert await read_all(client, "acme", limit) == names
    assert await read_all(client, None, limit) == names


async def test_more_sessions_than_one_read_are_listed(client: "redis.asyncio.Redis") -> None:
    names = await open_sessions(client, 450)
    assert await read_all(client, None, 1000) == names
    assert await read_all(client, "acme", 150) == names


async def test_listed_session_has_its_host_and_last_checkpoint(client: "redis.asyncio.Redis") -> None:
    await open_sessions(client, 1)
    await client.hset(
        location_key("d", "acme", "acme-0"), mapping={"checkpoint": "c1", "checkpoint_at": 1_700_000_000.0}
    )
    [session] = (await SessionList(client, "d", KEYS).read("acme")).sessions
    assert session.id == "acme-0"
    assert session.tenant == "acme"
    assert session.state == "open"
    assert session.host == "a"
    assert session.queue == "host.a.b1"
    assert (session.fence, session.image, session.ttl_s, session.checkpoint) == (1, "python", 60.0, "c1")
    assert session.model_dump(mode="json")["checkpoint_at"] == "2023-11-14T22:13:20Z"


async def test_session_list_excludes_other_tenants(client: "redis.asyncio.Redis") -> None:
    await open_sessions(client, 2, "acme")
    bolt_sessions = await open_sessions(client, 1, "bolt")
    assert await read_all(client, "bolt", 50) == bolt_sessions
    assert len(await read_all(client, None, 50)) == 3
    assert await SessionList(client, "d", KEYS).counts(["acme", "bolt"]) == {"acme": 2, "bolt": 1}


async def test_closed_session_is_removed_from_every_list(client: "redis.asyncio.Redis") -> None:
    await open_sessions(client, 1)
    places = SessionStore(client, "d")
    await places.settle("acme", "acme-0", 1, LocationState.OPEN, '{"image": "python"}')
    assert await places.facts("acme", "acme-0") == '{"image": "python"}'
    await places.close("acme", "acme-0")
    assert await places.facts("acme", "acme-0") is None
    keys = [open_sessions_key("d"), tenant_open_sessions_key("d", "acme"), session_facts_key("d", "acme", "acme-0")]
    assert await client.exists(*keys) == 0


async def test_expired_sessions_are_skipped_and_removed_from_the_lists(client: "redis.asyncio.Redis") -> None:
    names = await open_sessions(client, 6)
    await client.delete(*(location_key("d", "acme", name) for name in names[::2]))
    assert await read_all(client, "acme", 2) == names[1::2]
    assert await client.zcard(open_sessions_key("d")) == await client.zcard(tenant_open_sessions_key("d", "acme")) == 3


@pytest.mark.parametrize(
    ("life", "host", "fields", "has_ended"),
    [
        (LOCATION_MARGIN_S, "given up", {}, True),
        (LOCATION_MARGIN_S, "unknown", {}, True),
        (LOCATION_MARGIN_S + 5, "given up", {}, False),
        (LOCATION_MARGIN_S, "silent", {}, False),
        (LOCATION_MARGIN_S, "alive", {}, False),
        (LOCATION_MARGIN_S, "alive", {"state": "moving", "queue": ""}, True),
        (LOCATION_MARGIN_S, "alive", {"state": "moving", "moving_until": 9e9}, False),
    ],
)
async def test_session_of_a_lost_host_counts_only_until_its_time_to_live_is_over(
    client: "redis.asyncio.Redis", life: int, host: str, fields: dict[str, Any], has_ended: bool
) -> None:
    """A session that may still run a long call on a host stays."""
    queue = "host.a.b1"
    if host in ("alive", "silent"):
        await client.zadd(hosts_key("d"), {queue: 1.0})
    if host == "alive":
        await client.set(host_key("d", queue), "{}")
    if host == "given up":
        await client.zadd(hosts_key("d"), {queue: 1.0})
        await client.set(tombstone_key("d", queue), "1")
    for name in ("counted", "listed"):
        [session] = await open_sessions(client, 1, name)
        location = location_key("d", name, session)
        await client.hset(location, mapping=fields or {"fence": 1})  # type: ignore[misc]
        await client.expire(location, life)
    another = SessionStore(client, "d").open("counted", "s2", queue, start="{}", ttl_s=60, limit=1)
    if has_ended:
        await another
    else:
        with pytest.raises(ToolFailure) as full:
            await another
        assert full.value.code is ErrorCode.QUOTA_EXCEEDED
    assert await read_all(client, "listed", 50) == ([] if has_ended else ["listed-0"])
    assert await client.sismember(tenant_sessions_key("d", "listed"), "listed-0") == (not has_ended)  # type: ignore[misc]


@pytest.mark.parametrize("state", ["queued", "running", "ended"])
async def test_sessions_of_a_stack_that_ended_are_closed_unless_a_run_continues(
    client: "redis.asyncio.Redis", state: str
) -> None:
    for name in ("own", "opened", "given"):
        await SessionStore(client, "d").open("acme", name, "host.a.b1", start="{}", ttl_s=60, limit=3)
    await SessionStore(client, "d").open("bolt", "opened", "host.a.b1", start="{}", ttl_s=60, limit=3)
    await client.hset(run_key("d", "acme", "r1"), mapping={"state": state, "session": "given"})  # type: ignore[misc]
    sealed = KEYS.seal(session_purpose("acme", "r1"), "opened")
    await client.sadd(run_sessions_key("d", "acme", "r1"), sealed, "forged")  # type: ignore[misc]
    assert await close_unused_sessions(client, "d", KEYS) == (4 if state == "ended" else 2)
    kept = set() if state == "ended" else {b"opened", b"given"}
    assert await client.smembers(tenant_sessions_key("d", "acme")) == kept  # type: ignore[misc]
    assert await SessionStore(client, "d").find("bolt", "opened") is None


async def test_session_lists_do_not_grow_with_expired_sessions(client: "redis.asyncio.Redis") -> None:
    for number in range(400):
        await SessionStore(client, "d").open("acme", f"s{number}", "host.a.b1", start="{}", ttl_s=60, limit=1000)
        await client.delete(location_key("d", "acme", f"s{number}"))
    assert await client.zcard(open_sessions_key("d")) < 50
    assert await client.zcard(tenant_open_sessions_key("d", "acme")) < 50


async def test_record_of_a_later_release_stays_in_the_list(client: "redis.asyncio.Redis") -> None:
    names = await open_sessions(client, 2)
    await client.hset(location_key("d", "acme", names[0]), "colour", "red")
    assert await read_all(client, "acme", 50) == names[1:]
    assert await client.zcard(open_sessions_key("d")) == 2


@pytest.mark.parametrize(
    "start",
    [
        '{"image": "python"}',
        signed_start("acme", "acme-0", SigningKeys.of("a guess")),
        signed_start("acme", "another"),
        "{",
    ],
    ids=["unsigned", "another secret", "another session", "not JSON"],
)
async def test_session_with_an_invalid_signature_is_not_listed(client: "redis.asyncio.Redis", start: str) -> None:
    names = await open_sessions(client, 2)
    await client.hset(location_key("d", "acme", "acme-0"), "start", start)
    assert await read_all(client, "acme", 50) == names[:1]


@pytest.mark.parametrize(
    ("cursor", "limit"),
    [(cursor, 50) for cursor in ("", "x", "1.acme", "1.acme.s|t", "-1.acme.s", "1.acme.s\n", "1" * 40 + ".acme.s")]
    + [(None, 0), (None, 1001)],
)
async def test_invalid_cursor_or_limit_is_refused(
    client: "redis.asyncio.Redis", cursor: str | None, limit: int
) -> None:
    with pytest.raises(ToolFailure, match="the cursor" if cursor is not None else "use 1 to 1000") as refused:
        await SessionList(client, "d", KEYS).read(None, cursor, limit)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


async def test_session_is_found_only_by_its_tenant(client: "redis.asyncio.Redis") -> None:
    locator = build_locator(client, Hosts("a"))
    await locator.open("acme", "s1", DEFAULT, EMPTY_SESSION)
    with pytest.raises(ToolFailure) as unknown:
        await locator.find("rival", "s1", DEFAULT)
    assert unknown.value.code is ErrorCode.SESSION_NOT_FOUND
