"""The outcome of a call when its worker is lost: sent again if that is safe, otherwise an error. The call never acts
twice.
"""

import inspect
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.dispatch.test_session_locator import Hosts
from tests.support.records.builders import KEY, build_spec
from tests.support.records.fakes import StaticCatalog
from toolcrew.contract.calls import Clocks, ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import decode_call, encode_result
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode
from toolcrew.contract.names import call_key, host_key, location_key, result_key
from toolcrew.contract.session_spec import EMPTY_SESSION
from toolcrew.contract.signing import ResultSeal
from toolcrew.orchestrator.admission import Slot, UnlimitedAdmission
from toolcrew.orchestrator.dispatch import delivery
from toolcrew.orchestrator.dispatch import session_locator as locator
from toolcrew.orchestrator.dispatch.delivery import Pool
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.request import Attempt, Request, with_digest
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.orchestrator.dispatch.transport import CallIdInUse, CallLost, CallSentAgain, DeliveryFailed
from toolcrew.store.call_messages import NotSent
from toolcrew.store.call_records import CallState, seal_ticket
from toolcrew.store.calls import CallStore
from toolcrew.store.sessions import SessionStore
from toolcrew.store.slots import SlotRequest

pytestmark = pytest.mark.usefixtures("quiet_logs")

RESULT_LOST = CallLost("its result was lost", has_started=True)
# Redis has lost the renewal, and has the record of the attempt before.
OLD_RECORD = CallLost("gone", has_started=False)
SAFE, ACTS = build_spec("safe", idempotent=True), build_spec("acts")


class ScriptedTransport:
    """A transport whose tool calls end as scripted, one after the other, and then succeed. Session calls end by
    `session_outcomes`. The transport updates the ledger as publishing does.
    """

    def __init__(self, client: "redis.asyncio.Redis", *outcomes: Any) -> None:
        self.client = client
        self.outcomes = list(outcomes)
        self.session_outcomes: list[Callable[[ToolCall], ToolResult]] = []
        self.deliveries: list[Attempt] = []
        self.calls: list[tuple[ToolCall, ToolContext]] = []

    async def deliver(self, attempt: Attempt) -> Any:
        call, context = decode_call(attempt.envelope, KEY)
        if not call.name.startswith("session."):
            self.deliveries.append(attempt)
            self.calls.append((call, context))
            outcome = self.outcomes.pop(0) if self.outcomes else None
            if inspect.iscoroutinefunction(outcome):
                raise await outcome(attempt)
            if isinstance(outcome, NotSent):
                raise outcome
            await self.client.hset(
                call_key("d", attempt.tenant, call.id),
                mapping={"state": "queued", "attempt": attempt.number, "ticket": attempt.ticket},
            )
            if isinstance(outcome, DeliveryFailed):
                raise outcome
            if isinstance(outcome, CallLost):
                await self.client.hset(
                    call_key("d", attempt.tenant, call.id), "state", "done" if outcome is RESULT_LOST else "lost"
                )
                if outcome is OLD_RECORD:
                    earlier = attempt.number - 1
                    proof = {"attempt": earlier, "ticket": seal_ticket(KEY, attempt.tenant, call.id, earlier)}
                    await self.client.hset(call_key("d", attempt.tenant, call.id), mapping=proof)
                if outcome.has_started:
                    await self.client.hdel(call_key("d", attempt.tenant, call.id), "ticket")
                raise outcome
            if outcome is not None:
                return encode_result(outcome(call), seal=ResultSeal(KEY, context.tenant, context.attempt))
        elif self.session_outcomes:
            await self.client.hset(
                call_key("d", attempt.tenant, call.id), mapping={"state": "running", "attempt": attempt.number}
            )
            return encode_result(
                self.session_outcomes.pop(0)(call), seal=ResultSeal(KEY, context.tenant, context.attempt)
            )
        return encode_result(
            ToolResult(call_id=call.id, name=call.name, success=True, output="done"),
            seal=ResultSeal(KEY, context.tenant, context.attempt),
        )

    async def send_order(self, queue: str, envelope: str) -> None:
        """Send nothing."""

    async def aclose(self) -> None:
        """Close nothing."""


