"""Fixtures that several unit test files use."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.conftest import RedisProcess
from tests.guest_harness import Guest, running_guest
from tests.hosted_ground import MadeHosted, open_hosted


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
async def make_hosted(redis_server: RedisProcess) -> AsyncIterator[MadeHosted]:
    async with open_hosted(redis_server) as make:
        yield make
