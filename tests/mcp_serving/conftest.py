"""A real stack with two replicas of the MCP server."""

from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.support.mcp.mcp_stack import McpStack, open_mcp_stack


@pytest.fixture(scope="session")
def mcp_stack(engine: APIClient) -> Iterator[McpStack]:
    """Return the stack that all tests share. A test must leave the stack unchanged."""
    with open_mcp_stack(engine) as opened:
        yield opened