class Harness:
    def __init__(self, client: "redis.asyncio.Redis", *outcomes: Any) -> None:
        self.hosts = Hosts("a", "b")
        self.transport = ScriptedTransport(client, *outcomes)
        opening = build_spec(
            "session.open", audience="session", idempotent=True, properties={"moved": {"type": "object"}}
        )
        pool = Pool(SessionStore(client, "d"), self.hosts, CallStore(client, "d"))
        self.dispatcher = Dispatcher(
            self.transport,
            TenantCatalog(StaticCatalog(SAFE, ACTS, opening, build_spec("session.close", audience="session"))),
            KEY,
            queue_wait_s=5,
            pool=pool,
        )
        self.client = client

    async def call(self, name: str) -> ToolResult:
        await self.open()
        return await self.dispatcher.dispatch(Request(ToolCall(id="c1", name=name), "acme", "s1"))

    async def open(self) -> None:
        """Open a session on one of the hosts. All hosts are alive."""
        await self.client.mset({host_key("d", queue): "a report" for queue in self.hosts.all})
        assert (await self.dispatcher.open_session("acme", "s1", EMPTY_SESSION)).success

    async def state(self) -> str:
        return str((await self.client.hget(call_key("d", "acme", "c1"), "state") or b"").decode())


def refuse_with(code: ErrorCode, message: str, **metadata: Any) -> Callable[[ToolCall], ToolResult]:
    """Return the reply of a worker that refuses the call."""
    return lambda call: ToolResult.failed(call, code, message, metadata=metadata)


STARTED, UNSTARTED = CallLost("gone", has_started=True), CallLost("gone", has_started=False)
MOVED = refuse_with(ErrorCode.HOST_LOST, "moved", not_run="moved")
SANDBOXD_AWAY = refuse_with(ErrorCode.SANDBOX_UNAVAILABLE, "away", not_run="sandboxd")
NO_BROKER = refuse_with(ErrorCode.SANDBOX_UNAVAILABLE, "away", not_run="broker")
LATE = refuse_with(ErrorCode.TIMEOUT, "too late", not_run="expired")
DIED = refuse_with(ErrorCode.OUTCOME_UNKNOWN, "sandboxd is gone", outcome_lost=True)
KILLED = DeliveryFailed(ErrorCode.TIMEOUT, "killed with its process")
UNKNOWN, LOST, QUEUED = CallState.UNKNOWN, CallState.LOST, CallState.QUEUED


@pytest.mark.parametrize(
    ("tool", "outcomes", "sent", "code", "message", "state"),
    [
        ("safe", [STARTED], 2, None, "", QUEUED),
        ("safe", [UNSTARTED], 2, None, "", QUEUED),
        ("safe", [STARTED] * 9, 3, ErrorCode.OUTCOME_UNKNOWN, "attempt 3 of 3", UNKNOWN),
        ("safe", [STARTED, *[UNSTARTED] * 2], 3, ErrorCode.OUTCOME_UNKNOWN, "", UNKNOWN),
        ("acts", [UNSTARTED], 2, None, "", QUEUED),
        ("acts", [UNSTARTED] * 9, 3, ErrorCode.HOST_LOST, "was not run", LOST),
        ("acts", [UNSTARTED, UNSTARTED, OLD_RECORD], 3, ErrorCode.OUTCOME_UNKNOWN, "", None),
        ("acts", [MOVED], 2, None, "", QUEUED),
        ("acts", [SANDBOXD_AWAY] * 2, 3, None, "", QUEUED),
        ("acts", [NO_BROKER] * 2, 3, None, "", QUEUED),
        ("acts", [LATE], 1, ErrorCode.TIMEOUT, "", None),
        ("safe", [DIED], 2, None, "", QUEUED),
        ("safe", [DIED] * 9, 3, ErrorCode.OUTCOME_UNKNOWN, "", None),
        ("acts", [DIED], 1, ErrorCode.OUTCOME_UNKNOWN, "", None),
        ("safe", [RESULT_LOST], 2, None, "", QUEUED),
        ("acts", [RESULT_LOST], 1, ErrorCode.OUTCOME_UNKNOWN, "", "done"),
        ("acts", [KILLED], 1, ErrorCode.TIMEOUT, "", UNKNOWN),
        ("acts", [CallIdInUse("c1")], 1, ErrorCode.INVALID_ARGUMENTS, "", QUEUED),
        ("safe", [NotSent("duplicate")], 1, ErrorCode.OUTCOME_UNKNOWN, "its own id", None),
        ("safe", [STARTED, NotSent("duplicate")], 2, ErrorCode.OUTCOME_UNKNOWN, "cancelled", None),
    ],
)
async def test_a_call_is_sent_again_only_if_it_did_not_act_or_is_idempotent(
    client: "redis.asyncio.Redis",
    tool: str,
    outcomes: list[Any],
    sent: int,
    code: ErrorCode | None,
    message: str,
    state: str | None,
) -> None:
    """`safe` is idempotent and `acts` is not. `state`: the record of the call in the ledger at the end."""
    harness = Harness(client, *outcomes)
    result = await harness.call(tool)
    assert (result.error_code, result.success, message in str(result.error)) == (code, code is None, True)
    assert message in ("was not run", "its own id") or "was not run" not in str(result.error)
    assert message != "cancelled" or "id" not in str(result.error).split()
    assert [context.attempt for _, context in harness.transport.calls] == [*range(1, sent + 1)]
    assert len({call.id for call, _ in harness.transport.calls}) == 1
    if state is not None:
        assert await harness.state() == state


