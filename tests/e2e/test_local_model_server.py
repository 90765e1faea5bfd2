"""The server of the embedded model, with the real weights: its access rules, and its end together with its owner."""

import os
import subprocess
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from toolcrew.contract.errors import ConfigError, ModelUnavailable
from toolcrew.orchestrator.dialects.model import ModelRequest
from toolcrew.orchestrator.models.local import LocalModelServer
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.models.weights import DEFAULT_CACHE, load_weights

pytestmark = [pytest.mark.model, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[LocalModelServer]:
    try:
        weights = load_weights(cache_dir=DEFAULT_CACHE, hub_url=None)
    except ConfigError as error:
        pytest.skip(str(error))
    async with LocalModelServer(weights) as running:
        yield running


async def test_the_server_refuses_requests_without_a_valid_key(server: LocalModelServer) -> None:
    stranger = OpenAIModel("local", server.base_url, "wrong", retries=0)
    with pytest.raises(ModelUnavailable, match="refuses the API key"):
        await anext(aiter(stranger.stream(ModelRequest([{"role": "user", "content": "hi"}]))))
    await stranger.aclose()


async def test_the_key_is_not_on_the_command_line_of_the_server(server: LocalModelServer) -> None:
    done = subprocess.run(["cat", f"/proc/{server.pid}/cmdline"], capture_output=True, text=True, check=True)  # noqa: ASYNC221
    assert server.api_key not in done.stdout


async def test_the_server_ends_with_its_owner() -> None:
    weights = load_weights(cache_dir=DEFAULT_CACHE, hub_url=None)
    async with LocalModelServer(weights) as running:
        pid = running.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
