"""Attacks on the pages: forms of other sites, stolen and guessed tokens, ids of other tenants, redirects to other
sites, frames, and pages as keys.
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from playwright.async_api import Route

from tests.support.api.api_harness import open_api
from tests.support.api.page_harness import DEPLOYMENT, Visitors, World
from tests.support.redis.redis_harness import open_server
from toolcrew.orchestrator.api.pages.route import HEADERS
from toolcrew.store.api_keys import LOGIN_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

COOKIE = "toolcrew_login"
_TOKEN = re.compile(r'name="form_token" value="([0-9a-f]{64})"')


@asynccontextmanager
async def open_http_client(url: str, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client that sends a browser's requests, from a page of this service unless a test changes this."""
    async with httpx.AsyncClient(verify=False, base_url=url, timeout=60, headers={"Origin": url}) as client:
        if key is not None:
            assert (await client.post("/login", data={"key": key})).status_code == 303
        yield client


async def read_form_token(client: httpx.AsyncClient) -> str:
    found = _TOKEN.search((await client.get("/tools")).text)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.test"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
    ],
)
async def test_a_form_from_another_site_is_refused_even_with_cookie_and_token(
    world: World, visitors: Visitors, headers: dict[str, str]
) -> None:
    async with open_http_client(visitors.api.url, visitors.api.keys["operator"]) as client:
        form = {"form_token": await read_form_token(client), "enabled": "no"}
        response = await client.post("/tools/read_tool", data=form, headers=headers)
        assert response.status_code == 403
        assert "does not come from a page of this service" in response.text
        assert 'Disable<span class="hidden"> read_tool</span>' in (await client.get("/tools")).text


async def test_a_form_without_an_origin_is_refused(world: World, visitors: Visitors) -> None:
    async with open_http_client(visitors.api.url, visitors.api.keys["operator"]) as client:
        form = {"form_token": await read_form_token(client), "enabled": "no"}
        del client.headers["Origin"]
        assert (await client.post("/tools/read_tool", data=form)).status_code == 403
        assert (await client.post("/login", data={"key": visitors.api.keys["acme"]})).status_code == 403


async def test_a_form_needs_the_token_of_its_own_login(world: World, visitors: Visitors) -> None:
    keys = visitors.api.keys
    async with (
        open_http_client(visitors.api.url, keys["operator"]) as client,
        open_http_client(visitors.api.url, keys["admin"]) as other,
    ):
        for token in (
            "",
            "0" * 64,
            await read_form_token(other),
            "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
        ):
            response = await client.post("/tools/read_tool", data={"form_token": token, "enabled": "no"})
            assert (token, response.status_code) == (token, 403)


async def test_a_form_on_another_site_is_sent_without_the_login_cookie(world: World, visitors: Visitors) -> None:
    async def evil(route: Route) -> None:
        form = (
            f'<form method="post" action="{visitors.api.url}/tools/read_tool"><input name="enabled" '
            'value="no"></form><script>document.forms[0].submit()</script>'
        )
        await route.fulfill(content_type="text/html", body=form)

    async with visitors.visit("operator") as visit:
        await visit.page.route("http://evil.test/", evil)
        visit.expected = (403,)
        await visit.page.goto("http://evil.test/")
        await visit.page.wait_for_url("**/login")
        await visit.page.goto("/tools")
        assert await visit.page.get_by_role("button", name="Disable read_tool for all tenants").count() == 1


async def test_scripts_cannot_read_the_login_cookie_and_redis_does_not_store_it(
    world: World, visitors: Visitors
) -> None:
    async with visitors.visit("acme") as visit:
        await visit.page.goto("/")
        assert await visit.page.evaluate("document.cookie") == ""
        cookie = next(one for one in await visit.page.context.cookies() if one["name"] == COOKIE)
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
        logins = [name async for name in world.redis.scan_iter(f"toolcrew:{DEPLOYMENT}:page:login:*")]
        records = [name.decode() + (await world.redis.get(name)).decode() for name in logins]
        assert records
        assert not any(cookie["value"] in text or visitors.api.keys["acme"] in text for text in records)
        assert all([0 < await world.redis.ttl(name) <= LOGIN_S for name in logins])


