"""A call whose sending process has died: awaited where it runs, sent if it was certainly not sent, and never executed
twice.
"""

import time

import pytest
import redis.asyncio

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode
from contract.names import call_key
from orchestrator.dispatch.request import Attempt, Request
from store.calls import seal_ticket
from tests.builders import KEY
from tests.unit.test_delivery import Harness

pytestmark = pytest.mark.usefixtures("quiet_logs")

NOW = time.time()


async def gone_on_with(
    client: "redis.asyncio.Redis", tool: str, sent_since: float = NOW, **record: str
) -> tuple[ToolResult, list[Attempt]]:
    """Return the result of a call with this state in the ledger, and the deliveries made for the call."""
    harness = Harness(client)
    await harness.open()
    if record:
        fields = {"attempt": "1", "nonce": "1:ab", "task": "hub-c1", "queue": "host.a.b00t", **record}
        await client.hset(call_key("d", "acme", "c1"), mapping=fields)
    result = await harness.dispatcher.dispatch(
        Request(ToolCall(id="c1", name=tool), "acme", "s1", keeps_result=True, sent_since=sent_since)
    )
    return result, harness.fleet.deliveries


async def test_a_call_that_was_never_sent_is_sent(client: "redis.asyncio.Redis") -> None:
    result, (delivery,) = await gone_on_with(client, "acts")
    assert (result.success, delivery.published_as, delivery.number, delivery.request.keeps_result) == (
        True,
        None,
        1,
        True,
    )


@pytest.mark.parametrize(("tool", "sent"), [("safe", [1]), ("acts", [])])
async def test_the_age_of_a_call_is_counted_by_the_clock_of_redis(
    client: "redis.asyncio.Redis", tool: str, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of this host is five hours behind. By it the call was sent 20 hours ago, and its record would still be
    there.
    """

    async def now() -> tuple[int, int]:
        return int(time.time()) + 5 * 3600, 0

    monkeypatch.setattr(client, "time", now)
    result, deliveries = await gone_on_with(client, tool, time.time() - 20 * 3600)
    assert [one.number for one in deliveries] == sent
    assert result.error_code is (None if sent else ErrorCode.OUTCOME_UNKNOWN)


@pytest.mark.parametrize("state", ["queued", "running", "done"])
@pytest.mark.parametrize("tool", ["safe", "acts"])
async def test_a_call_on_its_way_is_awaited_where_it_was_sent(
    client: "redis.asyncio.Redis", tool: str, state: str
) -> None:
    result, (delivery,) = await gone_on_with(client, tool, state=state, attempt="2", nonce="2:ab", queue="host.z.b00t")
    assert (result.success, delivery.published_as, delivery.number, delivery.queue) == (
        True,
        "hub-c1",
        2,
        "host.z.b00t",
    )


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
async def test_a_call_that_may_have_acted_is_sent_again_only_when_that_is_safe(
    client: "redis.asyncio.Redis",
    tool: str,
    record: dict[str, str],
    age_s: float,
    sent: list[int],
    code: ErrorCode | None,
) -> None:
    result, deliveries = await gone_on_with(client, tool, time.time() - age_s, **record)
    assert ([one.number for one in deliveries], result.error_code) == (sent, code)
