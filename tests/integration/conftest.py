"""Fixtures: a client and a session on the shared stack, and sandboxds that a test may kill."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
from docker import APIClient

from tests.support.stack.daemons import Daemons, open_daemons
from tests.support.stack.stack import Stack, missing
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[ToolClient]:
    async with ToolClient.connect(stack.redis_url) as connected:
        yield connected


@pytest.fixture
async def session(client: ToolClient) -> AsyncIterator[Session]:
    async with await client.open_session() as opened:
        yield opened


@pytest.fixture
def daemons(engine: APIClient) -> Iterator[Daemons]:
    with open_daemons(engine) as opened:
        yield opened


@pytest.fixture(scope="session")
def needs_root() -> None:
    if os.geteuid() != 0:
        missing("disks are mounted by root: run the tests as root")
