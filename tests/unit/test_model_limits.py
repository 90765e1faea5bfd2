"""The shared limits of an endpoint: two orchestrators on one real Redis."""

import asyncio
from collections.abc import Callable

import pytest
import redis.asyncio

from contract.model_endpoints import EndpointBlocked, ModelEndpoint, RequestLease
from store import model_limits
from store.model_limits import SharedLimits

pytestmark = pytest.mark.usefixtures("quiet_logs")

Build = Callable[..., SharedLimits]


@pytest.fixture
def build(client: "redis.asyncio.Redis") -> Build:
    """Return a factory of limits as different processes have them."""

    def build(**bounds: int) -> SharedLimits:
        endpoint = ModelEndpoint(base_url="http://127.0.0.1:1/v1", model="m").model_copy(update=bounds)
        return SharedLimits(client, "d", "fast", endpoint, jitter=lambda: 0.0)

    return build


async def acquire(limits: SharedLimits, tokens: int = 0, max_wait_s: float = 60.0) -> RequestLease:
    return await limits.acquire(lambda: tokens, max_wait_s)


async def test_a_block_holds_every_orchestrator_until_it_ends(build: Build) -> None:
    one, two = build(), build()
    await one.block(30.0, "rate_limit")
    await two.block(0.1, "down")
    for limits in (one, two):
        with pytest.raises(EndpointBlocked) as blocked:
            await acquire(limits, max_wait_s=5.0)
        assert blocked.value.reason == "rate_limit"
        assert 25 < blocked.value.left_s <= 30


async def test_requests_wait_for_the_end_of_a_short_block(build: Build) -> None:
    one, two = build(), build()
    began = asyncio.get_running_loop().time()
    await one.block(0.3, "rate_limit")
    await acquire(two)
    assert asyncio.get_running_loop().time() - began >= 0.3


@pytest.mark.parametrize(
    ("bounds", "cause"),
    [
        ({"concurrency": 1}, "concurrency limit 1"),
        ({"requests_per_minute": 1}, "limit of 1 requests per minute"),
        ({"tokens_per_minute": 5}, "limit of 5 tokens per minute"),
    ],
)
async def test_every_request_in_line_learns_what_it_waits_for(
    build: Build, monkeypatch: pytest.MonkeyPatch, bounds: dict[str, int], cause: str
) -> None:
    monkeypatch.setattr(model_limits, "WAIT_NOTICE_S", 0.05)
    limits, causes = build(**bounds), asyncio.Queue[str]()
    await limits.acquire(lambda: 5, 60.0, causes.put_nowait)
    assert causes.empty()
    waiting = [asyncio.create_task(limits.acquire(lambda: 5, 60.0, causes.put_nowait)) for _ in range(2)]

    assert [await asyncio.wait_for(causes.get(), 10) for _ in waiting] == [cause] * 2

    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_a_wait_for_the_end_of_a_block_is_reported(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_limits, "WAIT_NOTICE_S", 0.05)
    limits, causes = build(), list[str]()
    await limits.block(0.3, "rate_limit")
    await limits.acquire(lambda: 0, 60.0, causes.append)
    assert causes == ["the rate limit of its server"]


async def test_no_more_requests_than_allowed_run_at_once_in_all_orchestrators(build: Build) -> None:
    running, most = 0, 0

    async def work(limits: SharedLimits) -> None:
        nonlocal running, most
        lease = await acquire(limits)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        await limits.release(lease, 0)

    processes = [build(concurrency=3) for _ in range(3)]
    await asyncio.gather(*(work(limits) for limits in processes for _ in range(8)))
    assert most == 3


async def test_the_lease_of_a_killed_process_ends_and_that_of_a_living_one_does_not(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_limits, "LEASE_S", 0.4)
    killed, living, waiting = (build(concurrency=2) for _ in range(3))
    await acquire(killed)
    assert killed._renewing is not None
    killed._renewing.cancel()
    held = await acquire(living)
    third = asyncio.create_task(acquire(waiting))
    await asyncio.wait_for(asyncio.shield(third), 10)
    fourth = asyncio.create_task(acquire(build(concurrency=2)))
    await asyncio.wait((fourth,), timeout=1.0)
    assert not fourth.done()
    await living.release(held, 0)
    await asyncio.wait_for(fourth, 10)


async def test_a_cancelled_request_leaves_no_lease(build: Build, client: "redis.asyncio.Redis") -> None:
    limits = build(concurrency=1)
    held = await acquire(limits)
    waiting = [asyncio.create_task(acquire(build(concurrency=1))) for _ in range(3)]
    await asyncio.sleep(0.05)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await limits.release(held, 0)
    await asyncio.wait_for(acquire(build(concurrency=1)), 10)
    assert await client.zcard("toolcrew:d:model-limits:fast:leases") == 1


@pytest.mark.parametrize(
    ("bounds", "tokens"),
    [({"requests_per_minute": 3}, 0), ({"tokens_per_minute": 300}, 100)],
    ids=["requests", "tokens"],
)
async def test_a_minute_has_no_more_than_its_limit(
    build: Build, client: "redis.asyncio.Redis", bounds: dict[str, int], tokens: int
) -> None:
    processes = [build(**bounds) for _ in range(2)]
    for number in range(3):
        await acquire(processes[number % 2], tokens)
    fourth = asyncio.create_task(acquire(processes[1], tokens))
    await asyncio.wait((fourth,), timeout=0.5)
    assert not fourth.done()
    # A minute later: the script drops the seconds that have left the window.
    window = "toolcrew:d:model-limits:fast:window"
    for field, count in (await client.hgetall(window)).items():  # type: ignore[misc]
        await client.hset(window, field[:1] + str(int(field[1:]) - 60).encode(), count)  # type: ignore[misc]
        await client.hdel(window, field)  # type: ignore[misc]
    await asyncio.wait_for(fourth, 10)


async def test_the_tokens_that_the_server_counted_replace_the_estimate(
    build: Build, client: "redis.asyncio.Redis"
) -> None:
    limits = build(tokens_per_minute=1000)
    for counted in (10, 20):
        await limits.release(await acquire(limits, 900), counted)
    await limits.release(await acquire(limits, 900), 2000)
    late = asyncio.create_task(acquire(limits, 1))
    await asyncio.wait((late,), timeout=0.5)
    assert not late.done()
    late.cancel()
    large = SharedLimits(client, "d", "other", ModelEndpoint(base_url="http://a", model="m", tokens_per_minute=1000))
    await asyncio.wait_for(acquire(large, 5000), 10)