@pytest.mark.parametrize("word", ["", "x", "A" * 43, "../" * 14 + "A", "A" * 5000, "\u00e9" * 43])
async def test_a_guessed_login_cookie_is_redirected_to_the_login_page(
    world: World, visitors: Visitors, word: str
) -> None:
    async with open_http_client(visitors.api.url) as client:
        response = await client.get("/runs", headers={"Cookie": f"{COOKIE}={word}".encode("latin-1")})
        assert (response.status_code, response.headers["location"]) == (303, "/login?next=%2Fruns")


async def test_logging_out_ends_copied_login_cookies(world: World, visitors: Visitors) -> None:
    async with open_http_client(visitors.api.url, visitors.api.keys["acme"]) as client:
        word, token = client.cookies[COOKIE], await read_form_token(client)
        assert (await client.post("/logout", data={"form_token": token})).status_code == 303
        assert (await client.get("/runs", headers={"Cookie": f"{COOKIE}={word}"})).status_code == 303


async def test_logging_in_creates_a_new_cookie_and_ends_the_previous_login(world: World, visitors: Visitors) -> None:
    async with open_http_client(visitors.api.url, visitors.api.keys["acme"]) as client:
        before = client.cookies[COOKIE]
        await client.post("/login", data={"key": visitors.api.keys["acme"]})
        assert client.cookies[COOKIE] != before
    async with open_http_client(visitors.api.url) as thief:
        assert (await thief.get("/runs", headers={"Cookie": f"{COOKIE}={before}"})).status_code == 303


async def test_wrong_revoked_and_malformed_keys_get_the_same_response(world: World, visitors: Visitors) -> None:
    revoked = await world.add_key("acme")
    await world.revoke_key(revoked)
    right = visitors.api.keys["acme"]
    answers = set()
    async with open_http_client(visitors.api.url) as client:
        for key in (
            revoked.text,
            right[:-1] + ("A" if right[-1] != "A" else "B"),
            "tc_" + "0" * 16 + "_" + "A" * 43,
            "",
            "x" * 256,
            "\x00",
        ):
            response = await client.post("/login", data={"key": key})
            answers.add((response.status_code, response.text))
            assert "set-cookie" not in response.headers
    assert len(answers) == 1
    assert next(iter(answers))[0] == 401


@pytest.mark.parametrize(
    "path", ["/runs/{}", "/runs/{}/transcript", "/runs/{}/stream", "/approvals/{}", "/batches/{}", "/calls/{}"]
)
async def test_objects_of_another_tenant_look_like_unknown_objects(world: World, visitors: Visitors, path: str) -> None:
    assert world.rival_question is not None
    theirs = {
        "runs": world.rival_run,
        "approvals": world.rival_question.id,
        "batches": "rival-batch",
        "calls": f"{world.rival_run}-1-1",
    }[path.split("/")[1]]
    nothing = "0" * len(theirs)
    async with open_http_client(visitors.api.url, visitors.api.keys["acme"]) as client:
        answers = [await client.get(path.format(name)) for name in (theirs, nothing)]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].text == answers[1].text
        # A request that names the tenant must not reveal whether that tenant exists.
        refused = [await client.get(path.format(theirs), params={"of": name}) for name in ("rival", "unknown")]
        assert [answer.status_code for answer in refused] == [403, 403]
        assert refused[0].text == refused[1].text


async def test_objects_of_another_tenant_cannot_be_changed(world: World, visitors: Visitors) -> None:
    assert world.rival_question is not None
    async with open_http_client(visitors.api.url, visitors.api.keys["acme"]) as client:
        form = {"form_token": await read_form_token(client)}
        decision = {"decision": "allow", "digest": world.rival_question.digest}
        tries = {
            f"/runs/{world.rival_run}/cancel": (form, 404),
            "/batches/rival-batch/cancel": (form, 404),
            f"/approvals/{world.rival_question.id}": ({**form, **decision}, 404),
            "/tenants/rival/pause": (form, 403),
            "/tenants/acme/pause": (form, 403),
            "/hosts/h1/drain": (form, 403),
            "/tools/read_tool": ({**form, "enabled": "no"}, 403),
        }
        for path, (sent, status) in tries.items():
            assert (path, (await client.post(path, data=sent)).status_code) == (path, status)


