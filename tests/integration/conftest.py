"""Fixtures: a client and a session on the shared stack."""

from collections.abc import AsyncIterator

import pytest

from orchestrator.dispatch.sessions import Session
from orchestrator.sdk.client import ToolClient
from tests.stack import Stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[ToolClient]:
    async with ToolClient.connect(stack.redis_url) as connected:
        yield connected


@pytest.fixture
async def session(client: ToolClient) -> AsyncIterator[Session]:
    async with await client.open_session() as opened:
        yield opened
