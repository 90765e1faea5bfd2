"""Fixtures for all tests of pages: one service on a separate Redis, one browser, and a deployment with content on
every page.
"""

import shutil
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.support.api.api_harness import api_settings, open_api
from tests.support.api.page_harness import CHROMIUM, FLOWER, SCREENSHOTS, Visitors, World, open_browser
from tests.support.stack.stack import RedisServer, missing, open_redis_server
from toolcrew.store.connection import open_redis


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SCREENSHOTS.is_dir():
        terminalreporter.write_line(f"pictures of the pages: {SCREENSHOTS}")


@pytest.fixture(scope="session")
def page_redis() -> Iterator[RedisServer]:
    with open_redis_server() as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def visitors(page_redis: RedisServer) -> AsyncIterator[Visitors]:
    if shutil.which(CHROMIUM) is None:
        missing(f"there is no {CHROMIUM}: apt-get install chromium")
    async with open_api(page_redis.url, flower_url=FLOWER) as api, open_browser() as browser:
        yield Visitors(browser, api)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def world(page_redis: RedisServer, visitors: Visitors) -> AsyncIterator[World]:
    settings = api_settings(page_redis.url)
    async with open_redis(settings.broker()) as client:
        made = World(client, settings)
        await made.fill()
        yield made