async def test_a_decision_with_a_wrong_digest_or_invalid_arguments_is_refused(world: World, visitors: Visitors) -> None:
    question = await world.ask("make", number=50)
    async with open_http_client(visitors.api.url, visitors.api.keys["acme"]) as client:
        form = {"form_token": await read_form_token(client), "decision": "allow", "digest": "0" * 64}
        assert (await client.post(f"/approvals/{question.id}", data=form)).status_code == 409
        for text in ("", "[]", "{", '{"a": 1, "a": 2}', "[" * 100_000, '{"a": NaN}'):
            sent = {**form, "decision": "change", "digest": question.digest, "arguments": text}
            assert (text[:20], (await client.post(f"/approvals/{question.id}", data=sent)).status_code) == (
                text[:20],
                422,
            )
    assert (await world.approvals.pending(world.actor("acme"), "acme", None, 100)).questions


@pytest.mark.parametrize(
    "next_",
    [
        "//evil.test",
        "https://evil.test",
        "/\\evil.test",
        "\\\\evil.test",
        "/\t/evil.test",
        "javascript:alert(1)",
        "/\r\nX: y",
        "",
    ],
)
async def test_login_does_not_redirect_to_another_site(world: World, visitors: Visitors, next_: str) -> None:
    async with open_http_client(visitors.api.url) as client:
        response = await client.post("/login", data={"key": visitors.api.keys["acme"], "next": next_})
        assert (response.status_code, response.headers["location"]) == (303, "/")


async def test_every_response_has_the_security_headers(world: World, visitors: Visitors) -> None:
    async with open_http_client(visitors.api.url, visitors.api.keys["acme"]) as client:
        for path in (
            "/",
            "/login",
            "/runs",
            "/runs/none",
            "/hosts",
            f"/runs/{world.done}",
            "/static/page.css",
            "/static/none",
        ):
            headers = (await client.get(path)).headers
            shown_headers = {name: headers.get(name) for name in HEADERS}
            if path == "/static/page.css":
                assert "immutable" in str(shown_headers.pop("Cache-Control"))
            assert (path, shown_headers) == (path, {name: HEADERS[name] for name in shown_headers})
        assert (await client.get("/login")).headers["content-security-policy"].startswith("default-src 'none'")


async def test_a_login_cookie_is_not_accepted_by_the_api_and_a_key_not_by_the_pages(
    world: World, visitors: Visitors
) -> None:
    async with open_http_client(visitors.api.url, visitors.api.keys["acme"]) as client:
        assert (await client.get("/v1/tools")).status_code == 401
    async with open_http_client(visitors.api.url) as client:
        headers = {"Authorization": f"Bearer {visitors.api.keys['acme']}"}
        assert (await client.get("/runs", headers=headers)).status_code == 303


async def test_text_in_a_url_is_not_repeated_on_the_page(world: World, visitors: Visitors) -> None:
    async with open_http_client(visitors.api.url, visitors.api.keys["acme"]) as client:
        for path in ("/tools?done=call+0800", "/runs?state=call+0800", "/approvals?shown=call+0800"):
            assert "call 0800" not in (await client.get(path)).text


async def test_behind_tls_the_cookie_is_secure_and_host_only() -> None:
    with open_server() as server:
        async with open_api(server.url(), page_url="https://crew.test") as api, open_http_client(api.url) as client:
            response = await client.post(
                "/login", data={"key": api.keys["acme"]}, headers={"Origin": "https://crew.test"}
            )
            cookie = response.headers["set-cookie"]
            assert cookie.startswith(f"__Host-{COOKIE}=")
            assert all(word in cookie for word in ("; Secure", "; HttpOnly", "; Path=/", "; SameSite=strict"))
            assert "Domain" not in cookie


async def test_an_unreachable_redis_is_reported_without_its_address() -> None:
    with open_server() as server:
        async with open_api(server.url()) as api, open_http_client(api.url, api.keys["acme"]) as client:
            server.kill()
            for path in ("/", "/runs", "/tools"):
                response = await client.get(path)
                assert (path, response.status_code) == (path, 503)
                assert response.headers["content-type"].startswith("text/html")
                assert str(server.port) not in response.text
                assert server.password not in response.text
