"""Runs at configured endpoints, with real servers and a real Redis: fallback, cost, policy, keys, and what several
orchestrators share.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.models.model_endpoint import END, HELLO, ROLE, Server, answer, cut_stream, serving, stream, text_of
from tests.support.records.builders import KEY
from tests.support.runs.item_harness import HarnessFactory, ItemHarness, build_run
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ErrorCode, ModelBlocked, ModelUnavailable, ToolFailure
from toolcrew.contract.model_endpoints import ModelEndpoint
from toolcrew.contract.run_events import FailureKind, Warned
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.dialects.model import ModelRequest
from toolcrew.orchestrator.models.notices import report_notices
from toolcrew.orchestrator.runs import endpoints as endpoints_module
from toolcrew.orchestrator.runs.models import Models
from toolcrew.orchestrator.runs.run_gate import RunDeferred
from toolcrew.store import model_endpoints as endpoint_store
from toolcrew.store import model_limits
from toolcrew.store import tenants as tenant_store
from toolcrew.store.model_endpoints import ModelEndpoints
from toolcrew.store.model_limits import SharedLimits
from toolcrew.store.secrets import SecretStore
from toolcrew.store.tenants import RedisTenants

pytestmark = pytest.mark.usefixtures("quiet_logs")

SECRET = "sk-canary-1234567890"
USAGE = {"choices": [], "usage": {"prompt_tokens": 1_000_000, "completion_tokens": 100_000}}
REPLY = stream(ROLE, HELLO, END, USAGE)
CALL = {"index": 0, "id": "c", "function": {"name": "echo", "arguments": '{"text": "x"}'}}
CALLS = stream({"choices": [{"index": 0, "delta": {"tool_calls": [CALL]}, "finish_reason": "tool_calls"}]}, USAGE)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_store, "ENDPOINTS_FRESH_S", 0.0)
    monkeypatch.setattr(tenant_store, "POLICY_FRESH_S", 0.0)
    monkeypatch.setattr(endpoints_module, "FALLBACK_AFTER_S", 0.3)


def build_models(client: "redis.asyncio.Redis", *, is_service: bool = False, **fields: Any) -> Models:
    """Return the models of one process of deployment d."""
    settings = OrchestratorSettings.model_validate({"deployment": "d", "redis_url": None, **fields})
    pool: Any = SimpleNamespace(redis=client, keys=KEY, tenants=RedisTenants(client, "d", KEY))
    return Models(settings, pool, is_service=is_service)


async def test_service_refuses_a_model_that_was_removed_after_the_start_without_an_operator_s_advice(
    client: "redis.asyncio.Redis",
) -> None:
    await ModelEndpoints(client, "d", KEY).set("fast", build_endpoint(None))
    async with build_models(client, is_service=True) as models:
        with pytest.raises(ToolFailure) as refused:
            await models.get("acme", "fats")
    assert (refused.value.code, refused.value.metadata["nearest"]) == (ErrorCode.INVALID_ARGUMENTS, ["fast"])
    assert "OPENAI" not in refused.value.message


def build_endpoint(server: Server | None, **fields: Any) -> ModelEndpoint:
    """Return an endpoint at the server; None: where no server listens."""
    url = server.url if server is not None else "http://127.0.0.1:9/v1"
    return ModelEndpoint(base_url=url, model="m-70b", **fields)


def use_endpoints(harness: ItemHarness) -> ModelEndpoints:
    """Let the runs of the process use configured endpoints. Return the endpoints."""
    harness.work.models = build_models(harness.client)
    return ModelEndpoints(harness.client, "d", KEY)


async def ask(models: Any, name: str = "fast", notices: list[str] | None = None) -> str:
    chosen = await models.get("acme", name)
    request = ModelRequest([{"role": "user", "content": "hi"}])
    with report_notices((notices if notices is not None else []).append):
        return text_of([chunk async for chunk in chosen.model.stream(request)])


# Fallback


async def test_fallback_answers_at_its_own_prices_with_a_notice(make: HarnessFactory) -> None:
    harness = make()
    endpoints = use_endpoints(harness)
    async with serving([CALLS, REPLY]) as server:
        await endpoints.set("slow", build_endpoint(server, prompt_price=2.0, completion_price=10.0))
        down = build_endpoint(None, prompt_price=50.0, completion_price=50.0, fallback="slow")
        await endpoints.set("fast", down)
        outcome = await harness.execute(await harness.put(build_run(model="fast", limits={"max_cost": 100.0})))
        assert (outcome.failure, len(server.bodies)) == (None, 2)
    assert outcome.body["cost"] == pytest.approx(6.0)
    notices = [event.message for event in harness.run_events if isinstance(event, Warned)]
    assert [("fast" in notice, "slow answers instead" in notice) for notice in notices] == [(True, True)] * 2


@pytest.mark.parametrize("first", [answer(429, {}, retry_after="60"), answer(503, {})], ids=["blocked", "failing"])
async def test_blocked_or_failing_endpoint_sends_all_requests_to_the_fallback(
    client: "redis.asyncio.Redis", first: bytes
) -> None:
    endpoints, notices = ModelEndpoints(client, "d", KEY), list[str]()
    async with serving([first]) as bad, serving([REPLY]) as good, build_models(client) as models:
        await endpoints.set("slow", build_endpoint(good))
        await endpoints.set("fast", build_endpoint(bad, fallback="slow"))
        await ask(models, notices=notices)
        requests = len(bad.bodies)
        async with build_models(client) as other:
            await asyncio.gather(*(ask(process, notices=notices) for process in (models, other) for _ in range(3)))
        assert (len(bad.bodies), len(good.bodies), len(notices)) == (requests, 7, 7)


@pytest.mark.parametrize("reply", [answer(401, {}), answer(400, {"error": {"message": "no"}}), cut_stream(ROLE, HELLO)])
async def test_refused_or_broken_reply_does_not_use_the_fallback(client: "redis.asyncio.Redis", reply: bytes) -> None:
    endpoints = ModelEndpoints(client, "d", KEY)
    async with serving([reply]) as bad, serving([REPLY]) as good, build_models(client) as models:
        await endpoints.set("slow", build_endpoint(good))
        await endpoints.set("fast", build_endpoint(bad, fallback="slow"))
        with pytest.raises(Exception, match="model endpoint fast"):
            await ask(models)
        assert good.bodies == []


async def test_unreachable_endpoint_defers_only_its_own_runs(make: HarnessFactory) -> None:
    harness = make()
    endpoints = use_endpoints(harness)
    harness.work.models = build_models(harness.client, model_retries=0)
    await endpoints.set("fast", build_endpoint(None))
    claim = await harness.put(build_run(model="fast"))
    for _ in range(2):
        with pytest.raises(RunDeferred) as deferred:
            await harness.execute(claim)
        assert (deferred.value.cause, deferred.value.after_s > 0) == ("endpoint", True)
    assert (harness.work.gate.is_down, harness.work.gate.admit(8, 0)) == (True, 8)


async def test_fallback_refused_by_the_policy_is_not_used(client: "redis.asyncio.Redis") -> None:
    endpoints = ModelEndpoints(client, "d", KEY)
    await RedisTenants(client, "d", KEY).add("acme", TenantPolicy(models=("fast",)))
    async with serving([answer(503, {})]) as bad, serving([REPLY]) as good, build_models(client) as models:
        await endpoints.set("slow", build_endpoint(good))
        await endpoints.set("fast", build_endpoint(bad, fallback="slow"))
        with pytest.raises(ModelUnavailable, match="model endpoint fast failed with status 503"):
            await ask(models)
        assert good.bodies == []


async def test_model_list_request_needs_no_lease(client: "redis.asyncio.Redis") -> None:
    async with serving([REPLY]) as server, build_models(client) as models:
        listing = {"data": [{"id": "m-70b", "max_model_len": 4096}]}
        server.models = answer(200, listing)
        await ModelEndpoints(client, "d", KEY).set("fast", build_endpoint(server, concurrency=1))
        server.gate.clear()
        running = asyncio.create_task(ask(models))
        await wait_until_async(lambda: server.bodies, SOON_S, "no request arrived")
        chosen: Any = (await models.get("acme", "fast")).model
        assert (await chosen.describe()).context_window == 4096
        server.gate.set()
        await running


async def test_run_warns_once_while_it_waits_for_a_model_limit(
    make: HarnessFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_limits, "WAIT_NOTICE_S", 0.02)
    harness = make()
    endpoints = use_endpoints(harness)
    # Another orchestrator has the only lease whenever the run begins a step.
    async with serving([CALLS, CALLS, REPLY]) as server:
        bounds = build_endpoint(server, concurrency=1)
        await endpoints.set("fast", bounds)
        stored = await endpoints.find("acme", "fast")
        other = SharedLimits(harness.client, "d", stored.id, bounds)
        leases = [await other.acquire(lambda: 0, 60.0)]
        running = asyncio.create_task(harness.execute(await harness.put(build_run(model="fast"))))

        def waits() -> list[str]:
            return [event.message for event in harness.run_events if isinstance(event, Warned)]

        await wait_until_async(lambda: waits() or running.done(), SOON_S, "no notice came")
        for _ in range(2):
            next_lease = asyncio.create_task(other.acquire(lambda: 0, 60.0))
            await other.release(leases.pop(), 0)
            leases.append(await next_lease)
        await other.release(leases.pop(), 0)
        outcome = await running
        assert (outcome.failure, len(server.bodies)) == (None, 3)
        assert [("fast" in wait, "concurrency limit 1" in wait) for wait in waits()] == [(True, True)]


# Policy and keys


async def test_model_policy_is_checked_before_the_run_and_between_steps(make: HarnessFactory) -> None:
    harness = make()
    endpoints, tenants = use_endpoints(harness), RedisTenants(harness.client, "d", KEY)
    async with serving([CALLS, REPLY]) as server:
        await endpoints.set("fast", build_endpoint(server))
        await tenants.add("acme", TenantPolicy(models=("slow*",)))
        claim = await harness.put(build_run(model="fast"))
        refused = await harness.execute(claim)
        assert (server.bodies, harness.sent()) == ([], [])
        await tenants.replace("acme", TenantPolicy(models=("fa*",)))
        server.gate.clear()
        running = asyncio.create_task(harness.execute(await harness.claim_next_attempt(claim)))
        await wait_until_async(lambda: server.bodies, SOON_S, "no request arrived")
        await tenants.replace("acme", TenantPolicy(models=()))
        server.gate.set()
        ended = await running
        assert len(server.bodies) == 1
    for outcome in (refused, ended):
        assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.INPUT, ErrorCode.PERMISSION_DENIED.value)


async def test_endpoint_key_is_sent_and_appears_in_no_output_or_redis_key(
    make: HarnessFactory, caplog: pytest.LogCaptureFixture, redis_server: RedisProcess
) -> None:
    harness = make()
    endpoints, secrets = use_endpoints(harness), SecretStore(harness.client, "d", KEY)
    await secrets.set(None, "MODEL_KEY", SECRET)
    failing = answer(400, {"error": {"message": f"the key {SECRET} may not do this"}})
    async with serving([answer(503, {"error": {"message": SECRET}}), failing]) as server:
        await endpoints.set("fast", build_endpoint(server, secret="MODEL_KEY"))
        outcome = await harness.execute(await harness.put(build_run(model="fast")))
        assert all(f"authorization: bearer {SECRET}" in head for head in server.heads)
        assert len(server.heads) == 2
    assert "the key *** may not do this" in outcome.failure.message
    views = [view.model_dump_json() for view in await endpoints.views()]
    texts = [outcome.model_dump_json(), *views, *map(repr, harness.run_events), caplog.text]
    with redis_server.client() as client:
        found: Any = client.keys()
        texts += [repr(client.dump(key)) for key in found]
    assert [text for text in texts if SECRET in text] == []


async def test_changed_or_removed_key_applies_to_the_next_request(client: "redis.asyncio.Redis") -> None:
    endpoints, secrets = ModelEndpoints(client, "d", KEY), SecretStore(client, "d", KEY)
    async with serving([REPLY]) as first, serving([REPLY]) as second, build_models(client) as models:
        await endpoints.set("fast", build_endpoint(first, secret="MODEL_KEY"))
        with pytest.raises(Exception, match="MODEL_KEY, which does not exist"):
            await ask(models)
        await secrets.set(None, "MODEL_KEY", SECRET)
        await ask(models)
        await endpoints.set("fast", build_endpoint(second, secret="MODEL_KEY"))
        await secrets.set(None, "MODEL_KEY", "another-key")
        await ask(models)
        assert (len(first.bodies), "bearer another-key" in second.heads[0]) == (1, True)
        await secrets.revoke(None, "MODEL_KEY")
        with pytest.raises(Exception, match="does not exist"):
            await ask(models)


# Several orchestrators


async def test_environment_endpoint_shares_rate_limits_per_api_key(client: "redis.asyncio.Redis") -> None:
    async with serving([answer(429, {}, retry_after="600"), REPLY]) as server:
        shared = {"openai_base_url": server.url, "openai_api_key": SECRET}
        async with build_models(client, **shared) as one, build_models(client, **shared) as two:
            for models in (one, two):
                with pytest.raises(ModelBlocked, match=r"a wait of (600|599) s"):
                    await ask(models, "m")
            assert len(server.bodies) == 1
        async with build_models(client, openai_base_url=server.url, openai_api_key="another-key") as other:
            await ask(other, "m")
        assert len(server.bodies) == 2
        assert SECRET.encode() not in b"".join(await client.keys())
