"""A check that every batch test leaves no sandbox."""

from collections.abc import Iterator

import pytest

from tests.support.stack.stack import Stack
from tests.support.stack.waiting import SOON_S, wait_until


@pytest.fixture(autouse=True)
def no_sandbox_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a sandbox on the shared stack, instead of a later test."""
    if "stack" not in request.fixturenames:
        yield
        return
    stack: Stack = request.getfixturevalue("stack")
    yield
    wait_until(
        lambda: not stack.footprint.containers(), SOON_S, lambda: f"sandboxes are left: {stack.footprint.containers()}"
    )
