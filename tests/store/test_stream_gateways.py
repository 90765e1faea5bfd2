"""The records of stream gateways in a Redis with a user for each role."""

from collections.abc import Iterator

import pytest

from tests.support.redis.redis_harness import Server, open_server
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.names import sandboxd_queue, stream_gateway_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.stream_gateways import GATEWAY_TTL_S, StreamGateway
from toolcrew.store.clock import read_clock
from toolcrew.store.connection import open_redis
from toolcrew.store.stream_gateways import StreamGatewayStore

KEYS = SigningKeys.of("a secret", deployment="default")
GATEWAY = StreamGateway(
    id="a" * 32,
    queue="host.a.1",
    addresses=("127.0.0.1",),
    port=7070,
    certificate="0" * 64,
    started_at=1.0,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with open_server(users=True) as opened:
        yield opened


def open_store(server: Server, role: str, keys: SigningKeys = KEYS) -> StreamGatewayStore:
    client = open_redis(BrokerSettings.model_validate({"redis_url": server.url(role)}))
    return StreamGatewayStore(client, "default", keys)


async def test_an_orchestrator_reads_what_a_gateway_publishes_until_it_expires(server: Server) -> None:
    own, reader = open_store(server, "streams"), open_store(server, "orchestrator")
    await own.publish(GATEWAY)
    assert await reader.find("host.a.1") == GATEWAY
    with server.client("admin") as admin:
        assert 0 < admin.ttl(stream_gateway_key("default", "host.a.1")) <= GATEWAY_TTL_S
    await own.withdraw(GATEWAY)
    assert await reader.find("host.a.1") is None


async def test_a_gateway_that_ends_leaves_the_record_of_its_successor(server: Server) -> None:
    own = open_store(server, "streams")
    successor = GATEWAY.model_copy(update={"id": "b" * 32})
    await own.publish(successor)
    await own.withdraw(GATEWAY)
    assert await own.find("host.a.1") == successor


async def test_a_forged_or_copied_record_is_not_used(server: Server) -> None:
    own, reader = open_store(server, "streams"), open_store(server, "orchestrator")
    await open_store(server, "streams", SigningKeys.of("another secret", deployment="default")).publish(GATEWAY)
    assert await reader.find("host.a.1") is None
    await own.publish(GATEWAY)
    with server.client("admin") as admin:
        sealed = admin.get(stream_gateway_key("default", "host.a.1"))
        assert isinstance(sealed, bytes)
        admin.set(stream_gateway_key("default", "host.b.1"), sealed)
    assert await reader.find("host.b.1") is None


async def test_a_gateway_reads_the_shared_clock(server: Server) -> None:
    client = open_redis(BrokerSettings.model_validate({"redis_url": server.url("streams")}))
    assert await read_clock(client) > 1_000_000_000
    await client.aclose()


def test_all_workers_of_one_boot_have_the_same_gateway() -> None:
    assert [sandboxd_queue(queue) for queue in ("host.a.1", "host.a.1.2", "host.a.1.13")] == ["host.a.1"] * 3
