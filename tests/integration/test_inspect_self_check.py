"""Inspect's own conformance suite for sandbox providers, completely, on a session of a real pool."""

import json
import os
from collections.abc import AsyncIterator, Iterator

import pytest
from docker import APIClient
from inspect_ai.util import SandboxUserUnsupportedError
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from tests.support.stack.stack import Stack, open_stack
from toolcrew.orchestrator.adapters.inspect_config import ToolcrewSandboxConfig
from toolcrew.orchestrator.adapters.inspect_sandbox import ToolcrewSandboxEnvironment

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(os.geteuid() != 0, reason="root inside needs the OCI start, which needs root"),
]
CLASSES = {"default": {"largest": {"user": "root"}}}


@pytest.fixture(scope="module")
def rooted(engine: APIClient) -> Iterator[Stack]:
    with open_stack(engine, {"TOOLCREW_TENANT_CLASSES": json.dumps(CLASSES)}) as opened:
        yield opened


CONFIGS = {
    "root": ToolcrewSandboxConfig(user="root", default_user="sandbox"),
    "sandbox": ToolcrewSandboxConfig(),
}


@pytest.fixture(params=CONFIGS)
async def sandbox_env(
    rooted: Stack, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[ToolcrewSandboxEnvironment]:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", rooted.redis_url)
    if (request.node.originalname, request.param) == ("test_exec_as_user", "sandbox"):
        refused = pytest.mark.xfail(raises=SandboxUserUnsupportedError, strict=True, reason="it has one user")
        request.applymarker(refused)
    config = CONFIGS[request.param]
    environments = await ToolcrewSandboxEnvironment.sample_init("self_check", config, {})
    yield environments["default"].as_type(ToolcrewSandboxEnvironment)
    await ToolcrewSandboxEnvironment.sample_cleanup("self_check", config, environments, False)
    await ToolcrewSandboxEnvironment.task_cleanup("self_check", config, True)
