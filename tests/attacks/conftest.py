"""What attack tests start from: the engine, and a box under the real profile."""

from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.containers import Box, open_box, open_engine


@pytest.fixture(scope="session")
def engine() -> APIClient:
    return open_engine()


@pytest.fixture
def box(engine: APIClient) -> Iterator[Box]:
    with open_box(engine) as opened:
        yield opened
