"""Fixtures of attack tests: the engine, boxes under the real profile, and a separate sandboxd."""

from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.attack_ground import Ground, open_ground
from tests.containers import Box, open_box, open_engine


@pytest.fixture(scope="session")
def engine() -> APIClient:
    return open_engine()


@pytest.fixture
def box(engine: APIClient) -> Iterator[Box]:
    with open_box(engine) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_box(engine: APIClient) -> Iterator[Box]:
    """Return one box for the attacks of a file that leave nothing behind or that clean up."""
    with open_box(engine) as opened:
        yield opened


@pytest.fixture(scope="session")
def ground(engine: APIClient) -> Iterator[Ground]:
    """Return a sandboxd that no test kills."""
    with open_ground(engine) as opened:
        yield opened