async def test_a_lost_unstarted_call_without_another_host_was_not_run(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locator, "SETTLE_S", 0.3)
    harness = Harness(client, CallLost("the host is gone", has_started=False))
    await harness.open()
    for queue in list(harness.hosts.all):
        await harness.hosts.lose(client, queue)
        await client.delete(host_key("d", queue))
    result = await harness.dispatcher.dispatch(Request(ToolCall(id="c1", name="acts"), "acme", "s1"))
    assert (result.error_code, "was not run" in str(result.error)) == (ErrorCode.HOST_LOST, True)
    assert "no sandbox host reports" in str(result.error)
    assert await harness.state() == CallState.LOST


async def test_an_unsent_call_follows_its_moved_session(client: "redis.asyncio.Redis") -> None:
    """This holds for every tool, because nothing was published."""
    harness = Harness(client, NotSent("host_lost"))
    await harness.open()
    first = harness.dispatcher.session_queue("acme", "s1")
    await harness.hosts.lose(client, str(first))
    result = await harness.dispatcher.dispatch(Request(ToolCall(id="c1", name="acts"), "acme", "s1"))
    assert result.success
    assert harness.transport.deliveries[0].queue == first != harness.transport.deliveries[1].queue
    assert [attempt.fence for attempt in harness.transport.deliveries] == [1, 2]


@pytest.mark.parametrize(
    ("earlier", "outcome", "code", "state"),
    [
        ([], NotSent("moved"), ErrorCode.HOST_LOST, None),
        ([], SANDBOXD_AWAY, ErrorCode.SANDBOX_UNAVAILABLE, LOST),
        ([STARTED], SANDBOXD_AWAY, ErrorCode.SANDBOX_UNAVAILABLE, UNKNOWN),
    ],
    ids=["session moved", "refused", "refused after a loss"],
)
async def test_a_call_refused_by_every_worker_is_closed_in_the_ledger(
    client: "redis.asyncio.Redis",
    monkeypatch: pytest.MonkeyPatch,
    earlier: list[Any],
    outcome: Any,
    code: ErrorCode,
    state: str | None,
) -> None:
    monkeypatch.setattr(delivery, "RESEND_S", 0.3)
    harness = Harness(client, *earlier, *[outcome] * 99)
    result = await harness.call("safe" if earlier else "acts")
    assert (result.error_code, 2 <= len(harness.transport.calls) <= 9) == (code, True)
    if state is None:
        assert "was not run" in str(result.error)
    else:
        assert await harness.state() == state


async def test_a_refused_call_of_a_removed_session_is_closed_in_the_ledger(
    client: "redis.asyncio.Redis", redis_server: RedisProcess
) -> None:
    def refuse(call: ToolCall) -> ToolResult:
        with redis_server.client() as sync_client:
            sync_client.delete(location_key("d", "acme", "s1"))
        return SANDBOXD_AWAY(call)

    harness = Harness(client, refuse)
    assert (await harness.call("safe")).error_code is ErrorCode.SESSION_NOT_FOUND
    assert await harness.state() == CallState.LOST


