"""What every test of batches has to leave."""

from collections.abc import Iterator

import pytest

from tests.stack import Stack, wait_until


@pytest.fixture(autouse=True)
def no_sandbox_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whoever leaves a sandbox on the shared stack is told, instead of whoever comes after."""
    if "stack" not in request.fixturenames:
        yield
        return
    stack: Stack = request.getfixturevalue("stack")
    yield
    wait_until(
        lambda: not stack.footprint.containers(), 30, lambda: f"sandboxes are left: {stack.footprint.containers()}"
    )
