"""Redis behind TLS. A call works through every client of both sides. A wrong server or a wrong client is refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest

from contract.calls import ToolCall
from contract.errors import BrokerUnavailable
from contract.names import POOL_WEB
from contract.settings import BrokerSettings
from orchestrator.dispatch.pool_connection import open_pool
from orchestrator.dispatch.request import Request
from store.connection import check_connection, check_redis, open_redis
from tests.redis_harness import Server, broker_for, open_counting_pool, open_server
from tests.tls_harness import Authority, Pair, open_relay

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Harness:
    server: Server
    authority: Authority
    other_authority: Authority
    server_pair: Pair
    client_pair: Pair


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("tls")
    ours, stranger = Authority(folder / "ours"), Authority(folder / "stranger")
    with open_server() as server:
        yield Harness(server, ours, stranger, ours.issue("right"), ours.issue("client"))


def build_broker(harness: Harness, port: int, **files: str) -> BrokerSettings:
    files = {"ssl_ca_certs": str(harness.authority.ca), **files}
    options = urlencode({name: path for name, path in files.items() if path})
    return broker_for(f"rediss://:{harness.server.password}@localhost:{port}/0{'?' if options else ''}{options}")


async def refusals(broker: BrokerSettings) -> list[str]:
    """Return the messages of orchestrator and worker about a Redis that both refuse."""
    client = open_redis(broker)
    try:
        with pytest.raises(BrokerUnavailable) as refused:
            await check_redis(client, broker)
    finally:
        await client.aclose()
    with pytest.raises(BrokerUnavailable) as refused_there:
        check_connection(broker)
    return [str(refused.value), str(refused_there.value)]


async def test_a_call_succeeds_when_both_sides_present_their_certificates(harness: Harness) -> None:
    with (
        open_relay(harness.server_pair, harness.server.port, harness.authority.ca) as relay,
        harness.server.client() as watch,
    ):
        pair = {"ssl_certfile": str(harness.client_pair.certificate), "ssl_keyfile": str(harness.client_pair.key)}
        broker = build_broker(harness, relay.port, **pair)
        with open_counting_pool(broker, broker.redis_url.get_secret_value(), watch) as pool:
            async with open_pool(broker, queue_wait_s=10) as opened:
                call = ToolCall(id="c1", name="append_tool", arguments={"path": str(pool.marks)})
                result = await opened.dispatcher.dispatch(Request(call, "acme", None, POOL_WEB))
            assert result.success, result
            assert pool.acted("c1") == 1


@pytest.mark.parametrize(
    ("names", "days", "word"),
    [("DNS:other.example", 30, "Hostname mismatch"), ("DNS:localhost", -1, "certificate has expired")],
    ids=["another host", "expired"],
)
async def test_an_expired_certificate_or_one_for_another_host_is_refused(
    harness: Harness, names: str, days: int, word: str
) -> None:
    pair = harness.authority.issue(f"wrong{days}", names, days)
    with open_relay(pair, harness.server.port) as relay:
        for message in await refusals(build_broker(harness, relay.port)):
            assert word in message
            assert "name the host of TOOLCREW_REDIS_URL" in message


@pytest.mark.parametrize("authority", ["stranger", None])
async def test_a_certificate_of_an_untrusted_authority_is_refused(harness: Harness, authority: str | None) -> None:
    with open_relay(harness.server_pair, harness.server.port) as relay:
        ca = str(harness.other_authority.ca) if authority else ""
        for message in await refusals(build_broker(harness, relay.port, ssl_ca_certs=ca)):
            assert "CERTIFICATE_VERIFY_FAILED" in message
            assert "ssl_ca_certs" in message


async def test_a_missing_client_certificate_is_reported_with_its_settings(harness: Harness) -> None:
    with open_relay(harness.server_pair, harness.server.port, harness.authority.ca) as relay:
        for message in await refusals(build_broker(harness, relay.port)):
            assert "ssl_certfile" in message


async def test_a_missing_certificate_file_is_reported(harness: Harness, tmp_path: Path) -> None:
    for message in await refusals(build_broker(harness, 1, ssl_ca_certs=str(tmp_path / "none.pem"))):
        assert "ssl_ca_certs" in message or "ssl_certfile" in message


async def test_tls_error_messages_contain_no_password(harness: Harness) -> None:
    with open_relay(harness.server_pair, harness.server.port) as relay:
        for message in await refusals(build_broker(harness, relay.port, ssl_ca_certs=str(harness.other_authority.ca))):
            assert harness.server.password not in message
