"""Fixtures: a guest as PID 1 of a real pid namespace."""

from collections.abc import Iterator

import pytest

from tests.support.guest.guest_harness import Guest, running_guest


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
