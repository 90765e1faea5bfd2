"""The API on the tests' Redis without workers, and one real stack with two replicas of the API."""

from collections.abc import AsyncIterator, Iterator

import pytest
from docker import APIClient

from tests.conftest import RedisProcess
from tests.support.api.api_harness import ApiHarness, api_settings, open_api
from tests.support.api.local_streams import LocalStreams, open_local_streams
from tests.support.stack.api_stack import ApiStack, open_api_stack
from toolcrew.contract.session_locations import seal_start
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.orchestrator.http import app_state
from toolcrew.store.connection import open_redis
from toolcrew.store.sessions import SessionStore


@pytest.fixture
async def api(redis_server: RedisProcess) -> AsyncIterator[ApiHarness]:
    async with open_api(redis_server.url) as harness:
        yield harness


@pytest.fixture
async def local_streams(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalStreams]:
    """Return the streams that the API of a test uses, of a stream server without a container."""
    async with open_local_streams() as streams:
        monkeypatch.setattr(app_state, "Streams", lambda _pool, _deployment: streams)
        yield streams


@pytest.fixture
async def session(local_streams: LocalStreams, api: ApiHarness, redis_server: RedisProcess) -> str:
    """Return an open session of the tenant acme whose sandbox is the stream server of `local_streams`."""
    broker = api_settings(redis_server.url).broker()
    client, start = open_redis(broker), seal_start(broker.signing_keys(), "acme", "s1", SessionSpec())
    try:
        await SessionStore(client, "default").open("acme", "s1", "host.h1.b00t", start=start, ttl_s=1800, limit=9)
    finally:
        await client.aclose()
    return "/v1/sessions/s1"


@pytest.fixture(scope="session")
def api_stack(engine: APIClient) -> Iterator[ApiStack]:
    """Return the stack that all tests share. A test must leave the stack unchanged."""
    with open_api_stack(engine) as opened:
        yield opened


@pytest.fixture
def five_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a key send a burst of five requests where `api_rate` is 0.01."""
    monkeypatch.setattr(app_state, "BURST_S", 500.0)
