"""The dispatcher: permission, location and deadline of a call, and always a result, whatever the transport does."""

import time
from typing import Any

import pytest

from tests.support.records.builders import KEY, build_call, build_spec
from tests.support.records.fakes import AnsweringTransport, StaticCatalog
from toolcrew.contract.calls import Clocks, ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, EnvelopeRefused, ErrorCode
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher, effective_limit
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.orchestrator.dispatch.transport import DeliveryFailed

ROUTE = ("acme", "s1", "host.h1.b00t")
ECHO = build_spec("echo", aliases={"words": "text"})
TIMED = build_spec("sleepy", properties={"timeout": {"type": "number"}})


def echo_text(call: ToolCall, _: ToolContext) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True, output=str(call.arguments.get("text")))


def build_failing_answer(error: Exception) -> Any:
    def answer(*_: Any) -> ToolResult:
        raise error

    return answer


class Harness:
    """A dispatcher over a transport whose worker is a function."""

    def __init__(self, answer: Any = echo_text, *specs: ToolSpec) -> None:
        self.transport = AnsweringTransport(answer)
        self._dispatcher = Dispatcher(
            self.transport, TenantCatalog(StaticCatalog(*(specs or (ECHO, TIMED)))), KEY, queue_wait_s=60
        )

    async def call(self, call: ToolCall | None = None, **fields: Any) -> ToolResult:
        return await self._dispatcher.dispatch(Request(call or build_call(text="hi"), *ROUTE, **fields))


async def test_delivery_contains_call_queue_deadline_and_tenant() -> None:
    harness = Harness()
    before = time.time()
    await harness.call(run="r1", model="m", blob="b", timeout_s=10)
    [delivery], [context] = harness.transport.deliveries, harness.transport.contexts
    assert (delivery.request.worker_call.name, delivery.queue, delivery.call_id) == ("echo", "host.h1.b00t", "call-1")
    assert before + 60 <= delivery.start_by <= time.time() + 60
    assert delivery.request.wait_s >= 60 + 10
    assert (context.tenant, context.session, context.timeout_s) == ("acme", "s1", 10)
    assert (context.run, context.model, context.blob) == ("r1", "m", "b")


async def test_worker_gets_arguments_with_defaults_and_canonical_names() -> None:
    harness = Harness(
        echo_text,
        build_spec("echo", properties={"text": {}, "n": {"type": "integer", "default": 3}}, aliases={"words": "text"}),
    )
    result = await harness.call(build_call(words="hi"))
    assert harness.transport.calls[0].arguments == {"text": "hi", "n": 3}
    assert result.metadata["aliases_used"] == ["words -> text"]


async def test_model_cannot_call_a_session_verb() -> None:
    verb = build_spec("session.exec", audience="session")
    result = await Harness(echo_text, ECHO, verb).call(build_call("session.exec"))
    assert result.error == "Tool not found: session.exec"
    assert "session.exec" not in result.metadata["nearest"]  # type: ignore[operator]


@pytest.mark.parametrize(
    "arguments",
    [{"nope": 1}, {"text": "a", "words": "b"}, {"text": 5}, {"x" * 30_000: 1}],
    ids=["unknown name", "name and alias", "wrong type", "huge name"],
)
async def test_invalid_arguments_are_not_sent(arguments: dict[str, Any]) -> None:
    harness = Harness()
    result = await harness.call(build_call(**arguments))
    assert (result.error_code, harness.transport.deliveries) == (ErrorCode.INVALID_ARGUMENTS, [])


async def test_a_call_too_large_for_an_envelope_fails() -> None:
    result = await Harness().call(build_call(text="x" * 1_100_000))
    assert (result.error_code, "write_file" in str(result.error)) == (ErrorCode.INVALID_ARGUMENTS, True)


LIMITS = [
    ({}, {}, 30),
    ({}, {"default_timeout_s": 45}, 45),
    ({}, {"default_timeout_s": 2}, 2),
    ({}, {"timeout_s": 12}, 12),
    ({"timeout": 5}, {}, 5),
    ({"timeout": 120}, {}, 120),
    ({"timeout": 900}, {}, 600),
    ({"timeout": 5}, {"timeout_s": 9}, 9),
    ({"timeout": 0}, {}, 30),
    ({"timeout": -1}, {}, 30),
    ({"timeout": True}, {}, 30),
    ({"timeout": "5"}, {}, 30),
    ({"timeout": float("nan")}, {}, 30),
    ({"timeout": float("inf")}, {}, 600),
    ({"timeout": 10**400}, {}, 600),
]


