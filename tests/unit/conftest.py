"""Fixtures that several unit test files use."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.guest_harness import Guest, running_guest
from tests.hosted_harness import HostedFactory, open_hosted
from tests.item_harness import HarnessFactory, open_harness_factory


@pytest.fixture
def guest() -> Iterator[Guest]:
    """A new guest for each test. A file may override this fixture with a guest that it shares and resets."""
    with running_guest() as running:
        yield running


@pytest.fixture(scope="module")
def shared_guest() -> Iterator[Guest]:
    """One guest for all tests of a file."""
    with running_guest() as running:
        yield running


@pytest.fixture
async def make_hosted(redis_server: RedisProcess) -> AsyncIterator[HostedFactory]:
    async with open_hosted(redis_server) as make:
        yield make


@pytest.fixture
async def make(redis_server: RedisProcess) -> AsyncIterator[HarnessFactory]:
    async with open_harness_factory(redis_server) as made:
        yield made


@pytest.fixture
async def client(redis_server: RedisProcess) -> AsyncIterator["redis.asyncio.Redis"]:
    """Return a connection to the emptied server. A file may override this fixture."""
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as opened:
        yield opened


@pytest.fixture
def quiet_logs() -> Iterator[None]:
    """Silence the logs: a stack trace with all its locals takes seconds to render for a terminal."""
    with capture_logs():
        yield
