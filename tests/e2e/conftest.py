"""One stack for the commands that need a running one."""

from collections.abc import Iterator

import pytest
from docker import APIClient

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
def footprint(engine: APIClient) -> Iterator[Footprint]:
    with open_footprint(engine) as opened:
        yield opened
