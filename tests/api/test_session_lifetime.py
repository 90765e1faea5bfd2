"""A client changes how long its session lives without a call: in Redis, on the host, and for the next host."""

import asyncio
import contextlib
from pathlib import Path

import pytest
import redis

from tests.support.stack.api_stack import ApiStack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew import AsyncClient, ErrorCode, ToolClient, ToolFailure
from toolcrew.contract.names import location_key
from toolcrew.contract.session_locations import LOCATION_MARGIN_S
from toolcrew.workers.sandbox_client import SandboxClient

pytestmark = pytest.mark.stack


async def test_a_session_lives_longer_or_ends_earlier(api_stack: ApiStack) -> None:
    def life_s(session: str) -> int:
        """Return the remaining life of the session's location in Redis."""
        found = store.ttl(location_key("default", "acme", session))
        assert isinstance(found, int)
        return found

    with contextlib.closing(redis.Redis.from_url(api_stack.stack.redis_url)) as store:
        async with (
            AsyncClient(api_stack.apis[0].url, api_stack.keys["acme"]) as client,
            ToolClient.connect(api_stack.stack.redis_url, api_key=api_stack.keys["acme"]) as direct,
        ):
            longer, other = await client.sessions.open(ttl_s=3), await client.sessions.open(ttl_s=3)
            await longer.set_ttl(900)
            assert 800 < life_s(longer.id) - LOCATION_MARGIN_S <= 900
            listed = {one.id: one.ttl_s for one in (await direct.sessions("acme")).sessions}
            assert (listed[longer.id], listed[other.id]) == (900, 3)
            start = await direct._dispatcher.locator.start("acme", longer.id)
            assert start.ttl_s == 900, "another host opens the session with the new time"
            await wait_until_async(lambda: life_s(other.id) == -2, SOON_S, "the unchanged session has ended")
            await longer.files.write("a", b"kept")
            await (await direct.session(longer.id)).set_ttl(2)
            assert life_s(longer.id) <= LOCATION_MARGIN_S + 2
            await wait_until_async(lambda: life_s(longer.id) == -2, SOON_S, "the shorter time is over")
            for change in (longer.set_ttl(900), other.set_ttl(900)):
                with pytest.raises(ToolFailure) as ended:
                    await change
                assert ended.value.code is ErrorCode.SESSION_NOT_FOUND


@pytest.mark.parametrize("seconds", [0, -1, 86_401, 1e300])
async def test_a_session_cannot_live_longer_than_a_day(api_stack: ApiStack, seconds: float) -> None:
    async with (
        AsyncClient(api_stack.apis[0].url, api_stack.keys["acme"]) as client,
        ToolClient.connect(api_stack.stack.redis_url, api_key=api_stack.keys["acme"]) as direct,
        await client.sessions.open(ttl_s=600) as session,
    ):
        attached = await direct.session(session.id)
        for change in (session.set_ttl(seconds), attached.set_ttl(seconds)):
            with pytest.raises(ToolFailure) as refused:
                await change
            assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
        assert (await direct._dispatcher.locator.location("acme", session.id)).ttl_s == 600


async def test_changes_at_the_same_time_leave_host_and_location_with_one_value(api_stack: ApiStack) -> None:
    async with (
        AsyncClient(api_stack.apis[0].url, api_stack.keys["acme"]) as client,
        ToolClient.connect(api_stack.stack.redis_url, api_key=api_stack.keys["acme"]) as direct,
        await client.sessions.open(ttl_s=600) as session,
    ):
        attached = await direct.session(session.id)
        await asyncio.gather(*(attached.set_ttl(seconds) for seconds in range(300, 310)))
        location = await direct._dispatcher.locator.location("acme", session.id)
        start = await direct._dispatcher.locator.start("acme", session.id)
        assert location.ttl_s == start.ttl_s
        with SandboxClient(Path(api_stack.stack.info.sandboxd_socket)) as host:
            rows = {row["name"]: row["ttl_s"] for row in await asyncio.to_thread(host.sessions)}
        assert rows[f"acme:{session.id}"] == location.ttl_s
