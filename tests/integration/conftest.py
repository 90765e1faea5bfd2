"""One real stack for most tests; whoever kills things starts one of its own."""

from collections.abc import AsyncIterator, Iterator

import pytest
from docker import APIClient

from orchestrator.client import ToolClient
from orchestrator.sessions import Session
from tests.stack import Footprint, Stack, open_footprint, open_stack, require_engine


@pytest.fixture(scope="session")
def engine() -> APIClient:
    return require_engine()


@pytest.fixture(scope="session")
def stack(engine: APIClient) -> Iterator[Stack]:
    """Shared by every test that takes it: leave it as it was."""
    with open_stack(engine) as opened:
        yield opened
        code = opened.end()
        opened.footprint.assert_nothing_left(within_s=5)
    assert code == 0


@pytest.fixture
def own_stack(engine: APIClient) -> Iterator[Stack]:
    """A stack that the test may break."""
    with open_stack(engine) as opened:
        yield opened


@pytest.fixture
def footprint(engine: APIClient) -> Iterator[Footprint]:
    with open_footprint(engine) as opened:
        yield opened


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[ToolClient]:
    async with ToolClient.connect(stack.redis_url) as connected:
        yield connected


@pytest.fixture
async def session(client: ToolClient) -> AsyncIterator[Session]:
    async with await client.open_session() as opened:
        yield opened
