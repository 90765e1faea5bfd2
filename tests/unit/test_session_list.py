"""The list of sessions: newest first, page by page, for each tenant separately, and without ended sessions. Over a
real Redis.
"""

import pytest
import redis.asyncio

from contract.errors import ErrorCode, ToolFailure
from contract.names import place_key
from contract.session_locations import LocationState, seal_start
from contract.signing import SigningKeys
from store.session_list import SessionList
from store.sessions import SessionStore, open_sessions_key, session_facts_key, tenant_open_sessions_key

KEYS = SigningKeys.of("a secret", deployment="d")


def signed_start(tenant: str, session: str, keys: SigningKeys = KEYS) -> str:
    return seal_start(keys, tenant, session, {"image": "python"})


async def open_some(client: "redis.asyncio.Redis", count: int, tenant: str = "acme") -> list[str]:
    """Open sessions of the tenant. Return the sessions, newest first."""
    names = [f"{tenant}-{number}" for number in range(count)]
    for name in names:
        await SessionStore(client, "d").open(
            tenant, name, "host.a.b1", start=signed_start(tenant, name), ttl_s=60, limit=1000
        )
    return names[::-1]


async def read_all(client: "redis.asyncio.Redis", tenant: str | None, limit: int) -> list[str]:
    """Read the list page by page."""
    sessions, cursor = list[str](), None
    while True:
        page = await SessionList(client, "d", KEYS).read(tenant, cursor, limit)
        sessions += [session.id for session in page.sessions]
        if page.cursor is None:
            return sessions
        cursor = page.cursor


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 50])
async def test_pages_hold_every_session_once_the_newest_first(client: "redis.asyncio.Redis", limit: int) -> None:
    names = await open_some(client, 5)
    assert await read_all(client, "acme", limit) == names
    assert await read_all(client, None, limit) == names


async def test_more_sessions_than_are_read_at_once_are_listed_too(client: "redis.asyncio.Redis") -> None:
    names = await open_some(client, 450)
    assert await read_all(client, None, 1000) == names
    assert await read_all(client, "acme", 150) == names


async def test_a_session_reports_where_it_lives_and_of_its_last_checkpoint(client: "redis.asyncio.Redis") -> None:
    await open_some(client, 1)
    await client.hset(place_key("d", "acme", "acme-0"), mapping={"checkpoint": "c1", "checkpoint_at": 1_700_000_000.0})
    [session] = (await SessionList(client, "d", KEYS).read("acme")).sessions
    assert session.id == "acme-0"
    assert session.tenant == "acme"
    assert session.state == "open"
    assert session.host == "a"
    assert session.queue == "host.a.b1"
    assert (session.fence, session.image, session.ttl_s, session.checkpoint) == (1, "python", 60.0, "c1")
    assert session.model_dump(mode="json")["checkpoint_at"] == "2023-11-14T22:13:20Z"


async def test_sessions_of_other_tenants_are_not_among_ones_own(client: "redis.asyncio.Redis") -> None:
    await open_some(client, 2, "acme")
    mine = await open_some(client, 1, "bolt")
    assert await read_all(client, "bolt", 50) == mine
    assert len(await read_all(client, None, 50)) == 3
    assert await SessionList(client, "d", KEYS).counts(["acme", "bolt"]) == {"acme": 2, "bolt": 1}


async def test_a_closed_session_is_listed_no_more_and_leaves_nothing_of_itself(client: "redis.asyncio.Redis") -> None:
    await open_some(client, 1)
    places = SessionStore(client, "d")
    await places.settle("acme", "acme-0", 1, LocationState.OPEN, '{"image": "python"}')
    assert await places.facts("acme", "acme-0") == '{"image": "python"}'
    await places.close("acme", "acme-0")
    assert await places.facts("acme", "acme-0") is None
    keys = [open_sessions_key("d"), tenant_open_sessions_key("d", "acme"), session_facts_key("d", "acme", "acme-0")]
    assert await client.exists(*keys) == 0


async def test_sessions_that_expired_are_passed_over_and_taken_out_of_the_lists(client: "redis.asyncio.Redis") -> None:
    names = await open_some(client, 6)
    await client.delete(*(place_key("d", "acme", name) for name in names[::2]))
    assert await read_all(client, "acme", 2) == names[1::2]
    assert await client.zcard(open_sessions_key("d")) == await client.zcard(tenant_open_sessions_key("d", "acme")) == 3


async def test_the_lists_do_not_grow_with_sessions_that_expired(client: "redis.asyncio.Redis") -> None:
    for number in range(400):
        await SessionStore(client, "d").open("acme", f"s{number}", "host.a.b1", start="{}", ttl_s=60, limit=1000)
        await client.delete(place_key("d", "acme", f"s{number}"))
    assert await client.zcard(open_sessions_key("d")) < 50
    assert await client.zcard(tenant_open_sessions_key("d", "acme")) < 50


async def test_a_record_of_a_later_release_stays_listed(client: "redis.asyncio.Redis") -> None:
    names = await open_some(client, 2)
    await client.hset(place_key("d", "acme", names[0]), "colour", "red")
    assert await read_all(client, "acme", 50) == names[1:]
    assert await client.zcard(open_sessions_key("d")) == 2


@pytest.mark.parametrize(
    "start",
    [
        '{"image": "python"}',
        signed_start("acme", "acme-0", SigningKeys.of("a guess")),
        signed_start("acme", "another"),
        "{",
    ],
    ids=["unsigned", "another secret", "another session", "not JSON"],
)
async def test_a_session_without_a_signature_is_not_listed(client: "redis.asyncio.Redis", start: str) -> None:
    names = await open_some(client, 2)
    await client.hset(place_key("d", "acme", "acme-0"), "start", start)
    assert await read_all(client, "acme", 50) == names[:1]


@pytest.mark.parametrize(
    ("cursor", "limit"),
    [(cursor, 50) for cursor in ("", "x", "1.acme", "1.acme.s|t", "-1.acme.s", "1.acme.s\n", "1" * 40 + ".acme.s")]
    + [(None, 0), (None, 1001)],
)
async def test_a_wrong_cursor_or_limit_is_refused(
    client: "redis.asyncio.Redis", cursor: str | None, limit: int
) -> None:
    with pytest.raises(ToolFailure, match="the cursor" if cursor is not None else "between 1 and 1000") as refused:
        await SessionList(client, "d", KEYS).read(None, cursor, limit)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