@pytest.mark.parametrize(("arguments", "fields", "limit"), LIMITS)
def test_caller_limit_overrides_arguments(arguments: dict[str, Any], fields: dict[str, Any], limit: float) -> None:
    assert effective_limit(TIMED, arguments, Request(build_call(), *ROUTE, **fields)) == limit


@pytest.mark.parametrize(
    ("tool", "arguments", "timeout_s", "limit_s"),
    [
        ({"max_timeout_s": 20}, {}, 100, 20),
        ({"max_timeout_s": 20}, {"timeout": 100}, None, 20),
        ({"max_timeout_s": 20}, {}, None, 20),
        ({"timeout_s": 120}, {}, None, 120),
        ({"timeout_s": 5}, {}, None, 5),
        ({"name": "grep_tool"}, {}, 7_200, 600),
        ({"name": "skill_tool"}, {}, 7_200, 7_200),
        ({"name": "session.exec"}, {}, 90_000, 86_400),
        ({"is_installed_skill": True}, {"timeout": 7_200}, None, 7_200),
        ({"is_installed_skill": True, "max_timeout_s": 900}, {}, 7_200, 900),
    ],
)
def test_tool_limits_bound_the_timeout(
    tool: dict[str, Any], arguments: dict[str, Any], timeout_s: float | None, limit_s: float
) -> None:
    request = Request(build_call(), *ROUTE, timeout_s=timeout_s)
    assert effective_limit(build_spec(**tool), arguments, request) == limit_s


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
async def test_invalid_timeout_is_a_failed_result(timeout_s: float) -> None:
    assert (await Harness().call(timeout_s=timeout_s)).error_code is ErrorCode.INVALID_ARGUMENTS


FAILURES = [
    (TimeoutError(), ErrorCode.OUTCOME_UNKNOWN),
    (BrokerUnavailable("Redis does not answer"), ErrorCode.BROKER_UNAVAILABLE),
    (ConfigError("no key"), ErrorCode.CONFIG_MISSING),
    (EnvelopeRefused("garbage"), ErrorCode.ENVELOPE_REFUSED),
    (DeliveryFailed(ErrorCode.TIMEOUT, "not run"), ErrorCode.TIMEOUT),
    (DeliveryFailed(ErrorCode.OUTCOME_UNKNOWN, "the worker was lost"), ErrorCode.OUTCOME_UNKNOWN),
]


@pytest.mark.parametrize(("error", "code"), FAILURES, ids=lambda value: repr(value)[:40])
async def test_delivery_failure_is_a_failed_result(error: Exception, code: ErrorCode) -> None:
    result = await Harness(build_failing_answer(error)).call()
    assert (result.success, result.error_code, bool(result.error)) == (False, code, True)


async def test_the_result_of_another_call_is_refused() -> None:
    def answer_other_call(call: ToolCall, context: ToolContext) -> ToolResult:
        return echo_text(call, context).model_copy(update={"call_id": "call-2"})

    result = await Harness(answer_other_call).call()
    assert (result.error_code, result.call_id, result.output) == (ErrorCode.ENVELOPE_REFUSED, "call-1", None)


@pytest.mark.parametrize("answer", [None, "text", {}, {"v": 2}, {"v": 1, "call_id": "call-1"}])
async def test_invalid_result_is_refused(answer: Any) -> None:
    class Garbage:
        async def deliver(self, _: Any) -> Any:
            return answer

        async def aclose(self) -> None: ...

    result = await Dispatcher(Garbage(), TenantCatalog(StaticCatalog(ECHO)), KEY, queue_wait_s=1).dispatch(
        Request(build_call(), *ROUTE)
    )
    assert result.error_code is ErrorCode.ENVELOPE_REFUSED


async def test_transfer_time_is_computed_and_not_copied() -> None:
    def answer_with_clocks(call: ToolCall, context: ToolContext) -> ToolResult:
        return echo_text(call, context).model_copy(update={"clocks": Clocks(queued_s=1, run_s=2, transfer_s=99)})

    clocks = (await Harness(answer_with_clocks).call()).clocks
    assert (clocks.queued_s, clocks.run_s, clocks.transfer_s) == (1, 2, 0)
