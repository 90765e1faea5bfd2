"""Inspect's own conformance suite for sandbox providers, completely, on a session of a real pool."""

from collections.abc import AsyncIterator

import pytest
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from orchestrator.adapters.inspect_sandbox import ToolcrewSandboxEnvironment
from tests.stack import Stack

pytestmark = pytest.mark.stack

CANNOT = {
    "test_exec_as_user": "everything in a sandbox runs as uid 1000: no user can be added, nor chosen",
}
"""Check -> the reason why no sandbox passes it."""


@pytest.fixture
async def sandbox_env(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[ToolcrewSandboxEnvironment]:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", stack.redis_url)
    if (reason := CANNOT.get(request.node.originalname)) is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    environments = await ToolcrewSandboxEnvironment.sample_init("self_check", None, {})
    yield environments["default"].as_type(ToolcrewSandboxEnvironment)
    await ToolcrewSandboxEnvironment.sample_cleanup("self_check", None, environments, False)
    await ToolcrewSandboxEnvironment.task_cleanup("self_check", None, True)
