"""A secret is changed while calls continue. Old and new senders and workers run at the same time, and each is
restarted once per step, in either order.
"""

import secrets
from collections.abc import Iterator

import pytest

from tests.support.redis.redis_harness import Server, open_counting_pool, open_server
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.names import POOL_WEB
from toolcrew.orchestrator.dispatch.pool_connection import open_pool
from toolcrew.orchestrator.dispatch.request import Request

OLD, NEW = "the-old-secret", "the-new-secret"


@pytest.fixture
def server() -> Iterator[Server]:
    with open_server() as opened:
        yield opened


async def call_with_secrets(server: Server, secret: str, previous: tuple[str, ...], path: str) -> ToolResult:
    """Make one call from a sender with these secrets."""
    broker = BrokerSettings.model_validate({"redis_url": server.url(), "secret": secret, "secrets_previous": previous})
    call = ToolCall(id=secrets.token_hex(8), name="append_tool", arguments={"path": path})
    async with open_pool(broker, queue_wait_s=10) as opened:
        return await opened.dispatcher.dispatch(Request(call, "acme", None, POOL_WEB))


@pytest.mark.parametrize(
    ("worker", "senders"),
    [
        # First all processes learn the new secret, in any order. Then all sign with it, in any order. Then the old
        # secret is removed.
        ((OLD, f'["{NEW}"]'), [(OLD, ()), (OLD, (NEW,)), (NEW, (OLD,))]),
        ((NEW, f'["{OLD}"]'), [(OLD, (NEW,)), (NEW, (OLD,)), (NEW, ())]),
    ],
    ids=["accepted", "signing"],
)
async def test_no_call_is_lost_in_any_order_of_restarts_during_a_key_rotation(
    server: Server, worker: tuple[str, str], senders: list[tuple[str, tuple[str, ...]]]
) -> None:
    variables = {"TOOLCREW_SECRET": worker[0], "TOOLCREW_SECRETS_PREVIOUS": worker[1]}
    broker = BrokerSettings.model_validate({"redis_url": server.url(), "secret": worker[0]})
    with server.client() as watch, open_counting_pool(broker, server.url(), watch, environment=variables) as pool:
        for secret, previous in senders:
            result = await call_with_secrets(server, secret, previous, str(pool.marks))
            assert result.success, (secret, previous, result)
        refused = await call_with_secrets(server, "a guess", (OLD, NEW), str(pool.marks))
        assert refused.error_code == "ENVELOPE_REFUSED"
        assert "TOOLCREW_SECRET" in str(refused.error)
        assert len(pool.marks.read_text().split()) == len(senders)
