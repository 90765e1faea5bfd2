"""The API on the tests' Redis without workers, and one real stack with two replicas of the API."""

from collections.abc import AsyncIterator, Iterator

import pytest
from docker import APIClient

from tests.conftest import RedisProcess
from tests.support.api.api_harness import ApiHarness, open_api
from tests.support.stack.api_stack import ApiStack, open_api_stack
from toolcrew.orchestrator.http import app_state


@pytest.fixture
async def api(redis_server: RedisProcess) -> AsyncIterator[ApiHarness]:
    async with open_api(redis_server.url) as harness:
        yield harness


@pytest.fixture(scope="session")
def api_stack(engine: APIClient) -> Iterator[ApiStack]:
    """Return the stack that all tests share. A test must leave the stack unchanged."""
    with open_api_stack(engine) as opened:
        yield opened


@pytest.fixture
def five_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a key send a burst of five requests where `api_rate` is 0.01."""
    monkeypatch.setattr(app_state, "BURST_S", 500.0)
