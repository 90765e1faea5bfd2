"""Shared fixtures: a real Redis server that is emptied between tests, and one real stack. A test that kills processes
starts its own stack.
"""

import gc
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import redis
from docker import APIClient
from structlog.testing import capture_logs

from tests.support.redis.redis_harness import answers
from tests.support.stack.stack import Footprint, Stack, open_footprint, open_stack, require_engine, require_redis_server
from tests.support.stack.waiting import wait_until
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.names import catalog_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.specs import Catalog, seal_catalog
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.operations.redis_server import find_redis_server, write_redis_config

if TYPE_CHECKING:
    from tests.support.redis.event_harness import EventHarness
    from tests.support.runs.durable_run_harness import DurableRunFactory
    from tests.support.runs.item_harness import HarnessFactory

START_S = 90.0

# A test run in the background of a shell ignores Ctrl-C. Every program that the tests start would inherit this.
for number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# The checks before a merge use the same examples every time, whatever the load of the machine. A manual run searches
# for new examples.
hypothesis.settings.register_profile(
    "required", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
if os.environ.get("TOOLCREW_TEST_REQUIRE"):
    hypothesis.settings.load_profile("required")


def pytest_collection_finish() -> None:
    # The imported modules and the tests live to the end. Garbage collections need not search them.
    gc.freeze()


@dataclass
class RedisProcess:
    """A redis-server on loopback with a password. Tests stop and start the server by pid, on the same port and data."""

    folder: Path
    port: int
    password: str
    process: "subprocess.Popen[bytes] | None" = field(default=None)

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def keys(self) -> SigningKeys:
        """Return the signing keys of a program that knows only `url`."""
        return BrokerSettings.model_validate({"redis_url": self.url}).signing_keys()

    def start(self) -> None:
        config = write_redis_config(self.folder, self.port, self.password)
        self.process = subprocess.Popen(
            [find_redis_server(), str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # The start of another process gives no event, so the test polls the server until it answers.
        wait_until(lambda: answers(self.client), START_S, "redis-server answers", pause_s=0.01)

    def stop(self) -> None:
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGTERM)
            self.process.wait(START_S)
            self.process = None

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def publish_catalog(self, catalog: Catalog) -> None:
        """Publish the tools of a pool of sandboxes, as its workers do."""
        with self.client() as client:
            client.set(catalog_key("default", "sandbox"), seal_catalog(self.keys, "sandbox", catalog))


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    require_redis_server()
    server = RedisProcess(tmp_path_factory.mktemp("redis"), reserve_port(), secrets.token_hex(16))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_server(redis_process: RedisProcess) -> RedisProcess:
    """Return the running server, emptied."""
    if redis_process.process is None:
        redis_process.start()
    with redis_process.client() as client:
        client.flushall()
    return redis_process


@pytest.fixture(scope="session")
def engine() -> APIClient:
    return require_engine()


@pytest.fixture(scope="session")
def stack(engine: APIClient) -> Iterator[Stack]:
    """Return the stack that all tests share. A test must leave the stack unchanged."""
    with open_stack(engine) as opened:
        yield opened
        code = opened.end()
        opened.footprint.assert_nothing_left(within_s=5)
    assert code == 0


@pytest.fixture
def own_stack(engine: APIClient) -> Iterator[Stack]:
    """Return a stack that the test may break."""
    with open_stack(engine) as opened:
        yield opened


@pytest.fixture
def footprint(engine: APIClient) -> Iterator[Footprint]:
    with open_footprint(engine) as opened:
        yield opened


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator["EventHarness"]:
    """Return both sides of the events of running calls, over a real Redis. Log output is suppressed."""
    from tests.support.redis.event_harness import EventHarness

    opened = EventHarness(redis_server)
    with capture_logs():
        yield opened
    await opened.close()


@pytest.fixture
async def make_durable(redis_server: RedisProcess) -> AsyncIterator["DurableRunFactory"]:
    from tests.support.runs.durable_run_harness import open_durable

    async with open_durable(redis_server) as make:
        yield make


@pytest.fixture
async def make(redis_server: RedisProcess) -> AsyncIterator["HarnessFactory"]:
    from tests.support.runs.item_harness import open_harness_factory

    async with open_harness_factory(redis_server) as made:
        yield made


@pytest.fixture
def quiet_logs() -> Iterator[None]:
    """Silence the logs: a stack trace with all its locals takes seconds to render for a terminal."""
    with capture_logs():
        yield