async def test_refused_session_calls_are_closed_in_the_ledger(client: "redis.asyncio.Redis") -> None:
    refused: list[str] = []

    def refuse(call: ToolCall) -> ToolResult:
        refused.append(call.id)
        return SANDBOXD_AWAY(call)

    harness = Harness(client)
    harness.transport.session_outcomes = [refuse]
    await harness.open()
    harness.transport.session_outcomes = [refuse, refuse]
    assert (await harness.dispatcher.close_session("acme", "s1")).success
    assert [await client.hget(call_key("d", "acme", call), "state") for call in refused] == [b"lost"] * 3


@pytest.mark.parametrize("tool", ["safe", "acts"])
async def test_a_lost_call_is_reported_when_redis_is_unavailable(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    async def refuse(*_: Any) -> bool:
        raise BrokerUnavailable("Redis is away")

    monkeypatch.setattr(CallStore, "renew", refuse)
    monkeypatch.setattr(CallStore, "give_up", refuse)
    result = await Harness(client, CallLost("gone", has_started=True)).call(tool)
    assert (result.error_code, "gone" in str(result.error)) == (ErrorCode.OUTCOME_UNKNOWN, True)


async def test_admission_is_charged_for_sandbox_and_run_time(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    slots: list[tuple[SlotRequest, Slot]] = []

    @asynccontextmanager
    async def grant_slot(_: Any, request: SlotRequest, **__: Any) -> AsyncIterator[Slot]:
        slots.append((request, Slot()))
        yield slots[-1][1]

    monkeypatch.setattr(UnlimitedAdmission, "slot", grant_slot)

    def run(call: ToolCall) -> ToolResult:
        clocks = Clocks(queued_s=8, sandbox_s=1, run_s=2)
        return ToolResult(call_id=call.id, name=call.name, success=True, clocks=clocks)

    await Harness(client, run).call("acts")
    request, slot = slots[-1]
    assert slot.used_s == 3
    assert delivery.MIN_WAIT_S < request.wait_s <= 5


async def test_a_session_on_a_lost_host_can_be_closed(client: "redis.asyncio.Redis") -> None:
    harness = Harness(client)
    await harness.open()
    for queue in list(harness.hosts.all):
        await harness.hosts.lose(client, queue)
    deliver = harness.transport.deliver

    async def refuse(attempt: Attempt) -> Any:
        if attempt.request.worker_call.name == "session.close":
            raise NotSent("host_lost")
        return await deliver(attempt)

    harness.transport.deliver = refuse  # type: ignore[method-assign]
    assert (await harness.dispatcher.close_session("acme", "s1")).success
    assert await client.hget(location_key("d", "acme", "s1"), "state") == b"closed"


async def test_a_session_is_closed_on_the_worker_that_took_it_over(client: "redis.asyncio.Redis") -> None:
    harness = Harness(client)
    await harness.open()
    location = location_key("d", "acme", "s1")
    # As a restarted worker takes its sessions over.
    await client.hset(location, mapping={"queue": "host.b.b00t", "fence": 2})
    close_calls: list[tuple[str, int]] = []

    async def deliver(attempt: Attempt) -> Any:
        call, context = decode_call(attempt.envelope, KEY)
        if context.fence != 2:
            raise NotSent("moved")
        close_calls.append((attempt.queue, context.fence))
        success = ToolResult(call_id=call.id, name=call.name, success=True, metadata={"closed": True})
        return encode_result(
            success if len(close_calls) > 1 else SANDBOXD_AWAY(call),
            seal=ResultSeal(KEY, context.tenant, context.attempt),
        )

    harness.transport.deliver = deliver  # type: ignore[method-assign]
    result = await harness.dispatcher.close_session("acme", "s1")
    assert (result.success, result.metadata["closed"], close_calls) == (True, True, [("host.b.b00t", 2)] * 2)
    assert await client.hget(location_key("d", "acme", "s1"), "state") == b"closed"


async def test_a_session_opened_by_another_process_is_closed_on_its_host(client: "redis.asyncio.Redis") -> None:
    harness = Harness(client)
    await harness.open()
    other = Harness(client)
    deliver, tasks = other.transport.deliver, []

    async def deliver_and_note(attempt: Attempt) -> Any:
        tasks.append(attempt.request.worker_call.name)
        return await deliver(attempt)

    other.transport.deliver = deliver_and_note  # type: ignore[method-assign]
    assert (await other.dispatcher.close_session("acme", "s1")).success
    assert tasks == ["session.close"]


# A call whose sending process has died: awaited where it runs, sent if it was certainly not sent, never run twice.

NOW = time.time()


async def dispatch_again(
    client: "redis.asyncio.Redis", tool: str, sent_since: float = NOW, *, is_closed: bool = False, **record: str
) -> tuple[ToolResult, list[Attempt]]:
    """Return the result of a call with this state in the ledger, and the deliveries made for the call. `is_closed`:
    its session was closed meanwhile.
    """
    harness = Harness(client)
    await harness.open()
    if is_closed:
        await harness.dispatcher.forget_sessions("acme", ["s1"])
    if record:
        fields = {"attempt": "1", "nonce": "1:ab", "task": "hub-c1", "queue": "host.a.b00t", **record}
        await client.hset(call_key("d", "acme", "c1"), mapping=fields)
    result = await harness.dispatcher.dispatch(
        Request(ToolCall(id="c1", name=tool), "acme", "s1", keeps_result=True, sent_since=sent_since)
    )
    return result, harness.transport.deliveries


async def test_a_call_without_a_record_is_sent(client: "redis.asyncio.Redis") -> None:
    result, (delivery,) = await dispatch_again(client, "acts")
    assert (result.success, delivery.published_as, delivery.number, delivery.request.keeps_result) == (
        True,
        None,
        1,
        True,
    )


@pytest.mark.parametrize(("tool", "sent"), [("safe", [1]), ("acts", [])])
async def test_the_age_of_a_call_uses_the_redis_clock(
    client: "redis.asyncio.Redis", tool: str, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of this host is five hours behind. By it the call was sent 20 hours ago, and its record would still be
    there.
    """

    async def now() -> tuple[int, int]:
        return int(time.time()) + 5 * 3600, 0

    monkeypatch.setattr(client, "time", now)
    result, deliveries = await dispatch_again(client, tool, time.time() - 20 * 3600)
    assert [one.number for one in deliveries] == sent
    assert result.error_code is (None if sent else ErrorCode.OUTCOME_UNKNOWN)


@pytest.mark.parametrize(
    ("state", "is_closed"), [("queued", False), ("running", False), ("done", False), ("done", True)]
)
@pytest.mark.parametrize("tool", ["safe", "acts"])
async def test_a_call_in_flight_is_awaited_on_its_queue(
    client: "redis.asyncio.Redis", tool: str, state: str, is_closed: bool
) -> None:
    result, (delivery,) = await dispatch_again(
        client, tool, is_closed=is_closed, state=state, attempt="2", nonce="2:ab", queue="host.z.b00t"
    )
    fields = (result.success, delivery.published_as, delivery.number, delivery.queue, delivery.fence is not None)
    assert fields == (True, "hub-c1", 2, "host.z.b00t", True)


FORBIDDEN, GIVEN_UP = {"state": "forbidden"}, {"state": "unknown"}
LOST_RUNNING = {"state": "lost", "holder": "h1/w1/7"}


@pytest.mark.parametrize(
    ("tool", "record", "age_s", "sent", "code"),
    [
        # A run lives longer than the records of its calls: a missing record does not mean that the call was not sent.
        ("safe", {}, 25 * 3600, [1], None),
        ("acts", {}, 25 * 3600, [], ErrorCode.OUTCOME_UNKNOWN),
        ("safe", FORBIDDEN, 0, [], ErrorCode.CANCELLED),
        ("acts", FORBIDDEN, 0, [], ErrorCode.CANCELLED),
        ("safe", GIVEN_UP, 0, [], ErrorCode.OUTCOME_UNKNOWN),
        ("acts", GIVEN_UP, 0, [], ErrorCode.OUTCOME_UNKNOWN),
        ("safe", LOST_RUNNING, 0, [2], None),
        ("acts", LOST_RUNNING, 0, [], ErrorCode.OUTCOME_UNKNOWN),
        # A loss before the start is not believed without the ticket of that attempt.
        ("acts", {"state": "lost", "ticket": ""}, 0, [], ErrorCode.OUTCOME_UNKNOWN),
        ("acts", {"state": "lost", "ticket": seal_ticket(KEY, "acme", "c1", 2)}, 0, [], ErrorCode.OUTCOME_UNKNOWN),
        ("acts", {"state": "lost", "ticket": seal_ticket(KEY, "acme", "other", 1)}, 0, [], ErrorCode.OUTCOME_UNKNOWN),
    ],
)
async def test_a_call_that_may_have_acted_is_sent_again_only_if_idempotent(
    client: "redis.asyncio.Redis",
    tool: str,
    record: dict[str, str],
    age_s: float,
    sent: list[int],
    code: ErrorCode | None,
) -> None:
    result, deliveries = await dispatch_again(client, tool, time.time() - age_s, is_closed=False, **record)
    assert ([one.number for one in deliveries], result.error_code) == (sent, code)


# A call whose caller chose its id.

SHARED = with_digest(Request(ToolCall(id="c1", name="acts"), "acme", "s1"))


async def dispatch_shared(
    client: "redis.asyncio.Redis", *outcomes: Any, **record: str
) -> tuple[ToolResult, list[tuple[int, str | None]]]:
    """Return the result of SHARED when its record has these fields, and the number and the task of each delivery."""
    harness = Harness(client, *outcomes)
    await harness.open()
    fields = {
        "attempt": "1",
        "nonce": "1:ab",
        "task": "hub-c1",
        "queue": "host.a.b00t",
        "request_digest": SHARED.digest,
    }
    if record:
        await client.hset(call_key("d", "acme", "c1"), mapping={**fields, **record})
    result = await harness.dispatcher.dispatch(SHARED)
    return result, [(one.number, one.published_as) for one in harness.transport.deliveries]


@pytest.mark.parametrize(
    ("record", "sent", "code"),
    [
        ({}, [(1, None)], None),
        ({"state": "queued"}, [(1, "hub-c1")], None),
        ({"state": "running"}, [(1, "hub-c1")], None),
        ({"state": "done"}, [], ErrorCode.RESULT_EXPIRED),
        ({"state": "running", "request_digest": "other"}, [], ErrorCode.INVALID_ARGUMENTS),
        ({"state": "lost", "ticket": seal_ticket(KEY, "acme", "c1", 1)}, [(2, None)], None),
        ({"state": "lost", "holder": "h1/w1/7"}, [], ErrorCode.OUTCOME_UNKNOWN),
        # Another process has renewed the call and not yet sent it.
        ({"state": "queued", "attempt": "2"}, [(2, None)], None),
    ],
)
async def test_a_call_with_a_chosen_id_is_sent_once(
    client: "redis.asyncio.Redis", record: dict[str, str], sent: list[tuple[int, str | None]], code: ErrorCode | None
) -> None:
    result, deliveries = await dispatch_shared(client, **record)
    assert (deliveries, result.error_code) == (sent, code)


async def test_a_call_with_a_chosen_id_awaits_the_stored_result(client: "redis.asyncio.Redis") -> None:
    await client.set(result_key("hub-c1"), "{}")
    result, deliveries = await dispatch_shared(client, state="done")
    assert (result.output, deliveries) == ("done", [(1, "hub-c1")])


@pytest.mark.parametrize("outcome", [CallSentAgain(), NotSent("duplicate"), CallLost("lost", has_started=False)])
async def test_a_call_with_a_chosen_id_follows_the_attempt_of_another_process(
    client: "redis.asyncio.Redis", outcome: Exception
) -> None:
    other = {"attempt": 2, "state": "running", "nonce": "2:cd", "task": "other-c1", "queue": "host.a.b00t"}

    async def sent_by_another_process(attempt: Attempt) -> Exception:
        record = {**other, "request_digest": SHARED.digest}
        await client.hset(call_key("d", "acme", attempt.call_id), mapping=record)
        return outcome

    result, deliveries = await dispatch_shared(client, sent_by_another_process, state="running")
    assert (result.output, deliveries) == ("done", [(1, "hub-c1"), (2, "other-c1")])
